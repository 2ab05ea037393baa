//! Random sequences of states, each written into kernel maps by three providers: one that applies changes, one that is
//! constantly restarted, and a new one with its own maps. The tests compare the destinations in the maps with the
//! state.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};

use health_common::service::{
    BACKEND_LINGERS, Backend, FRONTEND_DIRECT, FRONTEND_DROPS_INSIDE, FRONTEND_DROPS_OUTSIDE,
    FRONTEND_KEEPS_SOURCE, FRONTEND_LOCAL_INSIDE, FRONTEND_LOCAL_OUTSIDE, FRONTEND_RESTRICTED,
    Frontend,
};
use health_datapath::services::{ListedBackend, ListedFrontend, ServiceMapSizes, ServiceMaps};
use health_model::policy::Protocol;
use health_model::settings::ServiceForwarding;
use ipnet::IpNet;
use proptest::prelude::*;
use proptest::sample::subsequence;

use super::*;
use crate::spec::TrafficPolicy;
use crate::state::tests::bed::{self, Bed, READY};
use crate::state::tests::events::{Event, event};
use crate::state::{Changes, FrontendKind, PortState, Target};

const SIZES: ServiceMapSizes = ServiceMapSizes {
    frontends: 256,
    backends: 512,
    slots: 4_096,
    maglev: 64 * 251,
    source_ranges: 256,
    affinity: 64,
    flows: 64,
    flows_any: 64,
    sockets: 64,
};

static CLOCK: AtomicU64 = AtomicU64::new(0);

fn cases() -> ProptestConfig {
    let is_long = std::env::var_os("HEALTH_AGENT_LONG").is_some_and(|value| value == "1");
    ProptestConfig::with_cases(if is_long { 5_000 } else { 24 })
}

fn is_root() -> bool {
    let is_root = std::fs::read_to_string("/proc/self/status")
        .is_ok_and(|status| status.lines().any(|line| line.starts_with("Uid:\t0\t")));
    if !is_root {
        println!("skipped: needs root");
    }
    is_root
}

fn settings() -> Settings {
    Settings {
        maglev_size: 251,
        forwarding: Forwarding {
            default: ServiceForwarding::Hybrid,
            hindrance: None,
        },
        // Freed entries are reused after two or three syncs.
        ..Settings::new(|| CLOCK.fetch_add(4_000_000_000, Ordering::Relaxed))
    }
}

/// Maps, and the provider that writes services into them.
struct Node {
    maps: ServiceMaps,
    provider: EbpfProvider,
    addresses: watch::Sender<NodeAddresses>,
}

impl Node {
    fn new(sizes: ServiceMapSizes, addresses: &BTreeSet<IpAddr>) -> Self {
        let maps = ServiceMaps::unpinned(sizes).unwrap();
        let (sender, receiver) = watch::channel(Arc::new(addresses.clone()));
        let tables = ServiceTables::open(maps.try_clone().unwrap()).unwrap();
        Self {
            provider: EbpfProvider::new(tables, settings(), receiver).unwrap(),
            maps,
            addresses: sender,
        }
    }

    fn restart(&mut self) {
        let tables = ServiceTables::open(self.maps.try_clone().unwrap()).unwrap();
        let addresses = self.addresses.subscribe();
        self.provider = EbpfProvider::new(tables, settings(), addresses).unwrap();
    }

    fn sync(&mut self, state: &State, changes: &Changes, is_full: bool) -> Result<(), EbpfError> {
        let work = Work {
            state,
            changes,
            is_full,
        };
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        runtime.unwrap().block_on(self.provider.sync(work))
    }

    fn listed(&self) -> BTreeMap<(SocketAddr, Protocol), ListedFrontend> {
        let listed = self.maps.list().unwrap().into_iter();
        listed
            .map(|frontend| ((frontend.address, Protocol(frontend.protocol)), frontend))
            .collect()
    }

    /// Returns everything except values that vary over time.
    fn contents(&self) -> (Vec<ListedFrontend>, BTreeMap<u32, Backend>, Ranges) {
        (
            self.maps.list().unwrap(),
            self.maps.backends().unwrap(),
            self.maps.source_ranges().unwrap(),
        )
    }
}

