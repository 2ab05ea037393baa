//! gRPC probes: `grpc.health.v1.Health/Check`, in plain text or over TLS.
//!
//! Each probe is one call on its own connection.

mod call;
mod hpack;
mod huffman;

use std::fmt;
use std::time::Duration;

use prost::Message;
use tokio::time::{Instant, sleep_until};
use tonic::Code;

use self::call::{Answer, Call, CallError, Request};
use super::connect::{ConnectError, Ending, HANDSHAKE_MAX, Usage, connect};
use super::dialogue::hold;
use super::tls::{Protocol, TlsClient};
use super::{Deadline, Target, USER_AGENT, failure, success};
use crate::Outcome;

const PATH: &str = "/grpc.health.v1.Health/Check";
/// Maximum number of bytes that a server may send, not counting TLS: more than headers and a reply need.
const READ_MAX: usize = 32 * 1024;
/// Length of a message's prefix: the compression flag, and the message's length in four bytes.
const PREFIX_LEN: usize = 5;
/// Pause before reconnecting after a refusal.
const PAUSE: Duration = Duration::from_millis(250);

/// What to request, and from where.
#[derive(Clone, Debug)]
pub struct GrpcProbe {
    /// Where to connect to.
    pub target: Target,
    /// The service to ask for; empty for the server as a whole.
    pub service: String,
    /// How to speak TLS; `None` for plain text.
    pub tls: Option<TlsClient>,
}

/// `grpc.health.v1.HealthCheckRequest`. No other message of the protocol is needed but this and the response.
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

/// Why no status was received.
#[derive(Debug)]
enum NoStatus {
    /// The call failed.
    Call(CallError),
    /// The call ended with this code.
    Code(Code),
    /// The data received is not a gRPC response.
    Malformed(&'static str),
}

/// Requests the status of a service once.
pub async fn probe(probe: &GrpcProbe, deadline: Deadline) -> Outcome {
    let target = &probe.target;
    let refused = loop {
        match attempt(probe, deadline).await {
            Ok(outcome) => return outcome,
            // The server may still come up before the deadline.
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

/// Makes one attempt. After an error, another attempt may succeed.
async fn attempt(probe: &GrpcProbe, deadline: Deadline) -> Result<Outcome, String> {
    let target = &probe.target;
    let timeout = deadline.timeout();
    let usage = Usage {
        ending: Ending::Fin,
        read_max: match probe.tls {
            None => READ_MAX,
            Some(_) => READ_MAX + HANDSHAKE_MAX,
        },
        writes_first: true,
        // A plain call is written in one go, and no frame waits for acknowledgements.
        no_delay: probe.tls.is_some(),
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
    let left = deadline.at().saturating_duration_since(Instant::now());
    let mut call = Call::new(&Request {
        is_tls: probe.tls.is_some(),
        path: PATH,
        authority: &target.to_string(),
        user_agent: USER_AGENT,
        timeout_ms: left.as_millis(),
        message: &question(&probe.service),
    });
    let called = match &probe.tls {
        None => {
            let mut connection = connection;
            deadline.bound(hold(&mut call, &mut connection)).await
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
                Some(Ok(mut connection)) => deadline.bound(hold(&mut call, &mut connection)).await,
            }
        }
    };
    let Some(called) = called else {
        return Ok(match call.has_heard() {
            true => rpc_timed_out(timeout),
            false => dial_timed_out(target, deadline, "no answer"),
        });
    };
    let status = called
        .map_err(NoStatus::Call)
        .and_then(|answer| read(&answer));
    Ok(match status {
        Ok(Health::Serving) => success("SERVING"),
        Ok(status) => failure(format!(
            "service unhealthy (responded with \"{}\")",
            status.name()
        )),
        Err(NoStatus::Code(Code::DeadlineExceeded)) => rpc_timed_out(timeout),
        Err(NoStatus::Code(Code::Unimplemented)) => failure(
            "the server has no service grpc.health.v1.Health (the call ended with Unimplemented)",
        ),
        Err(NoStatus::Code(code)) => failure(format!("health rpc ended with {code:?}")),
        Err(NoStatus::Call(CallError::Protocol(violation))) => failure(format!(
            "failed to connect service \"{target}\": not an HTTP/2 server: {violation}"
        )),
        Err(NoStatus::Call(error)) => failure(format!("health rpc failed: {error}")),
        Err(NoStatus::Malformed(what)) => {
            failure(format!("health rpc failed: the response {what}"))
        }
    })
}

fn rpc_timed_out(timeout: Duration) -> Outcome {
    failure(format!(
        "timeout: health rpc did not complete within {timeout:?}"
    ))
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

/// The request message for a service, with its prefix.
fn question(service: &str) -> Vec<u8> {
    let question = Question {
        service: service.to_owned(),
    };
    let len = question.encoded_len();
    let mut bytes = Vec::with_capacity(PREFIX_LEN + len);
    bytes.push(0);
    bytes.extend_from_slice(&(len as u32).to_be_bytes());
    bytes.extend_from_slice(&question.encode_to_vec());
    bytes
}

/// Reads the status from a response. Ignores anything else in it.
fn read(answer: &Answer) -> Result<Health, NoStatus> {
    if !answer.is_grpc() {
        return Err(NoStatus::Malformed(match answer.status.as_slice() {
            b"200" => "is not gRPC: it has a different content type",
            _ => "is not gRPC: its HTTP status is not 200",
        }));
    }
    let status = answer.grpc_status.as_deref();
    match status.map(Code::from_bytes) {
        None => return Err(NoStatus::Malformed("has no gRPC status")),
        Some(Code::Ok) => {}
        Some(code) => return Err(NoStatus::Code(code)),
    }
    health(&answer.reply)
}

fn health(reply: &[u8]) -> Result<Health, NoStatus> {
    let Some((&[compressed, a, b, c, d], message)) = reply.split_first_chunk::<PREFIX_LEN>() else {
        return Err(NoStatus::Malformed("has no message"));
    };
    if compressed != 0 || u32::from_be_bytes([a, b, c, d]) as usize != message.len() {
        return Err(NoStatus::Malformed(
            "has a compressed or incomplete message",
        ));
    }
    let reply = Reply::decode(message)
        .map_err(|_| NoStatus::Malformed("has a message that cannot be decoded"))?;
    Ok(Health::try_from(reply.status).unwrap_or(Health::Unknown))
}

#[cfg(test)]
mod tests;
