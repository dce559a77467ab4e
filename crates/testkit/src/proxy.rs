//! `testkit proxy`: an HTTP proxy that only tunnels (CONNECT), and refuses or hangs on request.
//!
//! In: a command line. Out: `listening http://ADDR:PORT` on standard output, then tunnels; a log line for every request that it is asked for, whatever became of it, so that what must never come here can be counted. SIGTERM and
//! SIGINT end it with status 0. What can fail at the start (the address, the log) is one line on standard error and status 1.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use serde::Serialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::TcpStream;

use crate::log::{Log, Record};
use crate::server::{self, ServerError};

/// Most bytes of a request's head.
const HEAD_LEN_MAX: usize = 16 << 10;

/// The command line of `testkit proxy`.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Address to listen on; port 0 takes a free one
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:0")]
    addr: SocketAddr,
    /// File that one JSON line per request is appended to
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Answer every request with this status instead of a tunnel
    #[arg(long, value_name = "STATUS", value_parser = clap::value_parser!(u16).range(400..600))]
    refuse: Option<u16>,
    /// Answer no request at all
    #[arg(long, conflicts_with = "refuse")]
    hang: bool,
}

#[derive(Debug, thiserror::Error)]
enum ServeError {
    #[error("the log {path} cannot be opened")]
    Log { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Server(#[from] ServerError),
}

/// What the log says of a request, beside its number and its times.
#[derive(Serialize)]
struct Line {
    method: String,
    target: String,
    /// Status of the answer; 0 when none was sent.
    status: u16,
}

/// What becomes of requests.
#[derive(Debug, Clone, Copy)]
enum Manner {
    Tunnel,
    Refuse(u16),
    Hang,
}

/// Serves until SIGTERM or SIGINT.
pub(crate) fn run(args: Args) -> ExitCode {
    server::run("proxy", serve(args))
}

async fn serve(args: Args) -> Result<(), ServeError> {
    let log = Log::open(args.log.as_deref()).map_err(|source| ServeError::Log {
        path: args.log.clone().unwrap_or_default(),
        source,
    })?;
    let log = Arc::new(log);
    let manner = match (args.refuse, args.hang) {
        (Some(status), _) => Manner::Refuse(status),
        (None, true) => Manner::Hang,
        (None, false) => Manner::Tunnel,
    };
    let connection = |stream: TcpStream, _stopped| {
        let log = Arc::clone(&log);
        async move {
            // A connection that ends in an error is what clients do all the time.
            let _ = handle(stream, &log, manner).await;
        }
    };
    Ok(server::serve(args.addr, connection).await?)
}

async fn handle(mut stream: TcpStream, log: &Arc<Log>, manner: Manner) -> io::Result<()> {
    let Some(head) = read_head(&mut stream).await? else {
        return Ok(());
    };
    let mut words = head.split_ascii_whitespace();
    let mut word = || words.next().unwrap_or_default().to_owned();
    let (method, target) = (word(), word());
    let mut record = log.begin(Line {
        method,
        target,
        status: 0,
    });
    match manner {
        Manner::Hang => std::future::pending().await,
        Manner::Refuse(status) => answer(stream, record, status).await,
        Manner::Tunnel if record.line.method != "CONNECT" => answer(stream, record, 405).await,
        Manner::Tunnel => match TcpStream::connect(&record.line.target).await {
            Err(_) => answer(stream, record, 502).await,
            Ok(mut onward) => {
                record.line.status = 200;
                record.write();
                stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await?;
                copy_bidirectional(&mut stream, &mut onward).await?;
                Ok(())
            }
        },
    }
}

async fn answer(mut stream: TcpStream, mut record: Record<Line>, status: u16) -> io::Result<()> {
    record.line.status = status;
    record.write();
    let answer = format!("HTTP/1.1 {status} no\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
    stream.write_all(answer.as_bytes()).await?;
    stream.shutdown().await
}

/// The first request's head; `None` when the client says something else, or nothing. A client of a tunnel sends nothing more before it has an answer.
async fn read_head(stream: &mut TcpStream) -> io::Result<Option<String>> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        if head.len() > HEAD_LEN_MAX || stream.read_buf(&mut head).await? == 0 {
            return Ok(None);
        }
    }
    Ok(String::from_utf8(head).ok())
}
