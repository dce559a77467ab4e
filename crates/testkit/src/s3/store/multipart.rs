//! Multipart uploads: create, parts in any order and again, complete, abort.
//!
//! An upload is gone once it is completed: completing it a second time answers NoSuchUpload, so that a client which lost the first answer
//! has to look at the object.

use std::collections::BTreeMap;
use std::sync::Arc;

use s3s::crypto::{Checksum as _, Md5};
use s3s::dto::{
    AbortMultipartUploadInput, AbortMultipartUploadOutput, CompleteMultipartUploadInput,
    CompleteMultipartUploadOutput, CompletedPart, CreateMultipartUploadInput,
    CreateMultipartUploadOutput, ETag, UploadPartInput, UploadPartOutput,
};
use s3s::{S3Request, S3Response, S3Result, s3_error};

use super::blob::Wanted;
use super::checksum::{Algorithm, ChecksumKind, Sums, combine, set_sums, sums_of};
use super::objects::{announced_len, check_body, check_write, hex, hints, trailer_algorithms};
use super::{
    Bucket, Hints, Meta, Object, Part, Store, Upload, bucket, bucket_mut, disk_error, unix_us,
};

/// The open upload, or NoSuchUpload.
pub(super) fn upload<'a>(bucket: &'a Bucket, key: &str, id: &str) -> S3Result<&'a Upload> {
    bucket.uploads.get(&(key.to_owned(), id.to_owned())).ok_or_else(|| {
        s3_error!(
            NoSuchUpload,
            "The specified upload does not exist. The upload ID may be invalid, or the upload may have been aborted or completed."
        )
    })
}

impl Upload {
    /// The algorithm of the object's checksum.
    fn effective(&self) -> Algorithm {
        self.algorithm.unwrap_or(Algorithm::Crc64Nvme)
    }
}

impl Store {
    pub(super) fn create_upload(
        &self,
        input: CreateMultipartUploadInput,
    ) -> S3Result<S3Response<CreateMultipartUploadOutput>> {
        let algorithm = input
            .checksum_algorithm
            .as_ref()
            .map(Algorithm::parse)
            .transpose()?;
        let upload = Upload {
            initiated_us: unix_us(),
            algorithm,
            kind: ChecksumKind::choose(algorithm, input.checksum_type.as_ref())?,
            meta: Meta {
                content_type: input.content_type,
                user: input.metadata.unwrap_or_default().into_iter().collect(),
            },
            parts: BTreeMap::new(),
        };
        let id = self.fresh_id();
        let output = CreateMultipartUploadOutput {
            bucket: Some(input.bucket.clone()),
            key: Some(input.key.clone()),
            upload_id: Some(id.clone()),
            checksum_algorithm: algorithm.map(Algorithm::dto),
            checksum_type: algorithm.map(|_| upload.kind.dto()),
            ..CreateMultipartUploadOutput::default()
        };
        let mut state = self.lock();
        let bucket = bucket_mut(&mut state, &input.bucket)?;
        if let Some(disk) = &self.disk {
            disk.put_upload(&input.bucket, &input.key, &id, &upload)
                .map_err(disk_error)?;
        }
        bucket.uploads.insert((input.key, id), upload);
        Ok(S3Response::new(output))
    }

    pub(super) async fn put_part(
        &self,
        req: S3Request<UploadPartInput>,
    ) -> S3Result<S3Response<UploadPartOutput>> {
        let hints = hints(&req);
        let input = req.input;
        let limit = self.settings.part_limit;
        let number = u32::try_from(input.part_number)
            .ok()
            .filter(|number| (1..=limit).contains(number));
        let number = number.ok_or_else(|| {
            s3_error!(
                InvalidArgument,
                "Part number must be an integer between 1 and {limit}, inclusive"
            )
        })?;
        let expected = {
            let state = self.lock();
            let upload = upload(bucket(&state, &input.bucket)?, &input.key, &input.upload_id)?;
            (upload.algorithm, upload.effective())
        };
        let mut claimed = sums_of!(input);
        let announced: Vec<Algorithm> = claimed
            .algorithms()
            .chain(trailer_algorithms(&req.headers))
            .collect();
        if let (Some(expected), Some(actual)) = (
            expected.0,
            announced.iter().find(|got| Some(**got) != expected.0),
        ) {
            return Err(s3_error!(
                InvalidRequest,
                "Checksum Type mismatch occurred, expected checksum Type: {}, actual checksum Type: {}",
                expected.name().to_lowercase(),
                actual.name().to_lowercase()
            ));
        }
        let wanted = Wanted {
            len: announced_len(&req.headers),
            part: true,
            algorithms: announced.into_iter().chain([expected.1]).collect(),
            claimed: &claimed,
            flip_stored: hints.flip_stored,
        };
        let found = self.ingest(input.body, wanted).await?;
        let swallowed = self.settings.swallow;
        check_body(
            &found,
            &mut claimed,
            req.trailing_headers.as_ref(),
            input.content_md5.as_deref(),
            swallowed,
        )?;

        let mut output = UploadPartOutput {
            e_tag: Some(ETag::Strong(hex(&found.md5))),
            ..UploadPartOutput::default()
        };
        set_sums!(output, &found.sums);
        let part = Part {
            etag: hex(&found.md5),
            modified_us: unix_us(),
            sums: found.sums,
            blob: Arc::new(found.blob),
        };
        self.keep_part(&input.bucket, &input.key, &input.upload_id, number, part)?;
        Ok(S3Response::new(output))
    }

