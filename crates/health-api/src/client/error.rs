//! Errors of requests to an agent.

use std::io;
use std::path::PathBuf;

use hyper::StatusCode;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The socket's file does not exist.
    #[error("no agent at {0}: is it running, and are --instance and --runtime-dir correct?")]
    NoAgent(PathBuf),
    /// The socket has no listener.
    #[error("no agent at {0}: the socket is left over from a killed agent; start the agent again")]
    Stale(PathBuf),
    /// The socket's permissions deny access.
    #[error("cannot connect to the agent at {0}: permission denied; try it as root")]
    Permission(PathBuf),
    /// The request could not be built.
    #[error("{request}: {source}")]
    Request {
        /// Method and path.
        request: String,
        /// The error.
        source: hyper::http::Error,
    },
    /// The connection failed.
    #[error("cannot connect to the agent at {agent}: {source}")]
    Connect {
        /// The socket or the URL.
        agent: String,
        /// The system's error.
        source: io::Error,
    },
    /// One side refuses the certificate of the other.
    #[error("cannot connect to the agent at {agent}: {reason}")]
    Tls {
        /// The URL.
        agent: String,
        /// What is wrong.
        reason: String,
    },
    /// The agent took too long.
    #[error(
        "{request} at {agent}: no answer in {seconds} s; is the agent stopped or overloaded? see its \
         log"
    )]
    Timeout {
        /// Method and path.
        request: String,
        /// The socket or the URL.
        agent: String,
        /// How long the client waited.
        seconds: u64,
    },
    /// The connection broke.
    #[error("{request} at {agent}: the connection was lost: {source}; see the agent's log")]
    Broken {
        /// Method and path.
        request: String,
        /// The socket or the URL.
        agent: String,
        /// The error.
        source: hyper::Error,
    },
    /// The response ended before its last line.
    #[error(
        "{request} at {agent}: the agent's answer ended early; was the agent stopped? see its log"
    )]
    Cut {
        /// Method and path.
        request: String,
        /// The socket or the URL.
        agent: String,
    },
    /// The agent refused the request.
    #[error("{request}: {message}")]
    Refused {
        /// Method and path.
        request: String,
        /// The HTTP status.
        code: StatusCode,
        /// The agent's reason.
        message: String,
    },
    /// The response is invalid.
    #[error(
        "{request} at {agent}: cannot read the answer: {source}; do the agent and the command line \
         have the same version?"
    )]
    Decode {
        /// Method and path.
        request: String,
        /// The socket or the URL.
        agent: String,
        /// The error.
        source: serde_json::Error,
    },
}
