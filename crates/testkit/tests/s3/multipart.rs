//! Multipart uploads, in memory and across a kill.

use aws_sdk_s3::Client;
use aws_sdk_s3::operation::upload_part::UploadPartOutput;
use aws_sdk_s3::primitives::ByteStream;
use aws_sdk_s3::types::{
    ChecksumAlgorithm, ChecksumMode, ChecksumType, CompletedMultipartUpload, CompletedPart,
};

use crate::server::{BUCKET, MIB, Server, crc64, data, refusal};

async fn create(client: &Client, key: &str) -> String {
    let created = client
        .create_multipart_upload()
        .bucket(BUCKET)
        .key(key)
        .checksum_algorithm(ChecksumAlgorithm::Crc64Nvme)
        .checksum_type(ChecksumType::FullObject)
        .send()
        .await
        .expect("create");
    assert_eq!(
        created.checksum_algorithm(),
        Some(&ChecksumAlgorithm::Crc64Nvme)
    );
    created.upload_id().expect("id").to_owned()
}

async fn part(client: &Client, key: &str, id: &str, number: i32, bytes: &[u8]) -> UploadPartOutput {
    client
        .upload_part()
        .bucket(BUCKET)
        .key(key)
        .upload_id(id)
        .part_number(number)
        .checksum_crc64_nvme(crc64(bytes))
        .body(ByteStream::from(bytes.to_vec()))
        .send()
        .await
        .expect("part")
}

fn named(number: i32, part: &UploadPartOutput) -> CompletedPart {
    CompletedPart::builder()
        .part_number(number)
        .e_tag(part.e_tag().expect("etag"))
        .set_checksum_crc64_nvme(part.checksum_crc64_nvme().map(str::to_owned))
        .build()
}

fn list(parts: impl IntoIterator<Item = CompletedPart>) -> CompletedMultipartUpload {
    CompletedMultipartUpload::builder()
        .set_parts(Some(parts.into_iter().collect()))
        .build()
}

#[tokio::test]
async fn parts_in_any_order_and_again() {
    let server = Server::start(&[]);
    let client = server.client();
    let id = create(&client, "k").await;
    let bytes = data(1, 11 * MIB + 3);
    let third = part(&client, "k", &id, 7, &bytes[10 * MIB..]).await;
    let first = part(&client, "k", &id, 1, &bytes[..5 * MIB]).await;
    part(&client, "k", &id, 3, b"to be replaced").await;
    part(&client, "k", &id, 9, b"not wanted").await;
    let second = part(&client, "k", &id, 3, &bytes[5 * MIB..10 * MIB]).await;
    let done = client
        .complete_multipart_upload()
        .bucket(BUCKET)
        .key("k")
        .upload_id(&id)
        .checksum_crc64_nvme(crc64(&bytes))
        .checksum_type(ChecksumType::FullObject)
        .mpu_object_size(i64::try_from(bytes.len()).expect("length"))
        .multipart_upload(list([
            named(1, &first),
            named(3, &second),
            named(7, &third),
        ]))
        .send()
        .await
        .expect("complete");
    assert_eq!(done.checksum_crc64_nvme(), Some(crc64(&bytes).as_str()));
    assert_eq!(done.checksum_type(), Some(&ChecksumType::FullObject));
    let etag = done.e_tag().expect("etag");
    assert!(etag.ends_with("-3\"") && etag.len() == 36, "{etag}");

    let head = client
        .head_object()
        .bucket(BUCKET)
        .key("k")
        .checksum_mode(ChecksumMode::Enabled)
        .send()
        .await
        .expect("head");
    assert_eq!(head.checksum_crc64_nvme(), Some(crc64(&bytes).as_str()));
    let range = format!("bytes={}-{}", 5 * MIB - 2, 10 * MIB + 1);
    let got = client
        .get_object()
        .bucket(BUCKET)
        .key("k")
        .range(range)
        .send()
        .await
        .expect("get");
    assert!(
        got.body.collect().await.expect("body").into_bytes() == bytes[5 * MIB - 2..10 * MIB + 2]
    );
    let got = client
        .get_object()
        .bucket(BUCKET)
        .key("k")
        .part_number(2)
        .send()
        .await
        .expect("get");
    assert_eq!(got.parts_count(), Some(3));
    assert!(got.body.collect().await.expect("body").into_bytes() == bytes[5 * MIB..10 * MIB]);

    let again = client
        .list_parts()
        .bucket(BUCKET)
        .key("k")
        .upload_id(&id)
        .send()
        .await;
    assert_eq!(refusal(again), (404, "NoSuchUpload".to_owned()));
}

