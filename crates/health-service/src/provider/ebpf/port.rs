//! Converts the state of a port into a [`PortSpec`].

use std::collections::BTreeSet;
use std::net::SocketAddr;

use health_common::service::{
    ALGORITHM_LEAST_CONNECTION, ALGORITHM_MAGLEV, ALGORITHM_RANDOM, ALGORITHM_ROUND_ROBIN,
    FRONTEND_DIRECT, FRONTEND_KEEPS_SOURCE, FRONTEND_RESTRICTED, KIND_CLUSTER_IP, KIND_EXTERNAL_IP,
    KIND_LOAD_BALANCER, KIND_NODE_PORT,
};
use health_datapath::services::{self, BackendSpec, FrontendSpec, PortSpec};

use health_model::policy::Protocol;
use health_model::settings::ServiceForwarding;

use super::Settings;
use crate::spec::{Algorithm, PortKey, TrafficPolicy};
use crate::state::{Backend, Frontend, FrontendKind, Listen, PortState, Target};

/// Returns the specification of a port. `node_frontends` returns the addresses at which a NodePort is served.
pub(super) fn spec(
    key: &PortKey,
    port: &PortState,
    defaults: &Settings,
    node_frontends: impl Fn(u16) -> Vec<SocketAddr>,
) -> PortSpec {
    let forwarding = defaults.forwarding.of(port.forwarding);
    let is_direct = match key.name.protocol {
        Protocol::TCP => forwarding != ServiceForwarding::Snat,
        Protocol::UDP => forwarding == ServiceForwarding::Dsr,
        _ => false,
    };
    let frontends = port.frontends.iter().flat_map(|frontend| {
        let addresses = match frontend.listen {
            Listen::Address(address) => vec![address],
            Listen::NodePort(port) => node_frontends(port),
        };
        let addresses = addresses.into_iter();
        addresses.map(move |address| frontend_spec(frontend, address, is_direct))
    });
    let ranges = port.frontends.iter();
    let ranges = ranges.filter_map(|frontend| frontend.source_ranges.as_deref());
    let ranges: BTreeSet<_> = ranges.flatten().copied().collect();
    let affinity = port.affinity.map_or(0, |affinity| {
        u32::try_from(affinity.as_secs()).unwrap_or(u32::MAX).max(1)
    });
    PortSpec {
        owner: key.name.service.namespace.clone(),
        protocol: key.name.protocol.0,
        frontends: frontends.collect(),
        cluster: backends(&port.cluster),
        local: backends(&port.local),
        lingering: port.lingering.clone(),
        source_ranges: ranges.into_iter().collect(),
        affinity_secs: affinity,
        algorithm: match port.algorithm.unwrap_or(defaults.algorithm) {
            Algorithm::Random => ALGORITHM_RANDOM,
            Algorithm::RoundRobin => ALGORITHM_ROUND_ROBIN,
            Algorithm::Maglev => ALGORITHM_MAGLEV,
            Algorithm::LeastConnection => ALGORITHM_LEAST_CONNECTION,
        },
    }
}

fn frontend_spec(frontend: &Frontend, address: SocketAddr, is_direct: bool) -> FrontendSpec {
    let is_external = frontend.kind != FrontendKind::ClusterIp;
    let mut flags = 0;
    if frontend.source_ranges.is_some() {
        flags |= FRONTEND_RESTRICTED;
    }
    if is_external && frontend.policy == TrafficPolicy::Local {
        flags |= FRONTEND_KEEPS_SOURCE;
    }
    if is_direct {
        flags |= FRONTEND_DIRECT;
    }
    FrontendSpec {
        address,
        kind: match frontend.kind {
            FrontendKind::ClusterIp => KIND_CLUSTER_IP,
            FrontendKind::LoadBalancer => KIND_LOAD_BALANCER,
            FrontendKind::ExternalIp => KIND_EXTERNAL_IP,
            FrontendKind::NodePort => KIND_NODE_PORT,
        },
        flags,
        inside: target(frontend.inside),
        outside: target(frontend.outside),
    }
}

fn target(target: Target) -> services::Target {
    match target {
        Target::Cluster => services::Target::Cluster,
        Target::Local => services::Target::Local,
        Target::Drop => services::Target::Drop,
        Target::Reject => services::Target::Reject,
    }
}

fn backends(list: &[Backend]) -> Vec<BackendSpec> {
    let list = list.iter();
    list.map(|backend| BackendSpec {
        address: backend.address,
        weight: backend.weight,
    })
    .collect()
}
