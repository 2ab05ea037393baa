use std::net::IpAddr;

use health_common::addr::Addr;
use health_common::ct::{TUPLE_IN, TUPLE_OUT, Tuple4};
use health_common::service::socket::{SocketFlow, SocketKey};
use health_common::service::xdp::XdpTimes;
use health_common::service::{
    ALGORITHM_LEAST_CONNECTION, ALGORITHM_MAGLEV, ALGORITHM_RANDOM, ALGORITHM_ROUND_ROBIN,
    BACKEND_LINGERS, Backend, KIND_CLUSTER_IP, ServiceFlow4,
};

use super::*;

const SIZES: ServiceMapSizes = ServiceMapSizes {
    frontends: 64,
    backends: 8,
    slots: 32,
    maglev: 21,
    source_ranges: 4,
    affinity: 16,
    flows: 16,
    flows_any: 16,
    sockets: 16,
};
const TCP: u8 = 6;
const SECOND: u64 = 1_000_000_000;

/// Whose turn it is gets the next place.
struct InTurn;

impl FillMaglev for InTurn {
    fn size(&self) -> u32 {
        7
    }

    fn fill(&mut self, backends: &[MaglevBackend], table: &mut [u32]) {
        let turns = backends.iter().cycle();
        for (place, backend) in table.iter_mut().zip(turns) {
            *place = backend.index;
        }
    }
}

fn is_root() -> bool {
    let is_root = nix::unistd::geteuid().is_root();
    if !is_root {
        println!("skipped: needs root");
    }
    is_root
}

fn tables() -> ServiceTables {
    ServiceTables::open(ServiceMaps::unpinned(SIZES).unwrap()).unwrap()
}

fn again(tables: &ServiceTables) -> ServiceTables {
    ServiceTables::open(tables.maps().try_clone().unwrap()).unwrap()
}

fn at(ip: &str) -> SocketAddr {
    SocketAddr::new(ip.parse::<IpAddr>().unwrap(), 80)
}

/// A port at this address with backends of these weights.
fn spec(ip: &str, weights: &[u16]) -> PortSpec {
    let backends = weights.iter().zip(1..);
    PortSpec {
        protocol: TCP,
        frontends: vec![FrontendSpec {
            address: at(ip),
            kind: KIND_CLUSTER_IP,
            flags: 0,
            inside: Target::Cluster,
            outside: Target::Cluster,
        }],
        cluster: backends
            .map(|(weight, last)| BackendSpec {
                address: at(&format!("10.1.0.{last}")),
                weight: *weight,
            })
            .collect(),
        algorithm: ALGORITHM_RANDOM,
        ..PortSpec::default()
    }
}

/// Has one port as it is to be, at this second.
fn set(
    tables: &mut ServiceTables,
    known: Option<u32>,
    spec: &PortSpec,
    second: u64,
) -> Result<(u32, Written), ServicesError> {
    let mut change = tables.change(second * SECOND);
    let number = change.set(known, spec, &mut InTurn);
    let written = change.commit()?;
    Ok((number?, written))
}

/// The last byte of each backend's address that a frontend leads to, with its share.
fn led(tables: &ServiceTables, ip: &str) -> Vec<(u8, f64)> {
    let listed = tables.maps().list().unwrap();
    let frontend = listed.iter().find(|frontend| frontend.address == at(ip));
    let backends = frontend.unwrap().inside.iter();
    backends
        .map(|backend| match backend.address().ip() {
            IpAddr::V4(ip) => (ip.octets()[3], backend.share),
            IpAddr::V6(ip) => panic!("{ip}"),
        })
        .collect()
}

#[test]
fn backends_get_flows_by_weight_and_maglev_places() {
    if !is_root() {
        return;
    }
    let mut tables = tables();
    set(&mut tables, None, &spec("10.96.0.1", &[1, 1, 2]), 0).unwrap();
    let shares = led(&tables, "10.96.0.1");
    assert_eq!(
        shares.iter().map(|(last, _)| *last).collect::<Vec<_>>(),
        [1, 2, 3]
    );
    for ((_, share), wanted) in shares.iter().zip([0.25, 0.25, 0.5]) {
        assert!((share - wanted).abs() < 1e-9, "{shares:?}");
    }

    let mut maglev = spec("fd00::1", &[1, 1]);
    maglev.algorithm = ALGORITHM_MAGLEV;
    set(&mut tables, None, &maglev, 0).unwrap();
    let shares = led(&tables, "fd00::1");
    assert!((shares[0].1 - 4.0 / 7.0).abs() < 1e-9, "{shares:?}");
}

