//! The store's contract, the same for every store, and what the S3 store and its retries make of a server's faults.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use ckptstream::codec::{Crc32, Crc32Kind, Crc64};
use ckptstream::config::{BucketConfig, PartChecksum, StoreConfig, StoreKind, StorePlace};
use ckptstream::plan::PartLimits;
use ckptstream::progress::Meter;
use ckptstream::store::file::FileStore;
use ckptstream::store::memory::MemoryStore;
use ckptstream::store::retry::{RetryPolicy, Retrying};
use ckptstream::store::s3::S3Store;
use ckptstream::store::{
    Key, ObjectInfo, PART_LEN_MIN, PartBody, PartNumber, PartReceipt, PutOutcome, Store,
    StoreError, UploadId,
};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::support::S3Server;
use crate::support::s3_server::{BUCKET, connect, has_credentials, in_environment};
use crate::support::scene::{Scene, assert_failed};

fn key(text: &str) -> Key {
    Key::new(text).unwrap()
}

fn number(number: u64) -> PartNumber {
    PartNumber::new(number).unwrap()
}

/// Bytes without a pattern that a mix-up of places could hide in.
fn noise(len: usize, seed: u64) -> Bytes {
    let mut state = seed | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        bytes.extend_from_slice(&(state ^ (state >> 29)).to_be_bytes());
    }
    bytes.truncate(len);
    Bytes::from(bytes)
}

fn crc64(bytes: &[u8]) -> u64 {
    Crc64::of(bytes).value()
}

/// The bytes as pieces of odd lengths, one of them empty.
fn in_pieces(bytes: &Bytes) -> PartBody {
    let first = bytes.len() / 3;
    let second = bytes.len() / 2;
    let pieces = vec![
        bytes.slice(..first),
        Bytes::new(),
        bytes.slice(first..second),
        bytes.slice(second..),
    ];
    PartBody::new(pieces, crc64(bytes))
}

async fn put_part(
    store: &dyn Store,
    key: &Key,
    upload: &UploadId,
    part: u64,
    bytes: &Bytes,
) -> PartReceipt {
    store
        .put_part(key, upload, number(part), in_pieces(bytes))
        .await
        .unwrap()
}

/// Uploads the parts in this order of their numbers and completes the upload.
async fn upload(store: &dyn Store, key: &Key, parts: &[Bytes]) -> Result<(), StoreError> {
    let upload = store.begin_upload(key).await?;
    let mut receipts = Vec::new();
    for (part, bytes) in (1..).zip(parts) {
        receipts.push(
            store
                .put_part(key, &upload, number(part), in_pieces(bytes))
                .await?,
        );
    }
    let whole = parts.concat();
    store
        .complete_upload(key, &upload, &receipts, whole.len() as u64, crc64(&whole))
        .await
}

async fn read_range(
    store: &dyn Store,
    key: &Key,
    range: std::ops::Range<u64>,
) -> Result<Vec<u8>, StoreError> {
    let mut out = vec![0; usize::try_from(range.end - range.start).unwrap()];
    store.get_range(key, range, None, &mut out).await?;
    Ok(out)
}

/// What every store must do. `store` is empty and refuses parts under 5 MiB.
pub(crate) async fn contract(store: &dyn Store) {
    small_objects(store).await;
    uploads(store).await;
    refused_uploads(store).await;
    ranges(store).await;
    listings(store).await;
}

async fn small_objects(store: &dyn Store) {
    let (here, bytes) = (key("small/object"), noise(1000, 1));
    assert_eq!(store.get(&here, 1000).await.unwrap(), None);
    assert_eq!(store.head(&here).await.unwrap(), None);
    store.delete(&here).await.unwrap();

    assert_eq!(
        store.put_if_absent(&here, bytes.clone()).await.unwrap(),
        PutOutcome::Created
    );
    let again = store.put_if_absent(&here, noise(10, 2)).await.unwrap();
    assert_eq!(again, PutOutcome::AlreadyExists);
    assert!(store.get(&here, 1000).await.unwrap().as_ref() == Some(&bytes));
    let long = store.get(&here, 999).await;
    assert!(matches!(long, Err(StoreError::Mismatch { .. })), "{long:?}");
    let info: ObjectInfo = store.head(&here).await.unwrap().unwrap();
    assert_eq!(info.len, 1000);
    assert!(
        info.crc64.is_none_or(|sum| sum == crc64(&bytes)),
        "{info:?}"
    );
    assert!(
        info.age.is_none_or(|age| age < Duration::from_secs(60)),
        "{info:?}"
    );

    let empty = key("small/empty");
    assert_eq!(
        store.put_if_absent(&empty, Bytes::new()).await.unwrap(),
        PutOutcome::Created
    );
    assert_eq!(store.get(&empty, 0).await.unwrap(), Some(Bytes::new()));

    store.delete(&here).await.unwrap();
    store.delete(&here).await.unwrap();
    assert_eq!(store.get(&here, 1000).await.unwrap(), None);
    assert_eq!(
        store.put_if_absent(&here, bytes).await.unwrap(),
        PutOutcome::Created
    );

    // Of many at once, one creates.
    let contested = key("small/contested");
    let puts = (0..8).map(|seed| store.put_if_absent(&contested, noise(100, seed)));
    let puts = futures::future::try_join_all(puts).await.unwrap();
    assert_eq!(
        puts.iter()
            .filter(|put| **put == PutOutcome::Created)
            .count(),
        1
    );
}

