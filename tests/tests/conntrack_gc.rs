//! Collection of conntrack and NAT entries: what has expired goes, with its translation; what is alive
//! stays, however close it is to its end.

use std::net::Ipv4Addr;

use aya::Pod;
use aya::maps::{HashMap, Map, MapData};
use health_agent::conntrack::{Collected, Family, Pass, Tables as _};
use health_agent::datapath::clock::now_ns;
use health_agent::datapath::collect::KernelTables;
use health_common::collect::Translated;
use health_common::ct::{CtEntry, TUPLE_IN, TUPLE_OUT, Tuple4, Tuple6};
use health_common::nat::{NatEntry4, NatEntry6};
use tests::testrun::TestRun;

const TCP: u8 = 6;
const MINUTE_NS: u64 = 60_000_000_000;

/// A loaded datapath, its maps and their collector.
struct Bed {
    ct4: HashMap<MapData, Tuple4, CtEntry>,
    ct6: HashMap<MapData, Tuple6, CtEntry>,
    nat4: HashMap<MapData, Tuple4, NatEntry4>,
    nat6: HashMap<MapData, Tuple6, NatEntry6>,
    tables: KernelTables,
    run: TestRun,
}

impl Bed {
    fn new() -> Self {
        let run = TestRun::load();
        Self {
            ct4: map(&run, "HEALTH_CT4"),
            ct6: map(&run, "HEALTH_CT6"),
            nat4: map(&run, "HEALTH_NAT4"),
            nat6: map(&run, "HEALTH_NAT6"),
            tables: run.datapath.tables().expect("the maps"),
            run,
        }
    }

    fn collect(&self, family: Family) -> Collected {
        self.tables.collect(family).expect("a collection")
    }

    /// Enters the flow and both entries of its translation to `port`.
    fn enter4(&mut self, flow: Tuple4, expires: u32, port: u16, created_ns: u64) {
        self.ct4.insert(flow, entry(expires), 0).expect("room");
        self.translate4(flow, port, created_ns);
    }

    fn translate4(&mut self, flow: Tuple4, port: u16, created_ns: u64) {
        let out = NatEntry4 {
            created_ns,
            addr_be: ip(NODE),
            port_be: port.to_be(),
            ..NatEntry4::default()
        };
        let back = NatEntry4 {
            addr_be: flow.saddr_be,
            port_be: flow.sport_be,
            ..out
        };
        self.nat4.insert(flow, out, 0).expect("room");
        self.nat4
            .insert(flow.reply_key(&out), back, 0)
            .expect("room");
    }
}

const NODE: Ipv4Addr = Ipv4Addr::new(172, 30, 0, 1);

fn map<K: Pod, V: Pod>(run: &TestRun, name: &str) -> HashMap<MapData, K, V> {
    let map = MapData::from_pin(run.location.pins().join(name)).expect("a pinned map");
    HashMap::try_from(Map::from_map_data(map).expect("its kind")).expect("its layout")
}

fn ip(addr: Ipv4Addr) -> u32 {
    u32::from(addr).to_be()
}

fn now() -> u32 {
    (now_ns() / 1_000_000_000) as u32
}

fn entry(expires: u32) -> CtEntry {
    CtEntry {
        expires,
        ..CtEntry::default()
    }
}

/// The outbound flow number `n`.
fn flow4(n: u32) -> Tuple4 {
    Tuple4 {
        saddr_be: ip(Ipv4Addr::new(10, 244, 1, 7)),
        daddr_be: (0xc000_0000 + n / 50_000).to_be(),
        sport_be: (1_024 + (n % 50_000) as u16).to_be(),
        dport_be: 443_u16.to_be(),
        protocol: TCP,
        direction: TUPLE_OUT,
        pad: 0,
    }
}

fn flow6(n: u32) -> Tuple6 {
    Tuple6 {
        saddr_be: [0xfd00_u32.to_be(), 0, 0, 7],
        daddr_be: [0x2001_0db8_u32.to_be(), 0, 0, n.to_be()],
        sport_be: 1_024_u16.to_be(),
        dport_be: 443_u16.to_be(),
        protocol: TCP,
        direction: TUPLE_OUT,
        pad: 0,
    }
}

#[test]
#[ignore = "needs root"]
fn what_has_expired_goes_with_both_entries_of_its_translation() {
    let mut bed = Bed::new();
    let (past, future) = (now() - 2, now() + 60);
    // More than fit into one request, and not a multiple of those.
    for n in 0..300 {
        let expires = if n % 2 == 0 { past } else { future };
        bed.enter4(flow4(n), expires, 40_000 + n as u16, now_ns());
    }
    let collected = bed.collect(Family::Ipv4);
    assert_eq!(
        collected,
        Collected {
            flows: Pass {
                removed: 150,
                refreshed: 0,
                alive: 150
            },
            translations: Pass {
                removed: 300,
                refreshed: 0,
                alive: 300
            },
        }
    );
    let left: Vec<Tuple4> = bed.ct4.keys().map(|key| key.expect("a key")).collect();
    assert_eq!(left.len(), 150);
    for flow in left {
        assert_eq!(bed.ct4.get(&flow, 0).expect("an entry").expires, future);
        let out = bed.nat4.get(&flow, 0).expect("its translation");
        let back = bed
            .nat4
            .get(&flow.reply_key(&out), 0)
            .expect("the way back");
        assert_eq!((back.addr_be, back.port_be), (flow.saddr_be, flow.sport_be));
    }
    assert_eq!(bed.nat4.keys().count(), 300);
}

#[test]
#[ignore = "needs root"]
fn ipv6_entries_are_collected_too() {
    let mut bed = Bed::new();
    let out = NatEntry6 {
        created_ns: now_ns(),
        addr_be: [0xfd00_u32.to_be(), 0, 0, 1],
        port_be: 40_000_u16.to_be(),
        ..NatEntry6::default()
    };
    for n in 0..200 {
        let flow = flow6(n);
        let expires = if n < 100 { now() - 2 } else { now() + 60 };
        bed.ct6.insert(flow, entry(expires), 0).expect("room");
        let back = NatEntry6 {
            addr_be: flow.saddr_be,
            port_be: flow.sport_be,
            ..out
        };
        bed.nat6.insert(flow, out, 0).expect("room");
        bed.nat6
            .insert(flow.reply_key(&out), back, 0)
            .expect("room");
    }
    let collected = bed.collect(Family::Ipv6);
    assert_eq!(collected.flows.removed, 100);
    assert_eq!(collected.translations.removed, 200);
    assert_eq!(bed.ct6.keys().count(), 100);
    assert_eq!(bed.nat6.keys().count(), 200);
    assert_eq!(bed.collect(Family::Ipv4), Collected::default());
}