#[test]
fn a_change_writes_what_differs_and_a_restart_nothing() {
    if !is_root() {
        return;
    }
    let mut tables = tables();
    let (first, _) = set(&mut tables, None, &spec("10.96.0.1", &[1, 1, 1]), 0).unwrap();
    let mut weighted = spec("10.96.0.2", &[1, 3]);
    weighted.source_ranges = vec!["192.0.2.0/24".parse().unwrap(), "::/0".parse().unwrap()];
    let (second, _) = set(&mut tables, None, &weighted, 0).unwrap();
    assert_ne!(first, second);

    let (_, written) = set(&mut tables, Some(second), &weighted, 1).unwrap();
    assert_eq!(written, Written::default());
    weighted.cluster[0].weight = 2;
    let (_, written) = set(&mut tables, Some(second), &weighted, 1).unwrap();
    let expected = Written {
        frontends: 1,
        // A counter, two indexes, two thresholds, two aliases.
        places: 7,
        ..Written::default()
    };
    assert_eq!(written, expected);

    let mut tables = again(&tables);
    let mut change = tables.change(2 * SECOND);
    let spec = spec("10.96.0.1", &[1, 1, 1]);
    assert_eq!(change.set(None, &spec, &mut InTurn).unwrap(), first);
    assert_eq!(change.set(None, &weighted, &mut InTurn).unwrap(), second);
    change.remove_others();
    assert_eq!(change.commit().unwrap(), Written::default());
}

#[test]
fn a_backend_that_lingers_keeps_its_index_and_one_that_went_is_zeroed() {
    if !is_root() {
        return;
    }
    let mut tables = tables();
    let (number, _) = set(&mut tables, None, &spec("10.96.0.1", &[1, 1, 1]), 0).unwrap();
    let mut less = spec("10.96.0.1", &[1]);
    less.lingering = vec![at("10.1.0.2"), at("10.1.0.9")];
    let mut before = tables.maps().backends().unwrap();
    // Two flows went to each.
    before.values_mut().for_each(|backend| backend.flows = 2);
    let entries: Vec<_> = before
        .iter()
        .map(|(index, entry)| (*index, *entry))
        .collect();
    tables.maps.backends.write(&entries).unwrap();
    let noted = |tables: &ServiceTables| tables.maps.xdp_times.get(&0).unwrap().unwrap();
    assert_eq!(noted(&tables), XdpTimes::default());
    let (_, written) = set(&mut tables, Some(number), &less, 1).unwrap();
    assert_eq!((written.backends, written.backends_removed), (1, 1));
    let noted = noted(&tables);
    assert!(
        noted.changed_ns > 0 && noted.way_ticks > 0,
        "XDP is told: {noted:?}"
    );
    let now = tables.maps().backends().unwrap();
    let gone: Vec<_> = before
        .keys()
        .filter(|index| !now.contains_key(index))
        .collect();
    assert_eq!(gone.len(), 1);
    assert_eq!(before[gone[0]].addr.to_ip(), at("10.1.0.3").ip());
    let lingering = now
        .values()
        .filter(|backend| backend.flags == BACKEND_LINGERS);
    let lingering: Vec<_> = lingering.map(|backend| backend.addr.to_ip()).collect();
    assert_eq!(lingering, [at("10.1.0.2").ip()]);
    assert!(now.values().all(|backend| backend.flows == 2), "{now:?}");
    assert_eq!(led(&tables, "10.96.0.1").len(), 1);

    let mut tables = again(&tables);
    let mut more = spec("10.96.0.1", &[1, 1]);
    more.lingering.clear();
    let (_, written) = set(&mut tables, None, &more, 2).unwrap();
    assert_eq!((written.backends, written.backends_removed), (1, 0));
    let now = tables.maps().backends().unwrap();
    assert!(now.values().all(|backend| backend.flags == 0), "{now:?}");
}