type Ranges = BTreeMap<u32, Vec<IpNet>>;

#[derive(Clone, Debug)]
enum Step {
    Event(Event),
    Addresses(BTreeSet<IpAddr>),
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    // One of these is also an external address of services, another a ClusterIP.
    let all = [
        "192.0.2.1",
        "198.51.100.7",
        "10.96.0.98",
        "fd00::e",
        "fd00::f",
    ];
    let all = all.map(|text| text.parse().unwrap());
    let addresses = subsequence(all.to_vec(), 0..=5);
    prop_oneof![
        20 => event().prop_map(Step::Event),
        2 => addresses.prop_map(|addresses| Step::Addresses(addresses.into_iter().collect())),
        1 => Just(Step::Restart),
    ]
}

/// Returns where each port must be reachable; NodePorts only where no other port has the address.
fn places(
    state: &State,
    addresses: &BTreeSet<IpAddr>,
) -> BTreeMap<(SocketAddr, Protocol), (PortKey, crate::state::Frontend)> {
    let mut places = BTreeMap::new();
    let of_kind = |is_node_port: bool| {
        state.ports().flat_map(move |(key, port)| {
            let frontends = port.frontends.iter();
            let of_kind = frontends
                .filter(move |frontend| (frontend.kind == FrontendKind::NodePort) == is_node_port);
            of_kind.map(move |frontend| (key, frontend))
        })
    };
    for (key, frontend) in of_kind(false).chain(of_kind(true)) {
        let ours = addresses.iter().filter(|ip| Family::of(**ip) == key.family);
        let listens: Vec<_> = match frontend.listen {
            Listen::Address(address) => vec![address],
            Listen::NodePort(port) => ours.map(|ip| SocketAddr::new(*ip, port)).collect(),
        };
        for address in listens {
            let wanted = (key.clone(), frontend.clone());
            places.entry((address, key.name.protocol)).or_insert(wanted);
        }
    }
    places
}

fn wanted(port: &PortState, target: Target) -> Vec<(SocketAddr, f64)> {
    let list = match target {
        Target::Cluster => &port.cluster,
        Target::Local => &port.local,
        Target::Drop | Target::Reject => return Vec::new(),
    };
    let total: u32 = list.iter().map(|backend| u32::from(backend.weight)).sum();
    let share = |weight: u16| f64::from(weight) / f64::from(total);
    let list = list.iter();
    list.map(|backend| (backend.address, share(backend.weight)))
        .collect()
}

fn is_there(port: &PortState, target: Target, found: &[ListedBackend], number: u32) -> bool {
    let algorithm = port.algorithm.unwrap_or(Algorithm::Random);
    let mut wanted = wanted(port, target);
    let mut found: Vec<_> = found
        .iter()
        .map(|backend| {
            assert_eq!(backend.entry.service, number);
            (backend.address(), backend.share)
        })
        .collect();
    // A Maglev table has no order, and its precision is limited by the number of slots.
    let precision = if algorithm == Algorithm::Maglev {
        found.sort_by_key(|(address, _)| *address);
        wanted.sort_by_key(|(address, _)| *address);
        1.01 / 251.0
    } else {
        1e-9
    };
    wanted.len() == found.len()
        && wanted
            .iter()
            .zip(&found)
            .all(|(one, other)| one.0 == other.0 && (one.1 - other.1).abs() < precision)
}

fn flags(protocol: Protocol, port: &PortState, frontend: &crate::state::Frontend) -> u16 {
    let is_direct = match port.forwarding {
        Some(ServiceForwarding::Snat) => false,
        Some(ServiceForwarding::Dsr) => true,
        Some(ServiceForwarding::Hybrid) | None => protocol == Protocol::TCP,
    };
    let is_external = frontend.kind != FrontendKind::ClusterIp;
    let mut flags = 0;
    for (is_set, flag) in [
        (frontend.source_ranges.is_some(), FRONTEND_RESTRICTED),
        (
            is_external && frontend.policy == TrafficPolicy::Local,
            FRONTEND_KEEPS_SOURCE,
        ),
        (is_direct, FRONTEND_DIRECT),
        (frontend.inside == Target::Drop, FRONTEND_DROPS_INSIDE),
        (frontend.outside == Target::Drop, FRONTEND_DROPS_OUTSIDE),
        (frontend.inside == Target::Local, FRONTEND_LOCAL_INSIDE),
        (frontend.outside == Target::Local, FRONTEND_LOCAL_OUTSIDE),
    ] {
        flags |= if is_set { flag } else { 0 };
    }
    flags
}

