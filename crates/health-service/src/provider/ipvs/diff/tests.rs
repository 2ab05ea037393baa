//! Random states on a simulated kernel, and single cases.

use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::provider::ipvs::plan::{NodeAddresses, PlanSettings};
use crate::spec::{PortKey, ServiceName, ServicePortName, TrafficPolicy};
use crate::state::{Backend, Frontend, FrontendKind, Listen, PortState, Target};

/// A simulated kernel, which applies steps and refuses invalid ones.
#[derive(Clone, Debug, Default)]
struct Kernel {
    present: Present,
    /// Connection counts of real servers.
    connections: BTreeMap<(ServerKey, SocketAddr), u32>,
}

impl Kernel {
    fn run(&mut self, steps: &[Step]) {
        for step in steps {
            self.check(step);
            self.present.apply(step);
            // Connection counts are known only after a request for them.
            for server in self.present.servers.values_mut() {
                for real in server.real.values_mut() {
                    real.connections = None;
                }
            }
            let servers = &self.present.servers;
            let is_there = |key: &(ServerKey, SocketAddr)| {
                let server = servers.get(&key.0);
                server.is_some_and(|server| server.real.contains_key(&key.1))
            };
            self.connections.retain(|key, _| is_there(key));
        }
    }

    fn check(&self, step: &Step) {
        let present = &self.present;
        let server = |id: &ServerId| {
            let ServerId::Address(key) = id else {
                panic!("{id:?}")
            };
            assert!(!present.foreign.contains(key), "{step:?}");
            (*key, present.servers.get(key))
        };
        match step {
            Step::AddEntries(set, entries) => {
                assert!(!entries.is_empty());
                for entry in entries {
                    assert!(!present.entries.contains(&(*set, *entry)), "{step:?}");
                }
            }
            Step::DeleteEntries(set, entries) => {
                assert!(!entries.is_empty());
                for entry in entries {
                    assert!(present.entries.contains(&(*set, *entry)), "{step:?}");
                }
            }
            Step::Bind(address) => {
                assert!(!present.addresses.contains(address));
                let entry = (bound_set(*address), Entry::Ip(*address));
                assert!(present.entries.contains(&entry), "open before it is bound");
            }
            Step::Unbind(address) => {
                assert!(present.addresses.contains(address));
            }
            Step::Change(Change::AddServer(one)) => {
                let (key, known) = server(&one.id);
                assert!(known.is_none(), "{step:?}");
                assert!(present.entries.contains(&mark(key)), "not marked as ours");
            }
            Step::Change(Change::SetServer(one)) => assert!(server(&one.id).1.is_some()),
            Step::Change(Change::DeleteServer(id)) => {
                assert!(server(id).1.unwrap().real.is_empty(), "{step:?}");
            }
            Step::Change(Change::AddReal(id, real)) => {
                assert!(!server(id).1.unwrap().real.contains_key(&real.address));
            }
            Step::Change(Change::SetReal(id, real)) => {
                assert!(server(id).1.unwrap().real.contains_key(&real.address));
            }
            Step::Change(Change::DeleteReal(id, real)) => {
                let (key, known) = server(id);
                let known = known.unwrap().real[&real.address];
                if key.protocol == Protocol::TCP {
                    let connections = self.connections.get(&(key, real.address));
                    assert_eq!((known.weight, connections), (0, None), "{step:?}");
                }
            }
        }
    }

    fn listed(&self, key: ServerKey) -> Vec<RealServer> {
        let Some(server) = self.present.servers.get(&key) else {
            return Vec::new();
        };
        let real = server.real.iter().map(|(address, real)| RealServer {
            forwarding: real.forwarding,
            active: self
                .connections
                .get(&(key, *address))
                .copied()
                .unwrap_or_default(),
            ..RealServer::new(*address, real.weight)
        });
        real.collect()
    }
}

fn bound_set(address: IpAddr) -> SetId {
    SetId {
        family: Family::of(address),
        kind: SetKind::BoundIps,
    }
}

/// A provider without a kernel: its plan, and the kernel state that it assumes.
#[derive(Debug, Default)]
struct Provider {
    plan: Plan,
    present: Present,
    node: NodeAddresses,
}

