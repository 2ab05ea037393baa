//! The consequences of a failed probe or an exited container: whether to kill or restart it, and when.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{ProbeResult, ResultUpdate};
use crate::spec::{ContainerSpec, PodSpec, Probe, ProbeType, RestartPolicy, Role};

/// The delay before the second consecutive restart; the first restart is immediate.
pub(crate) const FIRST_WAIT: Duration = Duration::from_secs(10);
/// The longest delay.
pub(crate) const LONGEST_WAIT: Duration = Duration::from_secs(300);
/// A container that exits at least this long after its restart is treated as if it had never been restarted.
pub(crate) const RESET_AFTER: Duration = Duration::from_secs(600);
/// Maximum number of removed pods whose delays are remembered.
const GONE_KEPT: usize = 1000;

/// A container that must be killed because a probe failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kill {
    /// The pod's UID.
    pub pod_uid: Arc<str>,
    /// The container's name.
    pub container: Arc<str>,
    /// The container's ID.
    pub container_id: Arc<str>,
    /// The type of the probe that failed.
    pub kind: ProbeType,
    /// How long the container may take to exit by itself.
    pub grace: Duration,
    /// Whether the container is restarted afterwards.
    pub restart: bool,
}

impl Kill {
    /// The message of the event with reason `Killing`.
    pub fn message(&self) -> String {
        let Self {
            container, kind, ..
        } = self;
        let then = match self.restart {
            true => "will be restarted",
            false => "will not be restarted",
        };
        format!("Container {container} failed {kind} probe, {then}")
    }
}

/// Returns the kill that a result of a running container requires, if any.
pub fn decide(pod: &PodSpec, update: &ResultUpdate) -> Option<Kill> {
    if update.result != ProbeResult::Failure || update.kind == ProbeType::Readiness {
        return None;
    }
    let container = pod.container(&update.container)?;
    let probe = container.probe(update.kind)?;
    let (grace, restart) = consequence(pod, container, probe);
    Some(Kill {
        pod_uid: update.pod_uid.clone(),
        container: update.container.clone(),
        container_id: update.container_id.clone(),
        kind: update.kind,
        grace,
        restart,
    })
}

/// How long a container may take to exit when its liveness or startup probe kills it, and whether it is then restarted.
pub fn consequence(pod: &PodSpec, container: &ContainerSpec, probe: &Probe) -> (Duration, bool) {
    let grace = probe.termination_grace.unwrap_or(pod.termination_grace);
    let restart = policy(pod, container.role) != RestartPolicy::Never;
    (grace, restart)
}

/// Whether a container that exited by itself is restarted. For a container that was killed, see its [`Kill`].
pub fn restarts(pod: &PodSpec, role: Role, exit_code: i32) -> bool {
    match policy(pod, role) {
        RestartPolicy::Always => true,
        RestartPolicy::OnFailure => exit_code != 0,
        RestartPolicy::Never => false,
    }
}

fn policy(pod: &PodSpec, role: Role) -> RestartPolicy {
    match (role, pod.restart_policy) {
        (Role::Sidecar, _) => RestartPolicy::Always,
        // An init container that exited with 0 has completed its task.
        (Role::Init, RestartPolicy::Always) => RestartPolicy::OnFailure,
        (_, policy) => policy,
    }
}

/// The delays before containers are restarted: 10 s, doubled each time, up to 5 min.
#[derive(Clone, Debug, Default)]
pub struct Backoffs {
    /// The back-offs by pod and container.
    pods: HashMap<Arc<str>, HashMap<Arc<str>, Backoff>>,
}

#[derive(Clone, Copy, Debug)]
struct Backoff {
    wait: Duration,
    /// When the container was last restarted. If that was before the agent's start: how long before.
    restarted: Duration,
    before: Duration,
    /// How often the container was restarted.
    restarts: u64,
}

impl Backoff {
    /// How long ago the container was restarted.
    fn age(&self, now: Duration) -> Duration {
        now.saturating_add(self.before)
            .saturating_sub(self.restarted)
    }

    /// Whether a container that exited at `ended` had run for a long time.
    fn is_over(&self, ended: Duration) -> bool {
        self.age(ended) > RESET_AFTER
    }
}