/// Checks everything in the maps. Returns the numbers of all reachable ports.
fn check(
    node: &Node,
    state: &State,
    addresses: &BTreeSet<IpAddr>,
) -> Result<BTreeMap<PortKey, u32>, TestCaseError> {
    let places = places(state, addresses);
    let listed = node.listed();
    prop_assert_eq!(
        listed.keys().collect::<Vec<_>>(),
        places.keys().collect::<Vec<_>>()
    );
    let mut numbers: BTreeMap<PortKey, u32> = BTreeMap::new();
    let mut ranges = Ranges::new();
    for (place, (key, wanted)) in &places {
        let found = &listed[place];
        let entry: &Frontend = &found.entry;
        let port = state.port(key).unwrap();
        let number = *numbers.entry(key.clone()).or_insert(entry.service);
        prop_assert_eq!(number, entry.service, "one number for {}", key);
        prop_assert!(
            is_there(port, wanted.inside, &found.inside, number),
            "{:?}",
            found
        );
        prop_assert!(
            is_there(port, wanted.outside, &found.outside, number),
            "{:?}",
            found
        );
        let mask = FRONTEND_RESTRICTED
            | FRONTEND_KEEPS_SOURCE
            | FRONTEND_DIRECT
            | FRONTEND_DROPS_INSIDE
            | FRONTEND_DROPS_OUTSIDE
            | FRONTEND_LOCAL_INSIDE
            | FRONTEND_LOCAL_OUTSIDE;
        prop_assert_eq!(entry.flags & mask, flags(key.name.protocol, port, wanted));
        let affinity = port
            .affinity
            .map_or(0, |affinity| affinity.as_secs() as u32);
        prop_assert_eq!(entry.affinity_secs, affinity);
        if let Some(nets) = &wanted.source_ranges {
            let nets: BTreeSet<_> = nets.iter().copied().collect();
            ranges.insert(number, nets.into_iter().collect());
        }
    }
    ranges.retain(|_, nets| !nets.is_empty());
    prop_assert_eq!(node.maps.source_ranges().unwrap(), ranges);
    let distinct: BTreeSet<_> = numbers.values().collect();
    prop_assert_eq!(distinct.len(), numbers.len());
    prop_assert!(!distinct.contains(&0));
    Ok(numbers)
}

/// Returns each backend by port and address.
fn backends(node: &Node) -> BTreeMap<(u32, SocketAddr), u32> {
    let backends = node.maps.backends().unwrap().into_iter();
    backends
        .map(|(index, backend)| {
            let address = SocketAddr::new(backend.addr.to_ip(), u16::from_be(backend.port_be));
            ((backend.service, address), index)
        })
        .collect()
}