#[tokio::test]
async fn what_complete_refuses() {
    let server = Server::start(&["--part-limit", "20"]);
    let client = server.client();
    let id = create(&client, "k").await;
    let (one, two, three) = (data(1, 5 * MIB), data(2, 5 * MIB - 1), data(3, 10));
    let part_1 = part(&client, "k", &id, 1, &one).await;
    let part_2 = part(&client, "k", &id, 2, &two).await;
    let part_3 = part(&client, "k", &id, 3, &three).await;
    let complete = |parts: Vec<CompletedPart>| {
        client
            .complete_multipart_upload()
            .bucket(BUCKET)
            .key("k")
            .upload_id(&id)
            .multipart_upload(list(parts))
    };
    let refused = |code: &str| (400, code.to_owned());
    let (p1, p2, p3) = (named(1, &part_1), named(2, &part_2), named(3, &part_3));
    let small = complete(vec![p1.clone(), p2.clone(), p3.clone()])
        .send()
        .await;
    assert_eq!(refusal(small), refused("EntityTooSmall"));
    let disorder = complete(vec![p2.clone(), p1.clone()]).send().await;
    assert_eq!(refusal(disorder), refused("InvalidPartOrder"));
    let swapped = CompletedPart::builder()
        .part_number(1)
        .e_tag(part_2.e_tag().expect("etag"))
        .build();
    assert_eq!(
        refusal(complete(vec![swapped]).send().await),
        refused("InvalidPart")
    );
    let missing = CompletedPart::builder()
        .part_number(4)
        .e_tag(part_2.e_tag().expect("etag"))
        .build();
    assert_eq!(
        refusal(complete(vec![p1.clone(), missing]).send().await),
        refused("InvalidPart")
    );
    let wrong_sum = CompletedPart::builder()
        .part_number(1)
        .e_tag(part_1.e_tag().expect("etag"))
        .checksum_crc64_nvme(crc64(b"no"));
    assert_eq!(
        refusal(complete(vec![wrong_sum.build()]).send().await),
        refused("InvalidPart")
    );
    assert_eq!(
        refusal(complete(vec![]).send().await),
        refused("MalformedXML")
    );
    let pair = || vec![p1.clone(), p3.clone()];
    assert_eq!(
        refusal(complete(pair()).mpu_object_size(5).send().await),
        refused("InvalidRequest")
    );
    assert_eq!(
        refusal(
            complete(pair())
                .checksum_crc64_nvme(crc64(b"no"))
                .send()
                .await
        ),
        refused("BadDigest")
    );
    let composite = complete(pair())
        .checksum_type(ChecksumType::Composite)
        .send()
        .await;
    assert_eq!(refusal(composite), refused("InvalidRequest"));

    client
        .put_object()
        .bucket(BUCKET)
        .key("k")
        .body(ByteStream::from_static(b"x"))
        .send()
        .await
        .expect("put");
    let taken = complete(pair()).if_none_match("*").send().await;
    assert_eq!(refusal(taken), (412, "PreconditionFailed".to_owned()));
    client
        .delete_object()
        .bucket(BUCKET)
        .key("k")
        .send()
        .await
        .expect("delete");
    complete(pair())
        .if_none_match("*")
        .send()
        .await
        .expect("none of the refusals ended the upload");
    assert_eq!(
        refusal(complete(pair()).send().await),
        (404, "NoSuchUpload".to_owned())
    );
}

#[tokio::test]
async fn what_a_part_is_refused_for() {
    let server = Server::start(&["--part-limit", "20"]);
    let client = server.client();
    let id = create(&client, "k").await;
    let part = |number: i32| {
        client
            .upload_part()
            .bucket(BUCKET)
            .key("k")
            .upload_id(&id)
            .part_number(number)
            .body(ByteStream::from(data(1, 2 * MIB)))
    };
    assert_eq!(
        refusal(part(1).checksum_crc64_nvme(crc64(b"no")).send().await),
        (400, "BadDigest".to_owned())
    );
    assert_eq!(
        refusal(part(21).send().await),
        (400, "InvalidArgument".to_owned())
    );
    assert_eq!(
        refusal(part(0).send().await),
        (400, "InvalidArgument".to_owned())
    );
    assert_eq!(
        refusal(part(1).checksum_crc32_c("AAAAAA==").send().await),
        (400, "InvalidRequest".to_owned())
    );
    let elsewhere = part(1).upload_id("no-such-upload").send().await;
    assert_eq!(refusal(elsewhere), (404, "NoSuchUpload".to_owned()));
    let listed = client
        .list_parts()
        .bucket(BUCKET)
        .key("k")
        .upload_id(&id)
        .send()
        .await
        .expect("list");
    assert!(listed.parts().is_empty());
}