async fn uploads(store: &dyn Store) {
    let min = usize::try_from(PART_LEN_MIN).unwrap();
    let (first, second, last) = (noise(min, 3), noise(min + 1, 4), noise(1, 5));
    let whole = [&first[..], &second[..], &last[..]].concat();

    let here = key("upload/three parts");
    let id = store.begin_upload(&here).await.unwrap();
    // Any order, and a part sent twice counts once, as it was the last time.
    let third = put_part(store, &here, &id, 3, &last).await;
    put_part(store, &here, &id, 1, &noise(min, 6)).await;
    let one = put_part(store, &here, &id, 1, &first).await;
    let two = put_part(store, &here, &id, 2, &second).await;
    assert_eq!(
        (two.number.get(), two.len, two.crc64),
        (2, second.len() as u64, crc64(&second))
    );
    assert_eq!(
        store.head(&here).await.unwrap(),
        None,
        "nothing shows before completion"
    );
    let parts = [one, two, third];
    let len = whole.len() as u64;
    store
        .complete_upload(&here, &id, &parts, len, crc64(&whole))
        .await
        .unwrap();
    let info = store.head(&here).await.unwrap().unwrap();
    assert_eq!(info.len, len);
    assert!(
        info.crc64.is_none_or(|sum| sum == crc64(&whole)),
        "{info:?}"
    );
    assert!(read_range(store, &here, 0..len).await.unwrap() == whole);
    store.abort_upload(&here, &id).await.unwrap();
    assert!(
        store.head(&here).await.unwrap().is_some(),
        "aborting a completed upload"
    );

    // One short part is enough.
    let short = key("upload/short");
    upload(store, &short, &[noise(3, 7)]).await.unwrap();
    assert_eq!(read_range(store, &short, 0..3).await.unwrap(), noise(3, 7));

    // Two uploads under way at once do not meet.
    let (left, right) = (key("upload/left"), key("upload/right"));
    let (left_parts, right_parts) = ([noise(100, 8)], [noise(200, 9)]);
    let both = futures::future::try_join(
        upload(store, &left, &left_parts),
        upload(store, &right, &right_parts),
    );
    both.await.unwrap();
    assert_eq!(store.get(&left, 1000).await.unwrap(), Some(noise(100, 8)));
    assert_eq!(store.get(&right, 1000).await.unwrap(), Some(noise(200, 9)));
}

async fn refused_uploads(store: &dyn Store) {
    let here = key("refused/object");
    let body = noise(100, 10);

    let id = store.begin_upload(&here).await.unwrap();
    store.abort_upload(&here, &id).await.unwrap();
    store.abort_upload(&here, &id).await.unwrap();
    let put = store
        .put_part(&here, &id, number(1), in_pieces(&body))
        .await;
    assert!(put.as_ref().is_err_and(StoreError::is_not_found), "{put:?}");

    let id = store.begin_upload(&here).await.unwrap();
    let one = put_part(store, &here, &id, 1, &body).await;
    let two = put_part(store, &here, &id, 2, &body).await;
    let whole = [&body[..], &body[..]].concat();
    let (len, sum) = (whole.len() as u64, crc64(&whole));
    let tag = PartReceipt {
        etag: "\"00000000000000000000000000000000\"".to_owned(),
        ..one.clone()
    };
    for parts in [
        &[one.clone(), two.clone()][..],
        &[tag],
        &[two.clone(), one.clone()],
    ] {
        let complete = store.complete_upload(&here, &id, parts, len, sum).await;
        // Where the store knows no CRC64NVME, we see ourselves that parts are not the whole.
        assert!(
            matches!(
                complete,
                Err(StoreError::Refused { .. } | StoreError::Mismatch { .. })
            ),
            "{parts:?}: {complete:?}"
        );
    }
    let complete = store
        .complete_upload(&here, &id, &[two], 100, crc64(&body) ^ 1)
        .await;
    assert!(
        matches!(complete, Err(StoreError::Mismatch { .. })),
        "{complete:?}"
    );
    assert_eq!(store.head(&here).await.unwrap(), None);
    store.abort_upload(&here, &id).await.unwrap();
}