#[test]
fn what_was_freed_is_used_again_only_after_ten_seconds() {
    if !is_root() {
        return;
    }
    let mut tables = tables();
    // Seven backends are all that there are.
    let (number, _) = set(&mut tables, None, &spec("10.96.0.1", &[1; 7]), 0).unwrap();
    set(&mut tables, Some(number), &spec("10.96.0.1", &[1; 2]), 100).unwrap();
    let other = spec("10.96.0.2", &[1; 3]);
    let error = set(&mut tables, None, &other, 109).unwrap_err();
    assert_eq!(
        error.to_string(),
        "HEALTH_BACKENDS has no room for 3 more entries: 8 of 8 are taken, 0 are free in a row"
    );
    assert_eq!(tables.maps().list().unwrap().len(), 1);
    set(&mut tables, None, &other, 110).unwrap();
    assert_eq!(led(&tables, "10.96.0.2").len(), 3);
}

#[test]
fn a_number_is_not_given_out_again_while_a_client_is_known_by_it() {
    if !is_root() {
        return;
    }
    let mut tables = tables();
    let (number, _) = set(&mut tables, None, &spec("10.96.0.1", &[1]), 0).unwrap();
    let key = health_common::service::AffinityKey {
        client: at("192.0.2.1").ip().into(),
        service: number,
    };
    tables
        .maps
        .affinity
        .write(&[(key, Default::default())])
        .unwrap();
    let mut change = tables.change(0);
    change.remove(number);
    change.commit().unwrap();
    assert!(tables.maps().list().unwrap().is_empty());
    assert!(tables.maps().backends().unwrap().is_empty());

    let mut tables = again(&tables);
    let (next, _) = set(&mut tables, None, &spec("10.96.0.1", &[1]), 100).unwrap();
    assert_ne!(next, number);
}

#[test]
fn a_full_map_is_named_and_the_port_keeps_what_it_had() {
    if !is_root() {
        return;
    }
    let mut tables = tables();
    let (number, _) = set(&mut tables, None, &spec("10.96.0.1", &[1, 1]), 0).unwrap();
    let before = tables.maps().list().unwrap();

    let mut many = spec("10.96.0.1", &[1]);
    many.source_ranges = (0..5)
        .map(|net| format!("10.{net}.0.0/16").parse().unwrap())
        .collect();
    let mut wide = spec("10.96.0.1", &[1]);
    wide.frontends = (0..65)
        .map(|last| FrontendSpec {
            address: at(&format!("10.97.0.{last}")),
            ..wide.frontends[0]
        })
        .collect();
    let mut maglev = spec("10.96.0.1", &[1]);
    maglev.algorithm = ALGORITHM_MAGLEV;
    let others: Vec<_> = (1..=3)
        .map(|last| PortSpec {
            algorithm: ALGORITHM_MAGLEV,
            ..spec(&format!("fd00::{last}"), &[1])
        })
        .collect();
    for other in &others {
        set(&mut tables, None, other, 1).unwrap();
    }
    for (spec, map) in [
        (&many, "HEALTH_SOURCE_RANGES"),
        (&wide, "HEALTH_SVC4"),
        (&maglev, "HEALTH_MAGLEV"),
        (&spec("10.96.0.1", &[1; 8]), "HEALTH_BACKENDS"),
    ] {
        let error = set(&mut tables, Some(number), spec, 2).unwrap_err();
        assert!(error.to_string().starts_with(map), "{error}");
        assert_eq!(tables.maps().list().unwrap()[..1], before[..]);
    }
}