    fn keep_part(
        &self,
        bucket_name: &str,
        key: &str,
        id: &str,
        number: u32,
        part: Part,
    ) -> S3Result<()> {
        let mut state = self.lock();
        let bucket = bucket_mut(&mut state, bucket_name)?;
        upload(bucket, key, id)?;
        if let Some(disk) = &self.disk {
            disk.put_part(bucket_name, id, number, &part)
                .map_err(disk_error)?;
        }
        part.blob.keep();
        if let Some(upload) = bucket.uploads.get_mut(&(key.to_owned(), id.to_owned()))
            && let Some(old) = upload.parts.insert(number, part)
        {
            old.blob.doom();
        }
        Ok(())
    }

    pub(super) fn abort_upload(
        &self,
        input: &AbortMultipartUploadInput,
    ) -> S3Result<S3Response<AbortMultipartUploadOutput>> {
        let mut state = self.lock();
        let bucket = bucket_mut(&mut state, &input.bucket)?;
        upload(bucket, &input.key, &input.upload_id)?;
        if let Some(disk) = &self.disk {
            disk.remove_upload(&input.bucket, &input.upload_id)
                .map_err(disk_error)?;
        }
        if let Some(upload) = bucket
            .uploads
            .remove(&(input.key.clone(), input.upload_id.clone()))
        {
            upload.parts.values().for_each(|part| part.blob.doom());
        }
        Ok(S3Response::with_status(
            AbortMultipartUploadOutput::default(),
            http::StatusCode::NO_CONTENT,
        ))
    }

    pub(super) fn complete_upload(
        &self,
        input: &CompleteMultipartUploadInput,
        hints: &Hints,
    ) -> S3Result<CompleteMultipartUploadOutput> {
        let mut state = self.lock();
        let target = bucket(&state, &input.bucket)?;
        let upload = upload(target, &input.key, &input.upload_id)?;
        let listed = input
            .multipart_upload
            .as_ref()
            .and_then(|list| list.parts.as_deref())
            .unwrap_or_default();
        let chosen = self.choose_parts(upload, listed)?;
        let object = assemble(upload, &chosen, input)?;
        let existing = target.objects.get(&input.key).map(Arc::as_ref);
        check_write(
            existing,
            input.if_match.as_ref(),
            input.if_none_match.as_ref(),
            hints,
        )?;

        let mut output = CompleteMultipartUploadOutput {
            bucket: Some(input.bucket.clone()),
            key: Some(input.key.clone()),
            location: Some(format!("/{}/{}", input.bucket, input.key)),
            e_tag: Some(ETag::Strong(object.etag.clone())),
            checksum_type: (!object.sums.is_empty()).then(|| object.kind.dto()),
            ..CompleteMultipartUploadOutput::default()
        };
        set_sums!(output, &object.sums);
        let used: Vec<_> = object.blobs.clone();
        self.commit(&mut state, &input.bucket, &input.key, object)?;
        // From here on the object exists; what is left of the upload on disk is removed at the next start if we die.
        let bucket = bucket_mut(&mut state, &input.bucket)?;
        if let Some(upload) = bucket
            .uploads
            .remove(&(input.key.clone(), input.upload_id.clone()))
        {
            let unused = upload
                .parts
                .values()
                .filter(|part| !used.iter().any(|blob| Arc::ptr_eq(blob, &part.blob)));
            unused.for_each(|part| part.blob.doom());
        }
        if let Some(disk) = &self.disk {
            disk.remove_upload(&input.bucket, &input.upload_id)
                .map_err(disk_error)?;
        }
        Ok(output)
    }