/// Checks that the existing backends are those in use, each once, and the lingering ones that existed before.
fn check_backends(
    state: &State,
    numbers: &BTreeMap<PortKey, u32>,
    before: &BTreeMap<(u32, SocketAddr), u32>,
    node: &Node,
) -> Result<(), TestCaseError> {
    let now = backends(node);
    prop_assert_eq!(now.len(), node.maps.backends().unwrap().len());
    let mut wanted = BTreeSet::new();
    let mut lingers = BTreeSet::new();
    for (key, number) in numbers {
        let port = state.port(key).unwrap();
        let used = port.cluster.iter().chain(&port.local);
        wanted.extend(used.map(|backend| (*number, backend.address)));
        let lingering = port.lingering.iter().map(|address| (*number, *address));
        lingers.extend(lingering.filter(|backend| before.contains_key(backend)));
    }
    wanted.extend(lingers.iter().copied());
    let entries = node.maps.backends().unwrap();
    for (backend, index) in &now {
        let is_flagged = entries[index].flags == BACKEND_LINGERS;
        prop_assert_eq!(is_flagged, lingers.contains(backend), "{:?}", backend);
    }
    prop_assert_eq!(now.keys().copied().collect::<BTreeSet<_>>(), wanted);
    for (backend, index) in before {
        let kept = now.get(backend);
        prop_assert!(kept.is_none_or(|kept| kept == index), "{:?}", backend);
    }
    Ok(())
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn after_each_sync_every_frontend_leads_to_its_backends_and_nothing_else_is_there(
        steps in prop::collection::vec(step(), 1..40),
    ) {
        if !is_root() {
            return Ok(());
        }
        let mut addresses = BTreeSet::new();
        let mut bed = Bed::new();
        let mut node = Node::new(SIZES, &addresses);
        let mut restarted = Node::new(SIZES, &addresses);
        let mut is_full = true;
        let mut known: BTreeMap<PortKey, u32> = BTreeMap::new();
        let mut changes = Changes::default();
        for step in steps.into_iter().chain([Step::Event(Event::Sync)]) {
            let event = match step {
                Step::Event(event) => event,
                Step::Addresses(to) => {
                    addresses = to;
                    node.addresses.send_replace(Arc::new(addresses.clone()));
                    restarted.addresses.send_replace(Arc::new(addresses.clone()));
                    let reserved = bed::reserved(addresses.clone());
                    changes.ports.extend(bed.state.set_reserved(&Arc::new(reserved)));
                    continue;
                }
                Step::Restart => {
                    node.restart();
                    is_full = true;
                    continue;
                }
            };
            if let Event::Own(own) = event {
                let reserved = Arc::new(bed::reserved(own));
                changes.ports.extend(bed.state.set_reserved(&reserved));
                continue;
            }
            if let Event::Zone(zone) = event {
                changes.ports.extend(bed.state.set_topology(bed::topology(zone)));
                continue;
            }
            if !matches!(event, Event::Sync) {
                bed.happen(event);
                continue;
            }
            let synced = bed.state.sync(&mut bed.services, &mut bed.endpoints);
            changes.ports.extend(synced.ports);
            let state = &bed.state;

            let before = backends(&node);
            node.sync(state, &changes, is_full).unwrap();
            let numbers = check(&node, state, &addresses)?;
            check_backends(state, &numbers, &before, &node)?;
            if !is_full {
                for (key, number) in &numbers {
                    prop_assert!(known.get(key).is_none_or(|known| known == number), "{}", key);
                }
            }
            known = numbers;

            // A repeated full sync changes nothing.
            let contents = node.contents();
            node.sync(state, &Changes::default(), true).unwrap();
            prop_assert_eq!(&node.contents(), &contents);

            restarted.restart();
            restarted.sync(state, &Changes::default(), true).unwrap();
            check(&restarted, state, &addresses)?;
            let contents = restarted.contents();
            restarted.restart();
            restarted.sync(state, &Changes::default(), true).unwrap();
            prop_assert_eq!(&restarted.contents(), &contents);

            let mut fresh = Node::new(SIZES, &addresses);
            fresh.sync(state, &Changes::default(), true).unwrap();
            check(&fresh, state, &addresses)?;
            (is_full, changes) = (false, Changes::default());
        }
    }
}

/// Services `a` and `b` with this many endpoints each.
fn two_services(endpoints: [u8; 2]) -> Bed {
    let mut bed = Bed::new();
    for (name, count) in ["a", "b"].into_iter().zip(endpoints) {
        bed.set(bed::service(name, 1, |_| {}));
        let endpoints: Vec<_> = (1..=count).map(|last| (last, READY, "there")).collect();
        bed.slice(bed::slice(name, &endpoints));
    }
    bed
}

