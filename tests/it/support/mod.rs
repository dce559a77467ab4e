//! What the tests start and stop.

pub(crate) mod s3_server;

pub(crate) use s3_server::S3Server;