impl Provider {
    /// Starts a provider, which knows only what is in the kernel.
    fn start(kernel: &Kernel, states: &States, node: &NodeAddresses) -> Self {
        let mut provider = Self {
            present: kernel.present.clone(),
            node: node.clone(),
            ..Self::default()
        };
        for (key, state) in states {
            let mut touched = Touched::default();
            provider.set(key, Some(state), &mut touched);
        }
        provider
    }

    fn set(&mut self, key: &PortKey, state: Option<&PortState>, touched: &mut Touched) {
        let (node, settings) = (&self.node, PlanSettings::default());
        self.plan.set_port(key, state, node, &settings, touched);
    }

    fn all(&self) -> Touched {
        let mut touched = self.plan.touched();
        touched.extend(self.present.touched());
        touched
    }

    fn run(&mut self, kernel: &mut Kernel, touched: &Touched) {
        let steps = diff(&self.plan, &self.present, touched);
        kernel.run(&steps);
        for step in &steps {
            self.present.apply(step);
        }
        // Afterwards, no steps are left.
        assert_eq!(diff(&self.plan, &self.present, touched), []);
    }

    /// Removes drained servers.
    fn reap(&mut self, kernel: &mut Kernel) {
        let servers = self.present.servers.keys().copied();
        let draining = servers.filter(|key| self.present.is_draining(&self.plan, key));
        let draining: BTreeSet<_> = draining.collect();
        for key in &draining {
            self.present.note_real(*key, &kernel.listed(*key));
        }
        let touched = Touched {
            servers: draining,
            ..Touched::default()
        };
        self.run(kernel, &touched);
    }
}

type States = BTreeMap<PortKey, PortState>;

fn key(number: u8, protocol: Protocol, family: Family) -> PortKey {
    PortKey {
        name: ServicePortName {
            service: ServiceName::new("shop", &format!("s{number}")),
            port: "".into(),
            protocol,
        },
        family,
    }
}

fn address(family: Family, network: u8, host: u8) -> IpAddr {
    match family {
        Family::V4 => [10, network, 0, host].into(),
        Family::V6 => [0xfd00, network.into(), 0, 0, 0, 0, 0, host.into()].into(),
    }
}

fn backend(family: Family, host: u8, weight: u16) -> Backend {
    Backend {
        address: SocketAddr::new(address(family, 1, host), 8080),
        weight,
        is_local: host.is_multiple_of(2),
    }
}

fn keys() -> impl Strategy<Value = PortKey> {
    let protocols = prop::sample::select(vec![Protocol::TCP, Protocol::UDP, Protocol::SCTP]);
    let families = prop::sample::select(Family::ALL.to_vec());
    (0..3_u8, protocols, families)
        .prop_map(|(number, protocol, family)| key(number, protocol, family))
}

/// The state of a port in this family. Its frontends use addresses that other ports may have too.
fn states(family: Family) -> impl Strategy<Value = PortState> {
    let targets = prop::sample::select(vec![
        (Target::Cluster, Target::Cluster),
        (Target::Local, Target::Cluster),
        (Target::Drop, Target::Cluster),
        (Target::Drop, Target::Drop),
        (Target::Reject, Target::Reject),
    ]);
    let kinds = prop::sample::select(vec![
        FrontendKind::ClusterIp,
        FrontendKind::LoadBalancer,
        FrontendKind::ExternalIp,
        FrontendKind::NodePort,
    ]);
    let ranges = prop::option::of(prop::sample::select(vec![0_u8, 8, 32]));
    let frontend = (kinds, 0..4_u8, targets, any::<bool>(), ranges);
    let frontend = frontend.prop_map(move |(kind, host, (outside, inside), keeps, range)| {
        let is_node_port = kind == FrontendKind::NodePort;
        let range = range.filter(|_| kind == FrontendKind::LoadBalancer);
        Frontend {
            listen: if is_node_port {
                Listen::NodePort(80)
            } else {
                // Network 0 is for services, network 2 for the node.
                Listen::Address(SocketAddr::new(address(family, host / 3 * 2, host), 80))
            },
            kind,
            policy: match keeps {
                true => TrafficPolicy::Local,
                false => TrafficPolicy::Cluster,
            },
            inside,
            outside,
            source_ranges: range.map(|prefix| {
                let net = ipnet::IpNet::new(address(family, 3, 1), prefix).unwrap();
                vec![net.trunc()].into()
            }),
        }
    });
    let backends = || prop::collection::btree_map(0..5_u8, 1..3_u16, 0..4);
    (
        prop::collection::vec(frontend, 0..3),
        backends(),
        backends(),
        prop::collection::btree_set(0..5_u8, 0..3),
        any::<bool>(),
    )
        .prop_map(
            move |(frontends, cluster, local, lingering, has_affinity)| {
                let list = |map: BTreeMap<u8, u16>| {
                    let backends = map.into_iter();
                    let backends = backends.map(|(host, weight)| backend(family, host, weight));
                    backends.collect::<Vec<_>>()
                };
                let lingering = lingering.into_iter();
                PortState {
                    frontends,
                    cluster: list(cluster),
                    local: list(local),
                    lingering: lingering
                        .map(|host| SocketAddr::new(address(family, 1, host), 8080))
                        .collect(),
                    affinity: has_affinity.then_some(Duration::from_secs(60)),
                    algorithm: None,
                    forwarding: None,
                }
            },
        )
}

