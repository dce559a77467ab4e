//! The store's contract, the same for every store, and what the S3 store makes of a server's faults.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use ckptstream::codec::Crc64;
use ckptstream::config::{PartChecksum, StoreConfig};
use ckptstream::progress::Meter;
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
use crate::support::s3_server::{BUCKET, has_credentials};

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
    assert_eq!(store.get(&here, 1000).await.unwrap(), Some(bytes.clone()));
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
        assert!(
            matches!(complete, Err(StoreError::Refused { .. })),
            "{parts:?}: {complete:?}"
        );
    }
    let complete = store
        .complete_upload(&here, &id, &[two], 100, crc64(&body) ^ 1)
        .await;
    assert!(complete.is_err(), "a wrong checksum of the whole object");
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
        bucket: BUCKET.to_owned(),
        prefix: prefix.to_owned(),
        endpoint: Some(endpoint.to_owned()),
        region: None,
        path_style: true,
        part_size: None,
        parallelism: 4,
        checksum: PartChecksum::Crc64Nvme,
        sign_payload: false,
        retry_timeout: Duration::from_secs(30),
        connect_timeout: Duration::from_secs(5),
        request_timeout: Duration::from_secs(10),
        stall_timeout: Duration::from_secs(10),
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
async fn s3_keeps_the_contract() {
    if !has_credentials("store_contract::s3_keeps_the_contract") {
        return;
    }
    let server = S3Server::start(&[]);
    let plain = config(&server.endpoint, "some/prefix");
    contract(&S3Store::connect(&plain).await.unwrap()).await;
    let unprefixed = config(&server.endpoint, "");
    contract(&patient(S3Store::connect(&unprefixed).await.unwrap()).0).await;
    let signed = StoreConfig {
        sign_payload: true,
        ..config(&server.endpoint, "signed")
    };
    contract(&S3Store::connect(&signed).await.unwrap()).await;
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
            sign_payload,
            ..config(&endpoint, &prefix)
        };
        contract(&S3Store::connect(&config).await.unwrap()).await;
    }
}
