//! The command line lists, counts and flushes conntrack and NAT entries, and dumps maps. The tests fill the maps; no
//! agent runs.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::Context as _;
use aya::Pod;
use aya::maps::{HashMap, Map, MapData};
use health_common::addr::Addr;
use health_common::arrivals::{Arrivals, Prober};
use health_common::config::DatapathConfig;
use health_common::ct::{CT_SEEN_NON_SYN, CtEntry, TUPLE_IN, TUPLE_OUT, Tuple4, Tuple6};
use health_common::fragment::{FragmentKey4, FragmentPorts};
use health_common::nat::NatEntry4;
use health_common::service::xdp::{Pending, XdpDevice, XdpFlow};
use health_common::tcp::{self, ACK, FlowKey, SYN};
use health_datapath::layout::{self, MapLayout};
use serde_json::Value;
use tests::bed::agent_binary;
use tests::process::{RunOutput, run};
use tests::testrun::TestRun;
use tests::{RaisedAtEnd, is_long};

const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMPV6: u8 = 58;
const LOCAL: &str = "10.244.1.9";

/// Runs the command line with a test's maps.
fn cli(bed: &TestRun, words: &str) -> anyhow::Result<RunOutput> {
    let mut command = Command::new(agent_binary()?);
    command
        .args(["--instance", &bed.location.instance, "--bpf-root"])
        .arg(&bed.location.bpf_root)
        .args(words.split_ascii_whitespace());
    run(&mut command)
}

fn rows(bed: &TestRun, words: &str) -> anyhow::Result<Vec<Value>> {
    let text = cli(bed, &format!("{words} -o json"))?.success()?;
    Ok(serde_json::from_str(&text)?)
}

fn map<K: Pod, V: Pod>(
    bed: &TestRun,
    layout: &MapLayout,
) -> anyhow::Result<HashMap<MapData, K, V>> {
    let map = MapData::from_pin(bed.location.pins().join(layout.name))?;
    Ok(HashMap::try_from(Map::from_map_data(map)?)?)
}

fn v4(text: &str) -> anyhow::Result<u32> {
    let address: Ipv4Addr = text.parse()?;
    Ok(address.to_bits().to_be())
}

fn tuple4(
    protocol: u8,
    direction: u8,
    source: (&str, u16),
    destination: (&str, u16),
) -> anyhow::Result<Tuple4> {
    Ok(Tuple4 {
        saddr_be: v4(source.0)?,
        daddr_be: v4(destination.0)?,
        sport_be: source.1.to_be(),
        dport_be: destination.1.to_be(),
        protocol,
        direction,
        pad: 0,
    })
}

fn established() -> CtEntry {
    CtEntry {
        rx_packets: 3,
        expires: 5_000,
        last_tx: 100,
        flags: CT_SEEN_NON_SYN,
        rx_flags_seen: SYN | ACK,
        tx_flags_seen: SYN | ACK,
        ..CtEntry::default()
    }
}

/// Maps with an endpoint's masqueraded connection, a half-open one, a query to an endpoint, and an IPv6 echo.
fn filled() -> anyhow::Result<TestRun> {
    let mut bed = TestRun::load();
    let endpoint = (LOCAL.parse()?, "fd00:10:244:1::9".parse()?);
    bed.set_health_endpoint(endpoint, [2; 6], [4; 6], DatapathConfig::default());
    let open = tuple4(TCP, TUPLE_OUT, (LOCAL, 4_000), ("1.1.1.1", 443))?;
    let half_open = tuple4(TCP, TUPLE_OUT, (LOCAL, 4_001), ("1.1.1.1", 443))?;
    let query = tuple4(UDP, TUPLE_IN, ("172.30.0.2", 999), (LOCAL, 53))?;
    let mut flows: HashMap<_, Tuple4, CtEntry> = map(&bed, &layout::CT4)?;
    flows.insert(open, established(), 0)?;
    let syn = CtEntry {
        tx_flags_seen: SYN,
        ..CtEntry::default()
    };
    flows.insert(half_open, syn, 0)?;
    map(&bed, &layout::CT_ANY4)?.insert(query, CtEntry::default(), 0)?;
    let peer: Ipv6Addr = "fd00:30::2".parse()?;
    let echo = Tuple6 {
        saddr_be: Addr::from(peer).words_be,
        daddr_be: Addr::from(endpoint.1).words_be,
        sport_be: 77_u16.to_be(),
        protocol: ICMPV6,
        direction: TUPLE_IN,
        ..Tuple6::default()
    };
    map(&bed, &layout::CT_ANY6)?.insert(echo, CtEntry::default(), 0)?;

    let mut translations: HashMap<_, Tuple4, NatEntry4> = map(&bed, &layout::NAT4)?;
    for (flow, port) in [(open, 40_000_u16), (half_open, 40_001)] {
        let out = NatEntry4 {
            addr_be: v4("172.30.0.1")?,
            port_be: port.to_be(),
            ..NatEntry4::default()
        };
        let back = NatEntry4 {
            addr_be: flow.saddr_be,
            port_be: flow.sport_be,
            ..NatEntry4::default()
        };
        translations.insert(flow, out, 0)?;
        translations.insert(out.inbound_key(&flow), back, 0)?;
    }
    Ok(bed)
}