async fn ranges(store: &dyn Store) {
    let (here, bytes) = (key("range/object"), noise(100_000, 11));
    store.put_if_absent(&here, bytes.clone()).await.unwrap();
    for range in [0..1, 0..100_000, 99_999..100_000, 1..77_777, 5..5, 0..0] {
        let expected =
            &bytes[usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap()];
        assert!(read_range(store, &here, range).await.unwrap() == expected);
    }
    for range in [
        0..100_001,
        99_999..100_001,
        100_000..100_001,
        200_000..200_001,
    ] {
        let read = read_range(store, &here, range.clone()).await;
        assert!(
            matches!(read, Err(StoreError::Mismatch { .. })),
            "{range:?}: {read:?}"
        );
    }
    let read = store.get_range(&here, 0..10, None, &mut [0; 9]).await;
    assert!(read.is_err(), "a buffer of another length");
    let absent = read_range(store, &key("range/absent"), 0..1).await;
    assert!(
        absent.as_ref().is_err_and(StoreError::is_not_found),
        "{absent:?}"
    );

    let info = store.head(&here).await.unwrap().unwrap();
    let tag = info.etag.unwrap();
    store
        .get_range(&here, 0..10, Some(&tag), &mut [0; 10])
        .await
        .unwrap();
    store.delete(&here).await.unwrap();
    store
        .put_if_absent(&here, noise(100_000, 12))
        .await
        .unwrap();
    let read = store
        .get_range(&here, 0..10, Some(&tag), &mut [0; 10])
        .await;
    assert!(matches!(read, Err(StoreError::Mismatch { .. })), "{read:?}");
}

async fn listings(store: &dyn Store) {
    let names = [
        "list/a.b/1",
        "list/a/1",
        "list/a/2",
        "list/a/3/4",
        "list/b",
        "list/c/x",
    ];
    for (len, name) in names.iter().enumerate() {
        store
            .put_if_absent(&key(name), noise(len, 13))
            .await
            .unwrap();
    }
    let listed = store.list("list/").await.unwrap();
    assert!(listed.iter().map(|found| found.key.as_str()).eq(names));
    assert!(listed.iter().map(|found| found.len).eq(0..6));
    assert_eq!(store.list("list/a/").await.unwrap().len(), 3);
    assert_eq!(store.list("list/none/").await.unwrap(), []);
    assert_eq!(store.list_dirs("list/").await.unwrap(), ["a", "a.b", "c"]);
    assert_eq!(store.list_dirs("list/a/").await.unwrap(), ["3"]);
    assert!(
        store
            .list_dirs("")
            .await
            .unwrap()
            .contains(&"list".to_owned())
    );
}

/// Limits that a test can wait for.
fn config(endpoint: &str, prefix: &str) -> StoreConfig {
    StoreConfig {
        epoch: None,
        bucket: BucketConfig::default(),
        place: StorePlace::Bucket {
            bucket: BUCKET.to_owned(),
            prefix: prefix.to_owned(),
        },
        endpoint: Some(endpoint.to_owned()),
        region: None,
        kind: StoreKind::Generic,
        path_style: true,
        part_size: None,
        limits: PartLimits::S3,
        parallelism: 4,
        checksum: PartChecksum::Crc64Nvme,
        sign_payload: Some(false),
        retry_timeout: Duration::from_secs(30),
        connect_timeout: Duration::from_secs(5),
        request_timeout: Duration::from_secs(10),
        stall_timeout: Duration::from_secs(10),
        idle_timeout: Duration::from_secs(10),
    }
}

fn patient<S: Store>(store: S) -> (Retrying<S>, Arc<Meter>) {
    let meter = Meter::new();
    let policy = RetryPolicy {
        pause_first: Duration::from_millis(5),
        absence_patience: Duration::from_millis(200),
        ..RetryPolicy::new(Duration::from_secs(30))
    };
    let cancel = CancellationToken::new();
    (
        Retrying::new(Arc::new(store), policy, cancel, Arc::clone(&meter)),
        meter,
    )
}