#[derive(Clone, Debug)]
enum Event {
    /// Sets the state of ports; `None` removes one.
    Set(Vec<(PortKey, Option<PortState>)>),
    /// Changes the node's addresses.
    Node(BTreeSet<u8>),
    /// Opens connections: one count for each real server, starting over when the counts run out.
    Connect(Vec<u32>),
    /// Closes connections.
    Disconnect(Vec<u32>),
    Reap,
    /// Restarts the provider.
    Restart,
}

fn events() -> impl Strategy<Value = Event> {
    let port = keys().prop_flat_map(|key| {
        let state = prop::option::weighted(0.8, states(key.family));
        (Just(key), state)
    });
    prop_oneof![
        4 => prop::collection::vec(port, 1..3).prop_map(Event::Set),
        1 => prop::collection::btree_set(2..5_u8, 0..3).prop_map(Event::Node),
        2 => prop::collection::vec(0..3_u32, 1..6).prop_map(Event::Connect),
        2 => prop::collection::vec(0..2_u32, 1..6).prop_map(Event::Disconnect),
        2 => Just(Event::Reap),
        1 => Just(Event::Restart),
    ]
}

fn node(hosts: &BTreeSet<u8>) -> NodeAddresses {
    let families = Family::ALL.into_iter();
    let all = families.flat_map(|family| hosts.iter().map(move |host| address(family, 2, *host)));
    let all: BTreeSet<_> = all.collect();
    NodeAddresses {
        node_ports: all.clone(),
        all,
    }
}

/// Checks the invariants that hold after every event.
fn check(provider: &Provider, kernel: &Kernel) {
    let present = &kernel.present;
    let is_one = provider.present.servers.keys().eq(present.servers.keys());
    assert!(is_one && provider.present.entries == present.entries);
    assert_eq!(provider.present.addresses, present.addresses);
    let wanted = provider.plan.touched();
    for key in wanted.servers.difference(&present.foreign) {
        let server = provider.plan.server(key).unwrap();
        let there = &present.servers[key];
        assert_eq!(
            (&there.scheduler, there.flags),
            (&server.scheduler, server.flags)
        );
        for (address, weight) in &server.real {
            assert_eq!(there.real[address].weight, *weight);
        }
    }
    for (key, there) in &present.servers {
        let server = provider.plan.server(key);
        assert!(server.is_some() || !there.real.is_empty(), "{key} is left");
        for (address, real) in &there.real {
            if !server.is_some_and(|server| server.real.contains_key(address)) {
                assert_eq!(real.weight, 0, "{key} {address} gets new connections");
                let lingers = server.is_some_and(|server| server.lingering.contains(address));
                assert!(key.protocol == Protocol::TCP || lingers, "{key} {address}");
            }
        }
        assert!(present.entries.contains(&mark(*key)));
    }
    for (set, entry) in &wanted.entries {
        let is_wanted = provider.plan.has_entry(*set, *entry);
        let is_there = present.entries.contains(&(*set, *entry));
        assert_eq!(is_there, is_wanted, "{set} {entry:?}");
    }
    for address in &wanted.addresses {
        assert!(present.addresses.contains(address));
    }
}

