//! Services as the API shows them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;

use health_model::api::{
    ServiceBackend, ServiceConflict, ServiceEntry, ServiceFrontend, ServicePortEntry,
    ServiceProblem, ServiceTopology,
};
use health_model::ipam::Family;
use tokio::sync::watch;

use crate::choice::{Preference, TopologyMode};
use crate::source::{ServiceSet, Sourced};
use crate::spec::{PortKey, Service, ServiceName, ServicePort};
use crate::state::{Backend, Conflict, Frontend, FrontendKind, PortState, State, Target};

/// What is served.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct View {
    /// Whether the sources have been read once as a whole: before that, nothing is known.
    pub is_synced: bool,
    /// The services. What probes say of their backends is not told here.
    pub services: BTreeMap<ServiceName, Arc<ServiceEntry>>,
    /// The ports that are not served at an address, since another port has it.
    pub conflicts: Vec<ServiceConflict>,
    /// What keeps services from being served.
    pub problems: Vec<ServiceProblem>,
    /// Why the provider could not do what there was to do last; none if it could.
    pub error: Option<String>,
}

/// Changes what is shown. Whoever watches hears of it if it differs.
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
    /// Shows these services anew, and all that is wrong.
    pub(super) fn show(
        &mut self,
        set: &ServiceSet,
        state: &State,
        touched: impl IntoIterator<Item = ServiceName>,
    ) {
        self.is_synced = true;
        for name in touched {
            let sourced = set.services.get(&name);
            match sourced.and_then(|sourced| entry(sourced, state)) {
                Some(entry) => self.services.insert(name, Arc::new(entry)),
                None => self.services.remove(&name),
            };
        }
        let conflict = |conflict: &Conflict| ServiceConflict {
            service: conflict.key.name.service.to_string(),
            port: conflict.key.name.port.to_string(),
            protocol: conflict.key.name.protocol.to_string(),
            problem: conflict.to_string(),
        };
        self.conflicts = state.conflicts().map(conflict).collect();
        self.problems.clone_from(&set.problems);
    }
}

fn entry(sourced: &Sourced<Service>, state: &State) -> Option<ServiceEntry> {
    let service = sourced.object.as_deref()?;
    let common = &service.common;
    let name = &common.name;
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
        health_check_node_port: common.health_check_node_port,
        ports: service.ports.iter().map(|port| show(port, state)).collect(),
    })
}

fn show(port: &ServicePort, state: &State) -> ServicePortEntry {
    let mut entry = ServicePortEntry {
        name: port.name.to_string(),
        protocol: port.protocol.to_string(),
        port: port.port,
        node_port: port.node_port,
        frontends: Vec::new(),
        backends: Vec::new(),
        topology: Vec::new(),
    };
    for family in Family::ALL {
        let name = port.full_name();
        let key = PortKey { name, family };
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
