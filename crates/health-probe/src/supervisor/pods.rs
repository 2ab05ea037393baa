//! The pods that are probed, and what is known of them.

use std::collections::HashMap;
use std::sync::Arc;

use health_model::api::{ProbedContainer, ProbedPod};
use jiff::Timestamp;

use crate::source::SourcedPod;
use crate::spec::{PodSpec, Role};
use crate::worker::{ContainerState, ContainerStatus, Phase, PodStatus};

/// Pods, by UID.
#[derive(Debug, Default)]
pub(super) struct Pods(HashMap<Arc<str>, TrackedPod>);

/// A pod that is probed.
#[derive(Debug)]
pub(super) struct TrackedPod {
    /// As its source has it.
    pub(super) sourced: SourcedPod,
    /// What is probed: the same, with its addresses.
    pub(super) spec: Arc<PodSpec>,
    /// What the prober was told of it last.
    pub(super) told: Option<PodStatus>,
    /// What that and its probes come to.
    pub(super) status: Option<PodStatus>,
    /// Whether an earlier agent knew it to be ready. Counts until this one knows.
    pub(super) was_ready: bool,
    /// Number of its endpoint.
    pub(super) endpoint: Option<u16>,
    /// How often its containers were started again, by name.
    pub(super) restarts: HashMap<Arc<str>, u64>,
    /// When containers are started again that wait for it, by name.
    pub(super) restart_at: HashMap<Arc<str>, Timestamp>,
}

impl TrackedPod {
    pub(super) fn new(sourced: SourcedPod, was_ready: bool) -> Self {
        Self {
            spec: sourced.spec.clone(),
            sourced,
            told: None,
            status: None,
            was_ready,
            endpoint: None,
            restarts: HashMap::new(),
            restart_at: HashMap::new(),
        }
    }

    /// Whether all its containers can serve; `None` while nothing is known of it.
    pub(super) fn ready(&self) -> Option<bool> {
        let status = self.status.as_ref()?;
        let is_ready = |name: &Arc<str>| {
            let found = find(status, name);
            found.is_some_and(|container| container.ready)
        };
        let serving = self.spec.containers.iter();
        let mut serving = serving.filter(|container| container.role != Role::Init);
        Some(!status.phase.is_final() && serving.all(|container| is_ready(&container.name)))
    }

    fn show(&self) -> ProbedPod {
        let spec = &self.spec;
        let status = self.status.as_ref();
        ProbedPod {
            pod: format!("{}/{}", spec.namespace, spec.name),
            uid: spec.uid.to_string(),
            source: self.sourced.source.to_string(),
            phase: status.map(|status| phase(status.phase).to_owned()),
            ready: self.ready().unwrap_or(self.was_ready),
            ips: spec.ips.clone(),
            endpoint: self.endpoint,
            containers: spec
                .containers
                .iter()
                .map(|container| {
                    let name = &container.name;
                    let known = status.and_then(|status| find(status, name));
                    let (state, exit_code) = match known.map(|known| known.state) {
                        None | Some(ContainerState::Waiting) => ("waiting", None),
                        Some(ContainerState::Running { .. }) => ("running", None),
                        Some(ContainerState::Terminated { exit_code }) => {
                            ("terminated", Some(exit_code))
                        }
                    };
                    let restarts = self.restarts.get(name).copied().unwrap_or_default();
                    ProbedContainer {
                        name: name.to_string(),
                        id: known.and_then(|known| known.id.as_deref().map(str::to_owned)),
                        state: state.to_owned(),
                        exit_code,
                        ready: known.is_some_and(|known| known.ready),
                        started: known.and_then(|known| known.started),
                        restarts: u32::try_from(restarts).unwrap_or(u32::MAX),
                        restart_at: self.restart_at.get(name).copied(),
                    }
                })
                .collect(),
        }
    }
}

impl Pods {
    pub(super) fn get(&self, uid: &str) -> Option<&TrackedPod> {
        self.0.get(uid)
    }

    pub(super) fn get_mut(&mut self, uid: &str) -> Option<&mut TrackedPod> {
        self.0.get_mut(uid)
    }

    pub(super) fn insert(&mut self, pod: TrackedPod) {
        self.0.insert(pod.spec.uid.clone(), pod);
    }

    pub(super) fn remove(&mut self, uid: &str) -> Option<TrackedPod> {
        self.0.remove(uid)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &TrackedPod> {
        self.0.values()
    }

    pub(super) fn uids(&self) -> Vec<Arc<str>> {
        self.0.keys().cloned().collect()
    }

    /// How many there are, and how many of them are ready.
    pub(super) fn counts(&self) -> (u64, u64) {
        let ready = self.iter().filter(|pod| pod.ready() == Some(true));
        (self.0.len() as u64, ready.count() as u64)
    }

    /// All, by name.
    pub(super) fn shown(&self) -> Vec<ProbedPod> {
        let mut shown: Vec<_> = self.iter().map(TrackedPod::show).collect();
        shown.sort_by(|one, other| (&one.pod, &one.uid).cmp(&(&other.pod, &other.uid)));
        shown
    }

    /// How often containers were started again.
    pub(super) fn restarts(&self) -> Vec<(Arc<PodSpec>, Arc<str>, u64)> {
        let pods = self.iter();
        pods.flat_map(|pod| {
            let restarts = pod.restarts.iter();
            restarts.map(|(name, count)| (pod.spec.clone(), name.clone(), *count))
        })
        .collect()
    }
}

fn find<'a>(status: &'a PodStatus, name: &str) -> Option<&'a ContainerStatus> {
    let mut all = status.containers.iter().chain(&status.init_containers);
    all.find(|container| &*container.name == name)
}

const fn phase(phase: Phase) -> &'static str {
    match phase {
        Phase::Pending => "Pending",
        Phase::Running => "Running",
        Phase::Succeeded => "Succeeded",
        Phase::Failed => "Failed",
        Phase::Unknown => "Unknown",
    }
}
