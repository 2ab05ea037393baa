//! The probed pods and their known state.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use health_model::api::{ProbedContainer, ProbedPod};
use jiff::Timestamp;

use crate::source::SourcedPod;
use crate::spec::{PodSpec, ProbeType, Role};
use crate::worker::{ContainerState, ContainerStatus, Phase, PodStatus};

/// Pods, by UID.
#[derive(Debug, Default)]
pub(super) struct Pods(HashMap<Arc<str>, TrackedPod>);

/// A probed pod.
#[derive(Debug)]
pub(super) struct TrackedPod {
    /// The pod as its source lists it.
    pub(super) sourced: SourcedPod,
    /// The probed spec: the source's spec with the pod's addresses.
    pub(super) spec: Arc<PodSpec>,
    /// The status last passed to the prober.
    pub(super) reported: Option<PodStatus>,
    /// The status that follows from `reported` and the pod's probes.
    pub(super) status: Option<PodStatus>,
    /// Whether an earlier agent knew the pod to be ready. Applies until this agent knows.
    pub(super) was_ready: bool,
    /// The ID of the pod's endpoint.
    pub(super) endpoint: Option<u16>,
    /// How often the pod's containers were restarted, by name.
    pub(super) restarts: HashMap<Arc<str>, u64>,
    /// When waiting containers will be restarted, by name.
    pub(super) restart_at: HashMap<Arc<str>, Timestamp>,
    /// Why probes fail, by container and type.
    pub(super) failing: HashMap<(Arc<str>, ProbeType), String>,
    /// The containers that are not ready according to their probes, as far as reported.
    pub(super) unready: HashSet<Arc<str>>,
}

impl TrackedPod {
    pub(super) fn new(sourced: SourcedPod, was_ready: bool) -> Self {
        Self {
            spec: sourced.spec.clone(),
            sourced,
            reported: None,
            status: None,
            was_ready,
            endpoint: None,
            restarts: HashMap::new(),
            restart_at: HashMap::new(),
            failing: HashMap::new(),
            unready: HashSet::new(),
        }
    }

    /// Whether all containers of the pod can serve; `None` while the status is unknown.
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

    /// Whether the pod has finished.
    fn is_over(&self) -> bool {
        let status = self.status.as_ref();
        status.is_some_and(|status| status.phase.is_final())
    }

    fn show(&self) -> ProbedPod {
        let spec = &self.spec;
        let status = self.status.as_ref();
        ProbedPod {
            pod: format!("{}/{}", spec.namespace, spec.name),
            uid: spec.shown_uid().to_owned(),
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

    /// Returns the number of pods and the number of ready pods.
    pub(super) fn counts(&self) -> (u64, u64) {
        let ready = self.iter().filter(|pod| pod.ready() == Some(true));
        (self.0.len() as u64, ready.count() as u64)
    }

    /// Returns all pods, sorted by name.
    pub(super) fn shown(&self) -> Vec<ProbedPod> {
        let mut shown: Vec<_> = self.iter().map(TrackedPod::show).collect();
        shown.sort_by(|one, other| (&one.pod, &one.uid).cmp(&(&other.pod, &other.uid)));
        shown
    }

    /// Whether the pod at each address can serve. Leaves out pods of unknown state, the node's addresses, and addresses
    /// that several pods share: one pod must not speak for the others.
    pub(super) fn readiness(&self, node_addresses: &[IpAddr]) -> HashMap<IpAddr, bool> {
        let mut owners: HashMap<IpAddr, Vec<&TrackedPod>> = HashMap::new();
        for pod in self.iter() {
            for ip in pod
                .spec
                .ips
                .iter()
                .filter(|ip| !node_addresses.contains(ip))
            {
                owners.entry(*ip).or_default().push(pod);
            }
        }
        let known = owners.into_iter().filter_map(|(ip, pods)| {
            let living: Vec<_> = pods.iter().filter(|pod| !pod.is_over()).collect();
            match living[..] {
                // A finished pod keeps its address until another pod gets the address.
                [] => Some((ip, false)),
                [pod] => Some((ip, pod.ready().or(pod.was_ready.then_some(true))?)),
                _ => None,
            }
        });
        known.collect()
    }

    /// How often containers were restarted.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Keeper;
    use crate::spec;

    const NODE: [u8; 4] = [172, 30, 0, 1];

    /// A pod at the address `ip`, with a single container that is ready or not.
    fn pod(name: &str, ip: &str, phase: Phase, ready: Option<bool>) -> TrackedPod {
        let text = format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, uid: {name}}}\n\
             spec: {{containers: [{{name: app}}]}}\nstatus: {{podIP: {ip}}}"
        );
        let spec = Arc::new(spec::read(&text).pods.remove(0));
        let status = ready.map(|ready| PodStatus {
            phase,
            containers: vec![ContainerStatus {
                name: "app".into(),
                id: Some("1".into()),
                state: ContainerState::Running { started_at: None },
                ready,
                started: Some(true),
            }],
            ..PodStatus::default()
        });
        let sourced = SourcedPod {
            spec,
            status: None,
            source: "pods".into(),
            keeper: Keeper::Agent,
        };
        TrackedPod {
            status,
            ..TrackedPod::new(sourced, false)
        }
    }

    fn readiness(pods: Vec<TrackedPod>) -> Vec<(u8, bool)> {
        let mut all = Pods::default();
        pods.into_iter().for_each(|pod| all.insert(pod));
        let reported = all.readiness(&[NODE.into()]).into_iter();
        let mut reported: Vec<_> = reported
            .map(|(ip, ready)| match ip {
                IpAddr::V4(ip) => (ip.octets()[3], ready),
                IpAddr::V6(_) => panic!("{ip}"),
            })
            .collect();
        reported.sort_unstable();
        reported
    }

    #[test]
    fn the_readiness_of_an_address_is_that_of_the_only_pod_that_has_it() {
        let running = Phase::Running;
        let one = |name, ip, ready| pod(name, ip, running, ready);
        let reported = readiness(vec![
            one("a", "10.1.0.1", Some(true)),
            one("b", "10.1.0.2", Some(false)),
            // The state of this pod is unknown.
            one("c", "10.1.0.3", None),
            // Pods that share an address, and one at the node's address.
            one("d", "10.1.0.4", Some(true)),
            one("e", "10.1.0.4", Some(false)),
            one("f", "172.30.0.1", Some(false)),
        ]);
        assert_eq!(reported, [(1, true), (2, false)]);
    }

    #[test]
    fn a_pod_that_is_over_cannot_serve_and_leaves_its_address_to_the_next() {
        let over = |name, ip| pod(name, ip, Phase::Succeeded, Some(true));
        let reported = readiness(vec![
            over("a", "10.1.0.1"),
            over("b", "10.1.0.2"),
            pod("c", "10.1.0.2", Phase::Running, Some(true)),
        ]);
        assert_eq!(reported, [(1, false), (2, true)]);
    }
}
