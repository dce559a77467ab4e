//! `--null` and `--serve`.

use aws_sdk_s3::primitives::ByteStream;
use aws_sdk_s3::types::{
    ChecksumAlgorithm, ChecksumMode, ChecksumType, CompletedMultipartUpload, CompletedPart,
};

use crate::server::{BUCKET, MIB, Server, crc64, data, refusal};

#[tokio::test]
async fn bodies_are_swallowed_and_their_sizes_and_checksums_kept() {
    let server = Server::start(&["--null"]);
    // No signature is checked.
    let client = server.client_with("guess");
    let bytes = data(1, 11 * MIB);
    let created = client
        .create_multipart_upload()
        .bucket(BUCKET)
        .key("k")
        .checksum_algorithm(ChecksumAlgorithm::Crc64Nvme)
        .send()
        .await
        .expect("create");
    let id = created.upload_id().expect("id");
    let mut parts = Vec::new();
    for (number, piece) in (1..).zip(bytes.chunks(8 * MIB)) {
        let sent = client
            .upload_part()
            .bucket(BUCKET)
            .key("k")
            .upload_id(id)
            .part_number(number)
            .checksum_crc64_nvme(crc64(piece))
            .body(ByteStream::from(piece.to_vec()))
            .customize()
            .disable_payload_signing()
            .send()
            .await
            .expect("part");
        parts.push(
            CompletedPart::builder()
                .part_number(number)
                .e_tag(sent.e_tag().expect("etag"))
                .build(),
        );
    }
    let done = client
        .complete_multipart_upload()
        .bucket(BUCKET)
        .key("k")
        .upload_id(id)
        .mpu_object_size(i64::try_from(bytes.len()).expect("length"))
        .checksum_crc64_nvme(crc64(&bytes))
        .multipart_upload(
            CompletedMultipartUpload::builder()
                .set_parts(Some(parts))
                .build(),
        )
        .send()
        .await
        .expect("complete");
    let head = client
        .head_object()
        .bucket(BUCKET)
        .key("k")
        .checksum_mode(ChecksumMode::Enabled)
        .send()
        .await
        .expect("head");
    assert_eq!(
        head.content_length(),
        Some(i64::try_from(bytes.len()).expect("length"))
    );
    assert_eq!(head.e_tag(), done.e_tag());
    assert_eq!(head.checksum_crc64_nvme(), Some(crc64(&bytes).as_str()));
    assert_eq!(head.checksum_type(), Some(&ChecksumType::FullObject));
    let got = client
        .get_object()
        .bucket(BUCKET)
        .key("k")
        .range("bytes=100-199")
        .send()
        .await
        .expect("get");
    assert!(got.body.collect().await.expect("body").into_bytes() == [0; 100][..]);
}

#[tokio::test]
async fn small_objects_are_kept_whole() {
    let server = Server::start(&["--null"]);
    let client = server.client();
    let put = || {
        client
            .put_object()
            .bucket(BUCKET)
            .key("log/1.json")
            .if_none_match("*")
            .body(ByteStream::from_static(b"{}"))
    };
    put().send().await.expect("put");
    assert_eq!(
        refusal(put().send().await),
        (412, "PreconditionFailed".to_owned())
    );
    let got = client
        .get_object()
        .bucket(BUCKET)
        .key("log/1.json")
        .send()
        .await
        .expect("get");
    assert_eq!(got.body.collect().await.expect("body").into_bytes(), "{}");
    client
        .put_object()
        .bucket(BUCKET)
        .key("big")
        .body(ByteStream::from(data(1, MIB)))
        .send()
        .await
        .expect("put");
    let got = client
        .get_object()
        .bucket(BUCKET)
        .key("big")
        .range("bytes=-4")
        .send()
        .await
        .expect("get");
    assert_eq!(
        got.body.collect().await.expect("body").into_bytes(),
        [0; 4][..]
    );
}

#[tokio::test]
async fn files_are_served() {
    let dir = tempfile::tempdir().expect("folder");
    let bytes = data(9, 3 * MIB);
    std::fs::create_dir_all(dir.path().join("images/job/data")).expect("folder");
    std::fs::write(dir.path().join("images/job/data/gpu.zst"), &bytes).expect("file");
    let server = Server::start(&["--null", "--serve", dir.path().to_str().expect("path")]);
    let client = server.client();
    let get = client
        .get_object()
        .bucket("images")
        .key("job/data/gpu.zst")
        .range("bytes=1048000-2097200");
    let got = get.send().await.expect("get");
    assert!(got.body.collect().await.expect("body").into_bytes() == bytes[1_048_000..2_097_201]);
    let head = client
        .head_object()
        .bucket("images")
        .key("job/data/gpu.zst")
        .checksum_mode(ChecksumMode::Enabled);
    assert_eq!(
        head.send().await.expect("head").checksum_crc64_nvme(),
        Some(crc64(&bytes).as_str())
    );
}
