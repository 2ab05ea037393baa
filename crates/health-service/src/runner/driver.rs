//! Runs a job on tokio as a [`Runner`] says.

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tokio::time::{Instant, sleep_until};
use tracing::{info, warn};

use super::{Intervals, Runner, RunnerError};

/// What a driver runs.
pub trait Job {
    /// Why a run has failed.
    type Error: fmt::Display;

    /// Runs once.
    fn run(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;
}

/// Asks a driver for runs.
#[derive(Clone, Debug)]
pub struct Trigger(mpsc::Sender<()>);

impl Trigger {
    /// Asks for a run, and does not wait for it. An error once the driver has ended.
    pub fn trigger(&self) -> Result<(), RunnerError> {
        match self.0.try_send(()) {
            // One that waits already stands for this one too.
            Ok(()) | Err(TrySendError::Full(())) => Ok(()),
            Err(TrySendError::Closed(())) => Err(RunnerError::Stopped),
        }
    }
}

/// Runs a job when it is asked to, within its intervals.
#[derive(Debug)]
pub struct Driver {
    runner: Runner,
    start: Instant,
    asked: mpsc::Receiver<()>,
}

impl Driver {
    /// A driver that begins now, and what asks it for runs.
    pub fn new(intervals: Intervals) -> Result<(Self, Trigger), RunnerError> {
        let (sender, asked) = mpsc::channel(1);
        let driver = Self {
            runner: Runner::new(intervals, Duration::ZERO)?,
            start: Instant::now(),
            asked,
        };
        Ok((driver, Trigger(sender)))
    }

    /// Runs the job until `stop` is ready; a run that is under way then ends first. A job that panics has failed, and is
    /// run again as one that returned an error.
    pub async fn drive(mut self, mut job: impl Job, stop: impl Future<Output = ()>) {
        let mut stop = std::pin::pin!(stop);
        let mut is_askable = true;
        let mut failure = None;
        loop {
            if self.runner.poll(self.start.elapsed()) {
                let result = AssertUnwindSafe(job.run()).catch_unwind().await;
                let error = match &result {
                    Ok(Ok(())) => None,
                    Ok(Err(error)) => Some(error.to_string()),
                    Err(_) => Some("it has panicked".to_owned()),
                };
                tell(&failure, &error);
                failure = error;
                self.runner
                    .finished(self.start.elapsed(), failure.is_none());
            }
            let wake = self.runner.next_wake().unwrap_or_default();
            tokio::select! {
                biased;
                () = &mut stop => return,
                asked = self.asked.recv(), if is_askable => match asked {
                    // A driver that runs has not stopped.
                    Some(()) => drop(self.runner.trigger()),
                    None => is_askable = false,
                },
                () = sleep_until(self.start + wake) => {}
            }
        }
    }
}

/// Tells the log how runs fail, once for all that fail alike.
fn tell(before: &Option<String>, now: &Option<String>) {
    match now {
        Some(error) if before.as_ref() != Some(error) => {
            warn!(error, "a sync has failed; it is tried again");
        }
        None if before.is_some() => info!("syncs are well again"),
        _ => {}
    }
}
