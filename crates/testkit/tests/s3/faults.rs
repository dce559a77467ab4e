//! Every fault once, each seen from the client's side and beside a request that it must leave alone.

use std::time::{Duration, Instant};

use aws_sdk_s3::Client;
use aws_sdk_s3::error::SdkError;
use aws_sdk_s3::operation::put_object::{PutObjectError, PutObjectOutput};
use aws_sdk_s3::primitives::ByteStream;
use aws_sdk_s3::types::{CompletedMultipartUpload, CompletedPart};
use serde_json::{Value, json};

use crate::server::{BUCKET, MIB, Server, data, refusal};

type PutResult =
    Result<PutObjectOutput, SdkError<PutObjectError, aws_sdk_s3::config::http::HttpResponse>>;

async fn put(client: &Client, key: &str, bytes: &[u8]) -> PutResult {
    client
        .put_object()
        .bucket(BUCKET)
        .key(key)
        .body(ByteStream::from(bytes.to_vec()))
        .send()
        .await
}

/// The whole body, or an error at either the head or the body.
async fn get(client: &Client, key: &str) -> Result<Vec<u8>, String> {
    let got = client
        .get_object()
        .bucket(BUCKET)
        .key(key)
        .send()
        .await
        .map_err(|error| format!("{error:?}"))?;
    let body = got
        .body
        .collect()
        .await
        .map_err(|error| format!("{error:?}"))?;
    Ok(body.into_bytes().to_vec())
}

async fn exists(client: &Client, key: &str) -> bool {
    client
        .head_object()
        .bucket(BUCKET)
        .key(key)
        .send()
        .await
        .is_ok()
}

fn is_dispatch_failure<E: std::fmt::Debug>(
    error: &SdkError<E, aws_sdk_s3::config::http::HttpResponse>,
) -> bool {
    matches!(error, SdkError::DispatchFailure(_))
}

fn rule(action: Value) -> Value {
    json!([{"op": "PutObject", "nth": 1, "action": action}])
}

#[tokio::test]
async fn status_and_code_on_the_nth_call_of_a_filter() {
    let server = Server::start(&[]);
    let client = server.client();
    server.rules(&json!([
        {"op": "PutObject", "key_contains": "log/", "nth": 2, "action": {"status": 503, "code": "SlowDown"}},
        {"op": ["PutObject", "HeadObject"], "key_contains": "every", "every": 2, "times": 1, "action": {"status": 500, "code": "InternalError"}},
        {"op": "*", "key_contains": "last", "from": 2, "action": {"status": 400, "code": "ExpiredToken"}},
    ]));
    put(&client, "log/1", b"x").await.expect("first");
    put(&client, "data/1", &data(1, 2 * MIB))
        .await
        .expect("another key");
    assert_eq!(
        refusal(put(&client, "log/2", &data(1, 2 * MIB)).await),
        (503, "SlowDown".to_owned())
    );
    put(&client, "log/2", b"x").await.expect("third");
    put(&client, "every", b"x").await.expect("first");
    assert!(!exists(&client, "every").await);
    for _ in 0..3 {
        assert!(exists(&client, "every").await, "`times` is spent");
    }
    put(&client, "last", b"x").await.expect("first");
    assert_eq!(
        refusal(put(&client, "last", b"x").await),
        (400, "ExpiredToken".to_owned())
    );
    assert_eq!(
        refusal(put(&client, "last", b"x").await),
        (400, "ExpiredToken".to_owned())
    );
    let faults: Vec<Option<u64>> = server
        .log()
        .iter()
        .map(|line| line["fault"].as_u64())
        .collect();
    assert_eq!(faults[..4], [None, None, Some(0), None]);
    assert_eq!(
        faults.iter().flatten().copied().collect::<Vec<_>>(),
        [0, 1, 2, 2]
    );
}

#[tokio::test]
async fn rules_change_while_the_server_runs() {
    let server = Server::start(&[]);
    let client = server.client();
    let broken = json!([{"op": "PutObject", "always": true, "action": {"status": 500, "code": "InternalError"}}]);
    server.rules(&broken);
    put(&client, "k", b"x")
        .await
        .expect_err("the rule is in force");
    server.rules(&json!([{"op": "PutObject", "always": true, "action": {"staus": 500}}]));
    put(&client, "k", b"x")
        .await
        .expect_err("a file that is not understood changes nothing");
    server.rules(&json!([]));
    put(&client, "k", b"x").await.expect("no rule");
}

