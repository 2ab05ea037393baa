//! Garbage collection of conntrack and NAT entries: expired entries and their translations are removed, and live
//! entries stay, however soon they expire.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use aya::maps::{HashMap, Map, MapData, MapError};
use aya::programs::{SchedClassifier, TestRun as _};
use aya::{Pod, TestRunOptions};
use health_common::collect::{CHUNK, COLLECT_FLOWS, COLLECTED, NOT_A_REQUEST};
use health_common::config::DatapathConfig;
use health_common::ct::{
    CtEntry, DEFAULT_ANY_ENTRIES, DEFAULT_ENTRIES, TUPLE_IN, TUPLE_OUT, Timeouts, Tuple4, Tuple6,
};
use health_common::metrics::Reason;
use health_common::nat::{NatEntry4, NatEntry6};
use health_common::tuple::Tuple;
use health_datapath::conntrack::KernelTables;
use health_datapath::conntrack::{CollectionOutcome, Family, Fill, Pass, Tables as _};
use health_net::clock::now_ns;
use tests::packet::{IPV4, Ipv4, echo4, ethernet, payload};
use tests::testrun::{REDIRECT, TestRun};
use tests::{Bed as Nodes, PATIENCE, RaisedAtEnd, is_long, wait_for};

const TCP: u8 = 6;
const ICMP: u8 = 1;
const SECOND_NS: u64 = 1_000_000_000;
const NODE: Ipv4Addr = Ipv4Addr::new(172, 30, 0, 1);
const HEALTH: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 7);
const HEALTH6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x10, 0x244, 1, 0, 0, 0, 7);
const MAC: [u8; 6] = [0x02, 0, 0, 0, 0, 0x0e];
const HOST_MAC: [u8; 6] = [0x02, 0, 0, 0, 0, 0x01];
const ECHO_ID: u16 = 7;
/// Lifetime of echo flows in seconds: a flow expires when the last of these seconds begins.
const LIFETIME_SECS: u32 = 2;

/// A loaded datapath with its maps and their collector.
struct Bed {
    ct4: HashMap<MapData, Tuple4, CtEntry>,
    ct6: HashMap<MapData, Tuple6, CtEntry>,
    /// Flows of all protocols but TCP.
    ct_any4: HashMap<MapData, Tuple4, CtEntry>,
    nat4: HashMap<MapData, Tuple4, NatEntry4>,
    nat6: HashMap<MapData, Tuple6, NatEntry6>,
    tables: KernelTables,
    run: TestRun,
}

impl Bed {
    fn new() -> Self {
        Self::of(TestRun::load())
    }

    fn of(mut run: TestRun) -> Self {
        let settings = DatapathConfig {
            timeouts: Timeouts {
                icmp: LIFETIME_SECS,
                ..Timeouts::default()
            },
            ..DatapathConfig::default()
        };
        run.set_health_endpoint((HEALTH, HEALTH6), MAC, HOST_MAC, settings);
        Self {
            ct4: map(&run, "HEALTH_CT4"),
            ct6: map(&run, "HEALTH_CT6"),
            ct_any4: map(&run, "HEALTH_CT_ANY4"),
            nat4: map(&run, "HEALTH_NAT4"),
            nat6: map(&run, "HEALTH_NAT6"),
            tables: run.datapath.tables().expect("the maps"),
            run,
        }
    }

    fn collect(&self, family: Family) -> CollectionOutcome {
        self.tables.collect(family).expect("a collection")
    }

