//! Lists the pods and containers of a runtime.

use std::collections::BTreeMap;

use health_model::address::parse_ip;
use jiff::Timestamp;
use serde::de::IgnoredAny;

use super::config::{ContainerMetadata, Info};
use super::messages::{
    Container, ContainerList, ContainerStatusResponse, EXITED, Nothing, PodSandbox, PodSandboxList,
    PodSandboxStatusResponse, READY, RUNNING, StatusRequest,
};
use super::{Observation, PATIENCE, Reason, Runtime, RuntimeContainer, RuntimeError, RuntimePod};
use crate::worker::ContainerState;

impl Runtime {
    /// Returns all pods and containers. Requests details only where the state differs from `known`, so an unchanged
    /// node costs two calls. Leaves out pods and containers that vanish meanwhile. Where something cannot be
    /// determined, keeps the previous value and adds a problem to the observation.
    pub async fn observe(&self, known: &Observation) -> Result<Observation, RuntimeError> {
        let pods: PodSandboxList = self
            .call("ListPodSandbox", "", Nothing {}, PATIENCE)
            .await?;
        let containers: ContainerList = self
            .call("ListContainers", "", Nothing {}, PATIENCE)
            .await?;
        let mut last_attempts = last_attempts(containers.containers);
        let mut observation = Observation::default();
        for (uid, pod) in newest(pods.items) {
            let before = known.pods.iter().find(|one| one.sandbox_id == pod.id);
            let observed = self.pod(uid, &pod, before).await;
            let Some(mut observed) = observation.or_before(observed, before)? else {
                continue;
            };
            observed.containers.clear();
            for container in last_attempts.remove(&pod.id).unwrap_or_default() {
                let before = before.and_then(|pod| {
                    let mut containers = pod.containers.iter();
                    containers.find(|one| one.id == container.id)
                });
                let container = self.container(container, before).await;
                let container = observation.or_before(container, before)?;
                observed.containers.extend(container);
            }
            observation.pods.push(observed);
        }
        Ok(observation)
    }

    async fn pod(
        &self,
        uid: String,
        pod: &PodSandbox,
        before: Option<&RuntimePod>,
    ) -> Result<Option<RuntimePod>, RuntimeError> {
        let metadata = pod.metadata.clone().unwrap_or_default();
        let is_ready = pod.state == READY;
        let mut observed = RuntimePod {
            uid,
            namespace: metadata.namespace,
            name: metadata.name,
            sandbox_id: pod.id.clone(),
            is_ready,
            ips: Vec::new(),
            pid: None,
            containers: Vec::new(),
        };
        if let Some(before) = before.filter(|before| before.is_ready == is_ready) {
            observed.ips.clone_from(&before.ips);
            observed.pid = before.pid;
            return Ok(Some(observed));
        }
        let request = StatusRequest {
            id: pod.id.clone(),
            verbose: true,
        };
        let answer = self.call("PodSandboxStatus", &pod.id, request, PATIENCE);
        let answer: PodSandboxStatusResponse = match answer.await {
            Err(error) if error.is_not_found() => return Ok(None),
            answer => answer?,
        };
        let network = answer.status.and_then(|status| status.network);
        let network = network.unwrap_or_default();
        let ips = [network.ip]
            .into_iter()
            .chain(network.additional_ips.into_iter().map(|one| one.ip));
        // Strings that are not addresses are skipped.
        observed.ips = ips.filter_map(|ip| parse_ip(&ip).ok()).collect();
        observed.pid = pid(&answer.info).filter(|_| is_ready);
        Ok(Some(observed))
    }

