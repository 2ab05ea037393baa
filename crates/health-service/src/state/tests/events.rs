//! Random events.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use health_model::ipam::Family;
use health_model::policy::Protocol;
use health_model::settings::ServiceForwarding;
use jiff::Timestamp;
use proptest::prelude::*;
use proptest::sample::{select, subsequence};

use super::bed::{Bed, ENDED, ENDING, ILL, READY, port};
use crate::spec::{
    Algorithm, Common, Conditions, EndpointSlice, Hints, Service, ServiceName, ServiceType,
    SliceEndpoint, SliceName, SlicePort, SourceRanges, TrafficPolicy,
};

const SERVICES: [&str; 4] = ["a", "b", "c", "d"];
const SLICES: [&str; 4] = ["s1", "s2", "s3", "s4"];

/// An event on a node.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    Service(Service),
    NoService(&'static str),
    Slice(EndpointSlice),
    NoSlice(&'static str),
    Zone(&'static str),
    /// Sets the addresses of the node.
    Own(BTreeSet<IpAddr>),
    Sync,
}

fn service() -> impl Strategy<Value = Service> {
    let policy = || select(vec![TrafficPolicy::Cluster, TrafficPolicy::Local]);
    let ips = || -> Vec<IpAddr> {
        // One of these is also a service's ClusterIP.
        let texts = ["192.0.2.1", "192.0.2.2", "fd00::e", "10.96.0.98"];
        texts.iter().map(|text| text.parse().unwrap()).collect()
    };
    let node_port = || {
        select(vec![
            None,
            None,
            Some(30_000),
            Some(30_001),
            Some(31_000),
            Some(81),
        ])
    };
    let ports = prop::collection::vec((select(vec![80, 81, 30_000, 31_000]), node_port()), 0..3);
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
        (
            prop::option::of(Just(Duration::from_secs(60))),
            prop::option::of(select(Algorithm::ALL.to_vec())),
            prop::option::of(select(ServiceForwarding::ALL.to_vec())),
        ),
    )
        .prop_map(
            |(
                (name, created, families),
                (external, balancer),
                policies,
                rest,
                (affinity, algorithm, forwarding),
            )| {
                let last = name.as_bytes()[0];
                let v4: IpAddr = [10, 96, 0, last].into();
                let v6: IpAddr = format!("fd00:96::{last}").parse().unwrap();
                let common = Arc::new(Common {
                    name: ServiceName::new("shop", name),
                    kind: ServiceType::ClusterIp,
                    created: created.map(|at| Timestamp::from_second(at).unwrap()),
                    // Most services with a single family are IPv4.
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
                    affinity,
                    internal_policy: policies.0,
                    external_policy: policies.1,
                    health_check_node_port: policies.2,
                    algorithm,
                    forwarding,
                    local_readiness: false,
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
    let conditions = select(vec![READY, READY, READY, ENDING, ENDED, ILL]);
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
    let endpoints = prop::collection::vec(endpoint(), 0..6);
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

fn own() -> impl Strategy<Value = BTreeSet<IpAddr>> {
    // The last of these does not occur in services.
    let all = ["192.0.2.1", "fd00::e", "10.96.0.98", "192.0.2.99"];
    let all = all.map(|text| text.parse().unwrap());
    subsequence(all.to_vec(), 0..=4).prop_map(|own| own.into_iter().collect())
}

pub(crate) fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        5 => service().prop_map(Event::Service),
        2 => select(SERVICES.to_vec()).prop_map(Event::NoService),
        6 => slice().prop_map(Event::Slice),
        2 => select(SLICES.to_vec()).prop_map(Event::NoSlice),
        1 => select(vec!["z1", "z2", "z3"]).prop_map(Event::Zone),
        1 => own().prop_map(Event::Own),
        4 => Just(Event::Sync),
    ]
}

impl Bed {
    /// Applies an event other than a sync.
    pub(crate) fn happen(&mut self, event: Event) {
        match event {
            Event::Service(service) => self.set(service),
            Event::NoService(name) => self.unset(name),
            Event::Slice(slice) => self.slice(slice),
            Event::NoSlice(name) => {
                self.endpoints.remove(&SliceName::new("shop", name));
            }
            Event::Zone(zone) => {
                self.state.set_topology(super::bed::topology(zone));
            }
            Event::Own(own) => {
                self.state
                    .set_reserved(&Arc::new(super::bed::reserved(own)));
            }
            Event::Sync => {}
        }
    }
}