#[test]
fn a_port_without_room_stays_as_it_was_while_others_change() {
    if !is_root() {
        return;
    }
    let sizes = ServiceMapSizes {
        // The first one is not used.
        backends: 6,
        ..SIZES
    };
    let addresses = BTreeSet::new();
    let mut bed = two_services([2, 1]);
    let mut node = Node::new(sizes, &addresses);
    bed.sync();
    node.sync(&bed.state, &Changes::default(), true).unwrap();
    let before = node.listed();

    let endpoints: Vec<_> = (1..=7).map(|last| (last, READY, "there")).collect();
    bed.slice(bed::slice("a", &endpoints));
    bed.slice(bed::slice("b", &[(1, READY, "there"), (9, READY, "there")]));
    let changes = bed.state.sync(&mut bed.services, &mut bed.endpoints);
    let error = node.sync(&bed.state, &changes, false).unwrap_err();
    let text = error.to_string();
    assert!(
        text.starts_with(
            "cannot serve shop/a:http/TCP IPv4: HEALTH_BACKENDS has no room for 5 more"
        ),
        "{text}"
    );
    let place = |last| {
        (
            (SocketAddr::new([10, 96, 0, last].into(), 80)),
            Protocol::TCP,
        )
    };
    let now = node.listed();
    assert_eq!(now[&place(b'a')], before[&place(b'a')]);
    assert_eq!(now[&place(b'b')].inside.len(), 2);

    // After a failed sync, the whole state is requested.
    bed.slice(bed::slice("a", &endpoints[..3]));
    bed.sync();
    node.sync(&bed.state, &changes, true).unwrap();
    assert_eq!(node.listed()[&place(b'a')].inside.len(), 3);
}

#[test]
fn what_others_did_to_the_maps_is_put_right_by_a_full_sync() {
    if !is_root() {
        return;
    }
    let addresses = BTreeSet::new();
    let mut bed = two_services([2, 3]);
    let mut node = Node::new(SIZES, &addresses);
    bed.sync();
    node.sync(&bed.state, &Changes::default(), true).unwrap();
    let numbers = check(&node, &bed.state, &addresses).unwrap();

    // Another provider removes everything.
    let mut other = ServiceTables::open(node.maps.try_clone().unwrap()).unwrap();
    let mut change = other.change(0);
    change.remove_others();
    change.commit().unwrap();
    assert!(node.listed().is_empty());

    node.sync(&bed.state, &Changes::default(), true).unwrap();
    assert_eq!(check(&node, &bed.state, &addresses).unwrap(), numbers);
}

/// Only one table exists, and one port has it. Within one sync, that port gives up the table and the other port takes
/// it.
#[test]
fn a_port_without_a_maglev_table_is_named_and_served_and_gets_the_next_one() {
    if !is_root() {
        return;
    }
    let sizes = ServiceMapSizes {
        maglev: 251,
        ..SIZES
    };
    let addresses = BTreeSet::new();
    let mut bed = Bed::new();
    let with = |name, algorithm| bed::service(name, 1, |common| common.algorithm = Some(algorithm));
    for name in ["a", "b"] {
        bed.set(with(name, Algorithm::Maglev));
        bed.slice(bed::slice(
            name,
            &[(1, READY, "there"), (2, READY, "there")],
        ));
    }
    let mut node = Node::new(sizes, &addresses);
    bed.sync();
    let error = node
        .sync(&bed.state, &Changes::default(), true)
        .unwrap_err();
    let refused: Vec<_> = EbpfProvider::refused(&error).collect();
    let [(port, why)] = refused.as_slice() else {
        panic!("{refused:?}")
    };
    assert_eq!(*port, bed::key("b"));
    assert!(
        why.starts_with("maglev is not in force, backends are chosen at random: HEALTH_MAGLEV"),
        "{why}"
    );
    assert!(
        node.listed()
            .values()
            .all(|frontend| frontend.inside.len() == 2)
    );

    bed.set(with("a", Algorithm::Random));
    let mut changes = bed.state.sync(&mut bed.services, &mut bed.endpoints);
    changes.ports.insert(bed::key("b"));
    node.sync(&bed.state, &changes, false).unwrap();
    let maglev = node.listed().into_values();
    let maglev: Vec<_> = maglev
        .filter(|frontend| frontend.entry.algorithm == health_common::service::ALGORITHM_MAGLEV)
        .map(|frontend| frontend.address)
        .collect();
    assert_eq!(maglev, [SocketAddr::new([10, 96, 0, b'b'].into(), 80)]);
}
