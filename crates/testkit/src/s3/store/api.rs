//! The store behind the `s3s` trait: which operations there are. Every other one answers NotImplemented.

use std::sync::Arc;

use async_trait::async_trait;
use s3s::dto::{
    AbortMultipartUploadInput, AbortMultipartUploadOutput, CompleteMultipartUploadInput,
    CompleteMultipartUploadOutput, CreateBucketInput, CreateBucketOutput,
    CreateMultipartUploadInput, CreateMultipartUploadOutput, DeleteBucketInput, DeleteBucketOutput,
    DeleteObjectInput, DeleteObjectOutput, DeleteObjectsInput, DeleteObjectsOutput,
    GetBucketLocationInput, GetBucketLocationOutput, GetObjectInput, GetObjectOutput,
    HeadBucketInput, HeadBucketOutput, HeadObjectInput, HeadObjectOutput, ListBucketsInput,
    ListBucketsOutput, ListMultipartUploadsInput, ListMultipartUploadsOutput, ListObjectsV2Input,
    ListObjectsV2Output, ListPartsInput, ListPartsOutput, PutObjectInput, PutObjectOutput,
    UploadPartInput, UploadPartOutput,
};
use s3s::{S3, S3Request, S3Response, S3Result, s3_error};

use super::objects::hints;
use super::{Store, bucket, disk_error};

/// The region that buckets are in.
const REGION: &str = "us-east-1";

/// A shared store that answers S3 requests.
pub(in crate::s3) struct Api(pub(in crate::s3) Arc<Store>);

#[async_trait]
impl S3 for Api {
    async fn create_bucket(
        &self,
        req: S3Request<CreateBucketInput>,
    ) -> S3Result<S3Response<CreateBucketOutput>> {
        if self.0.lock().contains_key(&req.input.bucket) {
            return Err(s3_error!(
                BucketAlreadyOwnedByYou,
                "The bucket already exists and is owned by you"
            ));
        }
        self.0.make_bucket(&req.input.bucket).map_err(disk_error)?;
        let location = Some(format!("/{}", req.input.bucket));
        Ok(S3Response::new(CreateBucketOutput { location }))
    }

    async fn delete_bucket(
        &self,
        req: S3Request<DeleteBucketInput>,
    ) -> S3Result<S3Response<DeleteBucketOutput>> {
        self.0.remove_bucket(&req.input.bucket)?;
        Ok(S3Response::with_status(
            DeleteBucketOutput::default(),
            http::StatusCode::NO_CONTENT,
        ))
    }

    async fn head_bucket(
        &self,
        req: S3Request<HeadBucketInput>,
    ) -> S3Result<S3Response<HeadBucketOutput>> {
        bucket(&self.0.lock(), &req.input.bucket)?;
        let bucket_region = Some(REGION.to_owned());
        Ok(S3Response::new(HeadBucketOutput {
            bucket_region,
            ..HeadBucketOutput::default()
        }))
    }

    async fn get_bucket_location(
        &self,
        req: S3Request<GetBucketLocationInput>,
    ) -> S3Result<S3Response<GetBucketLocationOutput>> {
        bucket(&self.0.lock(), &req.input.bucket)?;
        Ok(S3Response::new(GetBucketLocationOutput::default()))
    }

    async fn list_buckets(
        &self,
        _req: S3Request<ListBucketsInput>,
    ) -> S3Result<S3Response<ListBucketsOutput>> {
        Ok(self.0.list_all_buckets())
    }

    async fn put_object(
        &self,
        req: S3Request<PutObjectInput>,
    ) -> S3Result<S3Response<PutObjectOutput>> {
        self.0.put(req).await
    }

    async fn get_object(
        &self,
        req: S3Request<GetObjectInput>,
    ) -> S3Result<S3Response<GetObjectOutput>> {
        self.0.get(&req)
    }

    async fn head_object(
        &self,
        req: S3Request<HeadObjectInput>,
    ) -> S3Result<S3Response<HeadObjectOutput>> {
        self.0.head(&req)
    }

    async fn delete_object(
        &self,
        req: S3Request<DeleteObjectInput>,
    ) -> S3Result<S3Response<DeleteObjectOutput>> {
        self.0.delete(&req)
    }

    async fn delete_objects(
        &self,
        req: S3Request<DeleteObjectsInput>,
    ) -> S3Result<S3Response<DeleteObjectsOutput>> {
        self.0.delete_many(&req.input)
    }

    async fn list_objects_v2(
        &self,
        req: S3Request<ListObjectsV2Input>,
    ) -> S3Result<S3Response<ListObjectsV2Output>> {
        let hints = hints(&req);
        self.0.list_objects(req.input, &hints)
    }

    async fn create_multipart_upload(
        &self,
        req: S3Request<CreateMultipartUploadInput>,
    ) -> S3Result<S3Response<CreateMultipartUploadOutput>> {
        self.0.create_upload(req.input)
    }

    async fn upload_part(
        &self,
        req: S3Request<UploadPartInput>,
    ) -> S3Result<S3Response<UploadPartOutput>> {
        self.0.put_part(req).await
    }

    async fn list_parts(
        &self,
        req: S3Request<ListPartsInput>,
    ) -> S3Result<S3Response<ListPartsOutput>> {
        self.0.list_parts(req.input)
    }

    async fn list_multipart_uploads(
        &self,
        req: S3Request<ListMultipartUploadsInput>,
    ) -> S3Result<S3Response<ListMultipartUploadsOutput>> {
        self.0.list_uploads(req.input)
    }

    async fn abort_multipart_upload(
        &self,
        req: S3Request<AbortMultipartUploadInput>,
    ) -> S3Result<S3Response<AbortMultipartUploadOutput>> {
        self.0.abort_upload(&req.input)
    }

    async fn complete_multipart_upload(
        &self,
        req: S3Request<CompleteMultipartUploadInput>,
    ) -> S3Result<S3Response<CompleteMultipartUploadOutput>> {
        let hints = hints(&req);
        let Some(blanks) = hints.keep_alive else {
            return Ok(S3Response::new(self.0.complete_upload(&req.input, &hints)?));
        };
        let store = Arc::clone(&self.0);
        let work = async move {
            tokio::time::sleep(blanks).await;
            store.complete_upload(&req.input, &hints)
        };
        let future = Some(Box::pin(work) as _);
        Ok(S3Response::new(CompleteMultipartUploadOutput {
            future,
            ..CompleteMultipartUploadOutput::default()
        }))
    }
}
