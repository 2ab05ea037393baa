//! The plan of a port.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use health_model::ipam::Family;
use ipnet::IpNet;

use super::super::netlink::ipset::Entry;
use super::super::netlink::server::{Flags, Scheduler, ServerKey};
use super::super::sets::{SetId, SetKind};
use super::{NodeAddresses, PlanSettings, Server};
use crate::spec::{Algorithm, PortKey, TrafficPolicy};
use crate::state::{Backend, Frontend, FrontendKind, Listen, PortState, Target};

/// One port's part of the plan.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct PortPlan {
    /// The port's virtual servers, and whether each is for a NodePort.
    pub(super) servers: BTreeMap<ServerKey, (bool, Arc<Server>)>,
    pub(super) entries: BTreeSet<(SetId, Entry)>,
    pub(super) addresses: BTreeSet<IpAddr>,
}

pub(super) fn plan(
    key: &PortKey,
    state: &PortState,
    node: &NodeAddresses,
    settings: &PlanSettings,
) -> PortPlan {
    let mut builder = Builder {
        key,
        node,
        settings,
        plan: PortPlan::default(),
    };
    let server = |backends: &[Backend]| Arc::new(server(state, backends, &settings.scheduler));
    let (cluster, local, none) = (server(&state.cluster), server(&state.local), server(&[]));
    for frontend in &state.frontends {
        let server = match target(frontend) {
            Target::Cluster => &cluster,
            Target::Local => &local,
            Target::Drop | Target::Reject => &none,
        };
        builder.add(frontend, server);
    }
    if builder.plan.servers.is_empty() {
        return builder.plan;
    }
    for backend in state.cluster.iter().chain(&state.local) {
        if backend.is_local {
            let (ip, port) = (backend.address.ip(), backend.address.port());
            let entry = Entry::IpPortIp(ip, key.name.protocol, port, ip);
            builder.entry(SetKind::LoopBack, entry);
        }
    }
    builder.plan
}

/// Returns the endpoints of a virtual server. A virtual server treats all sources alike: if some traffic must go to
/// endpoints of this node, all traffic does. Where traffic from other machines must be dropped, a rule does that.
fn target(frontend: &Frontend) -> Target {
    match frontend.outside {
        Target::Drop => frontend.inside,
        outside => outside,
    }
}

fn server(state: &PortState, backends: &[Backend], default: &Scheduler) -> Server {
    let weight = |backend: &Backend| (backend.address, u32::from(backend.weight));
    let real: BTreeMap<_, _> = backends.iter().map(weight).collect();
    let mut scheduler = match state.algorithm {
        // IPVS has no random scheduler.
        Some(Algorithm::Random | Algorithm::RoundRobin) => Scheduler::RoundRobin,
        Some(Algorithm::Maglev) => Scheduler::Maglev,
        Some(Algorithm::LeastConnection) => Scheduler::LeastConnection,
        None => default.clone(),
    };
    let mut weights = real.values();
    let first = weights.next();
    if weights.any(|weight| Some(weight) != first) {
        scheduler = scheduler.weighted();
    }
    let mut flags = Flags::default();
    if state.affinity.is_some() {
        flags = flags | Flags::PERSISTENT;
    }
    if scheduler == Scheduler::Maglev {
        flags = flags | Flags::SCHEDULER_2;
    }
    let timeout = state.affinity.map_or(0, |affinity| affinity.as_secs());
    let others = state.cluster.iter().chain(&state.local);
    let others = others.map(|backend| &backend.address);
    // Endpoints for other traffic only are not part of this server, but still serve.
    let lingering = state.lingering.iter().chain(others);
    Server {
        scheduler,
        flags,
        timeout: u32::try_from(timeout).unwrap_or(u32::MAX),
        lingering: lingering
            .filter(|address| !real.contains_key(*address))
            .copied()
            .collect(),
        real,
    }
}

struct Builder<'a> {
    key: &'a PortKey,
    node: &'a NodeAddresses,
    settings: &'a PlanSettings,
    plan: PortPlan,
}

