//! SIGTERM and SIGINT.

use std::future::pending;
use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Requests to stop. Taken over before the start: the kernel drops a signal to the first process of a PID namespace
/// that does not wait for it.
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

    /// Waits until someone has asked to stop; from then on it returns at once. Cancellation loses no request.
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
