//! Random sequences of events, checked against a simple model that computes everything from the current objects.

use std::net::IpAddr;
use std::sync::Arc;

use proptest::prelude::*;

use super::super::*;
use super::bed::Bed;
use super::events::{Event, event};
use crate::spec::{
    Conditions, Endpoint, EndpointSlice, Service, ServicePort, SliceName, TrafficPolicy,
};

/// Number of random sequences; many if requested.
fn sequences() -> ProptestConfig {
    let is_long = std::env::var_os("HEALTH_AGENT_LONG").is_some_and(|value| value == "1");
    ProptestConfig::with_cases(if is_long { 200_000 } else { 3_000 })
}

/// The current objects.
#[derive(Debug, Default)]
struct Model {
    services: BTreeMap<ServiceName, Service>,
    slices: BTreeMap<SliceName, EndpointSlice>,
    zone: &'static str,
    /// The addresses of the node.
    own: BTreeSet<IpAddr>,
    /// Whether anything is reserved yet.
    is_reserved: bool,
}

/// The order in which ports get an address: first ports to which the cluster assigned it, then by age, then by name.
type Rank = (bool, Option<Timestamp>, ServicePortName);

fn rank(key: &PortKey, port: &ServicePort, kind: FrontendKind) -> Rank {
    let is_written = kind != FrontendKind::ClusterIp;
    (is_written, port.service.created, key.name.clone())
}

/// A port, and the addresses and node ports that it wants.
type Wanted<'a> = (PortKey, &'a ServicePort, Vec<(Listen, FrontendKind)>);

impl Model {
    /// Returns the endpoints of a port, unordered and without duplicate addresses.
    fn endpoints(&self, key: &PortKey) -> Vec<Endpoint> {
        let mut found: Vec<Endpoint> = Vec::new();
        for slice in self.slices.values() {
            for port in &slice.ports {
                let is_its = slice.service == key.name.service
                    && slice.family == key.family
                    && (&port.name, port.protocol) == (&key.name.port, key.name.protocol);
                for endpoint in slice.endpoints.iter().filter(|_| is_its) {
                    let endpoint = Endpoint {
                        address: SocketAddr::new(endpoint.address, port.port),
                        conditions: endpoint.conditions,
                        is_local: endpoint.node.as_deref() == Some("here"),
                        weight: slice.weight,
                        node: endpoint.node.clone(),
                        zone: endpoint.zone.clone(),
                        hints: endpoint.hints.clone(),
                    };
                    match found.iter_mut().find(|one| one.address == endpoint.address) {
                        None => found.push(endpoint),
                        Some(one) if comes_first(&endpoint, one) => *one = endpoint,
                        Some(_) => {}
                    }
                }
            }
        }
        found.sort_by_key(|endpoint| endpoint.address.to_string());
        found
    }

