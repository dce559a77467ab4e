//! `testkit s3`: an S3 server for tests, the demo and benches, with scripted faults and a request log.
//!
//! ```text
//! socket -> wire.rs (rate, resets, idle close) -> hyper -> faults.rs (rules, body.rs, line.rs) -> s3s (signature, XML) -> store/
//! ```
//!
//! In: a command line, a rules file that may change while the server runs. Out: `listening http://ADDR:PORT` on standard output, then S3.
//! SIGTERM and SIGINT end it with status 0. What can fail at the start (the address, the folder, the rules) is one line on standard error
//! and status 1.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use hyper::service::service_fn;
use s3s::auth::SimpleAuth;
use s3s::config::{S3Config, StaticConfigProvider};
use s3s::service::S3ServiceBuilder;
use tokio::net::TcpStream;
use tokio::sync::watch;

use crate::log::Log;
use crate::script::ScriptError;
use crate::server::{self, ServerError};

mod body;
mod clock;
mod faults;
mod line;
mod null;
mod op;
mod rule_file;
mod rules;
mod store;
mod wire;

use clock::ServerClock;
use faults::Front;
use rules::Rules;
use store::{Api, Settings, Store};
use wire::{Connection, Pace, Wire};

/// The command line of `testkit s3`.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Address to listen on; port 0 takes a free one
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:0")]
    addr: SocketAddr,
    /// Folder that the objects and open uploads live in; without it they live in memory
    #[arg(long, value_name = "DIR", conflicts_with_all = ["null", "serve"])]
    root: Option<PathBuf>,
    /// Swallow bodies and keep their lengths only; check no signature
    #[arg(long)]
    null: bool,
    /// Load DIR/BUCKET/KEY into memory as objects at the start
    #[arg(long, value_name = "DIR")]
    serve: Option<PathBuf>,
    /// Bucket to make at the start; may be repeated
    #[arg(long = "bucket", value_name = "NAME")]
    buckets: Vec<String>,
    /// Rules that make requests fail; read again whenever the file changes
    #[arg(long, value_name = "FILE")]
    rules: Option<PathBuf>,
    /// File that one JSON line per request is appended to
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Limit for the bytes of all connections together, both ways
    #[arg(long, value_name = "BYTES/s", value_parser = crate::units::parse_rate)]
    rate: Option<u64>,
    /// Highest part number
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    part_limit: u32,
    /// Least length of every part but the last
    #[arg(long, value_name = "BYTES", default_value = "5MiB", value_parser = crate::units::parse_size)]
    min_part: u64,
    /// Close a connection on which no byte has moved for this long, as in 3s
    #[arg(long, value_name = "TIME", value_parser = crate::units::parse_duration)]
    close_idle: Option<Duration>,
    /// Seconds that the server's clock is ahead of this machine's, or behind it with a minus
    #[arg(long, value_name = "SECONDS", allow_hyphen_values = true, value_parser = clap::value_parser!(i64).range(-1_000_000_000..=1_000_000_000))]
    clock_offset: Option<i64>,
}

#[derive(Debug, thiserror::Error)]
enum ServeError {
    #[error("bucket name `{0}` is not one that S3 allows")]
    BucketName(String),
    #[error("the log {path} cannot be opened")]
    Log {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error(transparent)]
    Rules(#[from] ScriptError),
    #[error("the store cannot be opened")]
    Store(#[source] std::io::Error),
    #[error(transparent)]
    Server(#[from] ServerError),
}

/// Serves until SIGTERM or SIGINT.
pub(crate) fn run(args: Args) -> ExitCode {
    server::run("s3", serve(args))
}

async fn serve(args: Args) -> Result<(), ServeError> {
    let front = Arc::new(front(&args)?);
    let pace = args.rate.map(|rate| Arc::new(Pace::new(rate)));
    let connection = |stream: TcpStream, stopped: watch::Receiver<()>| {
        let front = Arc::clone(&front);
        let connection = Arc::new(Connection::new(stream));
        let wire = Wire::new(Arc::clone(&connection), pace.clone(), args.close_idle);
        let service = service_fn(move |req| {
            let (front, connection) = (Arc::clone(&front), Arc::clone(&connection));
            async move { front.handle(req, connection).await }
        });
        server::speak_http(wire, service, stopped)
    };
    Ok(server::serve(args.addr, connection).await?)
}

fn front(args: &Args) -> Result<Front, ServeError> {
    if let Some(name) = args
        .buckets
        .iter()
        .find(|name| !s3s::path::check_bucket_name(name))
    {
        return Err(ServeError::BucketName(name.clone()));
    }
    let rules = Rules::open(args.rules.clone())?;
    let log = Log::open(args.log.as_deref()).map_err(|source| ServeError::Log {
        path: args.log.clone().unwrap_or_default(),
        source,
    })?;
    let settings = Settings {
        root: args.root.clone(),
        swallow: args.null,
        part_limit: args.part_limit,
        part_len_min: args.min_part,
    };
    let store = Store::open(settings, &args.buckets).map_err(ServeError::Store)?;
    if let Some(dir) = &args.serve {
        store.serve(dir).map_err(ServeError::Store)?;
    }
    let mut s3 = S3ServiceBuilder::new(Api(Arc::new(store)));
    if !args.null {
        let key =
            |name: &str, usual: &str| std::env::var(name).unwrap_or_else(|_| usual.to_owned());
        s3.set_auth(SimpleAuth::from_single(
            key("AWS_ACCESS_KEY_ID", "test"),
            key("AWS_SECRET_ACCESS_KEY", "testtest"),
        ));
    }
    let clock = args.clock_offset.map(ServerClock::new);
    if clock.is_some() {
        // That of the S3 layer is this machine's.
        let mut config = S3Config::default();
        config.presigned_url_max_skew_time_secs = u32::MAX;
        s3.set_config(Arc::new(StaticConfigProvider::new(Arc::new(config))));
    }
    Ok(Front {
        s3: s3.build(),
        clock,
        rules,
        log: Arc::new(log),
        null: args.null,
    })
}