#[tokio::test]
async fn composite_checksums_need_every_part_named() {
    let server = Server::start(&["--min-part", "1"]);
    let client = server.client();
    let created = client
        .create_multipart_upload()
        .bucket(BUCKET)
        .key("k")
        .checksum_algorithm(ChecksumAlgorithm::Sha256)
        .send()
        .await
        .expect("create");
    assert_eq!(created.checksum_type(), Some(&ChecksumType::Composite));
    let id = created.upload_id().expect("id");
    let mut parts = Vec::new();
    for number in 1..=2 {
        let sent = client
            .upload_part()
            .bucket(BUCKET)
            .key("k")
            .upload_id(id)
            .part_number(number)
            .body(ByteStream::from_static(b"part"))
            .send()
            .await
            .expect("part");
        parts.push(
            CompletedPart::builder()
                .part_number(number)
                .e_tag(sent.e_tag().expect("etag"))
                .set_checksum_sha256(sent.checksum_sha256().map(str::to_owned))
                .build(),
        );
    }
    let complete = |parts| {
        client
            .complete_multipart_upload()
            .bucket(BUCKET)
            .key("k")
            .upload_id(id)
            .multipart_upload(list(parts))
    };
    let bare: Vec<_> = parts
        .iter()
        .map(|part| {
            CompletedPart::builder()
                .set_part_number(part.part_number())
                .set_e_tag(part.e_tag().map(str::to_owned))
                .build()
        })
        .collect();
    assert_eq!(
        refusal(complete(bare).send().await),
        (400, "InvalidRequest".to_owned())
    );
    let done = complete(parts).send().await.expect("complete");
    assert_eq!(done.checksum_type(), Some(&ChecksumType::Composite));
    assert!(
        done.checksum_sha256()
            .is_some_and(|value| value.ends_with("-2"))
    );
    let full = client
        .create_multipart_upload()
        .bucket(BUCKET)
        .key("k")
        .checksum_algorithm(ChecksumAlgorithm::Sha256)
        .checksum_type(ChecksumType::FullObject)
        .send()
        .await;
    assert_eq!(refusal(full), (400, "InvalidRequest".to_owned()));
}

#[tokio::test]
async fn lists_of_parts_and_uploads_are_paged_until_abort() {
    let server = Server::start(&[]);
    let client = server.client();
    let id = create(&client, "dir/k").await;
    let other = create(&client, "dir/k").await;
    let third = create(&client, "else").await;
    for number in [5, 1, 3, 2, 4] {
        part(&client, "dir/k", &id, number, &data(1, 10)).await;
    }
    let mut numbers = Vec::new();
    let mut marker = None;
    loop {
        let page = client
            .list_parts()
            .bucket(BUCKET)
            .key("dir/k")
            .upload_id(&id)
            .max_parts(2)
            .set_part_number_marker(marker)
            .send()
            .await
            .expect("list");
        numbers.extend(page.parts().iter().filter_map(|part| part.part_number()));
        assert!(
            page.parts()
                .iter()
                .all(|part| part.size() == Some(10) && part.checksum_crc64_nvme().is_some())
        );
        marker = page.next_part_number_marker().map(str::to_owned);
        if page.is_truncated() != Some(true) {
            break;
        }
    }
    assert_eq!(numbers, [1, 2, 3, 4, 5]);

    let mut ids = Vec::new();
    let (mut key_marker, mut id_marker) = (None, None);
    loop {
        let page = client
            .list_multipart_uploads()
            .bucket(BUCKET)
            .max_uploads(1)
            .set_key_marker(key_marker)
            .set_upload_id_marker(id_marker)
            .send()
            .await
            .expect("list");
        ids.extend(
            page.uploads()
                .iter()
                .filter_map(|upload| upload.upload_id())
                .map(str::to_owned),
        );
        (key_marker, id_marker) = (
            page.next_key_marker().map(str::to_owned),
            page.next_upload_id_marker().map(str::to_owned),
        );
        if page.is_truncated() != Some(true) {
            break;
        }
    }
    assert_eq!(ids, [id.clone(), other.clone(), third.clone()]);
    let page = client
        .list_multipart_uploads()
        .bucket(BUCKET)
        .prefix("dir/")
        .send()
        .await
        .expect("list");
    assert_eq!(page.uploads().len(), 2);

    for (key, id) in [("dir/k", &id), ("dir/k", &other), ("else", &third)] {
        client
            .abort_multipart_upload()
            .bucket(BUCKET)
            .key(key)
            .upload_id(id)
            .send()
            .await
            .expect("abort");
    }
    let again = client
        .abort_multipart_upload()
        .bucket(BUCKET)
        .key("dir/k")
        .upload_id(&id)
        .send()
        .await;
    assert_eq!(refusal(again), (404, "NoSuchUpload".to_owned()));
    let page = client
        .list_multipart_uploads()
        .bucket(BUCKET)
        .send()
        .await
        .expect("list");
    assert!(page.uploads().is_empty());
}