/// Returns the kernel state once nothing is draining.
fn ideal(provider: &Provider, kernel: &Kernel) -> Present {
    let mut ideal = Present {
        foreign: kernel.present.foreign.clone(),
        ..Present::default()
    };
    let steps = diff(&provider.plan, &ideal, &provider.plan.touched());
    for step in &steps {
        ideal.apply(step);
    }
    ideal
}

fn replay(events: Vec<Event>, foreign: bool) {
    let mut kernel = Kernel::default();
    if foreign {
        kernel.present.foreign.insert(ServerKey {
            address: SocketAddr::new(address(Family::V4, 0, 1), 80),
            protocol: Protocol::TCP,
        });
    }
    let mut states = States::new();
    let mut own = node(&BTreeSet::from([2]));
    let mut provider = Provider::start(&kernel, &states, &own);
    for event in events {
        match event {
            Event::Set(ports) => {
                let mut touched = Touched::default();
                for (key, state) in ports {
                    provider.set(&key, state.as_ref(), &mut touched);
                    match state {
                        Some(state) => states.insert(key, state),
                        None => states.remove(&key),
                    };
                }
                provider.run(&mut kernel, &touched);
                let afresh = Provider::start(&kernel, &states, &own);
                assert_eq!(provider.plan, afresh.plan);
            }
            Event::Node(hosts) => {
                own = node(&hosts);
                provider = Provider::start(&kernel, &states, &own);
                provider.run(&mut kernel, &provider.all());
            }
            Event::Connect(counts) => {
                let mut counts = counts.into_iter().cycle();
                for (key, server) in &kernel.present.servers {
                    let open = server.real.iter().filter(|(_, real)| real.weight > 0);
                    for ((address, _), count) in open.zip(&mut counts) {
                        if count > 0 {
                            *kernel.connections.entry((*key, *address)).or_default() += count;
                        }
                    }
                }
            }
            Event::Disconnect(left) => {
                let mut left = left.into_iter().cycle();
                kernel.connections.retain(|_, count| {
                    *count = left.next().unwrap_or_default().min(*count);
                    *count > 0
                });
            }
            Event::Reap => provider.reap(&mut kernel),
            Event::Restart => {
                provider = Provider::start(&kernel, &states, &own);
                provider.run(&mut kernel, &provider.all());
            }
        }
        check(&provider, &kernel);
    }
    kernel.connections.clear();
    provider.reap(&mut kernel);
    let ideal = ideal(&provider, &kernel);
    assert_eq!(kernel.present, ideal);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]
    #[test]
    fn step_by_step_is_as_all_at_once(
        events in prop::collection::vec(events(), 1..10),
        foreign: bool,
    ) {
        replay(events, foreign);
    }
}

/// A port with one address and these backends.
fn port(backends: &[u8]) -> PortState {
    PortState {
        frontends: vec![Frontend {
            listen: Listen::Address(SocketAddr::new(address(Family::V4, 0, 1), 80)),
            kind: FrontendKind::ClusterIp,
            policy: TrafficPolicy::Cluster,
            inside: Target::Cluster,
            outside: Target::Cluster,
            source_ranges: None,
        }],
        cluster: backends
            .iter()
            .map(|host| backend(Family::V4, *host, 1))
            .collect(),
        local: Vec::new(),
        lingering: Vec::new(),
        affinity: None,
        algorithm: None,
        forwarding: None,
    }
}

#[test]
fn a_real_server_goes_when_its_last_connection_has_ended() {
    let mut kernel = Kernel::default();
    let key = key(0, Protocol::TCP, Family::V4);
    let states = States::from([(key.clone(), port(&[1, 2]))]);
    let mut provider = Provider::start(&kernel, &states, &NodeAddresses::default());
    provider.run(&mut kernel, &provider.all());
    let server = *kernel.present.servers.keys().next().unwrap();
    let gone = backend(Family::V4, 2, 1).address;
    kernel.connections.insert((server, gone), 1);

    let states = States::from([(key, port(&[1]))]);
    let mut touched = Touched::default();
    provider.set(
        &states.keys().next().unwrap().clone(),
        states.values().next(),
        &mut touched,
    );
    provider.run(&mut kernel, &touched);
    provider.reap(&mut kernel);
    let real = |kernel: &Kernel| kernel.present.servers[&server].real.clone();
    assert_eq!(real(&kernel)[&gone].weight, 0);

    // A restarted provider recognises draining servers from the kernel state.
    let mut provider = Provider::start(&kernel, &states, &NodeAddresses::default());
    provider.run(&mut kernel, &provider.all());
    provider.reap(&mut kernel);
    assert_eq!(real(&kernel).len(), 2);
    kernel.connections.clear();
    provider.reap(&mut kernel);
    assert_eq!(real(&kernel).len(), 1);
}