/// Destination ports of the listed flows, in ascending order.
fn ports(bed: &TestRun, words: &str) -> anyhow::Result<Vec<u64>> {
    let rows = rows(bed, words)?;
    let mut ports: Vec<u64> = rows
        .iter()
        .filter_map(|row| row["destination-port"].as_u64())
        .collect();
    ports.sort_unstable();
    Ok(ports)
}

#[test]
#[ignore = "needs root"]
fn flows_are_chosen_by_flags_and_endpoint() -> anyhow::Result<()> {
    let bed = filled()?;
    for (words, expected) in [
        ("", &[0, 53, 443, 443][..]),
        ("--proto tcp", &[443, 443]),
        ("--proto udp --proto icmpv6", &[0, 53]),
        ("--src 10.244.0.0/16 --port 4001", &[443]),
        ("--dst fd00::/8", &[0]),
        ("--dir in", &[0, 53]),
        ("--state established", &[443]),
        ("--state syn_sent --state time_wait", &[443]),
        ("77", &[0, 53, 443, 443]),
        ("10.244.1.9 --dir out", &[443, 443]),
        ("global --proto sctp", &[]),
    ] {
        assert_eq!(
            ports(&bed, &format!("bpf ct list {words}"))?,
            expected,
            "{words}"
        );
        let count = cli(&bed, &format!("bpf ct list {words} --count"))?.success()?;
        assert_eq!(count, format!("{}\n", expected.len()), "{words}");
    }
    for unknown in ["78", "172.30.0.2"] {
        let ran = cli(&bed, &format!("bpf ct list {unknown}"))?;
        assert_eq!(ran.code, Some(1));
        assert!(ran.stderr.contains(unknown), "{}", ran.stderr);
    }
    assert_eq!(ports(&bed, "bpf nat list --dir in")?, [40_000, 40_001]);
    assert_eq!(rows(&bed, "bpf nat list --port 4000")?.len(), 1);
    assert_eq!(cli(&bed, "bpf nat list --count")?.success()?, "4\n");
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn every_form_has_the_same_rows() -> anyhow::Result<()> {
    let bed = filled()?;
    let sorted = |mut rows: Vec<Value>| {
        rows.sort_by_key(Value::to_string);
        rows
    };
    // NAT entries are left out: they show their age, which differs between dumps.
    for listing in ["ct list", "map dump HEALTH_CT4", "map dump HEALTH_CONFIG"] {
        let json = sorted(rows(&bed, &format!("bpf {listing}"))?);
        let lines = cli(&bed, &format!("bpf {listing} -o jsonl"))?.success()?;
        let lines: Vec<Value> = lines
            .lines()
            .map(serde_json::from_str)
            .collect::<Result<_, _>>()?;
        assert_eq!(sorted(lines), json, "{listing}");
        let yaml = cli(&bed, &format!("bpf {listing} -o yaml"))?.success()?;
        let items = yaml.lines().filter(|line| line.starts_with("- "));
        assert_eq!(items.count(), json.len(), "{yaml}");
        let text = cli(&bed, &format!("bpf {listing}"))?.success()?;
        assert_eq!(text.lines().count(), json.len(), "{text}");
    }
    let text = cli(&bed, "bpf ct list --state established --time-diff")?.success()?;
    assert!(
        text.starts_with(&format!("TCP OUT {LOCAL}:4000 -> 1.1.1.1:443 expires=")),
        "{text}"
    );
    assert!(text.contains(" Flags=0x0010 [ SeenNonSyn ] "), "{text}");
    assert!(text.contains("LastRxReport=never"), "{text}");
    let relative = rows(&bed, "bpf ct list --state established -d")?;
    let times = ["expires-in-s", "last-tx-age-s"].map(|name| relative[0][name].as_i64());
    let [Some(expires), Some(age)] = times else {
        panic!("{relative:?}");
    };
    assert_eq!(expires + age, 4_900, "both from the same clock");
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn flushed_flows_take_their_translations_along() -> anyhow::Result<()> {
    let bed = filled()?;
    for bare in ["bpf ct flush", "bpf nat flush"] {
        assert_eq!(cli(&bed, bare)?.code, Some(2), "{bare}");
    }
    let pins = bed.location.pins();
    let flushed = |entries: [(&str, &str); 8]| -> String {
        entries
            .iter()
            .map(|(map, entries)| {
                format!("Flushed {entries} from {}/HEALTH_{map}\n", pins.display())
            })
            .collect()
    };
    let said = cli(&bed, "bpf ct flush --state syn_sent")?.success()?;
    assert_eq!(
        said,
        flushed([
            ("CT4", "1 entry"),
            ("NAT4", "2 entries"),
            ("CT_ANY4", "0 entries"),
            ("NAT_ANY4", "0 entries"),
            ("CT6", "0 entries"),
            ("NAT6", "0 entries"),
            ("CT_ANY6", "0 entries"),
            ("NAT_ANY6", "0 entries"),
        ])
    );
    assert_eq!(ports(&bed, "bpf ct list")?, [0, 53, 443]);
    assert_eq!(ports(&bed, "bpf nat list")?, [443, 40_000]);

    cli(&bed, &format!("bpf nat flush --dst {LOCAL}"))?.success()?;
    assert_eq!(rows(&bed, "bpf nat list")?.len(), 2, "none is for it");
    cli(&bed, "bpf nat flush --dir in --src 1.1.1.1")?.success()?;
    assert_eq!(rows(&bed, "bpf nat list")?, Vec::<Value>::new());

    let said = cli(&bed, "bpf ct flush global")?.success()?;
    assert_eq!(
        said,
        flushed([
            ("CT4", "1 entry"),
            ("NAT4", "0 entries"),
            ("CT_ANY4", "1 entry"),
            ("NAT_ANY4", "0 entries"),
            ("CT6", "0 entries"),
            ("NAT6", "0 entries"),
            ("CT_ANY6", "1 entry"),
            ("NAT_ANY6", "0 entries"),
        ])
    );
    assert_eq!(rows(&bed, "bpf ct list")?, Vec::<Value>::new());
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn entries_that_live_through_a_listing_are_in_it_once() -> anyhow::Result<()> {
    const COMING_AND_GOING: u32 = 2_000;
    // Both numbers of entries take several batches to read.
    let living = if is_long() { 20_000 } else { 5_000 };
    let bed = TestRun::load_alone();
    let tuple = |number: u32| Tuple4 {
        saddr_be: number.to_be(),
        daddr_be: 1,
        protocol: TCP,
        ..Tuple4::default()
    };
    let mut flows: HashMap<_, Tuple4, CtEntry> = map(&bed, &layout::CT4)?;
    for number in 0..living {
        flows.insert(tuple(number), CtEntry::default(), 0)?;
    }
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| -> anyhow::Result<()> {
        let churn = scope.spawn(|| -> anyhow::Result<()> {
            let mut number = 0;
            while !is_over.load(Ordering::Relaxed) {
                let place = number % COMING_AND_GOING;
                let other = tuple(living + place);
                if flows.remove(&other).is_err() {
                    flows.insert(other, CtEntry::default(), 0)?;
                }
                // The remaining entries are also updated all the time.
                flows.insert(tuple(number % living), established(), 0)?;
                number = number.wrapping_add(1);
            }
            Ok(())
        });
        let ends_churn = RaisedAtEnd(&is_over);
        let listed = (0..10).try_for_each(|_| -> anyhow::Result<()> {
            let text = cli(&bed, "bpf ct list -o jsonl")?.success()?;
            let mut times: BTreeMap<u32, u32> = BTreeMap::new();
            for line in text.lines() {
                let row: Value = serde_json::from_str(line)?;
                let source = row["source"].as_str().context("no source")?;
                *times
                    .entry(source.parse::<Ipv4Addr>()?.to_bits())
                    .or_default() += 1;
            }
            let listed = times.range(..living).count();
            assert_eq!(listed, living as usize, "none is missing");
            assert!(
                times.values().all(|times| *times == 1),
                "none is listed twice"
            );
            Ok(())
        });
        drop(ends_churn);
        let churned = churn.join().ok().context("the churn panicked")?;
        listed.and(churned)
    })
}

#[test]
#[ignore = "needs root"]
fn each_map_shows_its_fields() -> anyhow::Result<()> {
    let bed = filled()?;
    let prober = Prober {
        session: 4660,
        icmp_id_be: 258_u16.to_be(),
        pad: 0,
    };
    map(&bed, &layout::ARRIVALS)?.insert(prober, Arrivals::default(), 0)?;
    let address: IpAddr = "172.30.0.2".parse()?;
    let peer = tcp::Peer {
        path: 1,
        pad: [0; 3],
    };
    map(&bed, &layout::PEERS)?.insert(Addr::from(address), peer, 0)?;
    let connection = FlowKey {
        peer: address.into(),
        local: address.into(),
        peer_port_be: 443_u16.to_be(),
        local_port_be: 4_000_u16.to_be(),
    };
    map(&bed, &layout::TCP)?.insert(connection, tcp::Flow::default(), 0)?;
    let ports = FragmentPorts {
        dport_be: 53_u16.to_be(),
        ..FragmentPorts::default()
    };
    map(&bed, &layout::FRAGMENTS4)?.insert(FragmentKey4::default(), ports, 0)?;
    let way: XdpFlow<u32> = XdpFlow {
        pending: Pending::packet(40).0,
        ..XdpFlow::default()
    };
    map(&bed, &layout::XDP_FLOWS4)?.insert(Tuple4::default(), way, 0)?;
    map(&bed, &layout::XDP_DEVICES)?.insert(5_u32, XdpDevice::default(), 0)?;
    for (name, field, value) in [
        ("HEALTH_XDP_FLOWS4", "/value/pending-bytes", 40.into()),
        (
            "HEALTH_XDP_DEVICES",
            "/value/mac",
            "00:00:00:00:00:00".into(),
        ),
        ("HEALTH_ARRIVALS", "/key/session", Value::from(4660)),
        ("HEALTH_PEERS", "/value/path", "host".into()),
        ("HEALTH_TCP", "/key/peer", "172.30.0.2:443".into()),
        ("HEALTH_CT4", "/key/protocol", "TCP".into()),
        ("HEALTH_CT_ANY4", "/key/protocol", "UDP".into()),
        ("HEALTH_CT_ANY6", "/key/protocol", "ICMPv6".into()),
        ("HEALTH_CONFIG", "/value/timeouts/tcp-close-s", 10.into()),
        ("HEALTH_FRAGMENTS4", "/value/destination-port", 53.into()),
        ("HEALTH_CALLS", "/value/program", "masquerade".into()),
        ("HEALTH_MONITOR", "/value/types", Value::Array(Vec::new())),
    ] {
        let rows = rows(&bed, &format!("bpf map dump {name}"))?;
        let shown = rows.first().and_then(|row| row.pointer(field));
        assert_eq!(shown, Some(&value), "{name}: {rows:?}");
    }
    let of_events = cli(&bed, "bpf map dump HEALTH_EVENTS")?;
    assert_eq!(of_events.code, Some(1));
    assert!(of_events.stderr.contains("monitor"), "{}", of_events.stderr);
    for layout in layout::MAPS {
        if layout == layout::EVENTS {
            continue;
        }
        let rows = rows(&bed, &format!("bpf map dump {}", layout.name))?;
        let in_hex = rows.iter().find(|row| row["value"].is_string());
        assert_eq!(in_hex, None, "{}", layout.name);
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn maps_that_are_not_the_agents_are_left_to_bpftool() -> anyhow::Result<()> {
    let bed = TestRun::load_alone();
    let pin = bed.location.pins().join("HEALTH_OTHER");
    let mut bpftool = Command::new("bpftool");
    bpftool.args(["map", "create"]).arg(&pin);
    bpftool.args("type hash key 4 value 4 entries 8 name other".split(' '));
    run(&mut bpftool)?.success()?;
    let path = pin.display().to_string();
    for map in ["HEALTH_OTHER", &path] {
        let ran = cli(&bed, &format!("bpf map dump {map}"))?;
        assert_eq!(ran.code, Some(1), "{map}");
        let hint = format!("use `bpftool map dump pinned {path}`");
        assert!(ran.stderr.contains(&hint), "{}", ran.stderr);
    }
    Ok(())
}
