//! Results and their changes.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::spec::ProbeType;

/// The state of a container according to one probe, after thresholds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProbeResult {
    /// Not known yet.
    Unknown,
    /// Healthy.
    Success,
    /// Unhealthy.
    Failure,
}

impl ProbeResult {
    /// The assumed result of a container that has not been probed yet.
    pub const fn initial(kind: ProbeType) -> Self {
        match kind {
            ProbeType::Startup => Self::Unknown,
            ProbeType::Readiness => Self::Failure,
            ProbeType::Liveness => Self::Success,
        }
    }
}

/// The last result of one probe, and its container.
#[derive(Clone, Debug, Default)]
pub struct Cache {
    entry: Option<(Arc<str>, ProbeResult)>,
}

impl Cache {
    /// The result for the container with this ID.
    pub fn get(&self, container_id: &str) -> Option<ProbeResult> {
        let (_, result) = self
            .entry
            .as_ref()
            .filter(|(id, _)| **id == *container_id)?;
        Some(*result)
    }

    /// The result, for any container.
    pub fn result(&self) -> Option<ProbeResult> {
        self.entry.as_ref().map(|(_, result)| *result)
    }

    /// Stores the result of a container. Returns whether the result is new or changed, so that an update is due.
    pub fn set(&mut self, container_id: &Arc<str>, result: ProbeResult) -> bool {
        let is_news = self.get(container_id) != Some(result);
        self.entry = Some((container_id.clone(), result));
        is_news
    }

    /// Forgets the result.
    pub fn remove(&mut self) {
        self.entry = None;
    }
}

/// A result that is new or has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResultUpdate {
    /// The pod's UID.
    pub pod_uid: Arc<str>,
    /// The container's name.
    pub container: Arc<str>,
    /// The type of the probe.
    pub kind: ProbeType,
    /// The ID of the container that the result is about.
    pub container_id: Arc<str>,
    /// The result.
    pub result: ProbeResult,
}
