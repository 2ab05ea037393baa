//! Combines all that is known about a pod: its addresses, its endpoint, and the state of its containers.

use std::net::IpAddr;
use std::sync::Arc;

use super::LocalEndpoint;
use super::containers::Known;
use super::task::Task;
use crate::runtime::{Observation, RuntimePod};
use crate::source::{Keeper, SourcedPod};
use crate::spec::{PodSpec, Role};
use crate::worker::{ContainerState, ContainerStatus, Phase, PodStatus};

impl Task {
    pub(super) fn refresh_all(&mut self) {
        let uids = self.shared.state().pods.uids();
        for uid in uids {
            self.refresh(&uid, false);
        }
        self.shared.note_change();
    }

    /// Updates a pod's probes, and the status passed to the prober, to the current knowledge.
    pub(super) fn refresh(&mut self, uid: &Arc<str>, is_changed: bool) {
        let Some((sourced, spec, reported, was_ready)) =
            self.shared.state().pods.get(uid).map(|pod| {
                let was_ready = pod.ready().unwrap_or(pod.was_ready);
                (
                    pod.sourced.clone(),
                    pod.spec.clone(),
                    pod.reported.clone(),
                    was_ready,
                )
            })
        else {
            return;
        };
        let observation = self.observation.clone();
        let running = observed_pod(&observation, &sourced.spec);
        let endpoint = self.endpoint(&sourced.spec, running);
        let ips = self.addresses(&sourced.spec, running, endpoint.as_ref());
        let wanted = match ips == sourced.spec.ips {
            true => sourced.spec.clone(),
            false => Arc::new(PodSpec {
                ips,
                ..PodSpec::clone(&sourced.spec)
            }),
        };
        let mut known = running.map(Known::of).unwrap_or_default();
        known.netns = endpoint.as_ref().map(|endpoint| endpoint.netns.clone());
        self.parts.containers.set(uid, known);
        if is_changed || *wanted != *spec {
            self.shared.prober.add_pod(wanted.clone());
        }
        let mut status = self.status(&sourced, running, endpoint.as_ref());
        if let Some(status) = &mut status {
            status.ready = was_ready;
        }
        let is_like = |reported: &PodStatus, now: &PodStatus| {
            PodStatus {
                ready: now.ready,
                ..reported.clone()
            } == *now
        };
        let is_news = match (&reported, &status) {
            (Some(reported), Some(status)) => !is_like(reported, status),
            (None, Some(_)) => true,
            // The pod's state is no longer known: keep the last known state.
            (_, None) => false,
        };
        let former = {
            let mut state = self.shared.state();
            let Some(pod) = state.pods.get_mut(uid) else {
                return;
            };
            pod.spec = wanted;
            if is_news {
                pod.reported.clone_from(&status);
            }
            std::mem::replace(&mut pod.endpoint, endpoint.as_ref().map(|one| one.id))
        };
        if let Some(status) = status.filter(|_| is_news) {
            self.shared.prober.set_status(uid, status);
        }
        let now = endpoint.map(|endpoint| endpoint.id);
        if let Some(former) = former.filter(|former| now != Some(*former)) {
            self.parts.endpoints.set_ready(former, None);
        }
        self.notify_endpoint(uid);
    }

    /// Tells a pod's endpoint whether the pod can serve.
    pub(super) fn notify_endpoint(&self, uid: &str) {
        let reported = {
            let state = self.shared.state();
            let pod = state.pods.get(uid);
            // Unknown does not mean "not ready".
            pod.and_then(|pod| Some((pod.endpoint?, pod.ready().or(pod.was_ready.then_some(true)))))
        };
        if let Some((endpoint, ready)) = reported {
            self.parts.endpoints.set_ready(endpoint, ready);
        }
    }

    fn endpoint(&self, spec: &PodSpec, running: Option<&RuntimePod>) -> Option<LocalEndpoint> {
        match running.map(|running| &running.ips) {
            Some(ips) if !ips.is_empty() => self.parts.endpoints.find(&PodSpec {
                ips: ips.clone(),
                ..spec.clone()
            }),
            _ => self.parts.endpoints.find(spec),
        }
    }

    /// Returns a pod's addresses. The runtime's take precedence: a manifest may be older than the pod.
    fn addresses(
        &self,
        spec: &PodSpec,
        running: Option<&RuntimePod>,
        endpoint: Option<&LocalEndpoint>,
    ) -> Vec<IpAddr> {
        match (running, endpoint) {
            (Some(running), _) if !running.ips.is_empty() => running.ips.clone(),
            _ if !spec.ips.is_empty() => spec.ips.clone(),
            (_, Some(endpoint)) => endpoint.ips.clone(),
            // A pod without an address of its own uses the host's network.
            (Some(running), None) if running.is_ready => self.parts.node_addresses.clone(),
            (_, None) => Vec::new(),
        }
    }

    /// Returns the pod status that the runtime reports. A pod with a container that was killed for a restart has not
    /// finished, whatever that container's exit code.
    pub(super) fn observed_status(&self, spec: &PodSpec, running: &RuntimePod) -> PodStatus {
        let mut status = running.status(spec);
        let is_restarted = |id: &str| self.killed(spec, id).is_some_and(|kill| kill.restart);
        if status.phase.is_final() && running.containers.iter().any(|one| is_restarted(&one.id)) {
            status.phase = Phase::Running;
        }
        status
    }

    /// Returns the state of a pod's containers; `None` if no source reports it.
    fn status(
        &self,
        sourced: &SourcedPod,
        running: Option<&RuntimePod>,
        endpoint: Option<&LocalEndpoint>,
    ) -> Option<PodStatus> {
        if self.parts.runtime.is_some() {
            let observed = match running {
                Some(running) => Some(self.observed_status(&sourced.spec, running)),
                None => self.is_observed.then(PodStatus::default),
            };
            return observed.map(|observed| with_end(observed, sourced));
        }
        if let Some(status) = &sourced.status {
            return Some(status.clone());
        }
        // The existence of the endpoint is all that is known: assume that the containers run.
        let endpoint = endpoint?;
        let containers = sourced.spec.containers.iter();
        let regular = containers.filter(|container| container.role == Role::Regular);
        Some(PodStatus {
            phase: Phase::Running,
            containers: regular
                .map(|container| ContainerStatus {
                    name: container.name.clone(),
                    id: Some(Arc::from(format!("endpoint:{}", endpoint.id))),
                    state: ContainerState::Running { started_at: None },
                    ready: false,
                    started: None,
                })
                .collect(),
            ..PodStatus::default()
        })
    }
}

/// Adds the end of the pod from the source: only its kubelet knows that a pod is being deleted or has finished.
fn with_end(observed: PodStatus, sourced: &SourcedPod) -> PodStatus {
    match (&sourced.status, sourced.keeper) {
        (Some(reported), Keeper::Kubelet { .. }) => PodStatus {
            deleting: reported.deleting,
            phase: match reported.phase.is_final() {
                true => reported.phase,
                false => observed.phase,
            },
            ..observed
        },
        _ => observed,
    }
}

/// Returns the runtime's pod of this name: the one with the same UID, or any if the manifest has no UID of its own.
pub(super) fn observed_pod<'a>(
    observation: &'a Observation,
    spec: &PodSpec,
) -> Option<&'a RuntimePod> {
    let is_named = |pod: &&RuntimePod| pod.namespace == spec.namespace && pod.name == spec.name;
    let uid = spec.known_uid();
    let mut pods = observation.pods.iter().filter(is_named);
    pods.find(|pod| uid.is_none_or(|uid| *pod.uid == *uid))
}