#[tokio::test]
async fn complete_answers_200_with_an_error_document() {
    let server = Server::start(&["--min-part", "1"]);
    let client = server.client();
    let created = client
        .create_multipart_upload()
        .bucket(BUCKET)
        .key("k")
        .send()
        .await
        .expect("create");
    let id = created.upload_id().expect("id");
    let part = client
        .upload_part()
        .bucket(BUCKET)
        .key("k")
        .upload_id(id)
        .part_number(1)
        .body(ByteStream::from_static(b"x"));
    let part = part.send().await.expect("part");
    let complete = || {
        let part = CompletedPart::builder()
            .part_number(1)
            .e_tag(part.e_tag().expect("etag"))
            .build();
        let list = CompletedMultipartUpload::builder().parts(part).build();
        client
            .complete_multipart_upload()
            .bucket(BUCKET)
            .key("k")
            .upload_id(id)
            .multipart_upload(list)
            .send()
    };
    server.rules(&json!([
        {"op": "CompleteMultipartUpload", "nth": 1, "action": {"body": "<Error><Code>InternalError</Code></Error>"}},
        {"op": "CompleteMultipartUpload", "nth": 2, "action": {"empty": true}},
        {"op": "CompleteMultipartUpload", "nth": 3, "action": {"keep_alive_ms": 350}},
    ]));
    assert_eq!(refusal(complete().await), (200, "InternalError".to_owned()));
    assert_eq!(refusal(complete().await).0, 200);
    assert!(!exists(&client, "k").await);
    complete().await.expect("blanks, then the answer");
    assert!(exists(&client, "k").await);
}

