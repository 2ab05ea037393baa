//! What the API reads of the running agent.

use std::sync::{OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

use health_common::identity;

use super::node::NodeDatapath;
use super::watch::Outcome;
use crate::api::server::Source;
use crate::api::types::{AgentState, Endpoint, HealthStatus, NodeList, SelfStatus, go_duration};
use crate::config::Config;
use crate::endpoint::health::HealthEndpoint;
use crate::mesh::MeshHandle;

/// The agent as the API shows it. Complete from the first moment, if empty at first.
pub(super) struct AgentSource {
    config: Config,
    started: Instant,
    mesh: OnceLock<MeshHandle>,
    endpoint: RwLock<Option<Endpoint>>,
    waiting: RwLock<Option<String>>,
    failure: RwLock<Option<String>>,
}

impl AgentSource {
    pub(super) fn new(config: Config) -> Self {
        Self {
            config,
            started: Instant::now(),
            mesh: OnceLock::new(),
            endpoint: RwLock::default(),
            waiting: RwLock::default(),
            failure: RwLock::default(),
        }
    }

    /// The first node registry that is stale, and why.
    fn stale_registry(&self) -> Option<String> {
        let registries = self.mesh.get()?.registries();
        registries.into_iter().find_map(|registry| {
            let reason = registry.stale?;
            Some(format!("{} is stale: {reason}", registry.registry))
        })
    }

    pub(super) fn mesh(&self) -> Option<&MeshHandle> {
        self.mesh.get()
    }

    pub(super) fn set_mesh(&self, mesh: MeshHandle) {
        // There is one mesh in an agent's life.
        let _ = self.mesh.set(mesh);
    }

    /// What the start waits for, in words.
    pub(super) fn set_waiting(&self, waiting: Option<String>) {
        *self.waiting.write().unwrap_or_else(PoisonError::into_inner) = waiting;
    }

    pub(super) fn set_endpoint(
        &self,
        endpoint: &HealthEndpoint,
        repairs: &std::collections::BTreeMap<String, u64>,
    ) {
        let shown = Endpoint {
            id: endpoint.id(),
            identity: identity::HEALTH,
            labels: vec!["reserved:health".to_owned()],
            ipv4: endpoint.ipv4().map(Into::into),
            ipv6: endpoint.ipv6().map(Into::into),
            state: "ready".to_owned(),
            interface: endpoint.ifname().to_owned(),
            ifindex: endpoint.ifindex(),
            mac: endpoint.mac().to_string(),
            host_mac: endpoint.host_mac().to_string(),
            netns: endpoint.netns().path().display().to_string(),
            repairs: repairs.clone(),
        };
        *self
            .endpoint
            .write()
            .unwrap_or_else(PoisonError::into_inner) = Some(shown);
    }

    /// Takes over how a look at the endpoint and the datapath went.
    pub(super) fn note_repairs(&self, node: &NodeDatapath, outcome: &Outcome) {
        if !outcome.repaired.is_empty() {
            self.set_endpoint(&node.endpoint, &node.repairs);
        }
        let mut failure = self.failure.write().unwrap_or_else(PoisonError::into_inner);
        failure.clone_from(&outcome.failure);
    }
}

impl Source for AgentSource {
    fn status(&self) -> HealthStatus {
        self.mesh.get().map_or_else(
            || HealthStatus {
                probe_interval: go_duration(
                    self.config
                        .probe_interval
                        .as_nanos()
                        .try_into()
                        .unwrap_or(i64::MAX),
                ),
                local: SelfStatus {
                    name: format!("{}/{}", self.config.cluster_name, self.config.node_name),
                    diagnosis: None,
                },
                ..HealthStatus::default()
            },
            MeshHandle::report,
        )
    }

    async fn probe(&self) -> HealthStatus {
        match self.mesh.get() {
            Some(mesh) => mesh.probe_now().await,
            None => self.status(),
        }
    }

    fn nodes(&self) -> NodeList {
        self.mesh
            .get()
            .map_or_else(NodeList::default, MeshHandle::nodes)
    }

    fn endpoints(&self) -> Vec<Endpoint> {
        self.endpoint
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .iter()
            .cloned()
            .collect()
    }

    fn config(&self) -> Config {
        self.config.clone()
    }

    fn state(&self) -> AgentState {
        let (state, msg) = if self.mesh.get().is_none() {
            let waiting = self.waiting.read().unwrap_or_else(PoisonError::into_inner);
            let msg = waiting.clone();
            (
                "Warning",
                msg.unwrap_or_else(|| "the agent is starting".to_owned()),
            )
        } else if let Some(failure) = &*self.failure.read().unwrap_or_else(PoisonError::into_inner)
        {
            ("Failure", failure.clone())
        } else if let Some(stale) = self.stale_registry() {
            ("Warning", stale)
        } else {
            ("Ok", String::new())
        };
        AgentState {
            state: state.to_owned(),
            msg,
        }
    }

    fn uptime(&self) -> Duration {
        self.started.elapsed()
    }
}
