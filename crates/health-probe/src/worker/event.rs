//! How a finished run is reported and counted.

use crate::spec::ProbeType;
use crate::worker::ProbeResult;
use crate::{Outcome, RawResult};

/// How a run is counted in metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Counted {
    /// The target is healthy.
    Successful,
    /// The target is unhealthy.
    Failed,
    /// Nothing was learned about the target.
    Errored,
    /// The probe could not be sent in time.
    NotSent,
}

impl Counted {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Successful, Self::Failed, Self::Errored, Self::NotSent];

    /// The value of the `result` label.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Successful => "successful",
            Self::Failed => "failed",
            Self::Errored => "errored",
            Self::NotSent => "not_sent",
        }
    }
}

/// An event to report about a container. All are warnings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// `Unhealthy` or `ProbeWarning`.
    pub reason: &'static str,
    /// What happened.
    pub message: String,
}

/// The meaning of a run's last attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Judgement {
    /// The result that the thresholds apply to; `None` if no conclusion is drawn.
    pub result: Option<ProbeResult>,
    /// How the run is counted.
    pub counted: Counted,
    /// The event to report, if any.
    pub event: Option<Event>,
}

/// Judges the outcome of a probe, before any threshold.
pub fn judge(kind: ProbeType, outcome: &Outcome) -> Judgement {
    let title = kind.title();
    let message = &outcome.message;
    let event = |reason, message| Some(Event { reason, message });
    if outcome.errored {
        let state = match outcome.result {
            RawResult::Success => "success",
            RawResult::Warning => "warning",
            RawResult::Failure => "failure",
            RawResult::Unknown => "unknown",
        };
        let message = format!("{title} probe errored and resulted in {state} state: {message}");
        return Judgement {
            result: None,
            counted: Counted::Errored,
            event: event("Unhealthy", message),
        };
    }
    let (result, counted) = match outcome.result {
        RawResult::Success | RawResult::Warning => (ProbeResult::Success, Counted::Successful),
        RawResult::Failure | RawResult::Unknown => (ProbeResult::Failure, Counted::Failed),
    };
    let event = match outcome.result {
        RawResult::Warning => event("ProbeWarning", format!("{title} probe warning: {message}")),
        RawResult::Failure => event("Unhealthy", format!("{title} probe failed: {message}")),
        RawResult::Success | RawResult::Unknown => None,
    };
    Judgement {
        result: Some(result),
        counted,
        event,
    }
}
