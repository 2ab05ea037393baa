//! What survives a restart of the agent.

use serde::{Deserialize, Serialize};

use super::ProbeResult;
use super::restart::SavedBackoff;
use crate::spec::ProbeType;

/// The state of all probes. It holds for the containers that it names and for no others.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// The workers.
    pub workers: Vec<SavedWorker>,
    /// The waits before further restarts, for the keeper of [`Backoffs`](super::restart::Backoffs) to fill in and to take out.
    #[serde(default)]
    pub backoffs: Vec<SavedBackoff>,
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
    /// The container that was probed last.
    pub container_id: String,
    /// Its result, if there was one.
    pub result: Option<ProbeResult>,
    /// What its last run came to.
    pub last: Option<ProbeResult>,
    /// How many runs in a row came to that.
    pub run: u32,
    /// Whether it is not probed any more.
    pub on_hold: bool,
}
