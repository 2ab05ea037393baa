//! Probes by HTTP and HTTPS: a GET over a connection of its own, and what the answer's status means.
//!
//! The kubelet's rules, with one difference: a body that stalls fails the probe, as its headers would.

use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::header::{
    ACCEPT, CONNECTION, CONTENT_LENGTH, HOST, HeaderMap, HeaderName, HeaderValue, LOCATION,
    TRAILER, TRANSFER_ENCODING, USER_AGENT,
};
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};

use super::connect::{ConnectError, Ending, HANDSHAKE_MAX, Usage, connect};
use super::tls::{Protocol, TlsClient};
pub use super::url::Scheme;
use super::url::{BadLocation, Redirect, Url, target};
use super::{Deadline, OUTPUT_LIMIT, Target, chain, drive, failure, outcome, own_error, success};
use crate::{Outcome, RawResult};

/// Most requests of one probe: the first and those that redirects lead to.
const REQUESTS: usize = 10;
/// Most bytes of an answer's head.
const HEAD_LIMIT: usize = 64 * 1024;
/// Most bytes that a server may send, TLS besides: the head, and as much of the body as is read even if it comes in
/// chunks of a byte.
const READ_MAX: usize = 2 * HEAD_LIMIT + OUTPUT_LIMIT;

/// What to ask, and whom.
#[derive(Clone, Debug)]
pub struct HttpProbe {
    /// Where to connect to.
    pub target: Target,
    /// By what.
    pub scheme: Scheme,
    /// The path, and a query if there is one, as in a manifest.
    pub path: String,
    /// Headers of the request. One of them may come several times. A `Host` is what the server is told to be, an empty
    /// `User-Agent` or `Accept` is not sent.
    pub headers: Vec<(String, String)>,
    /// How to speak TLS, be it after a redirect.
    pub tls: TlsClient,
}