    /// The parts that the request lists, checked against what was uploaded.
    fn choose_parts<'a>(
        &self,
        upload: &'a Upload,
        listed: &[CompletedPart],
    ) -> S3Result<Vec<&'a Part>> {
        let malformed = || s3_error!(MalformedXML, "The XML you provided was not well-formed");
        if listed.is_empty() || listed.len() > 10_000 {
            return Err(malformed());
        }
        let number = |part: &CompletedPart| {
            part.part_number
                .and_then(|number| u32::try_from(number).ok())
        };
        let numbers: Vec<u32> = listed
            .iter()
            .map(number)
            .collect::<Option<_>>()
            .ok_or_else(malformed)?;
        if !numbers.is_sorted_by(|a, b| a < b) {
            return Err(s3_error!(
                InvalidPartOrder,
                "The list of parts was not in ascending order."
            ));
        }
        let mut chosen = Vec::with_capacity(listed.len());
        for (index, (number, named)) in numbers.into_iter().zip(listed).enumerate() {
            let etag = named.e_tag.as_ref().ok_or_else(malformed)?;
            let part = upload
                .parts
                .get(&number)
                .filter(|part| part.etag == etag.value());
            let sums = sums_of!(named);
            let part = part.filter(|part| sums.check(&part.sums).is_ok()).ok_or_else(|| {
                s3_error!(
                    InvalidPart,
                    "One or more of the specified parts could not be found: part {number} was not uploaded with this ETag and checksum"
                )
            })?;
            if upload.algorithm.is_some()
                && upload.kind == ChecksumKind::Composite
                && sums.get(upload.effective()).is_none()
            {
                return Err(s3_error!(
                    InvalidRequest,
                    "The upload was created using a {} checksum. The complete request must include the checksum for each part. It was missing for part {number} in the request.",
                    upload.effective().name().to_lowercase()
                ));
            }
            let is_last = index + 1 == listed.len();
            if !is_last && part.blob.len() < self.settings.part_len_min {
                return Err(s3_error!(
                    EntityTooSmall,
                    "Your proposed upload is smaller than the minimum allowed size: part {number} has {} bytes, the least is {}",
                    part.blob.len(),
                    self.settings.part_len_min
                ));
            }
            chosen.push(part);
        }
        Ok(chosen)
    }
}

/// The object that the chosen parts make, checked against what the request says of it.
fn assemble(
    upload: &Upload,
    chosen: &[&Part],
    input: &CompleteMultipartUploadInput,
) -> S3Result<Object> {
    let len: u64 = chosen.iter().map(|part| part.blob.len()).sum();
    if let Some(size) = input.mpu_object_size
        && u64::try_from(size) != Ok(len)
    {
        return Err(s3_error!(
            InvalidRequest,
            "The provided 'x-amz-mp-object-size' header value {size} does not match what was computed: {len}"
        ));
    }
    if let Some(kind) = &input.checksum_type
        && kind.as_str() != upload.kind.dto().as_str()
    {
        return Err(s3_error!(
            InvalidRequest,
            "The upload was created using the {} checksum mode. The complete request must use the same checksum mode.",
            upload.kind.dto().as_str()
        ));
    }
    let algorithm = upload.effective();
    let parts: Vec<(u64, &Sums)> = chosen
        .iter()
        .map(|part| (part.blob.len(), &part.sums))
        .collect();
    let mut sums = Sums::default();
    if let Some(value) = combine(algorithm, upload.kind, &parts) {
        sums.insert(algorithm, value);
    }
    sums_of!(input).check(&sums)?;
    let mut md5 = Md5::new();
    for part in chosen {
        md5.update(&unhex(&part.etag));
    }
    Ok(Object {
        len,
        etag: format!("{}-{}", hex(&md5.finalize()), chosen.len()),
        modified_us: unix_us(),
        sums,
        kind: upload.kind,
        blobs: chosen.iter().map(|part| Arc::clone(&part.blob)).collect(),
        upload: Some(input.upload_id.clone()),
        meta: upload.meta.clone(),
    })
}

fn unhex(text: &str) -> Vec<u8> {
    text.as_bytes()
        .chunks_exact(2)
        .filter_map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok())
        .collect()
}
