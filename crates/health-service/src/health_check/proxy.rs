//! The health of the proxy: whether changes reach the kernel in time.

use std::collections::BTreeMap;
use std::time::Duration;

use health_model::ipam::Family;
use jiff::Timestamp;
use serde::Serialize;

/// Key of the taint that the cluster autoscaler puts on a node that it is about to delete.
const TO_BE_DELETED: &str = "ToBeDeletedByClusterAutoscaler";

/// Whether the changes of each family reach the kernel in time. The caller passes in the time: `now` is monotonic, and
/// `wall` is the same moment as a timestamp.
#[derive(Clone, Debug)]
pub struct ProxyHealth {
    /// How long a change may wait before the family counts as unhealthy.
    timeout: Duration,
    families: BTreeMap<Family, Progress>,
    is_eligible: bool,
}

/// The pending and the completed changes of a family.
#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    oldest_queued: Option<Duration>,
    newest_queued: Option<Duration>,
    last_updated: Option<Timestamp>,
}

impl Progress {
    /// Whether no change has waited too long. A family that was never updated is starting up, and healthy.
    fn is_healthy(&self, timeout: Duration, now: Duration) -> bool {
        let waits_long = |queued: Duration| now.saturating_sub(queued) >= timeout;
        self.last_updated.is_none() || !self.oldest_queued.is_some_and(waits_long)
    }
}

/// The cluster's view of a node.
#[derive(Clone, Copy, Debug)]
pub struct NodeStanding<'a> {
    /// Whether the node's object is being deleted.
    pub is_deleting: bool,
    /// The keys of the node's taints.
    pub taints: &'a [&'a str],
}

/// A response of `/healthz` or `/livez`, with the fields of its JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HealthAnswer {
    /// When the last change reached the kernel. If the node is healthy, this equals `current_time`, as in Kubernetes,
    /// where both were originally one field.
    pub last_updated: Timestamp,
    /// The current time.
    pub current_time: Timestamp,
    /// Whether the node may get new traffic. Absent in `/livez`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_eligible: Option<bool>,
    /// Whether the response reports success.
    pub healthy: bool,
    /// The families that were updated at least once, by name: `IPv4` and `IPv6`.
    pub status: BTreeMap<&'static str, FamilyStatus>,
}

impl HealthAnswer {
    /// Returns the HTTP status: 200 or 503.
    pub const fn code(&self) -> u16 {
        code(self.healthy)
    }
}

/// The health of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FamilyStatus {
    /// When the family's last change reached the kernel.
    pub last_updated: Timestamp,
    /// Whether no change has waited too long.
    pub healthy: bool,
}

pub(super) const fn code(is_success: bool) -> u16 {
    if is_success { 200 } else { 503 }
}

impl ProxyHealth {
    /// Creates the state of a healthy proxy without changes. It becomes unhealthy once a change has waited for
    /// `timeout`.
    pub fn new(timeout: Duration) -> Self {
        Self {
            timeout,
            families: BTreeMap::new(),
            is_eligible: true,
        }
    }

    /// Records that a change of this family waits since `now`, unless an earlier one is already waiting.
    pub fn queued(&mut self, family: Family, now: Duration) {
        let progress = self.families.entry(family).or_default();
        progress.oldest_queued.get_or_insert(now);
        progress.newest_queued = Some(now);
    }

    /// Records that the changes of this family queued up to the time `until` have reached the kernel. `wall` is the
    /// current time.
    pub fn updated(&mut self, family: Family, until: Duration, wall: Timestamp) {
        let progress = self.families.entry(family).or_default();
        // All changes that are still waiting were queued after `until`.
        let waits = progress.newest_queued.is_some_and(|newest| newest > until);
        progress.oldest_queued = waits.then_some(until);
        progress.last_updated = Some(wall);
    }

    /// Sets the cluster's view of the node. Until the first call, the node is eligible.
    pub fn node(&mut self, standing: NodeStanding<'_>) {
        self.is_eligible = !standing.is_deleting && !standing.taints.contains(&TO_BE_DELETED);
    }

    /// Whether the changes of all families reach the kernel in time, regardless of the cluster's view of the node.
    pub fn is_healthy(&self, now: Duration) -> bool {
        let mut families = self.families.values();
        families.all(|progress| progress.is_healthy(self.timeout, now))
    }

    /// Returns the response of `/healthz`, which tells load balancers whether this node may get new traffic.
    pub fn healthz(&self, now: Duration, wall: Timestamp) -> HealthAnswer {
        let is_healthy = self.is_healthy(now) && self.is_eligible;
        HealthAnswer {
            node_eligible: Some(self.is_eligible),
            ..self.answer(is_healthy, now, wall)
        }
    }

    /// Returns the response of `/livez`, which tells supervisors whether the proxy works.
    pub fn livez(&self, now: Duration, wall: Timestamp) -> HealthAnswer {
        self.answer(self.is_healthy(now), now, wall)
    }

    fn answer(&self, healthy: bool, now: Duration, wall: Timestamp) -> HealthAnswer {
        let updated = self.families.iter().filter_map(|(family, progress)| {
            let status = FamilyStatus {
                last_updated: progress.last_updated?,
                healthy: progress.is_healthy(self.timeout, now),
            };
            Some((family.name(), status))
        });
        let status: BTreeMap<_, _> = updated.collect();
        let last_updated = status.values().map(|status| status.last_updated).max();
        HealthAnswer {
            last_updated: match last_updated {
                Some(last_updated) if !healthy => last_updated,
                _ => wall,
            },
            current_time: wall,
            node_eligible: None,
            healthy,
            status,
        }
    }
}
