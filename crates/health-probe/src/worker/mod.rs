//! What decides when a container is probed and what its results mean, without clock, socket or task.
//!
//! A [`Manager`] has a [`Worker`] for each probe of each container. Time comes in as the duration since the agent began;
//! the wall clock is only needed to tell how long a container has run. The manager says what to probe next
//! ([`Manager::poll`]) and when to ask again ([`Manager::next_wake`]); whoever probes tells it what came of it
//! ([`Manager::finish`]). It answers with results that changed, and with what they make of the containers' statuses
//! (`ready`, `started`). One timer [`Wheel`] holds the times of all probes, [`Limits`] bound how many are sent, and pods and
//! namespaces share what there is (`shares.rs`).
//! [`restart`] decides what a failure means for a container.
//!
//! # What is kept of the kubelet, and what is not
//!
//! Kept, as in its newest version: the order of the decisions before a probe ([`Worker::decide`]); the initial values
//! (readiness failed, liveness well, startup unknown); failure at once for a container that does not run; the hold after
//! a failed liveness probe and after each startup verdict, until there is a new container; up to three attempts without
//! a pause while an attempt errs, and nothing concluded from a run whose last attempt erred; warning counts as success;
//! updates only for new and changed results; a slow probe makes several missed ticks one; a container that began more
//! than [`SURVIVED`] before the agent is not given an initial value; while a container is not ready, each computation of
//! its status has its readiness probed at once, and the next probe follows a whole period later.
//!
//! Different, on purpose:
//!
//! - The count of equal results in a row starts anew with each container. The kubelet carries it over, so a container
//!   that ended by itself leaves its failures to the next one.
//! - Errored runs are counted, as are runs that could not be sent in time; neither changes a result or a count.
//! - A request for a readiness probe while one is under way, queued or about to be sent for the first time is met by
//!   that one; the kubelet probes again right after it.
//! - How long a container has run is measured by the wall clock once, when the container is first seen, and by the
//!   monotonic clock from there on. A step of the wall clock neither ends nor prolongs an initial delay. A start in the
//!   future counts as a start now.
//! - There is no random delay before the first probe, except after a restart of the agent; then it is at most
//!   [`JITTER_MAX`], and derived from the probe.
//! - Results, counts and holds survive a restart of the agent ([`Snapshot`]), so that what is not known is never taken
//!   for not ready. What was saved is published again, as results in an empty cache are.
//! - A run that ends after its worker was stopped has no effect.
//! - Nothing blocks: there is no channel that could be full.
//! - Rules for restarts by exit code of single containers are not read; the pod's policy decides.

mod event;
mod left;
mod limits;
mod list;
mod machine;
mod manager;
pub mod restart;
mod result;
mod schedule;
mod shares;
mod snapshot;
mod status;
mod status_update;
#[cfg(test)]
mod tests;
mod wheel;

use std::time::Duration;

pub use event::{Counted, Event, Judgement, judge};
pub use limits::Limits;
pub use list::{LastRun, WorkerView};
pub use machine::{Conclusion, Decision, Exit, Report, Situation, Waiting, Worker};
pub use manager::{Finished, Manager, ManagerOptions, Start, WorkerId};
pub use result::{Cache, ProbeResult, ResultUpdate};
pub use shares::Delay;
pub use snapshot::{SavedWorker, Snapshot};
pub use status::{ContainerState, ContainerStatus, Phase, PodStatus};
pub use wheel::{TimerId, Wheel};

/// A result that is older than so many periods is overdue, and may not hold any more, unless a run that began before has not
/// used up its timeout.
pub const FRESH_PERIODS: u32 = 3;
/// A result that is not older than that is never overdue: very short periods are not worth a word.
pub const FRESH_MIN: Duration = Duration::from_secs(1);
/// Most attempts of one run.
pub const ATTEMPTS_MAX: u32 = 3;
/// A container that began so long before the agent is one that the agent's restart does not concern.
pub const SURVIVED: Duration = Duration::from_secs(10);
/// Longest delay of a first probe after a restart of the agent.
pub const JITTER_MAX: Duration = Duration::from_secs(10);
