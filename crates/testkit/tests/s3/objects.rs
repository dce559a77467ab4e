//! Whole objects.

use aws_sdk_s3::config::{Config, RequestChecksumCalculation};
use aws_sdk_s3::error::ProvideErrorMetadata;
use aws_sdk_s3::primitives::ByteStream;
use aws_sdk_s3::types::{ChecksumAlgorithm, ChecksumMode, ChecksumType, Delete, ObjectIdentifier};

use crate::server::{BUCKET, MIB, Server, crc64, data, refusal};

#[tokio::test]
async fn put_get_head_delete_and_ranges() {
    let server = Server::start(&[]);
    let client = server.client();
    let bytes = data(1, 3 * MIB + 17);
    let put = client
        .put_object()
        .bucket(BUCKET)
        .key("a b/c+d")
        .metadata("who", "me")
        .content_type("text/x-test")
        .body(ByteStream::from(bytes.clone()))
        .send()
        .await
        .expect("put");
    let etag = put.e_tag().expect("etag").to_owned();
    assert_eq!(etag.len(), 34, "an MD5 in quotes: {etag}");

    let head = client
        .head_object()
        .bucket(BUCKET)
        .key("a b/c+d")
        .checksum_mode(ChecksumMode::Enabled)
        .send()
        .await
        .expect("head");
    assert_eq!(
        head.content_length(),
        Some(i64::try_from(bytes.len()).expect("length"))
    );
    assert_eq!(head.checksum_crc64_nvme(), Some(crc64(&bytes).as_str()));
    assert_eq!(head.checksum_type(), Some(&ChecksumType::FullObject));
    assert_eq!(head.e_tag(), Some(etag.as_str()));
    assert_eq!(head.content_type(), Some("text/x-test"));
    assert_eq!(
        head.metadata()
            .and_then(|meta| meta.get("who"))
            .map(String::as_str),
        Some("me")
    );

    for (range, want) in [
        (None, &bytes[..]),
        (Some("bytes=0-0"), &bytes[..1]),
        (Some("bytes=1048570-1048590"), &bytes[1_048_570..1_048_591]),
        (Some("bytes=3145740-"), &bytes[3_145_740..]),
        (Some("bytes=-5"), &bytes[bytes.len() - 5..]),
        (Some("bytes=3145740-99999999"), &bytes[3_145_740..]),
    ] {
        let got = client
            .get_object()
            .bucket(BUCKET)
            .key("a b/c+d")
            .set_range(range.map(str::to_owned))
            .send()
            .await
            .expect("get");
        assert_eq!(got.content_range().is_some(), range.is_some());
        assert!(
            got.body.collect().await.expect("body").into_bytes() == want,
            "{range:?}"
        );
    }
    let past = client
        .get_object()
        .bucket(BUCKET)
        .key("a b/c+d")
        .range("bytes=3145745-")
        .send()
        .await;
    assert_eq!(refusal(past), (416, "InvalidRange".to_owned()));

    client
        .delete_object()
        .bucket(BUCKET)
        .key("a b/c+d")
        .send()
        .await
        .expect("delete");
    client
        .delete_object()
        .bucket(BUCKET)
        .key("a b/c+d")
        .send()
        .await
        .expect("delete again");
    let gone = client
        .get_object()
        .bucket(BUCKET)
        .key("a b/c+d")
        .send()
        .await;
    assert_eq!(refusal(gone), (404, "NoSuchKey".to_owned()));
}

#[tokio::test]
async fn wrong_checksums_are_refused_and_leave_nothing() {
    let server = Server::start(&[]);
    let client = server.client();
    let put = || {
        client
            .put_object()
            .bucket(BUCKET)
            .key("k")
            .body(ByteStream::from_static(b"right"))
    };
    let wrong = crc64(b"wrong");
    assert_eq!(
        refusal(put().checksum_crc64_nvme(wrong).send().await),
        (400, "BadDigest".to_owned())
    );
    assert_eq!(
        refusal(put().checksum_crc32_c("AAAAAA==").send().await),
        (400, "BadDigest".to_owned())
    );
    assert_eq!(
        refusal(put().checksum_crc32("AAAAAA==").send().await),
        (400, "BadDigest".to_owned())
    );
    let sha = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";
    assert_eq!(
        refusal(put().checksum_sha256(sha).send().await),
        (400, "BadDigest".to_owned())
    );
    assert_eq!(
        refusal(put().content_md5("AAAAAAAAAAAAAAAAAAAAAA==").send().await),
        (400, "BadDigest".to_owned())
    );
    assert_eq!(
        refusal(put().content_md5("nonsense").send().await),
        (400, "InvalidDigest".to_owned())
    );
    assert_eq!(
        refusal(client.get_object().bucket(BUCKET).key("k").send().await).0,
        404
    );
    put()
        .checksum_crc64_nvme(crc64(b"right"))
        .content_md5("fE8pQHiTwzSmy3qHvwRcDQ==")
        .send()
        .await
        .expect("right");
}

