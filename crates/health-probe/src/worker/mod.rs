//! Decides when a container is probed and what its results mean, without a clock, sockets or tasks.
//!
//! A [`Manager`] has a [`Worker`] for each probe of each container. Time is passed in as the duration since the agent
//! started; the wall clock only serves to determine how long a container has been running. The manager says what to
//! probe next ([`Manager::poll`]) and when to ask again ([`Manager::next_wake`]); the caller sends the probe and
//! reports its outcome ([`Manager::finish`]). The manager returns the results that changed, and the container statuses
//! that follow from them (`ready`, `started`). A single timer [`Wheel`] holds the times of all probes, [`Limits`] bound
//! the number of probes sent, and pods and namespaces share that capacity (`shares.rs`). [`restart`] decides what a
//! failure means for a container.
//!
//! # Differences from the kubelet
//!
//! The same as in the kubelet's newest version: the order of the decisions before a probe ([`Worker::decide`]); the
//! initial values (readiness failed, liveness passed, startup unknown); immediate failure for a container that is not
//! running; the hold after a failed liveness probe and after each startup verdict, until there is a new container; up
//! to three attempts without a pause while attempts end in errors, and no conclusion from a run whose last attempt
//! ended in an error; warnings count as success; updates only for new and changed results; a slow probe merges all
//! missed ticks into one; a container that started more than [`SURVIVED`] before the agent gets no initial value; while
//! a container is not ready, each computation of its status triggers an immediate readiness probe, and the next probe
//! follows a whole period later.
//!
//! Intentionally different:
//!
//! - The count of consecutive equal results starts from zero with each container. The kubelet carries the count over,
//!   so a container that exited by itself leaves its failures to its successor.
//! - Errored runs are counted, as are runs that could not be sent in time. Neither kind changes a result or a count of
//!   consecutive results.
//! - If a readiness probe is requested while one is under way, queued or about to be sent for the first time, that
//!   probe satisfies the request; the kubelet probes again right after it.
//! - How long a container has been running is measured on the wall clock once, when the container is first seen, and on
//!   the monotonic clock from then on. A step of the wall clock neither ends nor prolongs an initial delay. A start in
//!   the future counts as a start now.
//! - The first probe is not randomly delayed, except after a restart of the agent; the delay is then at most
//!   [`JITTER_MAX`], and derived from the probe.
//! - Results, counts and holds survive a restart of the agent ([`Snapshot`]), so unknown is never mistaken for not
//!   ready. Saved results are published again, like results that enter an empty cache.
//! - A run that finishes after its worker was stopped has no effect.
//! - Nothing blocks: no channel can fill up.
//! - Per-container restart rules by exit code are not read; the pod's policy decides.

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

/// A result older than this many periods is overdue and may no longer hold, unless a run that started before then is
/// still within its timeout.
pub(crate) const FRESH_PERIODS: u32 = 3;
/// A result younger than this is never overdue: with very short periods, that would not be worth reporting.
pub(crate) const FRESH_MIN: Duration = Duration::from_secs(1);
/// Maximum number of attempts in one run.
pub(crate) const ATTEMPTS_MAX: u32 = 3;
/// A container that started at least this long before the agent is not affected by the agent's restart.
pub(crate) const SURVIVED: Duration = Duration::from_secs(10);
/// Longest delay of a first probe after a restart of the agent.
pub(crate) const JITTER_MAX: Duration = Duration::from_secs(10);