#[tokio::test]
async fn delays_and_stalls() {
    let server = Server::start(&[]);
    let client = server.client();
    server.rules(&json!([
        {"op": "PutObject", "nth": 1, "action": {"delay_before_ms": 150, "delay_after_ms": 150}},
        {"op": "PutObject", "nth": 2, "action": {"stall": true}},
        {"op": "PutObject", "nth": 3, "action": {"stall": true, "apply": true}},
        {"op": "PutObject", "nth": 4, "action": {"wire": "stall-after", "bytes": 100_000}},
    ]));
    let start = Instant::now();
    put(&client, "slow", b"x").await.expect("put");
    assert!(start.elapsed() >= Duration::from_millis(300));
    for key in ["stalled", "applied", "body"] {
        let stalled = tokio::time::timeout(
            Duration::from_millis(400),
            put(&client, key, &data(1, 8 * MIB)),
        )
        .await;
        assert!(stalled.is_err(), "{key}: no answer");
    }
    assert!(
        !exists(&client, "stalled").await
            && exists(&client, "applied").await
            && !exists(&client, "body").await
    );
    // A request that its client gives up is logged without a status, once the server sees that the client is gone; behind the
    // unread body of the third one it cannot.
    let given_up = || {
        server
            .log()
            .iter()
            .filter(|line| line["op"] == "PutObject" && line["status"] == 0)
            .count()
    };
    for _ in 0..100 {
        if given_up() == 2 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("{} requests are logged as given up", given_up());
}

#[tokio::test]
async fn apply_then_drop_or_lie() {
    let server = Server::start(&[]);
    let client = server.client();
    server.rules(&json!([
        {"op": "PutObject", "nth": 1, "action": {"apply": true, "drop": true}},
        {"op": "PutObject", "nth": 2, "action": {"apply": true, "status": 500, "code": "InternalError"}},
        {"op": "PutObject", "nth": 3, "action": {"drop": true}},
    ]));
    assert!(is_dispatch_failure(
        &put(&client, "dropped", b"x").await.expect_err("dropped")
    ));
    assert!(exists(&client, "dropped").await);
    assert_eq!(
        refusal(put(&client, "lied", b"x").await),
        (500, "InternalError".to_owned())
    );
    assert!(exists(&client, "lied").await);
    assert!(is_dispatch_failure(
        &put(&client, "lost", b"x").await.expect_err("dropped")
    ));
    assert!(!exists(&client, "lost").await);
    let puts: Vec<_> = server
        .log()
        .into_iter()
        .filter(|line| line["op"] == "PutObject")
        .collect();
    assert_eq!(
        (puts[0]["status"].as_u64(), puts[0]["applied"].as_u64()),
        (Some(0), Some(200))
    );
    assert_eq!(
        (puts[1]["status"].as_u64(), puts[1]["applied"].as_u64()),
        (Some(500), Some(200))
    );
    assert_eq!(
        (puts[2]["status"].as_u64(), puts[2].get("applied")),
        (Some(0), None)
    );
}

#[tokio::test]
async fn a_request_is_reset_cut_or_damaged() {
    let server = Server::start(&[]);
    let client = server.client();
    let bytes = data(1, 8 * MIB);
    server.rules(&rule(json!({"wire": "reset-after", "bytes": 1_000_000})));
    let error = put(&client, "k", &bytes).await.expect_err("reset");
    let text = format!("{error:?}");
    assert!(
        is_dispatch_failure(&error) && text.contains("ConnectionReset")
            || text.contains("BrokenPipe"),
        "{text}"
    );
    let line = server.log().pop().expect("line");
    assert_eq!(
        (line["bytes_in"].as_u64(), line["status"].as_u64()),
        (Some(1_000_000), Some(0))
    );

    server.rules(&rule(
        json!({"wire": "cut-after", "of": "request", "bytes": 10}),
    ));
    assert!(is_dispatch_failure(
        &put(&client, "k", &bytes).await.expect_err("cut")
    ));
    server.rules(&rule(
        json!({"wire": "flip-bit", "of": "request", "bytes": 10}),
    ));
    let signed = put(&client, "k", &bytes).await;
    assert_eq!(
        refusal(signed),
        (400, "XAmzContentSHA256Mismatch".to_owned())
    );
    assert!(!exists(&client, "k").await);
    put(&client, "k", &bytes).await.expect("put");
}

#[tokio::test]
async fn an_answer_is_cut_reset_shortened_or_damaged() {
    let server = Server::start(&[]);
    let client = server.client();
    let bytes = data(1, 4 * MIB);
    put(&client, "k", &bytes).await.expect("put");
    server.rules(&json!([
        {"op": "GetObject", "nth": 1, "action": {"wire": "cut-after", "bytes": 3_000_000}},
        {"op": "GetObject", "nth": 2, "action": {"wire": "reset-after", "of": "response", "bytes": 1_000}},
        {"op": "GetObject", "nth": 3, "action": {"wire": "flip-bit", "bytes": 2_500_000}},
        {"op": "GetObject", "nth": 4, "action": {"wire": "short-after", "bytes": 1_234}},
        {"op": "GetObject", "nth": 5, "action": {"wire": "cut-after", "bytes": 0}},
    ]));
    get(&client, "k").await.expect_err("cut");
    get(&client, "k").await.expect_err("reset");
    let mut flipped = bytes.clone();
    flipped[2_500_000] ^= 1;
    assert!(get(&client, "k").await.expect("get") == flipped);
    assert!(get(&client, "k").await.expect("get") == bytes[..1_234]);
    get(&client, "k").await.expect_err("cut at once");
    assert!(get(&client, "k").await.expect("get") == bytes);
}

/// The bytes before the cut do arrive, all of them and no more.
#[test]
fn a_cut_answer_is_exact() {
    use std::io::{Read, Write};

    let dir = tempfile::tempdir().expect("folder");
    std::fs::create_dir(dir.path().join("files")).expect("folder");
    std::fs::write(dir.path().join("files/k"), data(1, 4 * MIB)).expect("file");
    let server = Server::start(&["--null", "--serve", dir.path().to_str().expect("path")]);
    for (wire, reset) in [("cut-after", false), ("reset-after", true)] {
        let action = json!({"wire": wire, "of": "response", "bytes": 3_000_001});
        server.rules(&json!([{"op": "GetObject", "always": true, "action": action}]));
        let mut stream =
            std::net::TcpStream::connect(&server.endpoint["http://".len()..]).expect("connect");
        stream
            .write_all(b"GET /files/k HTTP/1.1\r\nhost: test\r\n\r\n")
            .expect("send");
        let mut answer = Vec::new();
        let end = stream.read_to_end(&mut answer);
        assert_eq!(end.is_err(), reset, "{end:?}");
        if !reset {
            let head = answer
                .windows(4)
                .position(|window| window == b"\r\n\r\n")
                .expect("head")
                + 4;
            assert_eq!(answer.len() - head, 3_000_001);
        }
    }
}

#[tokio::test]
async fn a_stored_bit_flips_after_the_checks() {
    let root = tempfile::tempdir().expect("folder");
    for args in [&[][..], &["--root", root.path().to_str().expect("path")]] {
        let server = Server::start(args);
        let client = server.client();
        server.rules(&rule(json!({"wire": "flip-stored-bit", "bytes": 70_000})));
        let bytes = data(1, 100_000);
        put(&client, "k", &bytes).await.expect("put");
        let mut flipped = bytes.clone();
        flipped[70_000] ^= 1;
        assert!(get(&client, "k").await.expect("get") == flipped);
    }
}

#[tokio::test]
async fn headers_conditions_and_late_sight() {
    let server = Server::start(&[]);
    let client = server.client();
    put(&client, "k", b"x").await.expect("put");
    server.rules(&json!([
        {"op": ["HeadObject", "GetObject"], "key_contains": "new", "per_key": true, "always": true, "times": 2, "action": {"status": 404, "code": "NoSuchKey"}},
        {"op": "HeadObject", "always": true, "action": {"headers": {"x-amz-checksum-crc64nvme": "AAAAAAAAAAA=", "etag": ""}}},
        {"op": "PutObject", "header": {"name": "if-none-match"}, "nth": 1, "action": {"ignore_conditions": true}},
        {"op": "PutObject", "header": {"name": "if-none-match", "contains": "*"}, "nth": 2, "action": {"status": 501, "code": "NotImplemented"}},
        {"op": "PutObject", "without_header": "if-none-match", "key_contains": "bare", "always": true, "action": {"status": 403, "code": "AccessDenied"}},
        {"op": "ListObjectsV2", "nth": 1, "action": {"stale_ms": 3_600_000}},
    ]));
    let head = client
        .head_object()
        .bucket(BUCKET)
        .key("k")
        .send()
        .await
        .expect("head");
    assert_eq!(
        (head.checksum_crc64_nvme(), head.e_tag()),
        (Some("AAAAAAAAAAA="), None)
    );
    let once = || {
        client
            .put_object()
            .bucket(BUCKET)
            .key("k")
            .if_none_match("*")
            .body(ByteStream::from_static(b"y"))
    };
    once().send().await.expect("the condition is ignored");
    assert_eq!(
        refusal(once().send().await),
        (501, "NotImplemented".to_owned())
    );
    assert_eq!(refusal(once().send().await).0, 412);
    assert_eq!(refusal(put(&client, "bare", b"x").await).0, 403);
    for key in ["new-1", "new-2"] {
        put(&client, key, b"x").await.expect("put");
        assert!(!exists(&client, key).await);
        get(&client, key).await.expect_err("hidden");
        get(&client, key).await.expect("seen");
    }
    let count = || async {
        client
            .list_objects_v2()
            .bucket(BUCKET)
            .send()
            .await
            .expect("list")
            .contents()
            .len()
    };
    assert_eq!(count().await, 0);
    assert_eq!(count().await, 3);
}

#[tokio::test]
async fn a_rate_lets_every_byte_through() {
    let server = Server::start(&["--rate", "64MiB/s"]);
    let client = server.client();
    let bytes = data(1, 4 * MIB);
    let (one, two) = tokio::join!(put(&client, "1", &bytes), put(&client, "2", &bytes));
    one.and(two).expect("put");
    let (one, two) = tokio::join!(get(&client, "1"), get(&client, "2"));
    assert!(one.expect("get") == bytes && two.expect("get") == bytes);
}

#[test]
fn idle_connections_are_closed() {
    use std::io::Read;

    let server = Server::start(&["--close-idle", "200ms"]);
    let mut stream =
        std::net::TcpStream::connect(&server.endpoint["http://".len()..]).expect("connect");
    stream
        .set_read_timeout(Some(Duration::from_secs(20)))
        .expect("timeout");
    assert_eq!(stream.read(&mut [0; 16]).expect("closed, not timed out"), 0);
}

/// Whatever arrives, the server goes on.
#[tokio::test]
async fn hostile_requests() {
    use std::io::{Read, Write};

    let server = Server::start(&["--null"]);
    let requests: [&[u8]; 8] = [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET /%zz/%ff%fe?%00=%zz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        b"PUT /bucket/k HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999\r\n\r\n",
        b"PUT /bucket/k?partNumber=-1&uploadId= HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\nconnection: close\r\n\r\nx",
        b"GET /bucket/k HTTP/1.1\r\nhost: x\r\nrange: bytes=9-1\r\nconnection: close\r\n\r\n",
        b"POST /bucket/k?uploadId=x HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\nconnection: close\r\n\r\n<a><b",
        b"GET /bucket?list-type=2&max-keys=-5&continuation-token=!! HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        b"PUT /bucket/k HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\nffffffffffffffff\r\n",
    ];
    for request in requests {
        let mut stream =
            std::net::TcpStream::connect(&server.endpoint["http://".len()..]).expect("connect");
        stream
            .set_read_timeout(Some(Duration::from_secs(20)))
            .expect("timeout");
        stream.write_all(request).expect("send");
        stream
            .shutdown(std::net::Shutdown::Write)
            .expect("shutdown");
        // Any answer will do, or a closed connection.
        let _ = stream.read_to_end(&mut Vec::new());
    }
    server
        .client()
        .list_buckets()
        .send()
        .await
        .expect("the server lives");
    assert!(server.terminate());
}