#[tokio::test]
async fn memory_keeps_the_contract() {
    let store = MemoryStore::new();
    contract(&store).await;
    assert_eq!(store.open_uploads(), 0);
    contract(&patient(MemoryStore::new()).0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_keeps_the_contract() {
    let root = tempfile::tempdir().unwrap();
    contract(&FileStore::open(root.path()).unwrap()).await;
    let other = tempfile::tempdir().unwrap();
    contract(&patient(FileStore::open(other.path()).unwrap()).0).await;
    // Whoever reads there must not take it for a store without images.
    let refused = FileStore::open(&root.path().join("not mounted"));
    assert!(
        matches!(refused, Err(StoreError::Refused { .. })),
        "{refused:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn s3_keeps_the_contract() {
    if !has_credentials("store_contract::s3_keeps_the_contract") {
        return;
    }
    let server = S3Server::start(&[]);
    let plain = config(&server.endpoint, "some/prefix");
    contract(&connect(&plain).await.unwrap()).await;
    let unprefixed = config(&server.endpoint, "");
    contract(&patient(connect(&unprefixed).await.unwrap()).0).await;
    let signed = StoreConfig {
        sign_payload: Some(true),
        ..config(&server.endpoint, "signed")
    };
    contract(&connect(&signed).await.unwrap()).await;
    for (checksum, prefix) in [
        (PartChecksum::Crc32c, "crc32c"),
        (PartChecksum::Crc32, "crc32"),
        (PartChecksum::None, "none"),
    ] {
        let other = StoreConfig {
            checksum,
            ..config(&server.endpoint, prefix)
        };
        contract(&connect(&other).await.unwrap()).await;
    }
}

/// Against a server of one's own: `CKPTSTREAM_TEST_S3_ENDPOINT`, with an empty bucket `images` and the usual test keys.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a server of one's own in CKPTSTREAM_TEST_S3_ENDPOINT"]
async fn another_s3_keeps_the_contract() {
    if !has_credentials("store_contract::another_s3_keeps_the_contract") {
        return;
    }
    let endpoint = std::env::var("CKPTSTREAM_TEST_S3_ENDPOINT").unwrap();
    for sign_payload in [false, true] {
        let prefix = format!("test-{}-{sign_payload}", std::process::id());
        let config = StoreConfig {
            sign_payload: Some(sign_payload),
            ..config(&endpoint, &prefix)
        };
        contract(&connect(&config).await.unwrap()).await;
    }
}

/// A server that takes short parts, so that two parts are cheap.
fn lenient(extra_args: &[&str]) -> S3Server {
    S3Server::start(&[&["--min-part", "1KiB"], extra_args].concat())
}

async fn client(server: &S3Server) -> S3Store {
    connect(&config(&server.endpoint, "p")).await.unwrap()
}

/// Every request that the product makes, once, under keys that start with `name`; each answer is checked.
async fn every_request(store: &dyn Store, name: &str) {
    let (small, body) = (key(&format!("{name}/small")), noise(5000, 20));
    assert_eq!(
        store.put_if_absent(&small, body.clone()).await.unwrap(),
        PutOutcome::Created
    );
    assert!(store.get(&small, 5000).await.unwrap() == Some(body));
    let large = key(&format!("{name}/large"));
    let parts = [noise(300_000, 21), noise(200_000, 22)];
    upload(store, &large, &parts).await.unwrap();
    assert_eq!(store.head(&large).await.unwrap().unwrap().len, 500_000);
    assert!(read_range(store, &large, 0..500_000).await.unwrap() == parts.concat());
    assert_eq!(store.list(&format!("{name}/")).await.unwrap().len(), 2);
    let given_up = key(&format!("{name}/given up"));
    let id = store.begin_upload(&given_up).await.unwrap();
    store.abort_upload(&given_up, &id).await.unwrap();
    store.delete(&small).await.unwrap();
    assert_eq!(store.head(&small).await.unwrap(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn passing_faults_are_not_seen() {
    if !has_credentials("store_contract::passing_faults_are_not_seen") {
        return;
    }
    const ALL: [&str; 9] = [
        "PutObject",
        "GetObject",
        "CreateMultipartUpload",
        "UploadPart",
        "CompleteMultipartUpload",
        "HeadObject",
        "ListObjectsV2",
        "AbortMultipartUpload",
        "DeleteObject",
    ];
    let server = lenient(&[]);
    let (store, meter) = patient(client(&server).await);
    let cases = [
        (&ALL[..], json!({"status": 503, "code": "SlowDown"})),
        (&ALL, json!({"status": 500, "code": "InternalError"})),
        (
            &ALL,
            json!({"status": 502, "body": "<html>bad gateway</html>"}),
        ),
        (&ALL, json!({"drop": true})),
        // The answer is lost, the effect is not.
        (&ALL, json!({"apply": true, "drop": true})),
        (
            &ALL,
            json!({"apply": true, "status": 500, "code": "InternalError"}),
        ),
        (
            &["PutObject", "UploadPart"],
            json!({"status": 400, "code": "RequestTimeout"}),
        ),
        (
            &["PutObject"],
            json!({"status": 409, "code": "ConditionalRequestConflict"}),
        ),
        // S3 sends 200 before it has assembled the object.
        (
            &["CompleteMultipartUpload"],
            json!({"status": 200, "code": "InternalError"}),
        ),
        (
            &["CompleteMultipartUpload"],
            json!({"status": 200, "code": "SlowDown"}),
        ),
        (
            &["CompleteMultipartUpload"],
            json!({"status": 200, "empty": true, "apply": true}),
        ),
        (
            &["CompleteMultipartUpload"],
            json!({"status": 200, "empty": true}),
        ),
        (
            &["CompleteMultipartUpload"],
            json!({"status": 200, "body": "<CompleteMultip"}),
        ),
        (
            &["CompleteMultipartUpload"],
            json!({"status": 200, "body": "<CompleteMultipartUploadResult/>"}),
        ),
        (
            &["UploadPart"],
            json!({"wire": "reset-after", "bytes": 100_000}),
        ),
        (
            &["UploadPart"],
            json!({"wire": "flip-bit", "of": "request", "bytes": 1000}),
        ),
        (&["GetObject"], json!({"wire": "cut-after", "bytes": 1000})),
        (
            &["GetObject"],
            json!({"wire": "short-after", "bytes": 1000}),
        ),
        (
            &["GetObject"],
            json!({"wire": "reset-after", "of": "response", "bytes": 1000}),
        ),
    ];
    for (case, (operations, action)) in cases.iter().enumerate() {
        for operation in *operations {
            // A small object that comes short cannot be told from a shorter one; what reads it must know its form.
            let range = if action["wire"] == "short-after" {
                "range"
            } else {
                "host"
            };
            server.set_rules(&json!([
                {"op": operation, "header": {"name": range}, "nth": 1, "action": action}
            ]));
            let before = meter.view().retries;
            every_request(&store, &format!("{case}-{operation}")).await;
            let retried = meter.view().retries - before;
            // A completed upload is found by looking. A connection that closes before the answer may be taken for an idle one, and be replaced below us.
            let found = *operation == "CompleteMultipartUpload" && action["apply"] == true;
            let expected = u64::from(!found);
            assert!(
                retried == expected || action["drop"] == true,
                "{operation} {action}: {retried}"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn refusals_are_final_and_say_what_helps() {
    if !has_credentials("store_contract::refusals_are_final_and_say_what_helps") {
        return;
    }
    let server = lenient(&[]);
    let (store, meter) = patient(client(&server).await);
    let missing = "A header you provided implies functionality that is not implemented: x-amz-checksum-crc64nvme";
    let region = json!({"x-amz-bucket-region": "eu-west-1"});
    for (operation, action, says) in [
        (
            "PutObject",
            json!({"status": 403, "code": "AccessDenied"}),
            "s3:PutObject",
        ),
        (
            "UploadPart",
            json!({"status": 403, "code": "AccessDenied"}),
            "s3:PutObject",
        ),
        (
            "PutObject",
            json!({"status": 403, "code": "InvalidAccessKeyId"}),
            "AWS_ACCESS_KEY_ID",
        ),
        (
            "PutObject",
            json!({"status": 403, "code": "RequestTimeTooSkewed"}),
            "clock",
        ),
        (
            "PutObject",
            json!({"status": 301, "code": "PermanentRedirect", "headers": region}),
            "in eu-west-1, we asked in us-east-1: set store.region",
        ),
        (
            "PutObject",
            json!({"status": 404, "code": "NoSuchBucket"}),
            "no bucket \"images\"",
        ),
        (
            "UploadPart",
            json!({"status": 501, "code": "NotImplemented", "message": missing}),
            "store.checksum = \"none\"",
        ),
        (
            "UploadPart",
            json!({"status": 400, "code": "XAmzContentSHA256Mismatch"}),
            "store.sign_payload = true",
        ),
        (
            "PutObject",
            json!({"status": 501, "code": "NotImplemented"}),
            "If-None-Match",
        ),
        (
            "CompleteMultipartUpload",
            json!({"status": 200, "code": "AccessDenied"}),
            "AccessDenied",
        ),
    ] {
        server.set_rules(&json!([{"op": operation, "always": true, "action": action}]));
        let seen = server.requests(operation).len();
        let result = match operation {
            "PutObject" => store
                .put_if_absent(&key("refused"), noise(10, 1))
                .await
                .map(|_| ()),
            _ => upload(&store, &key("refused"), &[noise(5000, 2)]).await,
        };
        let error = result.unwrap_err();
        assert!(matches!(error, StoreError::Refused { .. }), "{error:?}");
        assert!(
            error.to_string().contains(says),
            "{operation} {action}: {error}"
        );
        assert_eq!(
            server.requests(operation).len() - seen,
            1,
            "{operation} {action}"
        );
    }
    assert_eq!(meter.view().retries, 0);
}

/// The chain of an error that took several attempts names one key throughout, and tells the store's words once.
#[tokio::test(flavor = "multi_thread")]
async fn a_chain_of_errors_tells_each_thing_once() {
    if !has_credentials("store_contract::a_chain_of_errors_tells_each_thing_once") {
        return;
    }
    let server = lenient(&[]);
    let policy = RetryPolicy {
        pause_first: Duration::from_millis(5),
        ..RetryPolicy::new(Duration::from_millis(50))
    };
    let inner = Arc::new(client(&server).await);
    let store = Retrying::new(inner, policy, CancellationToken::new(), Meter::new());
    let action = json!({"status": 500, "code": "InternalError", "message": "we are sorry"});
    server.set_rules(&json!([{"op": "*", "always": true, "action": action}]));
    let head = async { store.get(&key("job/object"), 10).await.map(drop) }.await;
    let list = async { store.list("job/").await.map(drop) }.await;
    let whole = async { store.list_dirs("").await.map(drop) }.await;
    for (result, start) in [
        (head, "GetObject job/object: "),
        (list, "ListObjectsV2 job/: "),
        (whole, "ListObjectsV2 /: "),
    ] {
        let chain = ckptstream::error::chain(&result.unwrap_err());
        assert!(
            chain.iter().all(|text| text.starts_with(start)),
            "{chain:?}"
        );
        let whole = chain.join(": ");
        assert_eq!(whole.matches("we are sorry").count(), 1, "{whole}");
        assert!(
            !whole.contains('{') && !whole.contains("unhandled"),
            "{whole}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_stores_own_word_proves_absence() {
    if !has_credentials("store_contract::only_the_stores_own_word_proves_absence") {
        return;
    }
    let server = lenient(&[]);
    let store = client(&server).await;
    server.set_rules(&json!([{"op": "GetObject", "always": true, "action": {"status": 404, "body": "<html>gateway</html>"}}]));
    let read = store.get(&key("absent"), 10).await;
    assert!(read.is_err(), "{read:?}");
    let elsewhere = StoreConfig {
        place: StorePlace::Bucket {
            bucket: "no-such-bucket".to_owned(),
            prefix: "p".to_owned(),
        },
        ..config(&server.endpoint, "")
    };
    server.set_rules(&json!([]));
    let read = connect(&elsewhere)
        .await
        .unwrap()
        .get(&key("absent"), 10)
        .await;
    assert!(matches!(read, Err(StoreError::Refused { .. })), "{read:?}");
}

/// Headers that some stores refuse are never sent; those that others need always are.
#[tokio::test(flavor = "multi_thread")]
async fn requests_carry_what_they_must_and_nothing_else() {
    if !has_credentials("store_contract::requests_carry_what_they_must_and_nothing_else") {
        return;
    }
    let server = lenient(&[]);
    let refuse = json!({"status": 501, "code": "NotImplemented"});
    let bodies = json!(["PutObject", "UploadPart"]);
    let unwanted = [
        json!({"op": "*", "header": {"name": "x-amz-trailer"}, "always": true, "action": refuse}),
        json!({"op": "*", "header": {"name": "content-encoding"}, "always": true, "action": refuse}),
        json!({"op": bodies, "header": {"name": "transfer-encoding"}, "always": true, "action": refuse}),
        json!({"op": bodies, "without_header": "content-length", "always": true, "action": refuse}),
    ];
    let checksum = "x-amz-checksum-crc64nvme";
    let with = json!({"op": "*", "header": {"name": checksum}, "always": true, "action": refuse});
    let without =
        json!({"op": bodies, "without_header": checksum, "always": true, "action": refuse});
    let md5 = "content-md5";
    let with_md5 = json!({"op": "*", "header": {"name": md5}, "always": true, "action": refuse});
    let without_md5 =
        json!({"op": bodies, "without_header": md5, "always": true, "action": refuse});
    let payload = "x-amz-content-sha256";
    let unsigned = json!({"op": bodies, "header": {"name": payload, "contains": "UNSIGNED"}, "always": true, "action": refuse});
    let plain = config(&server.endpoint, "plain");
    let no_checksum = StoreConfig {
        checksum: PartChecksum::None,
        ..config(&server.endpoint, "none")
    };
    let signed = StoreConfig {
        sign_payload: Some(true),
        ..config(&server.endpoint, "signed")
    };
    for (config, rules) in [
        (&plain, vec![without.clone(), with_md5.clone()]),
        // Content-MD5 in its place: every store knows it, and buckets with Object Lock take no part without either.
        (&no_checksum, vec![with.clone(), without_md5.clone()]),
        (&signed, vec![without.clone(), unsigned.clone()]),
    ] {
        server.set_rules(&json!([&unwanted[..], &rules].concat()));
        every_request(&connect(config).await.unwrap(), "it").await;
    }
    // The rules do bite.
    for (config, rule) in [
        (&plain, with),
        (&no_checksum, without),
        (&plain, unsigned),
        (&plain, without_md5),
        (&no_checksum, with_md5),
    ] {
        server.set_rules(&json!([rule]));
        let store = connect(config).await.unwrap();
        assert!(
            store
                .put_if_absent(&key("bitten"), noise(10, 1))
                .await
                .is_err()
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn composite_checksums_are_not_compared() {
    if !has_credentials("store_contract::composite_checksums_are_not_compared") {
        return;
    }
    let server = lenient(&[]);
    let store = client(&server).await;
    let here = key("object");
    upload(&store, &here, &[noise(5000, 1)]).await.unwrap();
    let full = store.head(&here).await.unwrap().unwrap();
    assert_eq!(full.crc64, Some(crc64(&noise(5000, 1))));
    assert!(full.age.is_some());
    for headers in [
        json!({"x-amz-checksum-crc64nvme": "AAAAAAAAAAA=-2"}),
        json!({"x-amz-checksum-type": "COMPOSITE"}),
        json!({"x-amz-checksum-crc64nvme": "nonsense"}),
    ] {
        server.set_rules(
            &json!([{"op": "HeadObject", "always": true, "action": {"headers": headers}}]),
        );
        let info = store.head(&here).await.unwrap().unwrap();
        assert_eq!((info.crc64, info.len), (None, 5000), "{headers}");
    }
}

/// S3-26: a value over the bytes is held against ours, one over the parts' values is not, whatever it is called.
#[tokio::test(flavor = "multi_thread")]
async fn only_a_checksum_of_the_whole_object_is_held_against_ours() {
    if !has_credentials("store_contract::only_a_checksum_of_the_whole_object_is_held_against_ours")
    {
        return;
    }
    let server = lenient(&[]);
    let short = StoreConfig {
        checksum: PartChecksum::Crc32c,
        ..config(&server.endpoint, "p")
    };
    let store = connect(&short).await.unwrap();
    let parts = [noise(5000, 1), noise(300, 2)];
    let mut kind = "FULL_OBJECT";
    let whole = Crc32::of(Crc32Kind::Crc32c, parts.iter().map(|part| &part[..]));
    for (name, sum, is_right) in [
        ("right", whole.to_base64(), true),
        ("wrong", "AAAAAA==".to_owned(), false),
        ("called so", "AAAAAA==-2".to_owned(), true),
        ("none", String::new(), true),
        ("composite", "AAAAAA==".to_owned(), true),
    ] {
        if name == "composite" {
            kind = "COMPOSITE";
        }
        let sum = match sum.as_str() {
            "" => String::new(),
            sum => format!("<ChecksumCRC32C>{sum}</ChecksumCRC32C>"),
        };
        let body = format!(
            "<CompleteMultipartUploadResult><ETag>\"e-2\"</ETag>{sum}<ChecksumType>{kind}</ChecksumType></CompleteMultipartUploadResult>"
        );
        server.set_rules(&json!([{"op": "CompleteMultipartUpload", "always": true, "action": {"apply": true, "body": body}}]));
        let done = upload(&store, &key(name), &parts).await;
        match is_right {
            true => done.unwrap(),
            false => assert!(matches!(done, Err(StoreError::Mismatch { .. })), "{done:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stall_ends_and_a_slow_line_does_not() {
    if !has_credentials("store_contract::a_stall_ends_and_a_slow_line_does_not") {
        return;
    }
    // Longer than what the kernel takes off our hands at once.
    let long = noise(40 << 20, 1);
    let server = S3Server::start(&["--rate", "8MiB/s"]);
    let short_limits = |stall: Duration| StoreConfig {
        request_timeout: stall,
        stall_timeout: stall,
        ..config(&server.endpoint, "p")
    };
    let transient = |result: Result<(), StoreError>, says: &str| {
        let error = result.unwrap_err();
        assert!(matches!(error, StoreError::Transient { .. }), "{error:?}");
        assert!(error.to_string().contains(says), "{error}");
    };

    // Five seconds of bytes, under a limit of two.
    let slow = connect(&short_limits(Duration::from_secs(2)))
        .await
        .unwrap();
    upload(&slow, &key("slow"), std::slice::from_ref(&long))
        .await
        .unwrap();

    // A frame table: two seconds of bytes, under a flat limit of one and a half.
    let slow = connect(&short_limits(Duration::from_millis(1500)))
        .await
        .unwrap();
    let table = long.slice(..16 << 20);
    let put = slow.put_if_absent(&key("table"), table.clone()).await;
    assert_eq!(put.unwrap(), PutOutcome::Created);

    let store = connect(&short_limits(Duration::from_millis(400)))
        .await
        .unwrap();
    server.set_rules(&json!([
        {"op": "PutObject", "always": true, "action": {"wire": "stall-after", "bytes": 1000}}
    ]));
    let put = store.put_if_absent(&key("another table"), table).await;
    transient(put.map(drop), "no byte moved for 400ms");
    let id = store.begin_upload(&key("stalled")).await.unwrap();
    let put = || async {
        store
            .put_part(&key("stalled"), &id, number(1), in_pieces(&long))
            .await
            .map(|_| ())
    };
    let rule =
        |operation: &str, action| json!([{"op": operation, "always": true, "action": action}]);
    server.set_rules(&rule(
        "UploadPart",
        json!({"wire": "stall-after", "bytes": 1000}),
    ));
    transient(put().await, "no byte moved for 400ms");
    // An answer may take three times as long as a byte.
    let small = noise(1000, 2);
    let put = || async {
        store
            .put_part(&key("stalled"), &id, number(1), in_pieces(&small))
            .await
            .map(|_| ())
    };
    server.set_rules(&rule("UploadPart", json!({"delay_after_ms": 600})));
    put().await.unwrap();
    server.set_rules(&rule("UploadPart", json!({"stall": true})));
    transient(put().await, "after 1000 of 1000 bytes");

    store
        .put_if_absent(&key("object"), noise(100_000, 3))
        .await
        .unwrap();
    let read = || async {
        read_range(&store, &key("object"), 0..100_000)
            .await
            .map(|_| ())
    };
    server.set_rules(&rule(
        "GetObject",
        json!({"wire": "stall-after", "of": "response", "bytes": 1000}),
    ));
    transient(read().await, "no byte moved for 400ms after 1000 of 100000");
    server.set_rules(&rule("GetObject", json!({"stall": true})));
    transient(read().await, "no answer in 400ms");
    server.set_rules(&rule("HeadObject", json!({"stall": true})));
    transient(
        store.head(&key("object")).await.map(|_| ()),
        "no answer in 400ms",
    );
}

#[tokio::test]
async fn a_server_that_is_not_there_is_a_passing_fault() {
    if !has_credentials("store_contract::a_server_that_is_not_there_is_a_passing_fault") {
        return;
    }
    let endpoint = lenient(&[]).endpoint.clone();
    let store = connect(&config(&endpoint, "p")).await.unwrap();
    let error = store.head(&key("object")).await.unwrap_err();
    assert!(
        matches!(
            &error,
            StoreError::Transient {
                source: Some(_),
                ..
            }
        ),
        "{error:?}"
    );
}

#[tokio::test]
async fn missing_credentials_are_told_at_once() {
    let environment = [
        ("AWS_EC2_METADATA_DISABLED", "true"),
        ("AWS_CONFIG_FILE", "/dev/null"),
        ("AWS_SHARED_CREDENTIALS_FILE", "/dev/null"),
    ];
    let name = "store_contract::missing_credentials_are_told_at_once";
    if !in_environment(name, &environment) {
        return;
    }
    // Nothing listens there: the store itself is not asked.
    let error = connect(&config("http://127.0.0.1:9", "p"))
        .await
        .unwrap_err();
    assert!(matches!(error, StoreError::Refused { .. }), "{error:?}");
    assert!(error.to_string().contains("AWS_ACCESS_KEY_ID"), "{error}");
    let no_region = StoreConfig {
        endpoint: None,
        ..config("", "p")
    };
    let error = connect(&no_region).await.unwrap_err();
    assert!(error.to_string().contains("store.region"), "{error}");
}

#[tokio::test]
async fn a_host_that_is_not_known_points_at_path_style() {
    if !has_credentials("store_contract::a_host_that_is_not_known_points_at_path_style") {
        return;
    }
    let hosted = StoreConfig {
        path_style: false,
        ..config("http://store.invalid:9000", "p")
    };
    let error = connect(&hosted)
        .await
        .unwrap()
        .head(&key("object"))
        .await
        .unwrap_err();
    assert!(error.is_retryable(), "{error:?}");
    assert!(
        error.to_string().contains("store.path_style = true"),
        "{error}"
    );
}

/// A store that keeps no checksum is asked for the bytes: what it damaged is never committed, and what the line damaged is sent again.
#[test]
fn a_save_is_proved_by_what_the_store_gives_back() {
    let no_checksum = "checksum = \"none\"\n";
    let hidden = json!({"op": "HeadObject", "always": true, "action": {"headers": {"x-amz-checksum-crc64nvme": ""}}});
    let part = |action| json!({"op": "UploadPart", "nth": 1, "action": action});
    let on_the_line = part(json!({"wire": "flip-bit", "of": "request", "bytes": 1000}));
    let in_the_store = part(json!({"wire": "flip-stored-bit", "bytes": 1000}));
    let on_the_way_back = json!({"op": "GetObject", "key_contains": ".zst", "nth": 1, "action": {"wire": "flip-bit", "bytes": 1000}});
    for (name, config, rules, is_saved) in [
        ("none-line", no_checksum, vec![on_the_line], true),
        ("none-store", no_checksum, vec![in_the_store.clone()], false),
        ("none-back", no_checksum, vec![on_the_way_back], true),
        (
            "hidden-store",
            "",
            vec![hidden.clone(), in_the_store],
            false,
        ),
        ("hidden", "", vec![hidden], true),
    ] {
        let scene = Scene::new(&[]);
        let mut target = scene.target();
        target.wait_for("step 2 ");
        scene.server.set_rules(&json!(rules));
        let saver = scene.saver_with(name, "", config);
        let run = saver.cli.run(&format!("checkpoint --pid {}", target.pid()));
        scene.server.set_rules(&json!([]));
        if is_saved {
            assert_eq!(run.code, 0, "{name}: {run:?}");
            assert_eq!(scene.images(name), [1], "{name}");
            saver.cli.ok("verify");
        } else {
            assert_failed(name, &run, 12, "land", &["has CRC64NVME"]);
            assert!(scene.images(name).is_empty(), "{name}");
        }
    }
}