#[test]
fn a_leftover_of_weight_0_gets_connections_again_if_it_is_wanted() {
    let mut kernel = Kernel::default();
    let key = key(0, Protocol::TCP, Family::V4);
    let states = States::from([(key, port(&[1]))]);
    let mut provider = Provider::start(&kernel, &states, &NodeAddresses::default());
    provider.run(&mut kernel, &provider.all());
    let server = *kernel.present.servers.keys().next().unwrap();
    let real = backend(Family::V4, 1, 1).address;
    let real_in = |kernel: &mut Kernel| {
        let server = kernel.present.servers.get_mut(&server).unwrap();
        server.real.get_mut(&real).unwrap().weight
    };
    let steps = [Step::Change(Change::SetReal(
        server.into(),
        RealServer::new(real, 0),
    ))];
    kernel.run(&steps);
    assert_eq!(real_in(&mut kernel), 0);
    let mut provider = Provider::start(&kernel, &states, &NodeAddresses::default());
    provider.run(&mut kernel, &provider.all());
    assert_eq!(real_in(&mut kernel), 1);
}

#[test]
fn an_address_of_an_excluded_network_is_left_to_others() {
    let (key, state) = (key(0, Protocol::TCP, Family::V4), port(&[1]));
    let plan = |network: &str| {
        let settings = PlanSettings {
            excluded_networks: vec![network.parse().unwrap()],
            ..PlanSettings::default()
        };
        let (mut plan, node) = (Plan::default(), NodeAddresses::default());
        plan.set_port(
            &key,
            Some(&state),
            &node,
            &settings,
            &mut Touched::default(),
        );
        plan.touched()
    };
    assert_eq!(plan("10.9.0.0/16").servers.len(), 1);
    let excluded = plan("10.0.0.0/16");
    assert!(excluded.servers.is_empty() && excluded.addresses.is_empty());
    assert!(excluded.entries.is_empty(), "{:?}", excluded.entries);
}

#[test]
fn a_node_port_without_endpoints_refuses_nothing_at_the_address_of_another_service() {
    let address = address(Family::V4, 2, 2);
    let node = node(&BTreeSet::from([2]));
    let vacant = PortState {
        frontends: vec![Frontend {
            listen: Listen::NodePort(80),
            kind: FrontendKind::NodePort,
            inside: Target::Reject,
            outside: Target::Reject,
            ..port(&[]).frontends.remove(0)
        }],
        ..port(&[])
    };
    let external = PortState {
        frontends: vec![Frontend {
            listen: Listen::Address(SocketAddr::new(address, 80)),
            kind: FrontendKind::ExternalIp,
            ..port(&[1]).frontends.remove(0)
        }],
        ..port(&[1])
    };
    let rejects = |kernel: &Kernel| {
        let set = SetId {
            family: Family::V4,
            kind: SetKind::Reject,
        };
        let entry = Entry::IpPort(address, Protocol::TCP, 80);
        kernel.present.entries.contains(&(set, entry))
    };
    // In either order; in the end, the first port is removed.
    for (first, second, refusals) in [
        (&vacant, &external, [true, false, false]),
        (&external, &vacant, [false, false, true]),
    ] {
        let (mut kernel, mut provider) = (Kernel::default(), Provider::default());
        provider.node = node.clone();
        let steps = [(0, Some(first)), (1, Some(second)), (0, None)];
        for ((number, state), refuses) in steps.into_iter().zip(refusals) {
            let mut touched = Touched::default();
            provider.set(&key(number, Protocol::TCP, Family::V4), state, &mut touched);
            provider.run(&mut kernel, &touched);
            assert_eq!(rejects(&kernel), refuses);
        }
    }
}
