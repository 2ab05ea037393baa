//! Why the runtime was of no use.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tonic::Code;

/// A call of the runtime failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct RuntimeError {
    /// Where it listens.
    pub(super) socket: Arc<Path>,
    /// What was called.
    pub(super) method: &'static str,
    /// The container or pod that it was about; may be empty.
    pub(super) subject: String,
    /// Why.
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
    /// Why.
    pub fn reason(&self) -> &Reason {
        &self.reason
    }

    /// Whether there is no such container or pod.
    pub(super) fn is_not_found(&self) -> bool {
        matches!(self.reason, Reason::Refused(Code::NotFound, _))
    }
}

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// Nobody listens there, or the connection broke.
    #[error("it cannot be reached: {0}")]
    Away(String),
    /// No answer in time.
    #[error("no answer within {0:?}")]
    TimedOut(Duration),
    /// It says no, or what it says is not gRPC.
    #[error("{0:?}: {1}")]
    Refused(Code, String),
    /// What it says lacks something, or cannot be read.
    #[error("its answer cannot be used: {0}")]
    Unusable(String),
}
