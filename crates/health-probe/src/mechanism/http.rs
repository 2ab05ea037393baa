//! HTTP and HTTPS probes: a GET on its own connection, and the meaning of the response's status.
//!
//! Follows the kubelet's rules, with one difference: a body that stalls fails the probe, like stalled headers.

mod answer;
mod request;

use std::io;

use self::answer::{Body, BodyError, Head, HeadError, HeadReader, Progress};
use self::request::Headers;
use super::connect::{ConnectError, Ending, HANDSHAKE_MAX, Usage, connect};
use super::dialogue::{Dialogue, hold};
use super::tls::{Protocol, TlsClient};
pub use super::url::Scheme;
use super::url::{BadLocation, Redirect, Url, target};
use super::{Deadline, OUTPUT_LIMIT, Target, failure, outcome, own_error, success};
use crate::{Outcome, RawResult};

/// Maximum number of requests of one probe: the first one, and one for each redirect followed.
const REQUESTS: usize = 10;
/// Maximum number of bytes that a server may send, not counting TLS: the head, and as much of the body as is read, even
/// if the body comes in one-byte chunks.
const READ_MAX: usize = 2 * answer::HEAD_LIMIT + OUTPUT_LIMIT;

/// What to request, and from where.
#[derive(Clone, Debug)]
pub struct HttpProbe {
    /// Where to connect to.
    pub target: Target,
    /// The scheme.
    pub scheme: Scheme,
    /// The path, with the query if any, as written in a manifest.
    pub path: String,
    /// The request's headers. Names may repeat. `Host` replaces the host name sent to the server; an empty `User-Agent`
    /// or `Accept` is not sent.
    pub headers: Vec<(String, String)>,
    /// How to speak TLS, including after a redirect.
    pub tls: TlsClient,
}

