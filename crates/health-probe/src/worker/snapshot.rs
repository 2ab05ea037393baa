//! State that survives a restart of the agent.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::ProbeResult;
use super::restart::SavedBackoff;
use crate::spec::ProbeType;

/// The state of all probes. Applies only to the containers that it names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// The workers.
    pub workers: Vec<SavedWorker>,
    /// The restart back-offs. The owner of the [`Backoffs`](super::restart::Backoffs) adds them to the snapshot and
    /// removes them from it.
    #[serde(default)]
    pub backoffs: Vec<SavedBackoff>,
}

impl Snapshot {
    /// Adjusts all ages for the time that has passed since the snapshot was taken.
    pub fn age(&mut self, passed: Duration) {
        let gone = self.workers.iter_mut().filter_map(|one| one.gone.as_mut());
        let ages = self.backoffs.iter_mut().map(|one| &mut one.age);
        for age in gone.chain(ages) {
            *age = age.saturating_add(passed);
        }
    }
}

/// The state of one probe of one container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedWorker {
    /// The pod's UID.
    pub pod_uid: String,
    /// The container's name.
    pub container: String,
    /// The type of the probe.
    pub kind: ProbeType,
    /// The ID of the last probed container.
    pub container_id: String,
    /// The probe's result, if any.
    pub result: Option<ProbeResult>,
    /// The result of the last run.
    pub last: Option<ProbeResult>,
    /// How many consecutive runs had that result.
    pub run: u32,
    /// Whether the container is no longer probed.
    pub on_hold: bool,
    /// How long the pod had been gone when this was saved; `None` if it still exists.
    #[serde(
        default,
        rename = "gone_ns",
        with = "health_model::duration::optional_nanoseconds",
        skip_serializing_if = "Option::is_none"
    )]
    pub gone: Option<Duration>,
}