/// One container's back-off, for a [`Snapshot`](super::Snapshot).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedBackoff {
    /// The pod's UID.
    pub pod_uid: String,
    /// The container's name.
    pub container: String,
    /// The next delay.
    #[serde(with = "health_model::duration::nanoseconds", rename = "wait_ns")]
    pub wait: Duration,
    /// How long before saving the container was restarted.
    #[serde(with = "health_model::duration::nanoseconds", rename = "age_ns")]
    pub age: Duration,
    /// How often the container was restarted.
    #[serde(default)]
    pub restarts: u64,
}

impl Backoffs {
    /// The earliest time at which a container that exited at `ended` may be started. If a start has failed since then,
    /// the delay counts from that attempt.
    pub fn ready(&self, pod_uid: &str, container: &str, ended: Duration) -> Duration {
        let backoff = self.pods.get(pod_uid).and_then(|pod| pod.get(container));
        let backoff = backoff.filter(|backoff| !backoff.is_over(ended));
        backoff.map_or(ended, |backoff| ended.max(backoff.restarted) + backoff.wait)
    }

    /// Records that a container that exited at `ended` is restarted `now`.
    pub fn restarted(
        &mut self,
        pod_uid: &Arc<str>,
        container: &Arc<str>,
        ended: Duration,
        now: Duration,
    ) {
        let pod = self.pods.entry(pod_uid.clone()).or_default();
        let backoff = pod.get(container).filter(|backoff| !backoff.is_over(ended));
        let wait = backoff.map_or(FIRST_WAIT, |backoff| (backoff.wait * 2).min(LONGEST_WAIT));
        let backoff = Backoff {
            wait,
            restarted: now,
            before: Duration::ZERO,
            restarts: pod.get(container).map_or(0, |backoff| backoff.restarts),
        };
        pod.insert(container.clone(), backoff);
    }

    /// Counts a successful restart.
    pub fn count(&mut self, pod_uid: &str, container: &str) {
        let pod = self.pods.get_mut(pod_uid);
        if let Some(backoff) = pod.and_then(|pod| pod.get_mut(container)) {
            backoff.restarts += 1;
        }
    }

    /// How often each container of a pod was restarted, by name.
    pub fn restarts(&self, pod_uid: &str) -> HashMap<Arc<str>, u64> {
        let containers = self.pods.get(pod_uid).into_iter().flatten();
        containers
            .map(|(name, backoff)| (name.clone(), backoff.restarts))
            .collect()
    }

    /// Forgets removed pods that were last restarted more than [`RESET_AFTER`] ago. If too many removed pods remain,
    /// forgets those restarted longest ago.
    pub fn forget_gone(&mut self, now: Duration, is_there: impl Fn(&str) -> bool) {
        let age = |pod: &HashMap<Arc<str>, Backoff>| {
            let ages = pod.values().map(|one| one.age(now));
            ages.min().unwrap_or(Duration::MAX)
        };
        self.pods
            .retain(|uid, pod| is_there(uid) || age(pod) <= RESET_AFTER);
        let gone = self.pods.iter().filter(|(uid, _)| !is_there(uid));
        let mut gone: Vec<_> = gone.map(|(uid, pod)| (age(pod), uid.clone())).collect();
        gone.sort_unstable();
        for (_, uid) in gone.into_iter().skip(GONE_KEPT) {
            self.pods.remove(&uid);
        }
    }

    /// Returns the state to save for the next agent.
    pub fn save(&self, now: Duration) -> Vec<SavedBackoff> {
        let mut saved = Vec::new();
        for (pod_uid, containers) in &self.pods {
            for (container, backoff) in containers {
                saved.push(SavedBackoff {
                    pod_uid: pod_uid.to_string(),
                    container: container.to_string(),
                    wait: backoff.wait,
                    age: backoff.age(now),
                    restarts: backoff.restarts,
                });
            }
        }
        saved
    }

    /// Restores an earlier agent's state, as of this agent's start.
    pub fn restore(saved: Vec<SavedBackoff>) -> Self {
        let mut backoffs = Self::default();
        for one in saved {
            let pod = backoffs.pods.entry(one.pod_uid.into()).or_default();
            let backoff = Backoff {
                wait: one.wait.min(LONGEST_WAIT),
                restarted: Duration::ZERO,
                before: one.age,
                restarts: one.restarts,
            };
            pod.insert(one.container.into(), backoff);
        }
        backoffs
    }
}