    /// Inserts a flow and both entries of its translation to `port`.
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

fn map<K: Pod, V: Pod>(run: &TestRun, name: &str) -> HashMap<MapData, K, V> {
    pinned(&run.location.pins().join(name))
}

fn pinned<K: Pod, V: Pod>(pin: &Path) -> HashMap<MapData, K, V> {
    let map = MapData::from_pin(pin).expect("a pinned map");
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

/// The outbound flow with index `n`.
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
    // More flows than fit into one request, and not a multiple of a request's size.
    for n in 0..300_u32 {
        let expires = if n.is_multiple_of(2) { past } else { future };
        bed.enter4(flow4(n), expires, 40_000 + n as u16, now_ns());
    }
    let collected = bed.collect(Family::Ipv4);
    assert_eq!(
        collected,
        CollectionOutcome {
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
    assert_eq!(bed.collect(Family::Ipv4), CollectionOutcome::default());
}

#[test]
#[ignore = "needs root"]
fn an_entry_that_is_alive_again_stays_with_its_translation() {
    let mut bed = Bed::new();
    let keys: Vec<Tuple4> = (0..CHUNK as u32).map(flow4).collect();
    for (n, &flow) in (0_u16..).zip(&keys) {
        let expires = if n.is_multiple_of(3) {
            now() - 2
        } else {
            now() + 60
        };
        bed.enter4(flow, expires, 40_000 + n, now_ns());
    }
    // The request is the one that follows a walk that found all entries expired.
    let outcome = bed.run.run("ct_collect", &request(4, &keys));
    assert_eq!(outcome.code as u32, COLLECTED);
    let answer = |at: usize| u32::from_ne_bytes(outcome.bytes[at..][..4].try_into().unwrap());
    assert_eq!((answer(28), answer(32), answer(36)), (22, 42, 44));
    assert_eq!(bed.ct4.keys().count(), 42);
    assert_eq!(bed.nat4.keys().count(), 84);

    let mut other = request(4, &keys);
    other[20] = 5;
    assert_eq!(bed.run.run("ct_collect", &other).code as u32, NOT_A_REQUEST);
    let short = &request(4, &keys)[..1_000];
    assert_eq!(bed.run.run("ct_collect", short).code as u32, NOT_A_REQUEST);
}

/// A request to `ct_collect`, byte by byte.
fn request(ip_version: u32, keys: &[Tuple4]) -> Vec<u8> {
    let mut bytes = vec![0; 16];
    for word in [COLLECT_FLOWS, ip_version, keys.len() as u32, 0, 0, 0] {
        bytes.extend(word.to_ne_bytes());
    }
    for key in keys {
        bytes.extend(key.saddr_be.to_ne_bytes());
        bytes.extend(key.daddr_be.to_ne_bytes());
        bytes.extend(key.sport_be.to_ne_bytes());
        bytes.extend(key.dport_be.to_ne_bytes());
        bytes.extend([key.protocol, key.direction, 0, 0]);
    }
    bytes
}

#[test]
#[ignore = "needs root"]
fn translations_without_a_flow_go_after_a_minute() {
    let mut bed = Bed::new();
    let old = now_ns() - 61 * SECOND_NS;
    let recent = now_ns() - 50 * SECOND_NS;
    bed.translate4(flow4(0), 40_000, old);
    bed.translate4(flow4(1), 40_001, recent);
    bed.enter4(flow4(2), now() + 60, 40_002, old);
    // A late reply was the first packet after the flow's entry was removed.
    let inward = flow4(3).reply();
    bed.ct4.insert(inward, entry(now() + 60), 0).expect("room");
    bed.translate4(flow4(3), 40_003, old);
    let collected = bed.collect(Family::Ipv4);
    assert_eq!(
        collected.translations,
        Pass {
            removed: 2,
            refreshed: 0,
            alive: 6
        }
    );
    let is_there = |n| bed.nat4.get(&flow4(n), 0).is_ok();
    assert_eq!([0, 1, 2, 3].map(is_there), [false, true, true, true]);
}

#[test]
#[ignore = "needs root"]
fn a_way_back_that_now_belongs_to_another_flow_stays() {
    let mut bed = Bed::new();
    let mut other = flow4(0);
    other.saddr_be = ip(Ipv4Addr::new(10, 244, 1, 8));
    bed.enter4(flow4(0), now() - 2, 40_000, now_ns());
    // Another flow now uses the same node port to the same server.
    bed.enter4(other, now() + 60, 40_000, now_ns());
    let collected = bed.collect(Family::Ipv4);
    assert_eq!(collected.translations.removed, 1);
    let out = bed.nat4.get(&other, 0).expect("its translation");
    let back = bed
        .nat4
        .get(&other.reply_key(&out), 0)
        .expect("the way back");
    assert_eq!(back.addr_be, other.saddr_be);
}

#[test]
#[ignore = "needs root"]
fn a_translation_stays_while_either_entry_of_its_flow_lives() {
    let mut bed = Bed::new();
    bed.enter4(flow4(0), now() - 2, 40_000, now_ns());
    // A late reply created this entry.
    let inward = flow4(0).reply();
    bed.ct4.insert(inward, entry(now() + 60), 0).expect("room");
    let collected = bed.collect(Family::Ipv4);
    assert_eq!((collected.flows.removed, collected.flows.alive), (1, 1));
    assert_eq!(collected.translations.removed, 0);
    assert_eq!(bed.nat4.keys().count(), 2);
}

#[test]
#[ignore = "needs root"]
fn how_full_a_map_is_shows_without_reading_it_all() {
    // The error of the estimate depends on the size of the map.
    let mut bed = Bed::of(TestRun::load_alone());
    let fill = |bed: &Bed| -> Fill {
        let fills = bed.tables.fills().expect("the maps");
        let names: Vec<_> = fills.iter().map(|fill| fill.map).collect();
        assert_eq!(
            names,
            [
                "HEALTH_CT4",
                "HEALTH_NAT4",
                "HEALTH_CT_ANY4",
                "HEALTH_NAT_ANY4",
                "HEALTH_CT6",
                "HEALTH_NAT6",
                "HEALTH_CT_ANY6",
                "HEALTH_NAT_ANY6",
                "HEALTH_REVNAT4",
                "HEALTH_REVNAT6"
            ]
        );
        fills[0]
    };
    let mut filled = 0;
    let mut fill_up = |bed: &mut Bed, to| {
        for n in filled..to {
            bed.ct4.insert(flow4(n), entry(u32::MAX), 0).expect("room");
        }
        filled = to;
    };
    assert_eq!(fill(&bed).entries, 0);
    fill_up(&mut bed, 1_000);
    assert_eq!(fill(&bed).entries, 1_000);
    assert_eq!(fill(&bed).capacity, u64::from(DEFAULT_ENTRIES));
    // From here on the fill is an estimate, with bounds of six standard deviations.
    fill_up(&mut bed, 30_000);
    let entries = fill(&bed).entries;
    assert!((24_000..=36_000).contains(&entries), "{entries}");
    assert!(!fill(&bed).is_pressed());
    fill_up(&mut bed, 64_000);
    assert!(fill(&bed).is_pressed());
}

/// An echo request to the health endpoint from the source with index `n`.
fn echo_request(n: u32) -> Vec<u8> {
    let ip = Ipv4::icmp(Ipv4Addr::from_bits(0x0a80_0000 + n), HEALTH);
    ethernet(
        MAC,
        HOST_MAC,
        IPV4,
        &ip.packet(&echo4(8, 0, ECHO_ID, 1, &payload(56))),
    )
}

/// The flow of these echo requests.
fn echo_flow(n: u32) -> Tuple4 {
    Tuple4 {
        saddr_be: (0x0a80_0000 + n).to_be(),
        daddr_be: ip(HEALTH),
        sport_be: ECHO_ID.to_be(),
        dport_be: 0,
        protocol: ICMP,
        direction: TUPLE_IN,
        pad: 0,
    }
}

fn answer(program: &SchedClassifier, request: &[u8]) -> i32 {
    let options = TestRunOptions {
        data_in: Some(request),
        ..TestRunOptions::new()
    };
    program.test_run(options).expect("a run").return_value as i32
}

/// Collects IPv4 entries continuously while `work` runs. Returns its result, the number of collections, and the number
/// of removed entries.
fn while_collecting<T>(tables: &KernelTables, work: impl FnOnce() -> T) -> (T, u64, u64) {
    let stop = AtomicBool::new(false);
    let (runs, removed) = (AtomicU64::new(0), AtomicU64::new(0));
    let result = thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let collected = tables.collect(Family::Ipv4).expect("a collection");
                runs.fetch_add(1, Ordering::Relaxed);
                removed.fetch_add(collected.flows.removed, Ordering::Relaxed);
            }
        });
        let _ends_collecting = RaisedAtEnd(&stop);
        work()
    });
    (result, runs.into_inner(), removed.into_inner())
}