/// Why there is no answer to judge.
#[derive(Debug, thiserror::Error)]
enum HttpError {
    #[error("{error}")]
    Connect { error: ConnectError, url: Url },
    #[error("cannot send the header {0:?}")]
    Header(String),
    #[error("cannot send the path as it is")]
    Path,
    #[error("timeout: no TLS with {0} within {1:?}")]
    TlsTimedOut(Url, std::time::Duration),
    #[error("no TLS with {0}: {1}")]
    Tls(Url, #[source] std::io::Error),
    #[error("timeout: no answer from {0} within {1:?}")]
    HeadTimedOut(Url, std::time::Duration),
    #[error("no answer from {0}: {1}")]
    Head(Url, String),
    #[error("timeout: the body from {0} stopped before its end, within {1:?}")]
    BodyTimedOut(Url, std::time::Duration),
    #[error("the body from {0} ended early: {1}")]
    Body(Url, String),
    #[error("stopped after {REQUESTS} redirects")]
    TooManyRedirects,
    #[error(transparent)]
    Location(#[from] BadLocation),
}

/// What a request led to.
enum Step {
    /// Status, and how much of the body was read, bytes.
    Answered(StatusCode, usize),
    Redirected(Redirect),
}

/// Asks once, and follows redirects to the same host.
pub async fn probe(probe: &HttpProbe, deadline: Deadline) -> Outcome {
    match ask(probe, deadline).await {
        Ok((status, _)) => judge(status),
        Err(HttpError::Connect { error, url }) => error.outcome(&url, deadline),
        // As with the kubelet: the server has answered, and the attempt is repeated.
        Err(error @ HttpError::Body(..)) => outcome(RawResult::Failure, error.to_string(), true),
        Err(error @ (HttpError::Header(_) | HttpError::Path)) => own_error(error.to_string()),
        Err(error) => failure(error.to_string()),
    }
}

fn judge(status: StatusCode) -> Outcome {
    let message = format!("HTTP status {}", status.as_u16());
    if status.is_success() {
        success(message)
    } else if status.is_redirection() {
        let message = format!("{message}: a redirect that was not followed");
        outcome(RawResult::Warning, message, false)
    } else {
        failure(message)
    }
}

/// The final answer's status, and how much of its body was read, bytes.
async fn ask(probe: &HttpProbe, deadline: Deadline) -> Result<(StatusCode, usize), HttpError> {
    let first = Url {
        scheme: probe.scheme,
        host: probe.target.host.clone(),
        port: probe.target.port,
        target: target(&probe.path),
    };
    let (mut host, headers) = headers(&probe.headers)?;
    let mut url = first.clone();
    for _ in 0..REQUESTS {
        let request = request(&url, host.as_ref(), &headers)?;
        match send(probe, &first, &url, request, deadline).await? {
            Step::Answered(status, body) => return Ok((status, body)),
            Step::Redirected(redirect) => {
                url = redirect.url;
                if redirect.is_absolute {
                    host = None;
                }
            }
        }
    }
    Err(HttpError::TooManyRedirects)
}

/// What of the manifest's headers stands for the host, and what is sent as it is.
fn headers(given: &[(String, String)]) -> Result<(Option<HeaderValue>, HeaderMap), HttpError> {
    let mut headers = HeaderMap::with_capacity(given.len() + 4);
    for (name, value) in given {
        let bad = || HttpError::Header(name.clone());
        let key = HeaderName::try_from(name.as_str()).map_err(|_| bad())?;
        let value = HeaderValue::from_bytes(value.trim().as_bytes()).map_err(|_| bad())?;
        headers.append(key, value);
    }
    let host = headers.remove(HOST).filter(|host| !host.is_empty());
    // What the connection itself decides.
    for own in [CONTENT_LENGTH, TRANSFER_ENCODING, TRAILER] {
        headers.remove(own);
    }
    for (name, default) in [(USER_AGENT, super::USER_AGENT), (ACCEPT, "*/*")] {
        match headers.get(&name) {
            None => {
                headers.insert(name, HeaderValue::from_static(default));
            }
            Some(value) if value.is_empty() => {
                headers.remove(name);
            }
            Some(_) => {}
        }
    }
    headers.insert(CONNECTION, HeaderValue::from_static("close"));
    Ok((host, headers))
}

fn request(
    url: &Url,
    host: Option<&HeaderValue>,
    headers: &HeaderMap,
) -> Result<Request<Empty<Bytes>>, HttpError> {
    let host = match host {
        Some(host) => host.clone(),
        None => HeaderValue::try_from(url.authority()).map_err(|_| HttpError::Path)?,
    };
    let mut request = Request::get(url.target.as_str())
        .header(HOST, host)
        .body(Empty::new())
        .map_err(|_| HttpError::Path)?;
    request.headers_mut().extend(headers.clone());
    Ok(request)
}

async fn send(
    probe: &HttpProbe,
    first: &Url,
    url: &Url,
    request: Request<Empty<Bytes>>,
    deadline: Deadline,
) -> Result<Step, HttpError> {
    let target = Target {
        host: url.host.clone(),
        port: url.port,
        netns: probe.target.netns.clone(),
    };
    let usage = Usage {
        ending: Ending::Reset,
        read_max: match url.scheme {
            Scheme::Http => READ_MAX,
            Scheme::Https => READ_MAX + HANDSHAKE_MAX,
        },
        // A plain request is written at once.
        no_delay: url.scheme == Scheme::Https,
    };
    let connection =
        connect(&target, usage, deadline)
            .await
            .map_err(|error| HttpError::Connect {
                error,
                url: url.clone(),
            })?;
    match url.scheme {
        Scheme::Http => exchange(connection, request, first, url, deadline).await,
        Scheme::Https => {
            let handshake = probe.tls.connect(&url.host, Protocol::Http1, connection);
            let connection = deadline
                .bound(handshake)
                .await
                .ok_or_else(|| HttpError::TlsTimedOut(url.clone(), deadline.timeout()))?
                .map_err(|error| HttpError::Tls(url.clone(), error))?;
            exchange(connection, request, first, url, deadline).await
        }
    }
}

async fn exchange(
    connection: impl AsyncRead + AsyncWrite + Unpin + 'static,
    request: Request<Empty<Bytes>>,
    first: &Url,
    url: &Url,
    deadline: Deadline,
) -> Result<Step, HttpError> {
    let head = |error: hyper::Error| HttpError::Head(url.clone(), chain(&error));
    let (mut sender, running) = http1::Builder::new()
        .title_case_headers(true)
        .max_buf_size(HEAD_LIMIT)
        .handshake(TokioIo::new(connection))
        .await
        .map_err(head)?;
    let call = async {
        let response = deadline
            .bound(sender.send_request(request))
            .await
            .ok_or_else(|| HttpError::HeadTimedOut(url.clone(), deadline.timeout()))?
            .map_err(head)?;
        if let Some(location) = location(&response) {
            match url.redirect(&location) {
                Ok(redirect) if redirect.url.has_host_of(first) => {
                    return Ok(Step::Redirected(redirect));
                }
                Ok(_) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let status = response.status();
        let body = deadline
            .bound(read_body(response.into_body()))
            .await
            .ok_or_else(|| HttpError::BodyTimedOut(url.clone(), deadline.timeout()))?
            .map_err(|error| HttpError::Body(url.clone(), chain(&error)))?;
        Ok(Step::Answered(status, body))
    };
    drive(running, call).await
}

/// Where a redirect leads that says so.
fn location(response: &Response<Incoming>) -> Option<String> {
    if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
        return None;
    }
    let location = response.headers().get(LOCATION)?;
    Some(String::from_utf8_lossy(location.as_bytes()).into_owned())
}

/// Reads a body as far as it is to be, and keeps none of it. Returns how much of it was looked at, bytes.
async fn read_body(mut body: Incoming) -> Result<usize, hyper::Error> {
    let mut read = 0;
    while read < OUTPUT_LIMIT
        && let Some(frame) = body.frame().await
    {
        read += frame?.data_ref().map_or(0, Bytes::len);
    }
    Ok(read.min(OUTPUT_LIMIT))
}

#[cfg(test)]
mod tests;
