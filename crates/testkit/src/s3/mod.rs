//! `testkit s3`: an S3 server for tests, the demo and benches, with scripted faults and a request log.
//!
//! ```text
//! socket -> wire.rs (rate, resets, idle close) -> hyper -> faults.rs (rules, body.rs, log.rs) -> s3s (signature, XML) -> store/
//! ```
//!
//! In: a command line, a rules file that may change while the server runs. Out: `listening http://ADDR:PORT` on standard output, then S3.
//! SIGTERM and SIGINT end it with status 0. What can fail at the start (the address, the folder, the rules) is one line on standard error
//! and status 1.

use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

mod body;
mod faults;
mod log;
mod null;
mod op;
mod rule_file;
mod rules;
mod store;
mod wire;

use faults::Front;
use log::Log;
use rules::{Rules, RulesError};
use store::{Api, Settings, Store};
use wire::{Connection, Pace, Wire};

/// Connections that are served at once; further ones wait in the listen queue.
const CONNECTIONS_MAX: u32 = 4_096;
/// What requests under way get to finish in after a signal.
const GRACE: Duration = Duration::from_millis(500);
/// Largest buffer of the HTTP layer per connection.
const HTTP_BUFFER_LEN_MAX: usize = 1 << 20;

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
    Rules(#[from] RulesError),
    #[error("the store cannot be opened")]
    Store(#[source] std::io::Error),
    #[error("the server cannot listen on {addr}")]
    Listen {
        addr: SocketAddr,
        source: std::io::Error,
    },
    #[error("the server cannot run")]
    Runtime(#[from] std::io::Error),
}

/// Serves until SIGTERM or SIGINT.
#[expect(clippy::print_stderr, reason = "the command's own error line")]
pub(crate) fn run(args: Args) -> ExitCode {
    let result = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(ServeError::from)
        .and_then(|runtime| {
            let result = runtime.block_on(serve(args));
            // Requests that a rule stalls never end by themselves.
            runtime.shutdown_background();
            result
        });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("testkit s3: {}", chain(&error));
            ExitCode::FAILURE
        }
    }
}

/// An error and what caused it, in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(": ")
}

async fn serve(args: Args) -> Result<(), ServeError> {
    let front = Arc::new(front(&args)?);
    let listen_error = |source| ServeError::Listen {
        addr: args.addr,
        source,
    };
    let listener = TcpListener::bind(args.addr).await.map_err(listen_error)?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    announce(listener.local_addr().map_err(listen_error)?)?;

    let (stop, stopped) = watch::channel(());
    let permits = Arc::new(Semaphore::new(CONNECTIONS_MAX as usize));
    let acceptor = Acceptor {
        front,
        pace: args.rate.map(|rate| Arc::new(Pace::new(rate))),
        idle_max: args.close_idle,
        permits: Arc::clone(&permits),
        stopped,
    };
    tokio::select! {
        () = acceptor.run(&listener) => {}
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    drop(listener);
    // Nobody listening means that every connection has ended.
    let _ = stop.send(());
    let _ = tokio::time::timeout(GRACE, permits.acquire_many(CONNECTIONS_MAX)).await;
    Ok(())
}

/// Takes connections and gives each to a task of its own.
struct Acceptor {
    front: Arc<Front>,
    pace: Option<Arc<Pace>>,
    idle_max: Option<Duration>,
    permits: Arc<Semaphore>,
    stopped: watch::Receiver<()>,
}

impl Acceptor {
    async fn run(&self, listener: &TcpListener) {
        // The semaphore is never closed.
        while let Ok(permit) = Arc::clone(&self.permits).acquire_owned().await {
            match listener.accept().await {
                Ok((stream, _)) => self.serve(stream, permit),
                // Out of file descriptors, most likely: let some connections end.
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    }

    fn serve(&self, stream: TcpStream, permit: OwnedSemaphorePermit) {
        // Without it the last bytes of an answer may wait for the client's acknowledgement.
        let _ = stream.set_nodelay(true);
        let connection = Arc::new(Connection::new(stream));
        let wire = Wire::new(Arc::clone(&connection), self.pace.clone(), self.idle_max);
        let front = Arc::clone(&self.front);
        let service = service_fn(move |req| {
            let (front, connection) = (Arc::clone(&front), Arc::clone(&connection));
            async move { front.handle(req, connection).await }
        });
        let mut stopped = self.stopped.clone();
        tokio::spawn(async move {
            let served = http1::Builder::new()
                .header_read_timeout(None)
                .max_buf_size(HTTP_BUFFER_LEN_MAX)
                .serve_connection(TokioIo::new(wire), service);
            tokio::pin!(served);
            // A connection that ends in an error is what clients and rules do all the time.
            tokio::select! {
                _ = served.as_mut() => {}
                _ = stopped.changed() => {
                    served.as_mut().graceful_shutdown();
                    let _ = served.await;
                }
            }
            drop(permit);
        });
    }
}

/// Prints the ready line.
fn announce(addr: SocketAddr) -> Result<(), std::io::Error> {
    let mut stdout = std::io::stdout();
    writeln!(stdout, "listening http://{addr}")?;
    stdout.flush()
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
    Ok(Front {
        s3: s3.build(),
        rules,
        log: Arc::new(log),
        null: args.null,
    })
}