#[tokio::test]
async fn unsigned_payload_is_taken_and_a_wrong_secret_is_not() {
    let server = Server::start(&[]);
    let client = server.client();
    let body = data(2, 100_000);
    client
        .put_object()
        .bucket(BUCKET)
        .key("k")
        .body(ByteStream::from(body))
        .customize()
        .disable_payload_signing()
        .send()
        .await
        .expect("unsigned payload");
    let stranger = server.client_with("guess");
    let refused = stranger
        .put_object()
        .bucket(BUCKET)
        .key("k2")
        .body(ByteStream::from(data(3, MIB)))
        .send()
        .await;
    assert_eq!(refusal(refused), (403, "SignatureDoesNotMatch".to_owned()));
}

#[tokio::test]
async fn a_streamed_body_with_a_checksum_trailer() {
    let server = Server::start(&[]);
    let client = server.client();
    let bytes = data(3, 300_000);
    std::fs::write(server.path("file"), &bytes).expect("file");
    let body = ByteStream::from_path(server.path("file"))
        .await
        .expect("body");
    let put = client
        .put_object()
        .bucket(BUCKET)
        .key("k")
        .checksum_algorithm(ChecksumAlgorithm::Crc64Nvme);
    let trailers =
        Config::builder().request_checksum_calculation(RequestChecksumCalculation::WhenSupported);
    let put = put
        .body(body)
        .customize()
        .config_override(trailers)
        .send()
        .await
        .expect("put");
    assert_eq!(put.checksum_crc64_nvme(), Some(crc64(&bytes).as_str()));
    assert!(
        server.log()[0]["bytes_in"].as_u64() > Some(300_000),
        "framing and trailer were sent"
    );
    let got = client
        .get_object()
        .bucket(BUCKET)
        .key("k")
        .send()
        .await
        .expect("get");
    assert!(got.body.collect().await.expect("body").into_bytes() == bytes);
}

#[tokio::test]
async fn conditions() {
    let server = Server::start(&[]);
    let client = server.client();
    let put = |text: &'static str| {
        client
            .put_object()
            .bucket(BUCKET)
            .key("k")
            .body(ByteStream::from_static(text.as_bytes()))
    };
    assert_eq!(
        refusal(put("x").if_match("\"00\"").send().await),
        (404, "NoSuchKey".to_owned())
    );
    let first = put("first").if_none_match("*").send().await.expect("first");
    let etag = first.e_tag().expect("etag");
    assert_eq!(
        refusal(put("second").if_none_match("*").send().await),
        (412, "PreconditionFailed".to_owned())
    );
    assert_eq!(
        refusal(put("second").if_match("\"00\"").send().await),
        (412, "PreconditionFailed".to_owned())
    );

    let get = || client.get_object().bucket(BUCKET).key("k");
    assert_eq!(
        refusal(get().if_match("\"00\"").send().await),
        (412, "PreconditionFailed".to_owned())
    );
    assert_eq!(refusal(get().if_none_match(etag).send().await).0, 304);
    let got = get()
        .if_match(etag)
        .send()
        .await
        .expect("get")
        .body
        .collect()
        .await
        .expect("body");
    assert_eq!(got.into_bytes(), "first");

    put("second").if_match(etag).send().await.expect("replace");
    let gone = client
        .delete_object()
        .bucket(BUCKET)
        .key("k")
        .if_match(etag)
        .send()
        .await;
    assert_eq!(refusal(gone), (412, "PreconditionFailed".to_owned()));
}

#[tokio::test]
async fn listings_are_paged_and_grouped() {
    let server = Server::start(&[]);
    let client = server.client();
    for key in ["a", "dir/1", "dir/2", "dir/sub/3", "other/4", "z"] {
        client
            .put_object()
            .bucket(BUCKET)
            .key(key)
            .body(ByteStream::from_static(b"x"))
            .send()
            .await
            .expect("put");
    }
    let mut names = Vec::new();
    let mut token = None;
    for _ in 0..10 {
        let page = client
            .list_objects_v2()
            .bucket(BUCKET)
            .delimiter("/")
            .max_keys(1)
            .set_continuation_token(token.clone())
            .send()
            .await
            .expect("list");
        assert_eq!(page.key_count(), Some(1));
        names.extend(
            page.contents()
                .iter()
                .filter_map(|object| object.key())
                .map(str::to_owned),
        );
        names.extend(
            page.common_prefixes()
                .iter()
                .filter_map(|prefix| prefix.prefix())
                .map(str::to_owned),
        );
        token = page.next_continuation_token().map(str::to_owned);
        assert_eq!(page.is_truncated(), Some(token.is_some()));
        if token.is_none() {
            break;
        }
    }
    assert_eq!(names, ["a", "dir/", "other/", "z"]);
    let page = client
        .list_objects_v2()
        .bucket(BUCKET)
        .prefix("dir/")
        .delimiter("/")
        .send()
        .await
        .expect("list");
    assert_eq!(page.contents().len(), 2);
    assert_eq!(page.common_prefixes()[0].prefix(), Some("dir/sub/"));
    let page = client
        .list_objects_v2()
        .bucket(BUCKET)
        .start_after("dir/2")
        .send()
        .await
        .expect("list");
    assert_eq!(page.contents()[0].key(), Some("dir/sub/3"));

    let ids =
        ["a", "z", "never"].map(|key| ObjectIdentifier::builder().key(key).build().expect("id"));
    let delete = Delete::builder()
        .set_objects(Some(ids.to_vec()))
        .build()
        .expect("delete");
    let deleted = client
        .delete_objects()
        .bucket(BUCKET)
        .delete(delete)
        .send()
        .await
        .expect("delete");
    assert_eq!(deleted.deleted().len(), 3);
    let left = client
        .list_objects_v2()
        .bucket(BUCKET)
        .send()
        .await
        .expect("list");
    assert_eq!(left.contents().len(), 4);
}