    /// Returns each served port and family, with the addresses and node ports that it wants.
    fn wanted(&self) -> Vec<Wanted<'_>> {
        let mut all = Vec::new();
        for port in self.services.values().flat_map(|service| &service.ports) {
            for family in Family::ALL {
                let common = &port.service;
                if !common
                    .cluster_ips
                    .iter()
                    .any(|ip| Family::of(*ip) == family)
                {
                    continue;
                }
                let mut wanted: Vec<(Listen, FrontendKind)> = Vec::new();
                let cluster = common
                    .cluster_ips
                    .iter()
                    .map(|ip| (ip, FrontendKind::ClusterIp));
                let balancer = common.load_balancer_ips.iter();
                let balancer = balancer.map(|ip| (ip, FrontendKind::LoadBalancer));
                let external = common
                    .external_ips
                    .iter()
                    .map(|ip| (ip, FrontendKind::ExternalIp));
                for (ip, kind) in cluster.chain(balancer).chain(external) {
                    let listen = Listen::Address(SocketAddr::new(*ip, port.port));
                    let is_known = wanted.iter().any(|(known, _)| *known == listen);
                    if Family::of(*ip) == family && !is_known {
                        wanted.push((listen, kind));
                    }
                }
                let node_port = port.node_port.map(Listen::NodePort);
                wanted.extend(node_port.map(|listen| (listen, FrontendKind::NodePort)));
                let name = port.full_name();
                all.push((PortKey { name, family }, port, wanted));
            }
        }
        all
    }

    /// Returns the desired state and the conflicts.
    fn state(&self) -> (BTreeMap<PortKey, PortState>, Vec<Conflict>) {
        let all = self.wanted();
        let mut ports = BTreeMap::new();
        let mut conflicts = Vec::new();
        for (key, port, wanted) in &all {
            let endpoints = self.endpoints(key);
            let (cluster, local) = self.lists(&endpoints, port);
            let exists = endpoints.iter().any(|endpoint| {
                let Conditions {
                    ready,
                    serving,
                    terminating,
                } = endpoint.conditions;
                ready || (serving && terminating)
            });
            let target = |is_local: bool| match is_local {
                false if !cluster.is_empty() => Target::Cluster,
                true if !local.is_empty() => Target::Local,
                _ if exists => Target::Drop,
                _ => Target::Reject,
            };
            let mut frontends = Vec::new();
            for (listen, kind) in wanted {
                let conflict = |listen, owner| Conflict {
                    key: key.clone(),
                    listen,
                    kind: *kind,
                    owner,
                };
                if let Some(reason) = self.refused(key, *listen, *kind) {
                    conflicts.push(conflict(*listen, Owner::Node(reason)));
                    continue;
                }
                let mine = rank(key, port, *kind);
                if let Some(name) = self.first(&all, key, *listen).filter(|first| *first < mine) {
                    conflicts.push(conflict(*listen, Owner::Port(name.2)));
                    continue;
                }
                if let Listen::NodePort(number) = listen {
                    for ip in self.own.iter().filter(|ip| Family::of(**ip) == key.family) {
                        let place = Listen::Address(SocketAddr::new(*ip, *number));
                        let first = self.first(&all, key, place);
                        if let Some(first) =
                            first.filter(|first| *first < mine && first.2 != key.name)
                        {
                            conflicts.push(conflict(place, Owner::Port(first.2)));
                        }
                    }
                }
                let is_internal = *kind == FrontendKind::ClusterIp;
                let policy = if is_internal {
                    port.service.internal_policy
                } else {
                    port.service.external_policy
                };
                let is_local = policy == TrafficPolicy::Local;
                let ranges = port.service.source_ranges.of(key.family);
                frontends.push(Frontend {
                    listen: *listen,
                    kind: *kind,
                    policy,
                    inside: target(is_local && is_internal),
                    outside: target(is_local),
                    source_ranges: ranges
                        .filter(|_| *kind == FrontendKind::LoadBalancer)
                        .map(Into::into),
                });
            }
            let backends = |list: &[&Endpoint]| -> Vec<Backend> {
                let backend = |endpoint: &&Endpoint| Backend {
                    address: endpoint.address,
                    weight: endpoint.weight,
                    is_local: endpoint.is_local,
                };
                list.iter().map(backend).collect()
            };
            let lingering = endpoints.iter().filter(|endpoint| {
                endpoint.conditions.serving
                    && !cluster.contains(endpoint)
                    && !local.contains(endpoint)
            });
            let state = PortState {
                frontends,
                cluster: backends(&cluster),
                local: backends(&local),
                lingering: lingering.map(|endpoint| endpoint.address).collect(),
                affinity: port.service.affinity,
                algorithm: port.service.algorithm,
                forwarding: port.service.forwarding,
            };
            ports.insert(key.clone(), state);
        }
        conflicts.sort_by_key(|conflict| conflict.key.clone());
        (ports, conflicts)
    }

    /// Returns why no service may have an address or node port.
    fn refused(&self, key: &PortKey, listen: Listen, kind: FrontendKind) -> Option<ReservedFor> {
        if !self.is_reserved {
            return self.checked(key, listen);
        }
        let (ip, number) = match listen {
            Listen::Address(address) => (Some(address.ip()), address.port()),
            Listen::NodePort(number) => (None, number),
        };
        if kind != FrontendKind::ClusterIp && ip == Some([192, 0, 2, 2].into()) {
            let cidr = "192.0.2.2/32".parse().unwrap();
            return Some(ReservedFor::Pods("west/there".to_owned(), cidr));
        }
        let is_own = ip.is_none_or(|ip| self.own.contains(&ip));
        if is_own && number == 81 && key.name.protocol == Protocol::TCP {
            return Some(ReservedFor::Agent("--health-port".to_owned()));
        }
        self.checked(key, listen)
    }

    /// Returns the health check that uses an address or node port.
    fn checked(&self, key: &PortKey, listen: Listen) -> Option<ReservedFor> {
        let number = match listen {
            Listen::NodePort(number) => number,
            Listen::Address(address) if self.own.contains(&address.ip()) => address.port(),
            Listen::Address(_) => return None,
        };
        if key.name.protocol != Protocol::TCP {
            return None;
        }
        let mut services = self.services.iter().filter(|(_, service)| {
            // A service without ports has no health check.
            !service.ports.is_empty() && service.common.health_check_node_port == Some(number)
        });
        let (name, _) = services.next()?;
        Some(ReservedFor::HealthCheck(name.clone()))
    }

    /// Returns the first port that may be served where another port wants to be: at the same address or node port, or
    /// through a NodePort at that address of the node.
    fn first(&self, all: &[Wanted<'_>], key: &PortKey, listen: Listen) -> Option<Rank> {
        let is_there = |place: Listen| match (place, listen) {
            (Listen::NodePort(number), Listen::Address(address)) => {
                number == address.port() && self.own.contains(&address.ip())
            }
            _ => place == listen,
        };
        let ranks = all.iter().flat_map(|(other, port, wanted)| {
            let is_rival = other.family == key.family && other.name.protocol == key.name.protocol;
            let wanted = wanted.iter().filter(move |_| is_rival);
            wanted
                .filter(|(place, kind)| {
                    is_there(*place) && self.refused(other, *place, *kind).is_none()
                })
                .map(|(_, kind)| rank(other, port, *kind))
        });
        // A port that is listed both by its address and by its NodePort takes precedence through either.
        let first = ranks.min()?;
        (first.2 != key.name).then_some(first)
    }

    /// Returns the cluster list and the local list.
    fn lists<'a>(
        &self,
        all: &'a [Endpoint],
        port: &ServicePort,
    ) -> (Vec<&'a Endpoint>, Vec<&'a Endpoint>) {
        let common = &port.service;
        let is_external = port.node_port.is_some()
            || !common.external_ips.is_empty()
            || !common.load_balancer_ips.is_empty();
        let ready: Vec<_> = all
            .iter()
            .filter(|endpoint| endpoint.conditions.ready)
            .collect();
        let last: Vec<_> = all
            .iter()
            .filter(|endpoint| endpoint.conditions.serving && endpoint.conditions.terminating)
            .collect();
        let nodes = |endpoint: &Endpoint| -> Vec<Arc<str>> {
            endpoint
                .hints
                .as_ref()
                .map(|hints| hints.nodes.clone())
                .unwrap_or_default()
        };
        let zones = |endpoint: &Endpoint| -> Vec<Arc<str>> {
            endpoint
                .hints
                .as_ref()
                .map(|hints| hints.zones.clone())
                .unwrap_or_default()
        };
        let hinted = |names: &dyn Fn(&Endpoint) -> Vec<Arc<str>>, own: &str| {
            let own = Arc::from(own);
            let all = ready.iter().all(|endpoint| !names(endpoint).is_empty());
            let matching: Vec<_> = ready
                .iter()
                .copied()
                .filter(|endpoint| names(endpoint).contains(&own))
                .collect();
            (all && !matching.is_empty()).then_some(matching)
        };
        let mut cluster = hinted(&nodes, "here")
            .or_else(|| hinted(&zones, self.zone))
            .unwrap_or_else(|| ready.clone());
        if cluster.is_empty() {
            cluster = last.clone();
        }
        if common.internal_policy == TrafficPolicy::Local && !is_external {
            cluster.clear();
        }
        let here = |list: &[&'a Endpoint]| -> Vec<&'a Endpoint> {
            list.iter()
                .copied()
                .filter(|endpoint| endpoint.is_local)
                .collect()
        };
        let mut local = here(&ready);
        if local.is_empty() {
            local = here(&last);
        }
        let is_local = common.internal_policy == TrafficPolicy::Local
            || (common.external_policy == TrafficPolicy::Local && is_external);
        if !is_local {
            local.clear();
        }
        (cluster, local)
    }
}