#[test]
fn a_frontend_that_changes_hands_is_never_missing() {
    if !is_root() {
        return;
    }
    let mut tables = tables();
    let mut ports = [spec("10.96.0.1", &[1]), spec("10.96.0.2", &[1, 1])];
    let shared = FrontendSpec {
        address: at("192.0.2.1"),
        ..ports[0].frontends[0]
    };
    ports[0].frontends.push(shared);
    let numbers = [0, 1].map(|which| set(&mut tables, None, &ports[which], 0).unwrap().0);
    for (from, order) in [(0, [0, 1]), (1, [0, 1]), (0, [1, 0]), (1, [1, 0])] {
        let to = 1 - from;
        ports[from].frontends.pop();
        ports[to].frontends.push(shared);
        let mut change = tables.change(SECOND);
        for which in order {
            let known = Some(numbers[which]);
            change.set(known, &ports[which], &mut InTurn).unwrap();
        }
        let written = change.commit().unwrap();
        assert_eq!((written.frontends, written.frontends_removed), (1, 0));
        assert_eq!(led(&tables, "192.0.2.1").len(), ports[to].cluster.len());
    }
}

#[test]
fn a_round_goes_on_where_it_was_when_backends_change() {
    if !is_root() {
        return;
    }
    let mut tables = tables();
    let mut round = spec("10.96.0.1", &[1, 1, 1]);
    round.algorithm = ALGORITHM_ROUND_ROBIN;
    let (number, _) = set(&mut tables, None, &round, 0).unwrap();
    let pool = |tables: &ServiceTables| tables.maps().list().unwrap()[0].entry.inside.at;
    tables.maps.slots.write(&[(pool(&tables), 41)]).unwrap();
    round.cluster.pop();
    let before = pool(&tables);
    set(&mut tables, Some(number), &round, 1).unwrap();
    assert_ne!(pool(&tables), before);
    assert_eq!(tables.maps.slots.get(&pool(&tables)).unwrap(), Some(41));
}

/// Three flows of the first backend, of which the map has lost one; a socket of the second, which has three too many; and
/// flows of what is no backend any more.
#[test]
fn flows_are_counted_anew_where_their_count_decides() {
    if !is_root() {
        return;
    }
    for (algorithm, is_counted) in [
        (ALGORITHM_LEAST_CONNECTION, true),
        (ALGORITHM_RANDOM, false),
    ] {
        let mut tables = tables();
        let spec = PortSpec {
            algorithm,
            ..spec("10.96.0.1", &[1, 1])
        };
        let (service, _) = set(&mut tables, None, &spec, 0).unwrap();
        let maps = tables.maps();
        let backends = maps.backends().unwrap();
        let [first, second] = *backends.keys().copied().collect::<Vec<_>>() else {
            panic!("{backends:?}")
        };
        let told = [(first, 3), (second, 4)].map(|(index, flows)| {
            let backend = backends[&index];
            (index, Backend { flows, ..backend })
        });
        maps.backends.write(&told).unwrap();
        let ways = [
            (first, service),
            (first, service),
            (first, service + 1),
            (7, service),
        ];
        let flows = ways
            .iter()
            .zip(1..)
            .flat_map(|(&(backend, service), port)| {
                [TUPLE_IN, TUPLE_OUT].map(|direction| {
                    let tuple = Tuple4 {
                        dport_be: port,
                        protocol: TCP,
                        direction,
                        ..Tuple4::default()
                    };
                    let flow = ServiceFlow4 {
                        backend,
                        service,
                        ..ServiceFlow4::default()
                    };
                    (tuple, flow)
                })
            });
        maps.flows4[0].write(&flows.collect::<Vec<_>>()).unwrap();
        let connected = SocketKey::connected(9, TCP);
        let sockets = [connected, connected.answers(Addr::default(), 80)].map(|key| {
            let flow = SocketFlow {
                backend: second,
                service,
                ..SocketFlow::default()
            };
            (key, flow)
        });
        maps.sockets.write(&sockets).unwrap();

        let counts = |tables: &ServiceTables| {
            let backends = tables.maps().backends().unwrap();
            [first, second].map(|index| backends[&index].flows)
        };
        let (corrected, wanted) = if is_counted { (2, [2, 1]) } else { (0, [3, 4]) };
        assert_eq!(tables.recount().unwrap(), corrected);
        assert_eq!(counts(&tables), wanted);
        assert_eq!(tables.recount().unwrap(), 0);
        assert_eq!(counts(&tables), wanted);
    }
}
