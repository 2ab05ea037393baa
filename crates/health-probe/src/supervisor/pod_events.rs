//! Events of pods for the cluster's users: why a container is no longer ready, or is killed.

use std::sync::Arc;

use super::events::Level;
use super::task::Task;
use crate::source;
use crate::spec::{PodSpec, ProbeType, Role};
use crate::worker::restart::Kill;
use crate::worker::{Event, ProbeResult, ResultUpdate};

/// Reason of events about failing probes, as in the kubelet.
const UNHEALTHY: &str = "Unhealthy";
/// Reason of events about killed containers, as in the kubelet.
pub(super) const KILLING: &str = "Killing";

/// An event of a pod of a Kubernetes cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodEvent {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub name: String,
    /// The pod's UID. For a pod from the kubelet's own manifest folder, that of the manifest.
    pub uid: String,
    /// The container, as a part of the pod: `spec.containers{web}`.
    pub field_path: String,
    /// Whether it is a problem.
    pub is_warning: bool,
    /// Why the event occurs, in one word.
    pub reason: &'static str,
    /// What happened.
    pub message: String,
}

/// Takes the events of pods.
pub trait PodEvents: Send + Sync {
    /// Takes an event, without waiting.
    fn occur(&self, event: PodEvent);
}

/// A node without a cluster.
#[derive(Clone, Copy, Debug)]
pub struct NoPodEvents;

impl PodEvents for NoPodEvents {
    fn occur(&self, _: PodEvent) {}
}

impl Task {
    /// Remembers why a probe fails, until its result changes.
    pub(super) fn note_failing(
        &self,
        pod: &PodSpec,
        container: &Arc<str>,
        kind: ProbeType,
        event: &Event,
    ) {
        if event.reason != UNHEALTHY {
            return;
        }
        if let Some(tracked) = self.shared.state().pods.get_mut(&pod.uid) {
            let key = (container.clone(), kind);
            tracked.failing.insert(key, event.message.clone());
        }
    }

    /// Reports a container that was ready and no longer is.
    pub(super) fn note_result(&self, update: &ResultUpdate) {
        let container = &update.container;
        let unready = {
            let mut state = self.shared.state();
            let Some(tracked) = state.pods.get_mut(&update.pod_uid) else {
                return;
            };
            let key = (container.clone(), update.kind);
            match (update.kind, update.result) {
                (ProbeType::Readiness, ProbeResult::Failure) => {
                    // The first result of a container is a failure, too.
                    let was_ready = tracked.unready.insert(container.clone());
                    let message = tracked.failing.remove(&key).filter(|_| was_ready);
                    message.map(|message| (tracked.spec.clone(), message))
                }
                (kind, ProbeResult::Success) => {
                    if kind == ProbeType::Readiness {
                        tracked.unready.remove(container);
                    }
                    tracked.failing.remove(&key);
                    None
                }
                _ => None,
            }
        };
        if let Some((pod, message)) = unready {
            self.emit(&pod, container, Level::Warning, UNHEALTHY, message);
        }
    }

    /// Reports a container that is being killed, and why.
    pub(super) fn report_kill(&self, pod: &PodSpec, kill: &Kill) {
        let container = &kill.container;
        let failing = {
            let mut state = self.shared.state();
            let tracked = state.pods.get_mut(&pod.uid);
            tracked.and_then(|pod| pod.failing.remove(&(container.clone(), kill.kind)))
        };
        if let Some(message) = failing {
            self.emit(pod, container, Level::Warning, UNHEALTHY, message);
        }
        self.emit(pod, container, Level::Normal, KILLING, kill.message());
    }

    /// Passes an event on, if the cluster knows the pod.
    fn emit(
        &self,
        pod: &PodSpec,
        container: &Arc<str>,
        level: Level,
        reason: &'static str,
        message: String,
    ) {
        let is_of_cluster = {
            let state = self.shared.state();
            let tracked = state.pods.get(&pod.uid);
            tracked.is_some_and(|tracked| *tracked.sourced.source == *source::KUBERNETES)
        };
        if is_of_cluster {
            self.parts.pod_events.occur(PodEvent {
                namespace: pod.namespace.clone(),
                name: pod.name.clone(),
                uid: pod.shown_uid().to_owned(),
                field_path: field_path(pod, container),
                is_warning: level == Level::Warning,
                reason,
                message,
            });
        }
    }
}

/// The container as a part of its pod, as in the kubelet.
fn field_path(pod: &PodSpec, container: &str) -> String {
    let role = pod.container(container).map(|container| container.role);
    let list = match role {
        Some(Role::Init | Role::Sidecar) => "initContainers",
        _ => "containers",
    };
    format!("spec.{list}{{{container}}}")
}
