//! Services as shown by the API.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;

use health_model::api::{
    ServiceBackend, ServiceConflict, ServiceEntry, ServiceFrontend, ServicePortEntry,
    ServiceProblem, ServiceTopology,
};
use health_model::ipam::Family;
use imbl::OrdMap;
use tokio::sync::watch;

use crate::choice::{Preference, TopologyMode};
use crate::forwarding::Forwarding;
use crate::source::{ServiceSet, Sourced};
use crate::spec::{PortKey, Service, ServiceName, ServicePort};
use crate::state::{Backend, Frontend, FrontendKind, PortState, State, Target};

/// The services, for display. A clone shares everything with the original, and a service's entry is built only on
/// request: the cost of a change depends only on its size, no matter how many clients watch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct View {
    /// Whether the sources have been read completely once; before that, nothing is known.
    pub is_synced: bool,
    services: OrdMap<ServiceName, Sourced<Service>>,
    state: Option<State>,
    /// Problems that keep services from being served.
    pub problems: Arc<[ServiceProblem]>,
    /// The failures of the provider's last sync; `None` if there were none.
    pub failure: Option<Arc<Failure>>,
}

/// The failures of a sync.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The error message.
    pub error: String,
    /// The ports that stayed unchanged, each with the reason; empty if the error concerns everything.
    pub ports: BTreeMap<PortKey, String>,
}

/// Changes the view. Notifies watchers if the view then differs.
pub(super) fn update(sender: &watch::Sender<Arc<View>>, change: impl FnOnce(&mut View)) {
    sender.send_if_modified(|shown| {
        let mut view = View::clone(shown);
        change(&mut view);
        let is_change = view != **shown;
        if is_change {
            *shown = Arc::new(view);
        }
        is_change
    });
}

impl View {
    /// Takes over these services, and all problems.
    pub(super) fn show(&mut self, set: &ServiceSet, state: &State) {
        self.is_synced = true;
        self.services.clone_from(&set.services);
        self.state = Some(state.clone());
        self.problems.clone_from(&set.problems);
    }

    /// Returns the names of the services, in order.
    pub fn names(&self) -> impl Iterator<Item = &ServiceName> {
        let services = self.services.iter();
        let served = services.filter(|(_, sourced)| sourced.object.is_some());
        served.map(|(name, _)| name)
    }

    /// Whether this node's probes decide, too, which endpoints of a service are ready.
    pub fn follows_probes(&self, name: &ServiceName) -> bool {
        let service = self.services.get(name);
        service.is_some_and(Sourced::follows_probes)
    }

    /// Returns a service; `None` if no service has this name. Probe results for its backends are not included.
    pub fn service(&self, name: &ServiceName, forwarding: &Forwarding) -> Option<ServiceEntry> {
        let sourced = self.services.get(name)?;
        let service = sourced.object.as_deref()?;
        let state = self.state.as_ref()?;
        let common = &service.common;
        let failed = self.failure.as_ref().map(|failure| &failure.ports);
        Some(ServiceEntry {
            namespace: name.namespace.to_string(),
            name: name.name.to_string(),
            kind: common.kind.name().to_owned(),
            source: sourced.source.to_string(),
            internal_policy: common.internal_policy.name().to_owned(),
            external_policy: common.external_policy.name().to_owned(),
            affinity_ns: common
                .affinity
                .map(|time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)),
            algorithm: common.algorithm.map(|one| one.name().to_owned()),
            forwarding: forwarding.of(common.forwarding).name().to_owned(),
            forwarding_problem: forwarding.problem(common.forwarding),
            health_check_node_port: common.health_check_node_port,
            ports: service
                .ports
                .iter()
                .map(|port| show(port, state, failed))
                .collect(),
        })
    }

    /// Returns the ports that are not served at an address because another port or the node has it.
    pub fn conflicts(&self) -> impl Iterator<Item = ServiceConflict> {
        let conflicts = self.state.iter().flat_map(State::conflicts);
        conflicts.map(|conflict| ServiceConflict {
            service: conflict.key.name.service.to_string(),
            port: conflict.key.name.port.to_string(),
            protocol: conflict.key.name.protocol.to_string(),
            problem: conflict.to_string(),
        })
    }
}

fn show(
    port: &ServicePort,
    state: &State,
    failed: Option<&BTreeMap<PortKey, String>>,
) -> ServicePortEntry {
    let mut entry = ServicePortEntry {
        name: port.name.to_string(),
        protocol: port.protocol.to_string(),
        port: port.port,
        node_port: port.node_port,
        frontends: Vec::new(),
        backends: Vec::new(),
        topology: Vec::new(),
        failures: Vec::new(),
    };
    for family in Family::ALL {
        let name = port.full_name();
        let key = PortKey { name, family };
        let failure = failed.and_then(|failed| failed.get(&key));
        let failure = failure.map(|error| format!("{}: {error}", family.name()));
        entry.failures.extend(failure);
        let served = state.port(&key);
        let frontends = served.into_iter().flat_map(|port| &port.frontends);
        entry
            .frontends
            .extend(frontends.map(|one| frontend(one, family)));
        let list = |of: fn(&PortState) -> Vec<SocketAddr>| -> BTreeSet<_> {
            served.into_iter().flat_map(of).collect()
        };
        let cluster = list(|port| addresses(&port.cluster));
        let local = list(|port| addresses(&port.local));
        let lingering = list(|port| port.lingering.clone());
        let endpoints = state.endpoints().get(&key);
        if port.uses_cluster_endpoints() {
            let preference = Preference::of(endpoints, state.topology());
            let topology = preference.map(|preference| topology(preference, family));
            entry.topology.extend(topology);
        }
        entry
            .backends
            .extend(endpoints.iter().map(|one| ServiceBackend {
                address: one.address,
                ready: one.conditions.ready,
                serving: one.conditions.serving,
                terminating: one.conditions.terminating,
                local: one.is_local,
                probed: None,
                in_cluster_list: cluster.contains(&one.address),
                in_local_list: local.contains(&one.address),
                lingering: lingering.contains(&one.address),
                weight: one.weight,
                node: one.node.as_deref().map(str::to_owned),
                zone: one.zone.as_deref().map(str::to_owned),
            }));
    }
    entry.backends.sort_by_key(|backend| backend.address);
    entry
}

fn topology(preference: Preference, family: Family) -> ServiceTopology {
    let prefers = match preference.mode {
        TopologyMode::All => "all",
        TopologyMode::PreferSameNode => "node",
        TopologyMode::PreferSameZone => "zone",
    };
    ServiceTopology {
        family: family.name().to_owned(),
        prefers: prefers.to_owned(),
        reason: preference.reason,
    }
}

fn addresses(backends: &[Backend]) -> Vec<SocketAddr> {
    backends.iter().map(|backend| backend.address).collect()
}

fn frontend(frontend: &Frontend, family: Family) -> ServiceFrontend {
    let kind = match frontend.kind {
        FrontendKind::ClusterIp => "ClusterIP",
        FrontendKind::LoadBalancer => "LoadBalancer",
        FrontendKind::ExternalIp => "ExternalIP",
        FrontendKind::NodePort => "NodePort",
    };
    let target = |target| match target {
        Target::Cluster => "cluster",
        Target::Local => "local",
        Target::Drop => "drop",
        Target::Reject => "reject",
    };
    ServiceFrontend {
        kind: kind.to_owned(),
        listen: frontend.listen.to_string(),
        family: family.name().to_owned(),
        inside: target(frontend.inside).to_owned(),
        outside: target(frontend.outside).to_owned(),
    }
}
