//! Metrics of a supervision as Prometheus reads them, over HTTP (`metrics.listen`) and as a file (`metrics.textfile`) for a node exporter.
//!
//! In: a [`Report`]. Out: text. What can fail: the address or the file; that is told, and ends nothing.

use std::convert::Infallible;
use std::fmt::Write as _;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::CONTENT_TYPE;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::runtime::Handle;

use super::desk::{Desk, Report};
use super::replace;

/// Pause between two writes of the file.
const WRITE_EVERY: Duration = Duration::from_secs(15);
/// A scrape has to come within this time.
const HEAD_WITHIN: Duration = Duration::from_secs(5);

/// Name, kind, what it is, and how it is read.
type Metric = (&'static str, &'static str, &'static str, fn(&Report) -> f64);

/// What is counted.
const METRICS: &[Metric] = &[
    (
        "notices_heard_total",
        "counter",
        "Notices heard by this process.",
        |it| float(it.notices_heard),
    ),
    (
        "notices_heard_ever",
        "gauge",
        "Notices that all runs of the job have heard, as the store has it.",
        |it| float(it.ever.heard),
    ),
    (
        "notices_missed_ever",
        "gauge",
        "Of these, those after which no image was committed.",
        |it| float(it.ever.missed),
    ),
    (
        "saves_committed_total",
        "counter",
        "Images committed by this process.",
        |it| float(it.saves_committed),
    ),
    (
        "saves_failed_total",
        "counter",
        "Saves of this process that failed.",
        |it| float(it.saves_failed),
    ),
    (
        "saves_skipped_total",
        "counter",
        "Saves without a notice that were skipped, because they would take too much of the job's time.",
        |it| float(it.saves_skipped),
    ),
    (
        "seconds_locked_total",
        "counter",
        "Seconds for which the job stood still.",
        |it| it.seconds_locked,
    ),
    (
        "notice_to_lock_seconds",
        "gauge",
        "Seconds from the last notice to the driver's lock.",
        |it| it.notice_to_lock_seconds,
    ),
    (
        "notice_to_commit_seconds",
        "gauge",
        "Seconds from the last notice to the commit.",
        |it| it.notice_to_commit_seconds,
    ),
    (
        "raw_bytes_total",
        "counter",
        "Bytes of GPU memory that were saved.",
        |it| float(it.bytes_raw),
    ),
    (
        "stored_bytes_total",
        "counter",
        "Bytes that they took in the store.",
        |it| float(it.bytes_stored),
    ),
    (
        "failed_aborts_total",
        "counter",
        "Uploads that could not be aborted, and stay in the store until `ckptstream gc`.",
        |it| float(it.failed_aborts),
    ),
    (
        "armed",
        "gauge",
        "1 while everything that a save needs is prepared.",
        |it| f64::from(u8::from(it.armed)),
    ),
    (
        "store_out_of_reach",
        "gauge",
        "1 when the store would not have taken a save at the last look.",
        |it| f64::from(u8::from(it.store_trouble.is_some())),
    ),
    (
        "armed_bytes",
        "gauge",
        "Bytes of host memory that are held for it.",
        |it| float(it.armed_bytes),
    ),
];

#[expect(clippy::cast_precision_loss, reason = "counts far below 2^53")]
fn float(count: u64) -> f64 {
    count as f64
}

/// Everything, in the text format 0.0.4.
pub(super) fn text(report: &Report) -> String {
    let mut text = String::new();
    let job = &report.job;
    for (name, kind, help, value) in METRICS {
        // Writing to a String does not fail.
        let _ = writeln!(
            text,
            "# HELP ckptstream_{name} {help}\n# TYPE ckptstream_{name} {kind}\nckptstream_{name}{{job=\"{job}\"}} {}",
            value(report)
        );
    }
    let name = "ckptstream_store_retries_total";
    let _ = writeln!(
        text,
        "# HELP {name} Store requests that were tried again.\n# TYPE {name} counter"
    );
    for (cause, count) in &report.retries {
        let _ = writeln!(text, "{name}{{job=\"{job}\",cause=\"{cause}\"}} {count}");
    }
    let name = "ckptstream_source_blind";
    let _ = writeln!(
        text,
        "# HELP {name} 1 for a source of notices that sees nothing.\n# TYPE {name} gauge"
    );
    for source in &report.blind {
        let _ = writeln!(
            text,
            "{name}{{job=\"{job}\",source=\"{}\"}} 1",
            source.source
        );
    }
    text
}

/// Serves `/metrics` from now on.
///
/// # Errors
/// The address cannot be had.
pub(super) fn serve(runtime: &Handle, address: SocketAddr, desk: &Desk) -> io::Result<()> {
    let listener = runtime.block_on(TcpListener::bind(address))?;
    let told = desk.teller();
    runtime.spawn(async move {
        loop {
            let Ok((stream, _)) = listener.accept().await else {
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            let told = told.clone();
            tokio::spawn(async move {
                let answer = service_fn(move |request: Request<Incoming>| {
                    let response = respond(request.uri().path(), &told());
                    async move { Ok::<_, Infallible>(response) }
                });
                let served = hyper::server::conn::http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(HEAD_WITHIN)
                    .serve_connection(TokioIo::new(stream), answer);
                if let Err(error) = served.await {
                    tracing::debug!("a scrape failed: {error}");
                }
            });
        }
    });
    Ok(())
}

fn respond(path: &str, report: &Report) -> Response<Full<Bytes>> {
    let (status, body) = match path {
        "/metrics" => (StatusCode::OK, text(report)),
        _ => (StatusCode::NOT_FOUND, "see /metrics\n".to_owned()),
    };
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    let kind = hyper::header::HeaderValue::from_static("text/plain; version=0.0.4");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}

/// Writes the file now and then, until the runtime ends.
pub(super) fn write_now_and_then(runtime: &Handle, path: &Path, desk: &Desk) {
    let (path, told) = (path.to_owned(), desk.teller());
    runtime.spawn(async move {
        loop {
            let (path, report) = (path.clone(), told());
            let written = tokio::task::spawn_blocking(move || write(&path, &report)).await;
            if let Ok(Err(error)) = written {
                tracing::warn!("metrics.textfile: {error}");
            }
            tokio::time::sleep(WRITE_EVERY).await;
        }
    });
}

/// Writes the file.
pub(super) fn write(path: &Path, report: &Report) -> io::Result<()> {
    replace(path, text(report).as_bytes())
}

#[cfg(test)]
mod tests {
    use super::super::desk::BlindSource;
    use super::*;

    #[test]
    fn every_metric_has_a_help_a_type_and_a_number() {
        let report = Report {
            job: "train".to_owned(),
            saves_committed: 3,
            seconds_locked: 1.5,
            blind: vec![BlindSource {
                source: "aws".to_owned(),
                why: "refused".to_owned(),
            }],
            ..Report::default()
        };
        let text = text(&report);
        assert!(
            text.contains("ckptstream_saves_committed_total{job=\"train\"} 3\n"),
            "{text}"
        );
        assert!(
            text.contains("ckptstream_seconds_locked_total{job=\"train\"} 1.5\n"),
            "{text}"
        );
        assert!(
            text.contains("ckptstream_source_blind{job=\"train\",source=\"aws\"} 1\n"),
            "{text}"
        );
        let samples = text.lines().filter(|line| !line.starts_with('#'));
        for sample in samples {
            let (name, value) = sample.rsplit_once(' ').unwrap();
            assert!(value.parse::<f64>().is_ok(), "{sample}");
            let name = name.split('{').next().unwrap();
            for kind in ["HELP", "TYPE"] {
                assert!(text.contains(&format!("# {kind} {name} ")), "{sample}");
            }
        }
    }

    #[test]
    fn the_file_is_replaced_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ckptstream.prom");
        for committed in 1..=2 {
            let report = Report {
                saves_committed: committed,
                ..Report::default()
            };
            write(&path, &report).unwrap();
            let text = std::fs::read_to_string(&path).unwrap();
            assert!(text.contains(&format!("committed_total{{job=\"\"}} {committed}\n")));
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
