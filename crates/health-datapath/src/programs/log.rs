//! Forwards program log output to the agent's log.

use std::io;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::Programs;

/// How much the programs log. Higher levels are removed from the programs at load time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramLog {
    /// Warnings and errors.
    Warn,
    /// Everything: a line for each refused packet.
    Debug,
}

/// Why the programs' log cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The object has no log, or the log was already taken.
    #[error("cannot read the log of the eBPF programs")]
    Missing,
    /// The runtime cannot wait for log output.
    #[error("cannot poll the log of the eBPF programs: {0}")]
    Poll(io::Error),
}

impl Programs {
    /// Forwards program log output until the runtime stops. Must be called in a tokio runtime.
    pub(crate) fn forward_log(&mut self) -> Result<(), LogError> {
        let log = self.log.take().ok_or(LogError::Missing)?;
        // SAFETY: the logger owns its descriptor and never closes or replaces it before it is dropped.
        let mut log = unsafe { AsyncFd::register_with_interest(log, Interest::READABLE) }
            .map_err(|error| LogError::Poll(error.into()))?;
        tokio::spawn(async move {
            while let Ok(mut ready) = log.readable_mut().await {
                ready.get_inner_mut().flush();
                ready.clear_ready();
            }
        });
        Ok(())
    }
}
