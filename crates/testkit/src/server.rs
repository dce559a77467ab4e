//! A server of the kit: listens, gives every connection to a task of its own, ends on a signal.
//!
//! In: an address, and what is done with a connection. Out: `listening URL` on standard output, then whatever the connections do. SIGTERM and SIGINT end it with status 0. What can fail at the start
//! is one line on standard error and status 1.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response};
use http_body::Body;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::Service;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Semaphore, watch};

/// Connections that are served at once; further ones wait in the listen queue.
const CONNECTIONS_MAX: u32 = 4_096;
/// What requests under way get to finish in after a signal.
const GRACE: Duration = Duration::from_millis(500);
/// Largest buffer of the HTTP layer per connection.
const HTTP_BUFFER_LEN_MAX: usize = 1 << 20;

/// What HTTP services and bodies may fail with.
type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Why a server does not run.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ServerError {
    #[error("the server cannot listen on {addr}")]
    Listen { addr: SocketAddr, source: io::Error },
    #[error("the server cannot run")]
    Runtime(#[from] io::Error),
}

/// Runs the subcommand `name` to its end.
#[expect(clippy::print_stderr, reason = "the command's own error line")]
pub(crate) fn run<E>(name: &str, work: impl Future<Output = Result<(), E>>) -> ExitCode
where
    E: std::error::Error + From<ServerError> + 'static,
{
    let result = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| ServerError::from(error).into())
        .and_then(|runtime| {
            let result = runtime.block_on(work);
            // Requests that a rule stalls never end by themselves.
            runtime.shutdown_background();
            result
        });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("testkit {name}: {}", chain(&error));
            ExitCode::FAILURE
        }
    }
}

/// An error and what caused it, in one line.
pub(crate) fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(": ")
}

/// Serves until SIGTERM or SIGINT. A connection's task is told by the channel's end to come to its own.
pub(crate) async fn serve<F, Fut>(addr: SocketAddr, connection: F) -> Result<(), ServerError>
where
    F: Fn(TcpStream, watch::Receiver<()>) -> Fut,
    Fut: Future<Output = ()> + Send + 'static,
{
    let url = |addr: SocketAddr| format!("http://{addr}");
    serve_as(url, addr, connection).await
}

/// The same, announced by another URL.
pub(crate) async fn serve_as<F, Fut>(
    url: impl FnOnce(SocketAddr) -> String,
    addr: SocketAddr,
    connection: F,
) -> Result<(), ServerError>
where
    F: Fn(TcpStream, watch::Receiver<()>) -> Fut,
    Fut: Future<Output = ()> + Send + 'static,
{
    let listen_error = |source| ServerError::Listen { addr, source };
    let listener = TcpListener::bind(addr).await.map_err(listen_error)?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    announce(&url(listener.local_addr().map_err(listen_error)?))?;

    let (stop, stopped) = watch::channel(());
    let permits = Arc::new(Semaphore::new(CONNECTIONS_MAX as usize));
    tokio::select! {
        () = accept(&listener, &permits, &stopped, connection) => {}
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    drop(listener);
    drop(stop);
    // All permits back means that every connection has ended.
    let _ = tokio::time::timeout(GRACE, permits.acquire_many(CONNECTIONS_MAX)).await;
    Ok(())
}

/// Takes connections and gives each to a task of its own.
async fn accept<F, Fut>(
    listener: &TcpListener,
    permits: &Arc<Semaphore>,
    stopped: &watch::Receiver<()>,
    connection: F,
) where
    F: Fn(TcpStream, watch::Receiver<()>) -> Fut,
    Fut: Future<Output = ()> + Send + 'static,
{
    // The semaphore is never closed.
    while let Ok(permit) = Arc::clone(permits).acquire_owned().await {
        match listener.accept().await {
            Ok((stream, _)) => {
                // Without it the last bytes of an answer may wait for the client's acknowledgement.
                let _ = stream.set_nodelay(true);
                let served = connection(stream, stopped.clone());
                tokio::spawn(async move {
                    served.await;
                    drop(permit);
                });
            }
            // Out of file descriptors, most likely: let some connections end.
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}

/// Speaks HTTP/1 on a connection until it ends, or until the request under way when the server ends.
pub(crate) async fn speak_http<I, S, B>(io: I, service: S, mut stopped: watch::Receiver<()>)
where
    I: AsyncRead + AsyncWrite + Unpin,
    S: Service<Request<Incoming>, Response = Response<B>>,
    S::Error: Into<BoxError>,
    B: Body + 'static,
    B::Error: Into<BoxError>,
{
    let served = http1::Builder::new()
        .header_read_timeout(None)
        .max_buf_size(HTTP_BUFFER_LEN_MAX)
        .serve_connection(TokioIo::new(io), service);
    tokio::pin!(served);
    // A connection that ends in an error is what clients and rules do all the time.
    tokio::select! {
        _ = served.as_mut() => {}
        _ = stopped.changed() => {
            served.as_mut().graceful_shutdown();
            let _ = served.await;
        }
    }
}

/// Prints the ready line.
fn announce(url: &str) -> Result<(), io::Error> {
    let mut stdout = io::stdout();
    writeln!(stdout, "listening {url}")?;
    stdout.flush()
}
