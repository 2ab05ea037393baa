//! Random sequences of events, against a plain model that computes all from the objects that there are.

use std::net::IpAddr;
use std::sync::Arc;

use health_model::policy::Protocol;
use jiff::Timestamp;
use proptest::prelude::*;
use proptest::sample::{select, subsequence};

use super::super::*;
use super::bed::{Bed, ENDING, ILL, READY, port};
use crate::spec::{
    Common, Conditions, Endpoint, EndpointSlice, Hints, Service, ServicePort, ServiceType,
    SliceEndpoint, SliceName, SlicePort, SourceRanges, TrafficPolicy,
};

/// Sequences, many if asked for.
fn sequences() -> ProptestConfig {
    let is_long = std::env::var_os("HEALTH_AGENT_LONG").is_some_and(|value| value == "1");
    ProptestConfig::with_cases(if is_long { 200_000 } else { 10_000 })
}

const SERVICES: [&str; 4] = ["a", "b", "c", "d"];
const SLICES: [&str; 4] = ["s1", "s2", "s3", "s4"];

#[derive(Clone, Debug)]
enum Event {
    Service(Service),
    NoService(&'static str),
    Slice(EndpointSlice),
    NoSlice(&'static str),
    Zone(&'static str),
    Sync,
}

fn service() -> impl Strategy<Value = Service> {
    let policy = || select(vec![TrafficPolicy::Cluster, TrafficPolicy::Local]);
    let ips = || -> Vec<IpAddr> {
        // One of them is the ClusterIP of a service.
        let texts = ["192.0.2.1", "192.0.2.2", "fd00::e", "10.96.0.98"];
        texts.iter().map(|text| text.parse().unwrap()).collect()
    };
    let node_port = || select(vec![None, None, Some(30_000), Some(30_001)]);
    let ports = prop::collection::vec((select(vec![80, 81]), node_port()), 0..3);
    (
        (
            select(SERVICES.to_vec()),
            prop::option::of(0_i64..3),
            any::<[bool; 3]>(),
        ),
        (subsequence(ips(), 0..3), subsequence(ips(), 0..2)),
        (
            policy(),
            policy(),
            prop::option::weighted(0.2, 31_000_u16..31_002),
        ),
        (any::<bool>(), ports, any::<bool>()),
    )
        .prop_map(
            |((name, created, families), (external, balancer), policies, rest)| {
                let last = name.as_bytes()[0];
                let v4: IpAddr = [10, 96, 0, last].into();
                let v6: IpAddr = format!("fd00:96::{last}").parse().unwrap();
                let common = Arc::new(Common {
                    name: ServiceName::new("shop", name),
                    kind: ServiceType::ClusterIp,
                    created: created.map(|at| Timestamp::from_second(at).unwrap()),
                    // Two of three that are not of both families are of IPv4 alone.
                    cluster_ips: match families {
                        [true, true, _] => vec![v4, v6],
                        [false, false, false] => vec![v6],
                        _ => vec![v4],
                    },
                    external_ips: external,
                    load_balancer_ips: balancer,
                    source_ranges: SourceRanges {
                        networks: vec!["10.0.0.0/8".parse().unwrap()],
                        has_error: rest.0,
                    },
                    affinity: None,
                    internal_policy: policies.0,
                    external_policy: policies.1,
                    health_check_node_port: policies.2,
                    algorithm: None,
                });
                let ports = rest.1.into_iter().enumerate();
                let ports = ports.map(|(i, (number, node_port))| {
                    let name = ["http", "dns"][i];
                    let protocol = if rest.2 && i == 1 {
                        Protocol::UDP
                    } else {
                        Protocol::TCP
                    };
                    port(&common, name, protocol, number, node_port)
                });
                Service {
                    ports: ports.collect(),
                    common: common.clone(),
                }
            },
        )
}

fn endpoint() -> impl Strategy<Value = (u8, Conditions, Option<&'static str>, Option<Hints>)> {
    let conditions = select(vec![READY, READY, READY, ENDING, ILL]);
    let node = select(vec![None, Some("here"), Some("there"), Some("there")]);
    let names = |names: [&'static str; 2]| subsequence(names.map(Arc::<str>::from).to_vec(), 0..=2);
    let hints = (names(["here", "there"]), names(["z1", "z2"]));
    let hints = hints.prop_map(|(nodes, zones)| Hints { nodes, zones });
    (
        1_u8..6,
        conditions,
        node,
        prop::option::weighted(0.9, hints),
    )
}

fn slice() -> impl Strategy<Value = EndpointSlice> {
    let ports = subsequence(
        vec![
            ("http", Protocol::TCP),
            ("dns", Protocol::TCP),
            ("dns", Protocol::UDP),
        ],
        0..=3,
    );
    let family = select(vec![Family::V4, Family::V4, Family::V6]);
    let endpoints = prop::collection::vec(endpoint(), 0..5);
    (
        select(SLICES.to_vec()),
        select(SERVICES.to_vec()),
        family,
        ports,
        endpoints,
        1_u16..3,
    )
        .prop_map(
            |(name, service, family, ports, endpoints, weight)| EndpointSlice {
                name: SliceName::new("shop", name),
                service: ServiceName::new("shop", service),
                family,
                ports: ports
                    .into_iter()
                    .map(|(name, protocol)| SlicePort {
                        name: name.into(),
                        protocol,
                        port: 8080,
                    })
                    .collect(),
                endpoints: endpoints
                    .into_iter()
                    .map(|(last, conditions, node, hints)| SliceEndpoint {
                        address: match family {
                            Family::V4 => [10, 1, 0, last].into(),
                            Family::V6 => format!("fd00:1::{last}").parse().unwrap(),
                        },
                        conditions,
                        node: node.map(Arc::from),
                        zone: None,
                        hints: hints.map(Arc::new),
                    })
                    .collect(),
                weight,
            },
        )
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        5 => service().prop_map(Event::Service),
        2 => select(SERVICES.to_vec()).prop_map(Event::NoService),
        6 => slice().prop_map(Event::Slice),
        2 => select(SLICES.to_vec()).prop_map(Event::NoSlice),
        1 => select(vec!["z1", "z2", "z3"]).prop_map(Event::Zone),
        4 => Just(Event::Sync),
    ]
}

/// The objects that there are.
#[derive(Debug, Default)]
struct Model {
    services: BTreeMap<ServiceName, Service>,
    slices: BTreeMap<SliceName, EndpointSlice>,
    zone: &'static str,
}

/// A port and where it wants to be.
type Wanted<'a> = (PortKey, &'a ServicePort, Vec<(Listen, FrontendKind)>);

impl Model {
    /// The endpoints of a port, in no order, each address once.
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
                        Some(one) if endpoint.is_local && !one.is_local => *one = endpoint,
                        Some(_) => {}
                    }
                }
            }
        }
        found.sort_by_key(|endpoint| endpoint.address.to_string());
        found
    }

    /// Each port and family that is served, with where it wants to be.
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

    /// What is to be done, and who is told that another comes first.
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
                let rivals = all.iter().filter(|(other, _, wanted)| {
                    other.family == key.family
                        && other.name.protocol == key.name.protocol
                        && wanted.iter().any(|(place, _)| place == listen)
                });
                let owner = rivals.min_by_key(|(other, port, wanted)| {
                    let is_cluster_ip = wanted.contains(&(*listen, FrontendKind::ClusterIp));
                    (!is_cluster_ip, port.service.created, other.name.clone())
                });
                let owner = &owner.unwrap().0;
                if owner != key {
                    conflicts.push(Conflict {
                        key: key.clone(),
                        listen: *listen,
                        kind: *kind,
                        owner: owner.name.clone(),
                    });
                    continue;
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
            };
            ports.insert(key.clone(), state);
        }
        conflicts.sort_by_key(|conflict| conflict.key.clone());
        (ports, conflicts)
    }

    /// The cluster list and the local one.
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
                    // A change of the node is a sync of its own: what waits goes on waiting.
                    model.zone = zone;
                    let known: BTreeMap<_, _> = owned(&bed.state);
                    let changed = bed.state.set_topology(super::bed::topology(zone));
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