/// Why there is no response to judge.
#[derive(Debug, thiserror::Error)]
enum HttpError {
    #[error("{error}")]
    Connect { error: ConnectError, url: Url },
    #[error("cannot send the header {0:?}")]
    Header(String),
    #[error("the host name contains characters that cannot be sent")]
    Host,
    #[error("timeout: no TLS with {0} within {1:?}")]
    TlsTimedOut(Url, std::time::Duration),
    #[error("no TLS with {0}: {1}")]
    Tls(Url, #[source] io::Error),
    #[error("timeout: no answer from {0} within {1:?}")]
    HeadTimedOut(Url, std::time::Duration),
    #[error("no answer from {0}: {1}")]
    Head(Url, #[source] HeadError),
    #[error("no answer from {0}: {1}")]
    HeadCut(Url, Cut),
    #[error("timeout: the body from {0} was not complete within {1:?}")]
    BodyTimedOut(Url, std::time::Duration),
    #[error("the body from {0} ended early: {1}")]
    Body(Url, #[source] BodyError),
    #[error("the body from {0} ended early: {1}")]
    BodyCut(Url, Cut),
    #[error("stopped after {REQUESTS} redirects")]
    TooManyRedirects,
    #[error(transparent)]
    Location(#[from] BadLocation),
}

/// Why the data stopped.
#[derive(Debug, thiserror::Error)]
enum Cut {
    #[error("the server closed the connection")]
    Closed,
    #[error(transparent)]
    Broken(#[from] io::Error),
}

impl Cut {
    fn new(because: Option<io::Error>) -> Self {
        because.map_or(Self::Closed, Self::Broken)
    }
}

/// The result of a request.
enum Step {
    /// The response's status, and how many bytes of its body were read.
    Answered(u16, usize),
    Redirected(Redirect),
}

/// Sends the request, and follows redirects to the same host.
pub async fn probe(probe: &HttpProbe, deadline: Deadline) -> Outcome {
    match ask(probe, deadline).await {
        Ok((status, _)) => judge(status),
        Err(HttpError::Connect { error, url }) => error.outcome(&url, deadline),
        // As with the kubelet: the server has responded, and the attempt is repeated.
        Err(error @ (HttpError::Body(..) | HttpError::BodyCut(..))) => {
            outcome(RawResult::Failure, error.to_string(), true)
        }
        Err(error @ (HttpError::Header(_) | HttpError::Host)) => own_error(error.to_string()),
        Err(error) => failure(error.to_string()),
    }
}

fn judge(status: u16) -> Outcome {
    let message = format!("HTTP status {status}");
    match status {
        200..300 => success(message),
        300..400 => {
            let message = format!("{message}: a redirect that was not followed");
            outcome(RawResult::Warning, message, false)
        }
        _ => failure(message),
    }
}

/// Returns the final response's status, and how many bytes of its body were read.
async fn ask(probe: &HttpProbe, deadline: Deadline) -> Result<(u16, usize), HttpError> {
    let first = Url {
        scheme: probe.scheme,
        host: probe.target.host.clone(),
        port: probe.target.port,
        target: target(&probe.path),
    };
    let mut headers = Headers::new(&probe.headers)?;
    let mut url = first.clone();
    for _ in 0..REQUESTS {
        let request = headers.request(&url)?;
        match send(probe, &first, &url, request, deadline).await? {
            Step::Answered(status, body) => return Ok((status, body)),
            Step::Redirected(redirect) => {
                url = redirect.url;
                if redirect.is_absolute {
                    headers.forget_host();
                }
            }
        }
    }
    Err(HttpError::TooManyRedirects)
}

async fn send(
    probe: &HttpProbe,
    first: &Url,
    url: &Url,
    request: Vec<u8>,
    deadline: Deadline,
) -> Result<Step, HttpError> {
    let target = Target {
        host: url.host.clone(),
        port: url.port,
        netns: probe.target.netns.clone(),
        asker: probe.target.asker.clone(),
    };
    let usage = Usage {
        ending: Ending::Reset,
        read_max: match url.scheme {
            Scheme::Http => READ_MAX,
            Scheme::Https => READ_MAX + HANDSHAKE_MAX,
        },
        writes_first: true,
        // A plain request is written in one go.
        no_delay: url.scheme == Scheme::Https,
    };
    let mut connection =
        connect(&target, usage, deadline)
            .await
            .map_err(|error| HttpError::Connect {
                error,
                url: url.clone(),
            })?;
    let mut exchange = Exchange {
        first,
        url,
        request,
        place: Place::Head(HeadReader::default()),
    };
    let answer = match url.scheme {
        Scheme::Http => deadline.bound(hold(&mut exchange, &mut connection)).await,
        Scheme::Https => {
            let handshake = probe.tls.connect(&url.host, Protocol::Http1, connection);
            let mut connection = deadline
                .bound(handshake)
                .await
                .ok_or_else(|| HttpError::TlsTimedOut(url.clone(), deadline.timeout()))?
                .map_err(|error| HttpError::Tls(url.clone(), error))?;
            deadline.bound(hold(&mut exchange, &mut connection)).await
        }
    };
    answer.unwrap_or_else(|| {
        Err(match exchange.place {
            Place::Head(_) => HttpError::HeadTimedOut(url.clone(), deadline.timeout()),
            Place::Body { .. } => HttpError::BodyTimedOut(url.clone(), deadline.timeout()),
        })
    })
}

/// A request and its response.
struct Exchange<'a> {
    /// The URL of the probe.
    first: &'a Url,
    /// The URL of this request.
    url: &'a Url,
    /// The request to write; empty once written.
    request: Vec<u8>,
    place: Place,
}

/// The current position in the response.
enum Place {
    Head(HeadReader),
    Body {
        status: u16,
        body: Body,
        read: usize,
    },
}

impl Exchange<'_> {
    /// Returns the redirect to follow, if any.
    fn followed(&self, head: &Head) -> Result<Option<Redirect>, BadLocation> {
        let Some(location) = &head.location else {
            return Ok(None);
        };
        let redirect = self.url.redirect(location)?;
        Ok(Some(redirect).filter(|redirect| redirect.url.has_host_of(self.first)))
    }

    fn step(&mut self, piece: &[u8]) -> Result<Option<Step>, HttpError> {
        let rest;
        let mut piece = piece;
        if let Place::Head(reader) = &mut self.place {
            let received = reader.receive(piece);
            let received = received.map_err(|error| HttpError::Head(self.url.clone(), error))?;
            let Some((head, body, begun)) = received else {
                return Ok(None);
            };
            if let Some(redirect) = self.followed(&head)? {
                return Ok(Some(Step::Redirected(redirect)));
            }
            rest = begun;
            piece = &rest;
            let status = head.status;
            self.place = Place::Body {
                status,
                body,
                read: 0,
            };
        }
        let Place::Body { status, body, read } = &mut self.place else {
            return Ok(None);
        };
        let progress = body.receive(piece, read);
        let progress = progress.map_err(|error| HttpError::Body(self.url.clone(), error))?;
        // The body is not kept.
        let answered = Step::Answered(*status, OUTPUT_LIMIT.min(*read));
        Ok((progress == Progress::Done).then_some(answered))
    }
}

impl Dialogue for Exchange<'_> {
    type End = Result<Step, HttpError>;

    fn to_write(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.request)
    }

    fn receive(&mut self, piece: &[u8]) -> Option<Self::End> {
        self.step(piece).transpose()
    }

    fn end(&mut self, because: Option<io::Error>) -> Self::End {
        let url = self.url.clone();
        // TLS reports an unexpected end: many servers close the connection without a TLS close. The kubelet accepts
        // that as an end too.
        let because = because.filter(|error| error.kind() != io::ErrorKind::UnexpectedEof);
        match &self.place {
            Place::Head(_) => Err(HttpError::HeadCut(url, Cut::new(because))),
            Place::Body { status, body, read } if body.may_end() && because.is_none() => {
                Ok(Step::Answered(*status, *read))
            }
            Place::Body { .. } => Err(HttpError::BodyCut(url, Cut::new(because))),
        }
    }
}

#[cfg(test)]
mod tests;
