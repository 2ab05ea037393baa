//! Runs a job on tokio whenever a [`Runner`] says so.

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tokio::time::{Instant, sleep_until};
use tracing::{info, warn};

use super::{Intervals, Runner, RunnerError};

/// The job of a driver.
pub trait Job {
    /// Why a run failed.
    type Error: fmt::Display;

    /// Runs once.
    fn run(&mut self) -> impl Future<Output = Result<(), Self::Error>> + Send;
}

/// Requests runs from a driver.
#[derive(Clone, Debug)]
pub struct Trigger(mpsc::Sender<()>);

impl Trigger {
    /// Requests a run without waiting for it. Fails once the driver has stopped.
    pub fn trigger(&self) -> Result<(), RunnerError> {
        match self.0.try_send(()) {
            // The request that is already waiting covers this one too.
            Ok(()) | Err(TrySendError::Full(())) => Ok(()),
            Err(TrySendError::Closed(())) => Err(RunnerError::Stopped),
        }
    }
}

/// Runs a job on request, within its intervals.
#[derive(Debug)]
pub struct Driver {
    runner: Runner,
    start: Instant,
    asked: mpsc::Receiver<()>,
}

impl Driver {
    /// Creates a driver that starts now, and the trigger that requests its runs.
    pub fn new(intervals: Intervals) -> Result<(Self, Trigger), RunnerError> {
        let (sender, asked) = mpsc::channel(1);
        let driver = Self {
            runner: Runner::new(intervals, Duration::ZERO)?,
            start: Instant::now(),
            asked,
        };
        Ok((driver, Trigger(sender)))
    }

    /// Runs the job until `stop` is ready, then lets a run in progress finish. A run that panics counts as failed and
    /// is retried.
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
                    Err(_) => Some("the sync panicked".to_owned()),
                };
                report(&failure, &error);
                failure = error;
                self.runner
                    .finished(self.start.elapsed(), failure.is_none());
            }
            let wake = self.runner.next_wake().unwrap_or_default();
            tokio::select! {
                biased;
                () = &mut stop => return,
                asked = self.asked.recv(), if is_askable => match asked {
                    // The runner has not stopped, since the driver is running.
                    Some(()) => drop(self.runner.trigger()),
                    None => is_askable = false,
                },
                () = sleep_until(self.start + wake) => {}
            }
        }
    }
}

/// Logs failures of runs, once for each series of equal ones.
fn report(before: &Option<String>, now: &Option<String>) {
    match now {
        Some(error) if before.as_ref() != Some(error) => {
            warn!(error, "a sync failed; it will be retried");
        }
        None if before.is_some() => info!("syncs succeed again"),
        _ => {}
    }
}
