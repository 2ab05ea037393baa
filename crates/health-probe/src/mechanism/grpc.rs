//! Probes by gRPC: `grpc.health.v1.Health/Check`, in plain text or over TLS.
//!
//! Each probe is one call on a connection of its own, and h2 alone does that in one task. tonic's client would start a
//! task for the connection and another one for a queue in front of it, and connect in its own way.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use h2::client;
use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderValue, TE, USER_AGENT};
use hyper::{Request, StatusCode};
use prost::Message;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, sleep_until};
use tonic::{Code, Status};

use super::connect::{ConnectError, Ending, HANDSHAKE_MAX, Usage, connect};
use super::tls::{Protocol, TlsClient};
use super::{Deadline, Target, chain, drive, failure, success};
use crate::Outcome;

const PATH: &str = "/grpc.health.v1.Health/Check";
/// Most bytes of a reply. A good one has two.
const REPLY_LIMIT: usize = 4096;
/// Most bytes of an answer's headers, unpacked.
const HEADERS_LIMIT: u32 = 16 * 1024;
/// Most bytes that a server may send, TLS besides: more than headers and a reply.
const READ_MAX: usize = 32 * 1024;
/// What stands in front of a message: whether it is compressed, and its length in four bytes.
const PREFIX_LEN: usize = 5;
/// Pause before the next attempt to connect, where somebody refuses.
const PAUSE: Duration = Duration::from_millis(250);

/// What to ask, and whom.
#[derive(Clone, Debug)]
pub struct GrpcProbe {
    /// Where to connect to.
    pub target: Target,
    /// The service to ask for; empty for the server as a whole.
    pub service: String,
    /// How to speak TLS; `None` for plain text.
    pub tls: Option<TlsClient>,
}

/// `grpc.health.v1.HealthCheckRequest`. These two messages are all that is needed of the protocol.
#[derive(Clone, PartialEq, Message)]
struct Question {
    #[prost(string, tag = "1")]
    service: String,
}

/// `grpc.health.v1.HealthCheckResponse`.
#[derive(Clone, PartialEq, Message)]
struct Reply {
    #[prost(enumeration = "Health", tag = "1")]
    status: i32,
}

/// `grpc.health.v1.HealthCheckResponse.ServingStatus`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Enumeration)]
#[repr(i32)]
enum Health {
    Unknown = 0,
    Serving = 1,
    NotServing = 2,
    ServiceUnknown = 3,
}

/// Why there is no status.
#[derive(Debug)]
enum CallError {
    /// Somebody listens, but it is no server of HTTP/2, or not over this kind of TLS.
    Connect(String),
    /// It is one, and the call failed.
    Call(String),
    /// The call ended with this code.
    Code(Code),
    /// What was received is no answer of gRPC.
    Malformed(&'static str),
}

/// Asks once for the status of a service.
pub async fn probe(probe: &GrpcProbe, deadline: Deadline) -> Outcome {
    let target = &probe.target;
    let refused = loop {
        match attempt(probe, deadline).await {
            Ok(outcome) => return outcome,
            // As long as there is time, a server may come.
            Err(refused) if Instant::now() + PAUSE < deadline.at() => {
                let _ = refused;
                tokio::time::sleep(PAUSE).await;
            }
            Err(refused) => break refused,
        }
    };
    sleep_until(deadline.at()).await;
    dial_timed_out(target, deadline, refused)
}

fn dial_timed_out(target: &Target, deadline: Deadline, because: impl fmt::Display) -> Outcome {
    failure(format!(
        "timeout: failed to connect service \"{target}\" within {:?}: {because}",
        deadline.timeout()
    ))
}

/// One attempt. An error is one that the next attempt may not have.
async fn attempt(probe: &GrpcProbe, deadline: Deadline) -> Result<Outcome, String> {
    let target = &probe.target;
    let timeout = deadline.timeout();
    let usage = Usage {
        ending: Ending::Fin,
        read_max: match probe.tls {
            None => READ_MAX,
            Some(_) => READ_MAX + HANDSHAKE_MAX,
        },
        no_delay: true,
    };
    let connection = match connect(target, usage, deadline).await {
        Ok(connection) => connection,
        Err(ConnectError::Refused(error)) => return Err(error.to_string()),
        Err(ConnectError::TimedOut) => {
            return Ok(dial_timed_out(target, deadline, "no answer"));
        }
        Err(error) if error.is_own() => return Ok(error.outcome(target, deadline)),
        Err(error) => {
            return Ok(failure(format!(
                "failed to connect service \"{target}\": {error}"
            )));
        }
    };
    let heard = Arc::new(AtomicBool::new(false));
    let called = match &probe.tls {
        None => {
            let connection = Listening::new(connection, &heard);
            deadline.bound(check(connection, probe, deadline)).await
        }
        Some(tls) => {
            let handshake = tls.connect(&target.host, Protocol::Http2, connection);
            match deadline.bound(handshake).await {
                None => return Ok(dial_timed_out(target, deadline, "no TLS")),
                Some(Err(error)) => {
                    return Ok(failure(format!(
                        "failed to connect service \"{target}\": no TLS: {error}"
                    )));
                }
                Some(Ok(connection)) => {
                    let connection = Listening::new(connection, &heard);
                    deadline.bound(check(connection, probe, deadline)).await
                }
            }
        }
    };
    let heard = heard.load(Ordering::Relaxed);
    Ok(match called {
        Some(Ok(Health::Serving)) => success("SERVING"),
        Some(Ok(status)) => failure(format!(
            "service unhealthy (responded with \"{}\")",
            status.name()
        )),
        None if !heard => dial_timed_out(target, deadline, "no answer"),
        None | Some(Err(CallError::Code(Code::DeadlineExceeded))) => failure(format!(
            "timeout: health rpc did not complete within {timeout:?}"
        )),
        Some(Err(CallError::Code(Code::Unimplemented))) => failure(
            "the server has no service grpc.health.v1.Health (the call ended with Unimplemented)",
        ),
        Some(Err(CallError::Code(code))) => failure(format!("health rpc ended with {code:?}")),
        Some(Err(CallError::Connect(error))) => failure(format!(
            "failed to connect service \"{target}\": no server of HTTP/2: {error}"
        )),
        Some(Err(CallError::Call(error))) => failure(format!("health rpc failed: {error}")),
        Some(Err(CallError::Malformed(what))) => {
            failure(format!("health rpc failed: the answer {what}"))
        }
    })
}

impl Health {
    fn name(self) -> &'static str {
        match self {
            Self::Unknown => "UNKNOWN",
            Self::Serving => "SERVING",
            Self::NotServing => "NOT_SERVING",
            Self::ServiceUnknown => "SERVICE_UNKNOWN",
        }
    }
}

