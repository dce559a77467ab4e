//! One request, from its head to the head of its answer: named, counted, made to fail if a rule says so, logged.
//!
//! In: a request whose body is unread. Out: an answer, or an error that closes the connection without one. Between the two lies the S3
//! layer, which this one calls unless a rule answers in its place. A rule's answer is given only after the request's body was read off,
//! so that a client which is still sending gets to see it.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body::Body as HttpBody;
use hyper::body::Incoming;
use s3s::Body;
use s3s::service::S3Service;

use super::body::{BodyFaultKind, FaultyResponse, RequestBody};
use super::clock::ServerClock;
use super::line::Line;
use super::null;
use super::op::Target;
use super::rule_file::{Action, error_xml};
use super::rules::Rules;
use super::wire::Connection;
use crate::log::{Log, Record};
use crate::rule::{Reply, set_headers, sleep};

/// Most body bytes that are read off after the S3 layer has refused a request without reading it.
const DRAIN_LEN_MAX: u64 = 64 << 20;

/// Why a connection ends without an answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum Dropped {
    #[error("a rule dropped the answer")]
    ByRule,
    #[error("the S3 layer failed")]
    Service(#[source] s3s::StdError),
}

/// Everything that requests share.
pub(super) struct Front {
    pub(super) s3: S3Service,
    pub(super) rules: Rules,
    pub(super) log: Arc<Log>,
    /// Where the server's time is not this machine's.
    pub(super) clock: Option<ServerClock>,
    /// Signatures are not looked at.
    pub(super) null: bool,
}

impl Front {
    /// Answers one request.
    pub(super) async fn handle(
        &self,
        req: Request<Incoming>,
        connection: Arc<Connection>,
    ) -> Result<Response<Body>, Dropped> {
        let (head, incoming) = req.into_parts();
        let target = Target::of(&head.method, &head.uri, &head.headers);
        let mut record = self.log.begin(Line::new(&head.method, &target));
        record.line.client_port = connection.client_port();
        note_headers(&mut record, &head.headers);
        let (fault, action) = self.rules.decide(&target, &head.headers).unzip();
        record.line.fault = fault;

        let body = RequestBody::new(
            incoming,
            action.as_ref().and_then(|action| action.on_request),
        );
        let req = Request::from_parts(head, ());
        let result = self
            .answer(
                req,
                body.clone(),
                &target,
                action.as_deref(),
                &mut record,
                &connection,
            )
            .await;
        record.line.bytes_in = body.bytes_in();
        let mut response = result?;
        if let Some(clock) = self.clock {
            clock.stamp(response.headers_mut());
        }
        record.line.status = response.status().as_u16();
        record.line.bytes_out = response.size_hint().exact().unwrap_or(0);
        let response = match action.and_then(|action| action.on_response) {
            Some(fault) => {
                if fault.kind != BodyFaultKind::Flip {
                    record.line.bytes_out = record.line.bytes_out.min(fault.at);
                }
                response.map(|body| Body::http_body(FaultyResponse::new(body, fault, connection)))
            }
            None => response,
        };
        record.write();
        Ok(response)
    }

    async fn answer(
        &self,
        req: Request<()>,
        mut body: RequestBody<Incoming>,
        target: &Target,
        action: Option<&Action>,
        record: &mut Record<Line>,
        connection: &Connection,
    ) -> Result<Response<Body>, Dropped> {
        let Some(action) = action else {
            return self.call_s3(req, &mut body, target).await;
        };
        sleep(action.delay_before).await;
        let mut answer = None;
        if action.on_request.is_none_or(|fault| fault.at > 0) && action.apply {
            let mut req = req;
            req.extensions_mut().insert(action.hints.clone());
            let stalls = action
                .on_request
                .is_some_and(|fault| fault.kind == BodyFaultKind::Stall);
            answer = tokio::select! {
                answer = self.call_s3(req, &mut body, target) => Some(answer?),
                // The S3 layer waits for a body that will never come.
                () = connection.peer_gone(), if stalls => None,
            };
        } else if matches!(action.reply, Reply::Fixed { .. } | Reply::Stall) {
            body.drain(u64::MAX).await;
        }
        if let Some(fault) = action
            .on_request
            .filter(|fault| body.ended_by() == Some(*fault))
        {
            match fault.kind {
                BodyFaultKind::Stall => connection.peer_gone().await,
                BodyFaultKind::Reset => connection.reset_on_close(),
                BodyFaultKind::Cut | BodyFaultKind::Flip | BodyFaultKind::Short => {}
            }
            return Err(Dropped::ByRule);
        }
        sleep(action.delay_after).await;
        let applied = answer.as_ref().map(|answer| answer.status().as_u16());
        let mut response = match (&action.reply, answer) {
            (Reply::Usual, Some(answer)) => answer,
            (Reply::Fixed { status, body }, _) => {
                record.line.applied = applied;
                fixed(*status, body, target)
            }
            (Reply::Stall, _) => {
                record.line.applied = applied;
                connection.peer_gone().await;
                return Err(Dropped::ByRule);
            }
            (Reply::Drop, _) | (Reply::Usual, None) => {
                record.line.applied = applied;
                return Err(Dropped::ByRule);
            }
        };
        set_headers(response.headers_mut(), &action.headers);
        if action
            .on_response
            .is_some_and(|fault| fault.kind == BodyFaultKind::Short)
        {
            response.headers_mut().remove(http::header::CONTENT_LENGTH);
        }
        Ok(response)
    }

    /// Hands a request to the S3 layer, and reads off what that has left of the body.
    async fn call_s3(
        &self,
        req: Request<()>,
        body: &mut RequestBody<Incoming>,
        target: &Target,
    ) -> Result<Response<Body>, Dropped> {
        if self.clock.is_some_and(|clock| clock.refuses(req.headers())) {
            body.drain(DRAIN_LEN_MAX).await;
            let code = "RequestTimeTooSkewed";
            let words =
                "The difference between the request time and the current time is too large.";
            let refusal = error_xml(code, words);
            return Ok(fixed(StatusCode::FORBIDDEN, &refusal, target));
        }
        let mut req = req.map(|()| Body::http_body(body.clone()));
        if self.null
            && let Some(refusal) = null::unsign(&mut req, target)
        {
            return Ok(refusal);
        }
        let response = self
            .s3
            .call(req)
            .await
            .map_err(|error| Dropped::Service(error.into()))?;
        body.drain(DRAIN_LEN_MAX).await;
        Ok(response)
    }
}

fn note_headers(record: &mut Record<Line>, headers: &HeaderMap) {
    record.line.if_none_match = headers
        .contains_key(http::header::IF_NONE_MATCH)
        .then_some(true);
    record.line.range = headers
        .get(http::header::RANGE)
        .and_then(|value| value.to_str().ok())
        .map(str::to_owned);
}

fn fixed(status: StatusCode, body: &str, target: &Target) -> Response<Body> {
    let bodiless = matches!(target.op, "HeadObject" | "HeadBucket");
    let body = if bodiless {
        Bytes::new()
    } else {
        Bytes::copy_from_slice(body.as_bytes())
    };
    let xml = !body.is_empty();
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    if xml {
        let value = http::HeaderValue::from_static("application/xml");
        response
            .headers_mut()
            .insert(http::header::CONTENT_TYPE, value);
    }
    response
}