/// An echo flow as the test last saw it.
#[derive(Clone, Copy, Default)]
struct Echoes {
    /// When the flow's last packet was in flight (`CLOCK_MONOTONIC`, in nanoseconds).
    last_ns: u64,
    packets: u64,
}

#[test]
#[ignore = "needs root"]
fn flows_that_are_used_until_their_last_moment_are_never_removed() {
    const FLOWS: u32 = 2_000;
    /// Each flow gets its next packet this long before it may expire, or earlier.
    const MARGIN_NS: u64 = SECOND_NS / 50;
    let packets = if is_long() { 6 } else { 3 } * u64::from(FLOWS);
    let bed = Bed::new();
    let program = bed.run.program("to_endpoint");
    let requests: Vec<_> = (0..FLOWS).map(echo_request).collect();
    let mut flows = vec![Echoes::default(); FLOWS as usize];
    let lifetime_ns = u64::from(LIFETIME_SECS - 1) * SECOND_NS;
    let ((in_time, wrong), runs, _) = while_collecting(&bed.tables, || {
        let (mut in_time, mut wrong) = (0, 0);
        while in_time < packets {
            for (n, echoes) in (0..).zip(&mut flows) {
                let due_ns = (echoes.last_ns + lifetime_ns).saturating_sub(MARGIN_NS);
                thread::sleep(Duration::from_nanos(due_ns.saturating_sub(now_ns())));
                let begun_ns = now_ns();
                assert_eq!(answer(&program, &requests[n as usize]), REDIRECT);
                let entry = bed.ct_any4.get(&echo_flow(n), 0).expect("an entry");
                // On a busy machine a packet may come too late and start a new flow.
                if now_ns() < echoes.last_ns + lifetime_ns {
                    in_time += 1;
                    wrong += u64::from(entry.rx_packets != echoes.packets + 1);
                }
                *echoes = Echoes {
                    last_ns: begun_ns,
                    packets: entry.rx_packets,
                };
            }
        }
        (in_time, wrong)
    });
    assert_eq!(wrong, 0, "of {in_time} packets, with {runs} collections");
    assert!(runs > 1, "{runs} collections");
}

