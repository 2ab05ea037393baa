//! SIGTERM and SIGINT.

use std::future::pending;
use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Stop requests. Their handlers are installed before the start, because the kernel drops signals that the first
/// process of a PID namespace does not handle.
pub(super) struct StopRequests {
    terminate: Signal,
    interrupt: Signal,
    is_requested: bool,
}

impl StopRequests {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            is_requested: false,
        })
    }

    /// Waits until a stop is requested; from then on, returns at once. Cancelling the wait loses no request.
    pub(super) async fn requested(&mut self) {
        if self.is_requested {
            return;
        }
        let signal = tokio::select! {
            signal = self.terminate.recv() => signal,
            signal = self.interrupt.recv() => signal,
        };
        match signal {
            Some(()) => self.is_requested = true,
            None => pending().await,
        }
    }
}