/// Whether an endpoint is used instead of another one with the same address.
fn comes_first(one: &Endpoint, other: &Endpoint) -> bool {
    let (a, b) = (one.conditions, other.conditions);
    if a.terminating != b.terminating {
        return b.terminating;
    }
    if a.serving != b.serving {
        return a.serving;
    }
    if a.ready != b.ready {
        return a.ready;
    }
    one.is_local && !other.is_local
}

proptest! {
    #![proptest_config(sequences())]

    #[test]
    fn after_each_sync_the_state_is_that_of_the_objects_and_changes_are_what_differs(
        events in prop::collection::vec(event(), 1..30),
    ) {
        let mut bed = Bed::new();
        let mut model = Model { zone: "z1", ..Model::default() };
        let mut before = BTreeMap::new();
        for event in events.into_iter().chain([Event::Sync]) {
            match event {
                Event::Service(service) => {
                    model.services.insert(service.common.name.clone(), service.clone());
                    bed.set(service);
                }
                Event::NoService(name) => {
                    model.services.remove(&ServiceName::new("shop", name));
                    bed.unset(name);
                }
                Event::Slice(slice) => {
                    model.slices.insert(slice.name.clone(), slice.clone());
                    bed.slice(slice);
                }
                Event::NoSlice(name) => {
                    let name = SliceName::new("shop", name);
                    let was_there = model.slices.remove(&name).is_some();
                    prop_assert_eq!(bed.endpoints.remove(&name), was_there);
                }
                Event::Zone(zone) => {
                    // A change of the node is applied separately: pending changes stay pending.
                    model.zone = zone;
                    let known: BTreeMap<_, _> = owned(&bed.state);
                    let changed = bed.state.set_topology(super::bed::topology(zone));
                    prop_assert_eq!(changed, difference(&known, &owned(&bed.state)));
                    before = owned(&bed.state);
                }
                Event::Own(own) => {
                    model.own = own.clone();
                    model.is_reserved = true;
                    let known: BTreeMap<_, _> = owned(&bed.state);
                    let reserved = Arc::new(super::bed::reserved(own));
                    let changed = bed.state.set_reserved(&reserved);
                    prop_assert_eq!(changed, difference(&known, &owned(&bed.state)));
                    before = owned(&bed.state);
                }
                Event::Sync => {
                    let changes = bed.state.sync(&mut bed.services, &mut bed.endpoints);
                    let (ports, conflicts) = model.state();
                    let now = owned(&bed.state);
                    prop_assert_eq!(&now, &ports);
                    prop_assert_eq!(bed.state.conflicts().cloned().collect::<Vec<_>>(), conflicts);
                    prop_assert_eq!(&bed.state, &bed.state.recomputed());
                    prop_assert_eq!(changes.ports, difference(&before, &ports));
                    prop_assert_eq!((bed.services.pending(), bed.endpoints.pending()), (0, 0));
                    before = now;
                }
            }
        }
    }
}

fn owned(state: &State) -> BTreeMap<PortKey, PortState> {
    let ports = state.ports();
    ports
        .map(|(key, port)| (key.clone(), port.clone()))
        .collect()
}

fn difference(
    before: &BTreeMap<PortKey, PortState>,
    after: &BTreeMap<PortKey, PortState>,
) -> BTreeSet<PortKey> {
    let keys = before.keys().chain(after.keys());
    keys.filter(|key| before.get(key) != after.get(key))
        .cloned()
        .collect()
}