    async fn container(
        &self,
        container: Container,
        before: Option<&RuntimeContainer>,
    ) -> Result<Option<RuntimeContainer>, RuntimeError> {
        if let Some(before) = before.filter(|before| is_in(before.state, container.state)) {
            return Ok(Some(before.clone()));
        }
        let request = StatusRequest {
            id: container.id.clone(),
            verbose: true,
        };
        let answer = self.call("ContainerStatus", &container.id, request, PATIENCE);
        let answer: ContainerStatusResponse = match answer.await {
            Err(error) if error.is_not_found() => return Ok(None),
            answer => answer?,
        };
        let status = answer.status.unwrap_or_default();
        let ContainerMetadata { name, attempt } = container.metadata.unwrap_or_default();
        Ok(Some(RuntimeContainer {
            id: container.id,
            name,
            attempt,
            state: match status.state {
                RUNNING => ContainerState::Running {
                    started_at: timestamp(status.started_at),
                },
                EXITED => ContainerState::Terminated {
                    exit_code: status.exit_code,
                },
                _ => ContainerState::Waiting,
            },
            pid: pid(&answer.info).filter(|_| status.state == RUNNING),
            finished_at: timestamp(status.finished_at),
        }))
    }
}

impl Observation {
    /// Returns the reported value, or else the previous one. Fails if the runtime is away, because that does not
    /// concern this item alone.
    fn or_before<T: Clone>(
        &mut self,
        reported: Result<Option<T>, RuntimeError>,
        before: Option<&T>,
    ) -> Result<Option<T>, RuntimeError> {
        match reported {
            Err(error) if matches!(error.reason(), Reason::Away(_)) => Err(error),
            Err(error) => {
                self.problems.push(error);
                Ok(before.cloned())
            }
            reported => reported,
        }
    }
}

/// The PID of the first process, if the details contain it.
fn pid(info: &BTreeMap<String, String>) -> Option<u32> {
    let info = Info::<IgnoredAny>::read(info).ok()?;
    Some(info.pid).filter(|pid| *pid > 0)
}

/// Whether a state matches the runtime's state number.
fn is_in(state: ContainerState, number: i32) -> bool {
    match state {
        ContainerState::Waiting => number != RUNNING && number != EXITED,
        ContainerState::Running { .. } => number == RUNNING,
        ContainerState::Terminated { .. } => number == EXITED,
    }
}

/// Converts nanoseconds since the epoch; 0 means none.
fn timestamp(nanoseconds: i64) -> Option<Timestamp> {
    let set = Some(nanoseconds).filter(|time| *time > 0)?;
    Timestamp::from_nanosecond(set.into()).ok()
}

/// Returns the newest pod for each UID.
fn newest(pods: Vec<PodSandbox>) -> BTreeMap<String, PodSandbox> {
    let mut newest = BTreeMap::<String, PodSandbox>::new();
    for pod in pods {
        let uid = pod.metadata.clone().unwrap_or_default().uid;
        let age = |pod: &PodSandbox| {
            let attempt = pod.metadata.as_ref().map(|metadata| metadata.attempt);
            (attempt, pod.created_at)
        };
        match newest.get(&uid) {
            Some(other) if age(other) >= age(&pod) => {}
            _ => {
                newest.insert(uid, pod);
            }
        }
    }
    newest
}

/// Returns the last attempt of each container, by pod.
fn last_attempts(containers: Vec<Container>) -> BTreeMap<String, Vec<Container>> {
    let mut last = BTreeMap::<(String, String), Container>::new();
    for container in containers {
        let name = container.metadata.clone().unwrap_or_default().name;
        let age = |container: &Container| {
            let metadata = container.metadata.as_ref();
            let attempt = metadata.map(|metadata| metadata.attempt);
            (attempt, container.created_at)
        };
        let key = (container.pod_sandbox_id.clone(), name);
        match last.get(&key) {
            Some(other) if age(other) >= age(&container) => {}
            _ => {
                last.insert(key, container);
            }
        }
    }
    let mut by_pod = BTreeMap::<String, Vec<Container>>::new();
    for ((pod, _), container) in last {
        by_pod.entry(pod).or_default().push(container);
    }
    by_pod
}