async fn check(
    connection: impl AsyncRead + AsyncWrite + Unpin,
    probe: &GrpcProbe,
    deadline: Deadline,
) -> Result<Health, CallError> {
    let request = request(probe, deadline)?;
    let question = frame(&Question {
        service: probe.service.clone(),
    });
    let (sender, running) = client::Builder::new()
        .enable_push(false)
        .max_header_list_size(HEADERS_LIMIT)
        .handshake(connection)
        .await
        .map_err(|error| CallError::Connect(chain(&error)))?;
    let call = async {
        let mut sender = sender.ready().await.map_err(failed)?;
        let (response, mut stream) = sender.send_request(request, false).map_err(failed)?;
        stream.send_data(question, true).map_err(failed)?;
        let (head, mut body) = response.await.map_err(failed)?.into_parts();
        if head.status != StatusCode::OK {
            return Err(CallError::Malformed(
                "is not of gRPC: its HTTP status is not 200",
            ));
        }
        let kind = head.headers.get(CONTENT_TYPE);
        if !kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc")) {
            return Err(CallError::Malformed(
                "is not of gRPC: it has another content type",
            ));
        }
        let mut reply = BytesMut::new();
        while let Some(data) = body.data().await {
            let data = data.map_err(failed)?;
            if reply.len() + data.len() > REPLY_LIMIT {
                return Err(CallError::Malformed("is too long"));
            }
            reply.put(data);
        }
        let trailers = body.trailers().await.map_err(failed)?;
        code(trailers.as_ref().unwrap_or(&head.headers))?;
        read(&reply)
    };
    drive(running, call).await
}

/// What went wrong: the protocol is not spoken, or the call had no luck.
fn failed(error: h2::Error) -> CallError {
    if error.is_go_away() && !error.is_remote() {
        CallError::Connect(chain(&error))
    } else {
        CallError::Call(chain(&error))
    }
}

fn request(probe: &GrpcProbe, deadline: Deadline) -> Result<Request<()>, CallError> {
    let scheme = if probe.tls.is_some() { "https" } else { "http" };
    let left = deadline.at().saturating_duration_since(Instant::now());
    Request::post(format!("{scheme}://{}{PATH}", probe.target))
        .header(CONTENT_TYPE, HeaderValue::from_static("application/grpc"))
        .header(TE, HeaderValue::from_static("trailers"))
        .header(USER_AGENT, HeaderValue::from_static(super::USER_AGENT))
        // Eight digits at most.
        .header(
            "grpc-timeout",
            format!("{}m", left.as_millis().clamp(1, 99_999_999)),
        )
        .body(())
        .map_err(|_| CallError::Call("the target cannot be named in a request".into()))
}

fn frame(message: &impl Message) -> Bytes {
    let len = message.encoded_len();
    let mut bytes = BytesMut::with_capacity(PREFIX_LEN + len);
    bytes.put_u8(0);
    bytes.put_u32(len as u32);
    bytes.put_slice(&message.encode_to_vec());
    bytes.freeze()
}

/// Fails unless the call ended well. What the server says of it besides stays with it.
fn code(headers: &HeaderMap) -> Result<(), CallError> {
    match Status::from_header_map(headers).map(|status| status.code()) {
        None => Err(CallError::Malformed("has no gRPC status")),
        Some(Code::Ok) => Ok(()),
        Some(code) => Err(CallError::Code(code)),
    }
}

fn read(reply: &[u8]) -> Result<Health, CallError> {
    let Some((&[compressed, a, b, c, d], message)) = reply.split_first_chunk::<PREFIX_LEN>() else {
        return Err(CallError::Malformed("has no message"));
    };
    if compressed != 0 || u32::from_be_bytes([a, b, c, d]) as usize != message.len() {
        return Err(CallError::Malformed("has no message as it was asked for"));
    }
    let reply = Reply::decode(message)
        .map_err(|_| CallError::Malformed("has a message that cannot be read"))?;
    Ok(Health::try_from(reply.status).unwrap_or(Health::Unknown))
}

/// A connection that remembers whether the server has said anything.
struct Listening<C> {
    connection: C,
    heard: Arc<AtomicBool>,
}

impl<C> Listening<C> {
    fn new(connection: C, heard: &Arc<AtomicBool>) -> Self {
        Self {
            connection,
            heard: heard.clone(),
        }
    }
}

impl<C: AsyncRead + Unpin> AsyncRead for Listening<C> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = Pin::new(&mut self.connection).poll_read(cx, buf);
        if buf.filled().len() > before {
            self.heard.store(true, Ordering::Relaxed);
        }
        read
    }
}

impl<C: AsyncWrite + Unpin> AsyncWrite for Listening<C> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.connection).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.connection).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.connection.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests;