#[tokio::test]
async fn buckets() {
    let server = Server::start(&[]);
    let client = server.client();
    client
        .head_bucket()
        .bucket(BUCKET)
        .send()
        .await
        .expect("head");
    assert_eq!(
        refusal(client.head_bucket().bucket("nowhere").send().await).0,
        404
    );
    client
        .create_bucket()
        .bucket("another")
        .send()
        .await
        .expect("create");
    let names: Vec<_> = client
        .list_buckets()
        .send()
        .await
        .expect("list")
        .buckets()
        .iter()
        .map(|b| b.name().map(str::to_owned))
        .collect();
    assert_eq!(names, [Some("another".to_owned()), Some(BUCKET.to_owned())]);
    client
        .get_bucket_location()
        .bucket("another")
        .send()
        .await
        .expect("location");
    client
        .delete_bucket()
        .bucket("another")
        .send()
        .await
        .expect("delete");
    let missing = client
        .put_object()
        .bucket("another")
        .key("k")
        .body(ByteStream::from_static(b"x"))
        .send()
        .await;
    assert_eq!(refusal(missing), (404, "NoSuchBucket".to_owned()));
    let unknown = client
        .get_bucket_policy()
        .bucket(BUCKET)
        .send()
        .await
        .expect_err("not there");
    assert_eq!(unknown.code(), Some("NotImplemented"));
}

#[tokio::test]
async fn the_log_says_who_when_and_how_much() {
    let server = Server::start(&[]);
    let client = server.client();
    client
        .put_object()
        .bucket(BUCKET)
        .key("k")
        .if_none_match("*")
        .body(ByteStream::from(data(1, 5000)))
        .send()
        .await
        .expect("put");
    // The record is written before the answer is sent: no waiting here.
    let log = server.log();
    assert_eq!(log.len(), 1);
    client
        .get_object()
        .bucket(BUCKET)
        .key("k")
        .range("bytes=10-19")
        .send()
        .await
        .expect("get");
    let log = server.log();
    let (put, get) = (&log[0], &log[1]);
    for (name, want) in [
        ("op", "PutObject"),
        ("method", "PUT"),
        ("bucket", BUCKET),
        ("key", "k"),
    ] {
        assert_eq!(put[name], want);
    }
    assert_eq!(
        (
            put["status"].as_u64(),
            put["bytes_in"].as_u64(),
            put["if_none_match"].as_bool()
        ),
        (Some(200), Some(5000), Some(true))
    );
    assert_eq!(
        (
            get["status"].as_u64(),
            get["bytes_out"].as_u64(),
            get["range"].as_str()
        ),
        (Some(206), Some(10), Some("bytes=10-19"))
    );
    assert!(
        get.get("part").is_none()
            && get.get("fault").is_none()
            && get.get("if_none_match").is_none()
    );
    let times = [&put["t_us"], &put["end_us"], &get["t_us"], &get["end_us"]]
        .map(|time| time.as_u64().expect("time"));
    assert!(times.is_sorted(), "{times:?}");
    assert_eq!(
        (put["seq"].as_u64(), get["seq"].as_u64()),
        (Some(0), Some(1))
    );
}

#[tokio::test]
async fn a_signal_ends_it_cleanly() {
    let server = Server::start(&[]);
    server.client().list_buckets().send().await.expect("list");
    assert!(server.terminate());
}

#[test]
fn wrong_command_lines_are_refused() {
    let dir = tempfile::tempdir().expect("folder");
    let rules = dir.path().join("rules.json");
    std::fs::write(
        &rules,
        r#"[{"op":"UploadParts","always":true,"action":{"stall":true}}]"#,
    )
    .expect("rules");
    let rules = rules.to_str().expect("path");
    for args in [
        &["--bucket", "No/Name"][..],
        &["--rules", rules],
        &["--rules", "/nowhere"],
        &["--rate", "0"],
    ] {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_testkit"))
            .args(["s3", "--addr", "127.0.0.1:0"])
            .args(args)
            .output()
            .expect("run");
        assert!(!output.status.success(), "{args:?}");
        assert!(!output.stderr.is_empty(), "{args:?}");
    }
}