impl Builder<'_> {
    fn add(&mut self, frontend: &Frontend, server: &Arc<Server>) {
        let protocol = self.key.name.protocol;
        let (mut addresses, is_node_port): (Vec<_>, _) = match frontend.listen {
            Listen::Address(address) => (vec![address], false),
            Listen::NodePort(port) => {
                let addresses = self.node.node_ports.iter();
                let addresses = addresses.filter(|ip| Family::of(**ip) == self.key.family);
                let addresses = addresses.map(|ip| SocketAddr::new(*ip, port));
                (addresses.collect(), true)
            }
        };
        addresses.retain(|address| !self.settings.excludes(address.ip()));
        if addresses.is_empty() {
            return;
        }
        let keeps_source = frontend.policy == TrafficPolicy::Local;
        match (frontend.kind, frontend.listen) {
            (FrontendKind::NodePort, Listen::NodePort(port)) => {
                let kind = SetKind::node_port(protocol, keeps_source);
                match kind {
                    SetKind::NodePortSctp | SetKind::NodePortLocalSctp => {
                        self.entries(kind, &addresses);
                    }
                    _ => self.entry(kind, Entry::Port(port)),
                }
            }
            (kind, _) => self.entries(set_of(kind, keeps_source), &addresses),
        }
        match (frontend.outside, frontend.inside) {
            (Target::Reject, _) => self.entries(SetKind::Reject, &addresses),
            (Target::Drop, Target::Cluster | Target::Local) => {
                self.entries(SetKind::DropOutside, &addresses);
            }
            (Target::Drop, _) => self.entries(SetKind::Drop, &addresses),
            _ => {}
        }
        if let Some(ranges) = &frontend.source_ranges {
            for address in &addresses {
                self.restrict(*address, ranges);
            }
        }
        for address in addresses {
            let key = ServerKey { address, protocol };
            let server = (is_node_port, server.clone());
            self.plan.servers.entry(key).or_insert(server);
            if !self.node.all.contains(&address.ip()) {
                self.plan.addresses.insert(address.ip());
            }
        }
    }

    /// Allows only these sources at an address. The node itself is allowed if one of its addresses is: the packets that
    /// it sends there have the address itself as their source.
    fn restrict(&mut self, address: SocketAddr, ranges: &[IpNet]) {
        let (ip, port, protocol) = (address.ip(), address.port(), self.key.name.protocol);
        self.entries(SetKind::LoadBalancerFirewall, &[address]);
        for range in ranges.iter().flat_map(halves) {
            let entry = Entry::IpPortNet(ip, protocol, port, range);
            self.entry(SetKind::SourceCidr, entry);
        }
        let mut own = self.node.all.iter();
        if own.any(|own| ranges.iter().any(|range| range.contains(own))) {
            let entry = Entry::IpPortIp(ip, protocol, port, ip);
            self.entry(SetKind::SourceIp, entry);
        }
    }

    fn entries(&mut self, kind: SetKind, addresses: &[SocketAddr]) {
        let protocol = self.key.name.protocol;
        for address in addresses {
            let entry = Entry::IpPort(address.ip(), protocol, address.port());
            self.entry(kind, entry);
        }
    }

    fn entry(&mut self, kind: SetKind, entry: Entry) {
        let family = self.key.family;
        self.plan.entries.insert((SetId { family, kind }, entry));
    }
}

fn set_of(kind: FrontendKind, keeps_source: bool) -> SetKind {
    match (kind, keeps_source) {
        (FrontendKind::ClusterIp, _) => SetKind::ClusterIp,
        (FrontendKind::LoadBalancer, false) => SetKind::LoadBalancer,
        (FrontendKind::LoadBalancer, true) => SetKind::LoadBalancerLocal,
        (_, false) => SetKind::ExternalIp,
        (_, true) => SetKind::ExternalIpLocal,
    }
}

/// Converts a network to the form that sets can store. They do not support a prefix length of 0, so the network of all
/// addresses becomes two networks.
fn halves(network: &IpNet) -> Vec<IpNet> {
    match network.prefix_len() {
        0 => network
            .subnets(1)
            .map_or_else(|_| vec![*network], Iterator::collect),
        _ => vec![*network],
    }
}
