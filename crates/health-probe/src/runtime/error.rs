//! Why a call to the runtime failed.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tonic::Code;

/// A failed call to the runtime.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct RuntimeError {
    /// The socket that the runtime listens on.
    pub(super) socket: Arc<Path>,
    /// The method that was called.
    pub(super) method: &'static str,
    /// The container or pod that the call was about; may be empty.
    pub(super) subject: String,
    /// The reason.
    #[source]
    pub(super) reason: Reason,
}

impl fmt::Display for RuntimeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the runtime at {}: {}",
            self.socket.display(),
            self.method
        )?;
        if !self.subject.is_empty() {
            write!(f, " of {}", self.subject)?;
        }
        write!(f, ": {}", self.reason)
    }
}

impl RuntimeError {
    /// The reason.
    pub fn reason(&self) -> &Reason {
        &self.reason
    }

    /// Whether the container or pod does not exist.
    pub(super) fn is_not_found(&self) -> bool {
        matches!(self.reason, Reason::Refused(Code::NotFound, _))
    }
}

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// Nothing listens on the socket, or the connection broke.
    #[error("unreachable: {0}")]
    Away(String),
    /// No response came in time.
    #[error("no answer within {0:?}")]
    TimedOut(Duration),
    /// The runtime refused the call, or its response is not gRPC.
    #[error("{0:?}: {1}")]
    Refused(Code, String),
    /// The response is incomplete or cannot be read.
    #[error("unusable answer: {0}")]
    Unusable(String),
}
