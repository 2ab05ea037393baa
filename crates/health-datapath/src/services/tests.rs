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

/// Fills slots round-robin.
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

/// Returns a port at this address with backends of these weights.
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

/// Sets one port to this spec at this second.
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

/// Returns the last byte of the address of each backend behind a frontend, with its share.
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
        slots: 7,
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
    // Each backend has two flows.
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
        "XDP is notified: {noted:?}"
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

/// Returns the indexes of the backends of the port with this number.
fn indexes(tables: &ServiceTables, number: u32) -> Vec<u32> {
    let backends = tables.maps().backends().unwrap().into_iter();
    let of_port = backends.filter(|(_, backend)| backend.service == number);
    of_port.map(|(index, _)| index).collect()
}

#[test]
fn what_was_freed_is_used_again_after_ten_seconds_or_for_lack_of_others() {
    if !is_root() {
        return;
    }
    let mut tables = tables();
    // There are seven backends in total.
    let (number, _) = set(&mut tables, None, &spec("10.96.0.1", &[1; 5]), 0).unwrap();
    let five = indexes(&tables, number);
    set(&mut tables, Some(number), &spec("10.96.0.1", &[1; 2]), 100).unwrap();
    // Two slots are free now, three have been retired.
    let (other, _) = set(&mut tables, None, &spec("10.96.0.2", &[1; 2]), 101).unwrap();
    let two = indexes(&tables, other);
    assert!(
        two.iter().all(|index| !five.contains(index)),
        "{five:?} {two:?}"
    );
    let (other, _) = set(&mut tables, None, &spec("10.96.0.3", &[1; 3]), 101).unwrap();
    let three = indexes(&tables, other);
    assert!(
        three.iter().all(|index| five.contains(index)),
        "{five:?} {three:?}"
    );
    let error = set(&mut tables, None, &spec("10.96.0.4", &[1; 3]), 200).unwrap_err();
    assert_eq!(
        error.to_string(),
        "HEALTH_BACKENDS has no room for 3 more entries: 8 of 8 are in use; longest free range: 0"
    );
    assert_eq!(tables.maps().list().unwrap().len(), 3);
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
    for (spec, map) in [
        (&many, "HEALTH_SOURCE_RANGES"),
        (&wide, "HEALTH_SVC4"),
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

/// Three flows of the first backend, one of which the map has lost; a socket of the second backend, whose count is
/// three too high; and flows of a backend that no longer exists.
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
        let reported = [(first, 3), (second, 4)].map(|(index, flows)| {
            let backend = backends[&index];
            (index, Backend { flows, ..backend })
        });
        maps.backends.write(&reported).unwrap();
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

/// The map holds three Maglev tables.
#[test]
fn a_port_without_room_for_a_maglev_table_is_served_at_random_until_there_is_room() {
    if !is_root() {
        return;
    }
    let sizes = ServiceMapSizes {
        backends: 32,
        ..SIZES
    };
    let mut tables = ServiceTables::open(ServiceMaps::unpinned(sizes).unwrap()).unwrap();
    let maglev = |ip: &str, backends: usize| PortSpec {
        algorithm: ALGORITHM_MAGLEV,
        ..spec(ip, &[1, 1, 1][..backends])
    };
    let numbers = [1, 2, 3].map(|last| {
        let ip = format!("10.96.0.{last}");
        set(&mut tables, None, &maglev(&ip, 2), 0).unwrap().0
    });
    let algorithm = |tables: &ServiceTables, ip: &str| {
        let listed = tables.maps().list().unwrap();
        let frontend = listed.iter().find(|frontend| frontend.address == at(ip));
        frontend.unwrap().entry.algorithm
    };
    let mut change = tables.change(SECOND);
    let fourth = change
        .set(None, &maglev("10.96.0.4", 2), &mut InTurn)
        .unwrap();
    assert_eq!(
        change.without_maglev(fourth).unwrap().to_string(),
        "HEALTH_MAGLEV has no room for 7 more entries: 21 of 21 are in use; longest free range: 0"
    );
    change.commit().unwrap();
    assert_eq!(algorithm(&tables, "10.96.0.4"), ALGORITHM_RANDOM);
    assert_eq!(led(&tables, "10.96.0.4").len(), 2);

    // A restart does not change that.
    let mut tables = again(&tables);
    let mut change = tables.change(SECOND);
    for last in 1..=4 {
        let ip = format!("10.96.0.{last}");
        let number = change.set(None, &maglev(&ip, 2), &mut InTurn).unwrap();
        assert_eq!(
            number,
            [numbers[0], numbers[1], numbers[2], fourth][last - 1]
        );
        assert_eq!(change.without_maglev(number).is_some(), last == 4);
    }
    change.remove_others();
    assert_eq!(change.commit().unwrap(), Written::default());

    // Other backends do not need another table.
    let (_, written) = set(&mut tables, Some(numbers[0]), &maglev("10.96.0.1", 3), 2).unwrap();
    assert_eq!((written.frontends, written.slots), (0, 7));
    assert_eq!(led(&tables, "10.96.0.1").len(), 3);

    let mut change = tables.change(3 * SECOND);
    change.remove(numbers[1]);
    change.commit().unwrap();
    let mut change = tables.change(3 * SECOND);
    change
        .set(Some(fourth), &maglev("10.96.0.4", 2), &mut InTurn)
        .unwrap();
    assert!(change.without_maglev(fourth).is_none());
    change.commit().unwrap();
    assert_eq!(algorithm(&tables, "10.96.0.4"), ALGORITHM_MAGLEV);
}

const LARGER: ServiceMapSizes = ServiceMapSizes {
    frontends: 1_024,
    backends: 1_024,
    slots: 4_096,
    source_ranges: 1_024,
    ..SIZES
};

/// Sets ports of an owner, with this many backends each, until one is refused. Returns the ports' numbers and the
/// error.
fn take_all(
    tables: &mut ServiceTables,
    owner: &str,
    net: u8,
    backends: usize,
) -> (Vec<u32>, String) {
    let mut numbers = Vec::new();
    loop {
        let port = numbers.len();
        let ip = format!("10.{net}.{}.{}", port / 256, port % 256);
        let spec = PortSpec {
            owner: owner.into(),
            ..spec(&ip, &vec![1; backends])
        };
        match set(tables, None, &spec, 0) {
            Ok((number, _)) => numbers.push(number),
            Err(error) => return (numbers, error.to_string()),
        }
    }
}

#[test]
fn an_owner_that_takes_all_it_can_leaves_room_to_all_others() {
    if !is_root() {
        return;
    }
    let mut tables = ServiceTables::open(ServiceMaps::unpinned(LARGER).unwrap()).unwrap();
    let mut small = PortSpec {
        owner: "small".into(),
        ..spec("10.96.0.1", &[1])
    };
    let (number, _) = set(&mut tables, None, &small, 0).unwrap();

    let (greedy, error) = take_all(&mut tables, "greedy", 100, 10);
    // There are 1,024 slots: the first is unused, and one belongs to the other owner. 910 would be more than eight
    // times the remainder.
    assert_eq!(greedy.len(), 90);
    assert_eq!(
        error,
        "HEALTH_BACKENDS has no room for 10 more entries of greedy, which uses 900 of 1023; the \
         last 122 are reserved for others"
    );
    // The neighbour replaces its only backend repeatedly within the ten seconds of the grace period.
    for last in 1..=200 {
        small.cluster[0].address = at(&format!("10.1.1.{last}"));
        let (kept, written) = set(&mut tables, Some(number), &small, 1).unwrap();
        assert_eq!((kept, written.backends), (number, 1));
        assert_eq!(led(&tables, "10.96.0.1"), [(last, 1.0)]);
    }
    // Other owners arrive and are served.
    let (second, error) = take_all(&mut tables, "second", 101, 10);
    assert!(error.contains("of second, which uses"), "{error}");
    assert!(second.len() >= 5, "{}", second.len());
    // An owner that may not grow may still replace or reduce its entries.
    let ip = "10.100.0.0";
    let mut own = PortSpec {
        owner: "greedy".into(),
        ..spec(ip, &[1; 10])
    };
    own.cluster
        .iter_mut()
        .zip(101..)
        .for_each(|(backend, last)| {
            backend.address = at(&format!("10.1.0.{last}"));
        });
    set(&mut tables, Some(greedy[0]), &own, 2).unwrap();
    assert_eq!(led(&tables, ip)[0].0, 101);

    // After a restart, the entries are found unchanged, even in another order.
    let mut tables = again(&tables);
    let mut change = tables.change(3 * SECOND);
    change.set(None, &own, &mut InTurn).unwrap();
    change.set(None, &small, &mut InTurn).unwrap();
    change.commit().unwrap();
    let more = PortSpec {
        owner: "small".into(),
        ..spec("10.96.0.9", &[1])
    };
    set(&mut tables, None, &more, 3).unwrap();
}

#[test]
fn no_table_can_be_filled_by_one_owner() {
    if !is_root() {
        return;
    }
    let wide = |count: u32, v6: bool| PortSpec {
        owner: "greedy".into(),
        frontends: (0..count)
            .map(|number| FrontendSpec {
                address: match v6 {
                    true => at(&format!("fd00::{number:x}")),
                    false => at(&format!("10.98.{}.{}", number / 256, number % 256)),
                },
                ..spec("10.96.0.1", &[1]).frontends[0]
            })
            .collect(),
        ..spec("10.96.0.1", &[1])
    };
    let ranges = |count: u32| PortSpec {
        owner: "greedy".into(),
        source_ranges: (0..count)
            .map(|number| {
                format!("10.{}.{}.0/24", number / 256, number % 256)
                    .parse()
                    .unwrap()
            })
            .collect(),
        ..spec("10.96.0.1", &[1])
    };
    for (map, fits, is_too_much) in [
        ("HEALTH_SVC4", wide(911, false), wide(912, false)),
        ("HEALTH_SVC6", wide(911, true), wide(912, true)),
        ("HEALTH_SOURCE_RANGES", ranges(911), ranges(912)),
    ] {
        let maps = ServiceMaps::unpinned(LARGER).unwrap();
        let mut tables = ServiceTables::open(maps).unwrap();
        let error = set(&mut tables, None, &is_too_much, 0).unwrap_err();
        assert_eq!(error.full_map(), Some(map), "{error}");
        let (number, _) = set(&mut tables, None, &fits, 0).unwrap();
        let error = set(&mut tables, Some(number), &is_too_much, 0).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("1 more entries of greedy, which uses 911"),
            "{error}"
        );
        set(&mut tables, Some(number), &fits, 0).unwrap();
    }
}
