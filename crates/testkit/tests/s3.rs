//! `testkit s3` as its clients see it: the true binary on a free port, spoken to by the AWS SDK with its retries off.

#[path = "s3/faults.rs"]
mod faults;
#[path = "s3/multipart.rs"]
mod multipart;
#[path = "s3/null.rs"]
mod null;
#[path = "s3/objects.rs"]
mod objects;
#[path = "s3/server.rs"]
mod server;
