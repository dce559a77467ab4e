//! `testkit metadata`: what EC2, Compute Engine and Azure tell their machines, on one port, with scripted faults and a request log.
//!
//! ```text
//! connection -> hyper -> this file (rules, log) -> clouds.rs (tokens, required headers, waiting) -> script.rs (values)
//! ```
//!
//! In: a command line, a rules file that may change while the server runs. Out: `listening http://ADDR:PORT` on standard output, then answers. SIGTERM and SIGINT end it with status 0. What can fail at the start
//! (the address, the rules, the log) is one line on standard error and status 1.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::{Body, Incoming};
use hyper::service::service_fn;
use serde::Serialize;
use tokio::net::TcpStream;
use tokio::sync::watch;

use crate::log::Log;
use crate::rule::{Reply, set_headers, sleep};
use crate::script::{ScriptError, ScriptFile};
use crate::server::{self, ServerError};

mod clouds;
mod script;

use clouds::Clouds;
use script::{Action, Script};

/// The command line of `testkit metadata`.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Address to listen on; port 0 takes a free one
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:0")]
    addr: SocketAddr,
    /// What is answered, and what fails; read again whenever the file changes
    #[arg(long, value_name = "FILE")]
    rules: Option<PathBuf>,
    /// File that one JSON line per request is appended to
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
enum ServeError {
    #[error("the log {path} cannot be opened")]
    Log {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error(transparent)]
    Rules(#[from] ScriptError),
    #[error(transparent)]
    Server(#[from] ServerError),
}

/// Why a connection ends without an answer.
#[derive(Debug, thiserror::Error)]
#[error("the script dropped the answer")]
struct Dropped;

/// What the log says of a request, beside its number and its times.
#[derive(Serialize)]
struct Line {
    method: String,
    path: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    query: Option<String>,
    /// Status of the answer that was sent; 0 when none was.
    status: u16,
    bytes_out: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    fault: Option<usize>,
}

/// Everything that requests share.
struct Front {
    script: ScriptFile<Script>,
    clouds: Clouds,
    log: Arc<Log>,
}

/// Serves until SIGTERM or SIGINT.
pub(crate) fn run(args: Args) -> ExitCode {
    server::run("metadata", serve(args))
}

async fn serve(args: Args) -> Result<(), ServeError> {
    let script = ScriptFile::open(args.rules, Script::parse)?;
    let log = Log::open(args.log.as_deref()).map_err(|source| ServeError::Log {
        path: args.log.clone().unwrap_or_default(),
        source,
    })?;
    let front = Arc::new(Front {
        script,
        clouds: Clouds::default(),
        log: Arc::new(log),
    });
    let connection = |stream: TcpStream, stopped: watch::Receiver<()>| {
        let front = Arc::clone(&front);
        let service = service_fn(move |req| {
            let front = Arc::clone(&front);
            async move { front.handle(req).await }
        });
        server::speak_http(stream, service, stopped)
    };
    Ok(server::serve(args.addr, connection).await?)
}

impl Front {
    /// Answers one request. A client that leaves meanwhile ends this, and the record says that it had no answer.
    async fn handle(&self, req: Request<Incoming>) -> Result<Response<Full<Bytes>>, Dropped> {
        let mut record = self.log.begin(Line {
            method: req.method().as_str().to_owned(),
            path: req.uri().path().to_owned(),
            query: req.uri().query().map(str::to_owned),
            status: 0,
            bytes_out: 0,
            fault: None,
        });
        let (fault, action) = self.script.with(|script| script.decide(&req)).unzip();
        record.line.fault = fault;
        let response = self.answer(&req, action.as_deref()).await?;
        record.line.status = response.status().as_u16();
        record.line.bytes_out = response.body().size_hint().exact().unwrap_or(0);
        record.write();
        Ok(response)
    }

    async fn answer(
        &self,
        req: &Request<Incoming>,
        action: Option<&Action>,
    ) -> Result<Response<Full<Bytes>>, Dropped> {
        let Some(action) = action else {
            return self.clouds.answer(req, &self.script).await;
        };
        sleep(action.delay_before).await;
        let mut response = match &action.reply {
            Reply::Usual => self.clouds.answer(req, &self.script).await?,
            Reply::Fixed { status, body } => {
                let mut response = Response::new(Full::from(body.clone()));
                *response.status_mut() = *status;
                response
            }
            Reply::Drop => return Err(Dropped),
            Reply::Stall => std::future::pending().await,
        };
        set_headers(response.headers_mut(), &action.headers);
        Ok(response)
    }
}