#[tokio::test]
async fn a_root_folder_survives_a_kill() {
    let root = tempfile::tempdir().expect("folder");
    let root_arg = root.path().to_str().expect("path").to_owned();
    let args = ["--root", root_arg.as_str()];
    let server = Server::start(&args);
    let client = server.client();
    let bytes = data(4, 6 * MIB);
    client
        .put_object()
        .bucket(BUCKET)
        .key("put")
        .body(ByteStream::from_static(b"old"))
        .send()
        .await
        .expect("put");
    client
        .put_object()
        .bucket(BUCKET)
        .key("put")
        .body(ByteStream::from_static(b"new"))
        .send()
        .await
        .expect("put");
    let done_id = create(&client, "done").await;
    let part_1 = part(&client, "done", &done_id, 1, &bytes[..5 * MIB]).await;
    let part_2 = part(&client, "done", &done_id, 2, &bytes[5 * MIB..]).await;
    part(&client, "done", &done_id, 3, b"unused").await;
    let parts = list([named(1, &part_1), named(2, &part_2)]);
    let complete = client
        .complete_multipart_upload()
        .bucket(BUCKET)
        .key("done")
        .upload_id(&done_id);
    let done = complete
        .multipart_upload(parts)
        .send()
        .await
        .expect("complete");
    let open_id = create(&client, "open").await;
    let open_part = part(&client, "open", &open_id, 2, &data(5, 100)).await;
    let gone_id = create(&client, "gone").await;
    part(&client, "gone", &gone_id, 1, b"aborted").await;
    client
        .abort_multipart_upload()
        .bucket(BUCKET)
        .key("gone")
        .upload_id(&gone_id)
        .send()
        .await
        .expect("abort");
    std::fs::write(root.path().join("blobs/orphan"), "half a part").expect("orphan");
    server.kill();

    let server = Server::start(&args);
    let client = server.client();
    let got = client
        .get_object()
        .bucket(BUCKET)
        .key("done")
        .if_match(done.e_tag().expect("etag"))
        .checksum_mode(ChecksumMode::Enabled)
        .send()
        .await
        .expect("get");
    assert_eq!(got.checksum_crc64_nvme(), Some(crc64(&bytes).as_str()));
    assert!(got.body.collect().await.expect("body").into_bytes() == bytes);
    let got = client
        .get_object()
        .bucket(BUCKET)
        .key("put")
        .send()
        .await
        .expect("get");
    assert_eq!(got.body.collect().await.expect("body").into_bytes(), "new");
    let uploads = client
        .list_multipart_uploads()
        .bucket(BUCKET)
        .send()
        .await
        .expect("list");
    let ids: Vec<_> = uploads
        .uploads()
        .iter()
        .filter_map(|upload| upload.upload_id())
        .collect();
    assert_eq!(ids, [open_id.as_str()]);
    client
        .complete_multipart_upload()
        .bucket(BUCKET)
        .key("open")
        .upload_id(&open_id)
        .multipart_upload(list([named(2, &open_part)]))
        .send()
        .await
        .expect("an upload goes on after the kill");
    // Two parts, the put object, the part completed just now: nothing replaced, aborted or half written is left.
    assert_eq!(
        std::fs::read_dir(root.path().join("blobs"))
            .expect("blobs")
            .count(),
        4
    );
}