#[test]
#[ignore = "needs root"]
fn flows_that_come_back_after_they_expired_stay_from_then_on() {
    const FLOWS: u32 = 2_000;
    const ROUNDS: u32 = 50;
    let mut bed = Bed::new();
    let program = bed.run.program("to_endpoint");
    let requests: Vec<_> = (0..FLOWS).map(echo_request).collect();
    let Bed {
        ct_any4, tables, ..
    } = &mut bed;
    let (missing, runs, removed) = while_collecting(tables, || {
        let mut missing = 0;
        for _ in 0..ROUNDS {
            for n in 0..FLOWS {
                ct_any4
                    .insert(echo_flow(n), entry(now() - 2), 0)
                    .expect("room");
            }
            for n in 0..FLOWS {
                assert_eq!(answer(&program, &requests[n as usize]), REDIRECT);
                let found = ct_any4.get(&echo_flow(n), 0);
                missing += u32::from(matches!(found, Err(MapError::KeyNotFound)));
            }
        }
        missing
    });
    // A few nanoseconds pass between the program's check of an entry and its removal, and a virtual CPU may be
    // descheduled in between. Removing everything that a walk found expired would lose a hundred times as many entries.
    let allowed = FLOWS * ROUNDS / 2_000;
    assert!(
        missing <= allowed,
        "{missing} of {} are missing, with {runs} collections",
        FLOWS * ROUNDS
    );
    assert!(removed > 0, "{runs} collections removed nothing");
}

#[test]
#[ignore = "needs root"]
fn a_full_map_makes_room_while_it_is_collected_and_is_empty_when_all_have_expired() {
    let bed = Bed::new();
    let program = bed.run.program("to_endpoint");
    let flows = DEFAULT_ANY_ENTRIES + DEFAULT_ANY_ENTRIES / 2;
    let ((), runs, _) = while_collecting(&bed.tables, || {
        for n in 0..flows {
            assert_eq!(answer(&program, &echo_request(n)), REDIRECT);
            assert!(bed.ct_any4.get(&echo_flow(n), 0).is_ok(), "flow {n}");
        }
    });
    assert!(runs > 0);
    assert_eq!(bed.run.counted(Reason::EchoAnswered), u64::from(flows));
    assert_eq!(bed.run.counted(Reason::CtFull), 0);
    wait_for("the map to be empty", PATIENCE, || {
        let left = bed.collect(Family::Ipv4).flows.alive;
        Ok((left == 0).then_some(()))
    })
    .expect("entries that expire");
    assert_eq!(bed.ct_any4.keys().count(), 0);
    assert_eq!(answer(&program, &echo_request(0)), REDIRECT);
    assert_eq!(bed.ct_any4.keys().count(), 1);
}

#[test]
#[ignore = "needs root"]
fn an_agent_reports_a_map_that_is_nearly_full_and_collects_at_once() -> anyhow::Result<()> {
    const ENTRIES: u32 = 8192;
    let bed = Nodes::builder()
        .nodes(1)
        .agent_args(&format!(
            "--conntrack-gc-interval 1h --conntrack-max-entries {ENTRIES}"
        ))
        .start()?;
    let node = bed.node(1);
    bed.wait_all_reachable(PATIENCE)?;
    let mut flows: HashMap<_, Tuple4, CtEntry> = pinned(&node.pins().join("HEALTH_CT4"));
    // None of these entries has expired.
    for n in 0..ENTRIES * 9 / 10 {
        flows.insert(flow4(n), entry(u32::MAX), 0)?;
    }
    let line = "Nearly full maps:   HEALTH_CT4 (";
    wait_for("status to report the full map", PATIENCE, || {
        let reported = node.cli("status")?.success()?.contains(line);
        let collected = node.logged(&["the map is nearly full", "HEALTH_CT4"])?;
        Ok((reported && !collected.is_empty()).then_some(()))
    })?;
    // Now all entries have expired.
    for n in 0..ENTRIES * 9 / 10 {
        flows.insert(flow4(n), entry(1), 0)?;
    }
    wait_for("the collection", PATIENCE, || {
        let reported = node.cli("status")?.success()?.contains(line);
        Ok((!reported && flows.get(&flow4(0), 0).is_err()).then_some(()))
    })?;
    // The flows of HTTP health checks may remain.
    assert!(flows.keys().count() < 100);
    Ok(())
}
