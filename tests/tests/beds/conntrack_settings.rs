//! Lifetimes and sizes of conntrack and NAT, set by flags, and sizes of the service maps. They take effect when an
//! agent next starts, and flows survive the change.

use std::net::{IpAddr, Ipv4Addr};
use std::process::Command;

use anyhow::Context as _;
use aya::Pod;
use aya::maps::lpm_trie::{Key, LpmTrie};
use aya::maps::{Array, HashMap, Map, MapData};
use health_common::ct::{CT_SEEN_NON_SYN, CtEntry, CtState, DEFAULT_ENTRIES, TUPLE_OUT, Tuple4};
use health_common::nat::NatEntry4;
use health_common::service::socket::SOCKET_ENTRIES;
use health_common::service::{Backend, Frontend, FrontendKey4, ServiceFlow4, SourceRange};
use health_common::tcp::{ACK, SYN};
use health_common::tuple::{ServiceFlowParts, Tuple as _};
use health_datapath::dump::Pinned;
use health_datapath::layout::{self, MapLayout};
use health_datapath::services::ServiceMapSizes;
use health_datapath::{Datapath, LoadSettings, MapSizes};
use health_model::settings::Location;
use health_net::clock::coarse_now_secs;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tests::process::run;
use tests::testrun::Bpffs;
use tests::{Bed, Node, PATIENCE};

const ECHOES: u64 = 5;
const FLOWS: u32 = 3_000;
const TCP: u8 = 6;

fn rows(node: &Node, listing: &str) -> anyhow::Result<Vec<Value>> {
    let rows = node.listing(listing)?;
    rows.as_array().cloned().context("no list")
}

fn lifetime(node: &Node, name: &str) -> anyhow::Result<Value> {
    let dump = rows(node, "bpf map dump HEALTH_CONFIG")?;
    let settings = dump.first().context("no settings")?;
    Ok(settings["value"]["timeouts"][name].clone())
}

/// The conntrack entry of a ping that has finished.
fn ping_entry(node: &Node, from: IpAddr) -> anyhow::Result<Value> {
    rows(
        node,
        &format!("bpf ct list --src {from} --proto icmp --time-diff"),
    )?
    .into_iter()
    .find(|row| row["rx-packets"] == ECHOES && row["rx-bytes"] == ECHOES * 128)
    .context("no entry of the ping")
}

fn max_entries(node: &Node) -> anyhow::Result<Vec<(String, u64)>> {
    let maps = rows(node, "bpf map list")?;
    let sizes = maps.iter().filter_map(|map| {
        let name = map["name"].as_str()?;
        let is_sized = ["HEALTH_CT", "HEALTH_NAT"]
            .iter()
            .any(|of| name.starts_with(of));
        is_sized.then_some((name.to_owned(), map["max-entries"].as_u64()?))
    });
    Ok(sizes.collect())
}

#[test]
#[ignore = "needs root"]
fn a_start_with_other_settings_keeps_the_flows_that_there_are() -> anyhow::Result<()> {
    let bed = Bed::builder()
        .nodes(2)
        .agent_args("--conntrack-timeout-icmp 300s --conntrack-timeout-tcp-close 20s")
        .start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let (node, peer) = (bed.node(1), bed.node(2));
    assert_eq!(lifetime(node, "icmp-s")?, 300);
    assert_eq!(lifetime(node, "tcp-close-s")?, 20);
    assert_eq!(lifetime(node, "udp-s")?, 60, "as it always was");
    let endpoint = node.health_ipv4()?;
    peer.exec(&format!("ping -q -n -i 0.01 -s 100 -c {ECHOES} {endpoint}"))?;
    let before = ping_entry(node, peer.ipv4().into())?;
    assert!(before["expires-in-s"].as_i64() > Some(100), "{before}");

    node.kill_agent(Signal::SIGTERM)?;
    node.start_agent_with(
        "--conntrack-timeout-icmp 90s --conntrack-max-entries 131072 --nat-max-entries 2048 \
         --conntrack-any-max-entries 65536 --nat-any-max-entries 4096",
    )?;
    bed.wait_all_reachable(PATIENCE)?;
    assert_eq!(lifetime(node, "icmp-s")?, 90);
    assert_eq!(lifetime(node, "tcp-close-s")?, 10);
    let sizes = [
        ("HEALTH_CT4", 131_072),
        ("HEALTH_CT4_RING", 131_072),
        ("HEALTH_CT6", 131_072),
        ("HEALTH_CT6_RING", 131_072),
        ("HEALTH_CT_ANY4", 65_536),
        ("HEALTH_CT_ANY6", 65_536),
        ("HEALTH_NAT4", 2_048),
        ("HEALTH_NAT4_RING", 2_048),
        ("HEALTH_NAT6", 2_048),
        ("HEALTH_NAT6_RING", 2_048),
        ("HEALTH_NAT_ANY4", 4_096),
        ("HEALTH_NAT_ANY6", 4_096),
    ];
    let sizes: Vec<_> = sizes.map(|(name, size)| (name.to_owned(), size)).into();
    assert_eq!(max_entries(node)?, sizes);
    let after = ping_entry(node, peer.ipv4().into())?;
    assert!(
        after["expires-in-s"].as_i64() > Some(100),
        "its end stays until its next packet: {after}"
    );
    let logged = node.logged(&["changing the map's size", "HEALTH_CT_ANY4"])?;
    assert_eq!(logged.len(), 1, "{logged:?}");
    // New packets get the new lifetime.
    peer.exec(&format!("ping -q -n -c 1 -s 200 {endpoint}"))?;
    let entries = rows(
        node,
        &format!("bpf ct list --src {} --proto icmp --time-diff", peer.ipv4()),
    )?;
    let last = entries.iter().find(|row| row["rx-bytes"] == 228);
    let expires = last.and_then(|row| row["expires-in-s"].as_i64());
    assert!(
        (1..=90).contains(&expires.context("the ping's entry")?),
        "{entries:?}"
    );

    // Repeating the same settings changes nothing.
    node.kill_agent(Signal::SIGKILL)?;
    node.start_agent_with(
        "--conntrack-max-entries 131072 --nat-max-entries 2048 \
         --conntrack-any-max-entries 65536 --nat-any-max-entries 4096",
    )?;
    bed.wait_all_reachable(PATIENCE)?;
    assert_eq!(max_entries(node)?, sizes);
    ping_entry(node, peer.ipv4().into())?;
    assert_eq!(
        node.logged(&["changing the map's size", "HEALTH_CT_ANY4"])?
            .len(),
        1
    );
    Ok(())
}

/// Maps without an agent.
struct Maps {
    bpffs: Bpffs,
}

impl Maps {
    fn location(&self) -> Location {
        Location {
            instance: "sizes".to_owned(),
            runtime_dir: "/nonexistent".into(),
            state_dir: "/nonexistent".into(),
            bpf_root: self.bpffs.path().to_owned(),
        }
    }

    fn load(&self, sizes: MapSizes) -> anyhow::Result<Datapath> {
        let settings = LoadSettings {
            sizes,
            ..LoadSettings::default()
        };
        Ok(Datapath::load(&self.location(), settings)?)
    }

    fn open<K: Pod, V: Pod>(&self, layout: &MapLayout) -> anyhow::Result<HashMap<MapData, K, V>> {
        let map = MapData::from_pin(self.location().pins().join(layout.name))?;
        Ok(HashMap::try_from(Map::from_map_data(map)?)?)
    }

    fn flows(&self) -> anyhow::Result<usize> {
        Ok(Pinned::open(&self.location())?.conntrack()?.len())
    }

    fn translations(&self) -> anyhow::Result<usize> {
        Ok(Pinned::open(&self.location())?.nat()?.len())
    }

    fn backends(&self) -> anyhow::Result<Array<MapData, Backend>> {
        let map = MapData::from_pin(self.location().pins().join(layout::BACKENDS.name))?;
        Ok(Array::try_from(Map::from_map_data(map)?)?)
    }

    /// Capacity for flows, and the names of all pins other than the current maps.
    fn room(&self) -> anyhow::Result<(u32, Vec<String>)> {
        self.room_of(&layout::CT4)
    }

    fn room_of(&self, layout: &MapLayout) -> anyhow::Result<(u32, Vec<String>)> {
        let maps = Pinned::open(&self.location())?.maps()?;
        let room = maps.iter().find(|map| map.name == layout.name);
        let others = maps
            .iter()
            .filter(|map| layout::MAPS.iter().all(|known| known.name != map.name))
            .map(|map| map.name.clone());
        Ok((room.context("no such map")?.max_entries, others.collect()))
    }
}

fn flow(number: u32) -> Tuple4 {
    Tuple4 {
        saddr_be: Ipv4Addr::new(10, 244, 1, 7).to_bits().to_be(),
        daddr_be: number,
        protocol: TCP,
        direction: TUPLE_OUT,
        ..Tuple4::default()
    }
}

#[test]
#[ignore = "needs root"]
fn flows_and_translations_move_to_maps_of_another_size() -> anyhow::Result<()> {
    let maps = Maps {
        bpffs: Bpffs::mount(),
    };
    let large = MapSizes {
        conntrack: 2 * DEFAULT_ENTRIES,
        nat: 2 * DEFAULT_ENTRIES,
        ..MapSizes::default()
    };
    let small = MapSizes {
        conntrack: 1_024,
        nat: 1_024,
        ..MapSizes::default()
    };
    drop(maps.load(MapSizes::default())?);
    let mut ct4 = maps.open::<Tuple4, CtEntry>(&layout::CT4)?;
    let mut nat4 = maps.open::<Tuple4, NatEntry4>(&layout::NAT4)?;
    let now = coarse_now_secs();
    for number in 0..FLOWS {
        let entry = CtEntry {
            tx_packets: u64::from(number),
            // Every third entry has expired.
            expires: if number % 3 == 0 { now } else { now + 3_600 },
            ..CtEntry::default()
        };
        ct4.insert(flow(number), entry, 0)?;
        nat4.insert(flow(number), NatEntry4::default(), 0)?;
    }
    let (all, alive) = (FLOWS as usize, FLOWS as usize * 2 / 3);

    // A start that fails before its programs take over.
    drop(maps.load(large)?);
    assert_eq!(maps.room()?, (DEFAULT_ENTRIES, Vec::new()));
    assert_eq!((maps.flows()?, maps.translations()?), (all, all));

    // Programs that are still in use may add flows until they are replaced.
    let mut datapath = maps.load(large)?;
    let late = CtEntry {
        expires: now + 3_600,
        ..CtEntry::default()
    };
    ct4.insert(flow(FLOWS), late, 0)?;
    datapath.attach(&[])?;
    drop(datapath);
    assert_eq!(maps.room()?, (2 * DEFAULT_ENTRIES, Vec::new()));
    assert_eq!((maps.flows()?, maps.translations()?), (alive + 1, all));
    let moved = maps.open::<Tuple4, CtEntry>(&layout::CT4)?;
    assert_eq!(moved.get(&flow(7), 0)?.tx_packets, 7);

    // A size smaller than the number of flows.
    maps.load(small)?.attach(&[])?;
    assert_eq!(maps.room()?, (small.conntrack, Vec::new()));
    let left = maps.flows()?;
    assert!(
        (512..=1_024).contains(&left),
        "{left} flows in a smaller map"
    );
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn where_fewer_flows_have_room_open_connections_stay_and_unanswered_ones_go() -> anyhow::Result<()>
{
    const OPEN: u32 = 300;
    let sizes = |entries| MapSizes {
        conntrack: entries,
        nat: entries,
        ..service_sizes(entries)
    };
    let maps = Maps {
        bpffs: Bpffs::mount(),
    };
    drop(maps.load(sizes(16_384))?);
    let mut ct4 = maps.open::<Tuple4, CtEntry>(&layout::CT4)?;
    let mut nat4 = maps.open::<Tuple4, NatEntry4>(&layout::NAT4)?;
    let mut revnat4 = maps.open::<Tuple4, ServiceFlow4>(&layout::REVNAT4)?;
    // All flows have the same source, and each has its own frontend.
    let frontend = |number: u32| (Ipv4Addr::new(10, 96, 0, 1).to_bits().to_be(), number as u16);
    let is_open = |number: u32| number.is_multiple_of(FLOWS / OPEN);
    // The key of the client's packets to the frontend, and that of the replies.
    let keys = |number| {
        let sent = flow(number);
        (sent.with_destination(frontend(number)), sent.reply())
    };
    for number in 0..FLOWS {
        let mut entry = CtEntry {
            expires: coarse_now_secs() + 3_600,
            ..CtEntry::default()
        };
        entry.set_state(match is_open(number) {
            true => CtState::new(CT_SEEN_NON_SYN, SYN | ACK, SYN | ACK),
            false => CtState::new(0, 0, SYN),
        });
        let sent = flow(number);
        ct4.insert(sent, entry, 0)?;
        nat4.insert(sent, NatEntry4::default(), 0)?;
        let (asked, answered) = keys(number);
        for (key, to) in [(asked, sent.destination()), (answered, frontend(number))] {
            let parts = ServiceFlowParts {
                to,
                backend: 1,
                service: 1,
                expires: 0,
                flags: 0,
                client_port_be: 0,
            };
            revnat4.insert(key, Tuple4::service_flow(&parts), 0)?;
        }
    }

    maps.load(sizes(1_024))?.attach(&[])?;
    let ct4 = maps.open::<Tuple4, CtEntry>(&layout::CT4)?;
    let nat4 = maps.open::<Tuple4, NatEntry4>(&layout::NAT4)?;
    let revnat4 = maps.open::<Tuple4, ServiceFlow4>(&layout::REVNAT4)?;
    for number in (0..FLOWS).filter(|number| is_open(*number)) {
        let (asked, answered) = keys(number);
        let found = (
            ct4.get(&flow(number), 0).is_ok(),
            nat4.get(&flow(number), 0).is_ok(),
            revnat4.get(&asked, 0).is_ok(),
            revnat4.get(&answered, 0).is_ok(),
        );
        assert_eq!(found, (true, true, true, true), "flow {number}");
    }
    assert_eq!(ct4.keys().count(), 1_024);
    Ok(())
}

fn service_sizes(entries: u32) -> MapSizes {
    MapSizes {
        services: Some(ServiceMapSizes {
            frontends: entries,
            backends: entries,
            flows: entries,
            ..ServiceMapSizes::default()
        }),
        ..MapSizes::default()
    }
}

#[test]
#[ignore = "needs root"]
fn what_is_in_the_maps_of_services_moves_to_maps_of_another_size_and_none_becomes_too_small()
-> anyhow::Result<()> {
    let maps = Maps {
        bpffs: Bpffs::mount(),
    };
    let load = |sizes| maps.load(sizes)?.attach(&[]).map_err(anyhow::Error::from);
    load(service_sizes(4_096))?;
    let backend = |service| Backend {
        service,
        flows: 2,
        ..Backend::default()
    };
    let frontend = |port_be| FrontendKey4 {
        port_be,
        ..FrontendKey4::default()
    };
    for index in [7, 3_000] {
        maps.backends()?.set(index, backend(index), 0)?;
    }
    let mut frontends = maps.open::<FrontendKey4, Frontend>(&layout::SVC4)?;
    for port in 0..3_000 {
        frontends.insert(frontend(port), Frontend::default(), 0)?;
    }
    let known = ServiceFlow4 {
        backend: 7,
        ..ServiceFlow4::default()
    };
    maps.open::<Tuple4, ServiceFlow4>(&layout::REVNAT4)?
        .insert(flow(1), known, 0)?;
    let all_is_there = || -> anyhow::Result<()> {
        for index in [7, 3_000] {
            assert_eq!(maps.backends()?.get(&index, 0)?, backend(index));
        }
        let frontends = maps.open::<FrontendKey4, Frontend>(&layout::SVC4)?;
        assert_eq!(frontends.keys().count(), 3_000);
        let flows = maps.open::<Tuple4, ServiceFlow4>(&layout::REVNAT4)?;
        assert_eq!(flows.get(&flow(1), 0)?, known);
        Ok(())
    };

    load(service_sizes(8_192))?;
    for map in [&layout::BACKENDS, &layout::SVC4, &layout::REVNAT4] {
        assert_eq!(maps.room_of(map)?, (8_192, Vec::new()), "{map:?}");
    }
    all_is_there()?;

    // Sizes too small for the agent's entries: those maps keep their sizes, and the programs' own maps follow suit.
    load(service_sizes(1_024))?;
    for (map, room) in [
        (&layout::BACKENDS, 8_192),
        (&layout::SVC4, 8_192),
        (&layout::REVNAT4, 1_024),
    ] {
        assert_eq!(maps.room_of(map)?, (room, Vec::new()), "{map:?}");
    }
    all_is_there()?;
    maps.backends()?.set(3_000, Backend::default(), 0)?;
    load(service_sizes(1_024))?;
    assert_eq!(maps.room_of(&layout::BACKENDS)?, (1_024, Vec::new()));
    assert_eq!(maps.backends()?.get(&7, 0)?, backend(7));

    // Without services.
    load(MapSizes {
        services: None,
        ..MapSizes::default()
    })?;
    for map in [
        &layout::BACKENDS,
        &layout::SVC4,
        &layout::REVNAT4,
        &layout::SOCKETS,
    ] {
        assert_eq!(maps.room_of(map)?, (1, Vec::new()), "{map:?}");
    }
    load(MapSizes::default())?;
    assert_eq!(
        maps.room_of(&layout::SOCKETS)?,
        (SOCKET_ENTRIES, Vec::new())
    );
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_move_that_was_cut_short_is_brought_to_its_end() -> anyhow::Result<()> {
    let maps = Maps {
        bpffs: Bpffs::mount(),
    };
    let sizes = MapSizes::default();
    let pins = maps.location().pins();
    let (pin, former) = (pins.join("HEALTH_CT4"), pins.join("HEALTH_CT4_former"));
    drop(maps.load(sizes)?);
    let entry = CtEntry {
        expires: coarse_now_secs() + 3_600,
        ..CtEntry::default()
    };
    maps.open::<Tuple4, CtEntry>(&layout::CT4)?
        .insert(flow(1), entry, 0)?;

    // Interrupted before the new map was created.
    std::fs::rename(&pin, &former)?;
    maps.load(sizes)?.attach(&[])?;
    assert_eq!(maps.room()?, (DEFAULT_ENTRIES, Vec::new()));
    assert_eq!(maps.flows()?, 1);

    // Interrupted after that, when programs may use either map.
    let elsewhere = Maps {
        bpffs: Bpffs::mount(),
    };
    drop(elsewhere.load(sizes)?);
    let mut new = elsewhere.open::<Tuple4, CtEntry>(&layout::CT4)?;
    new.insert(flow(2), entry, 0)?;
    std::fs::rename(&pin, &former)?;
    MapData::from_pin(elsewhere.location().pins().join("HEALTH_CT4"))?.pin(&pin)?;
    // A failed start leaves the former map unchanged.
    drop(maps.load(sizes)?);
    assert_eq!(maps.room()?.1, ["HEALTH_CT4_former"]);
    maps.load(sizes)?.attach(&[])?;
    assert_eq!(maps.room()?, (DEFAULT_ENTRIES, Vec::new()));
    assert_eq!(maps.flows()?, 2);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn listings_show_the_map_that_programs_use_after_a_move_was_cut_short() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(2).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let node = bed.node(1);
    node.kill_agent(Signal::SIGKILL)?;
    // The state left by a start that was killed after it had created the new map.
    let name = layout::CT_ANY4.name;
    let (pin, former) = (node.pins().join(name), format!("{name}_former"));
    std::fs::rename(&pin, node.pins().join(&former))?;
    let mut bpftool = Command::new("bpftool");
    bpftool.args(["map", "create"]).arg(&pin);
    bpftool.args(["type", "hash", "key", "16", "value", "64"]);
    run(bpftool.args(["entries", "1024", "name", name]))?.success()?;

    let flows = node.cli("bpf ct list --proto icmp")?.success()?;
    assert!(flows.contains("ICMP OUT"), "{flows}");
    assert_ne!(node.listing(&format!("bpf map dump {name}"))?, json!([]));
    let maps = node.listing("bpf map list")?;
    let maps = maps.as_array().context("no maps")?;
    let in_use = |name: &str| {
        let map = maps.iter().find(|map| map["name"] == name);
        map.map(|map| map["in-use"].clone())
    };
    assert_eq!(in_use(name), Some(false.into()));
    assert_eq!(in_use(&former), Some(true.into()));
    assert_eq!(in_use(layout::CT4.name), Some(true.into()));
    let table = node.cli("bpf map list")?.success()?;
    assert!(table.contains(&format!("{name} (not in use)")), "{table}");

    node.start_agent()?;
    bed.wait_all_reachable(PATIENCE)?;
    let table = node.cli("bpf map list")?.success()?;
    assert!(
        !table.contains("not in use") && !table.contains("_former"),
        "{table}"
    );
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_move_to_a_third_size_after_one_that_was_cut_short_loses_no_flow() -> anyhow::Result<()> {
    let sizes = |conntrack| MapSizes {
        conntrack,
        ..MapSizes::default()
    };
    let maps = Maps {
        bpffs: Bpffs::mount(),
    };
    let elsewhere = Maps {
        bpffs: Bpffs::mount(),
    };
    let entry = CtEntry {
        expires: coarse_now_secs() + 3_600,
        ..CtEntry::default()
    };
    maps.load(sizes(4_096))?.attach(&[])?;
    let mut first = maps.open::<Tuple4, CtEntry>(&layout::CT4)?;
    first.insert(flow(1), entry, 0)?;

    // A start that was killed before or after its programs took over.
    let pins = maps.location().pins();
    let pin = pins.join("HEALTH_CT4");
    std::fs::rename(&pin, pins.join("HEALTH_CT4_former"))?;
    drop(elsewhere.load(sizes(8_192))?);
    MapData::from_pin(elsewhere.location().pins().join("HEALTH_CT4"))?.pin(&pin)?;
    let mut second = maps.open::<Tuple4, CtEntry>(&layout::CT4)?;

    // A failed start leaves the former map unchanged.
    drop(maps.load(sizes(2_048))?);
    assert_eq!(maps.room()?, (8_192, vec!["HEALTH_CT4_former".to_owned()]));

    // The programs may add entries to either map until they are replaced.
    let mut start = maps.load(sizes(2_048))?;
    first.insert(flow(2), entry, 0)?;
    second.insert(flow(3), entry, 0)?;
    start.attach(&[])?;
    assert_eq!(maps.room()?, (2_048, Vec::new()));
    assert_eq!(maps.flows()?, 3);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn services_start_after_a_start_without_them_that_was_cut_short() -> anyhow::Result<()> {
    let maps = Maps {
        bpffs: Bpffs::mount(),
    };
    maps.load(service_sizes(4_096))?.attach(&[])?;
    let frontend = |port_be| FrontendKey4 {
        port_be,
        ..FrontendKey4::default()
    };
    let range = |service_be| {
        let range = SourceRange {
            service_be,
            ..SourceRange::default()
        };
        Key::new(u32::BITS, range)
    };
    let ranges = || -> anyhow::Result<LpmTrie<MapData, SourceRange, u32>> {
        let pin = maps.location().pins().join(layout::SOURCE_RANGES.name);
        Ok(LpmTrie::try_from(Map::LpmTrie(MapData::from_pin(pin)?))?)
    };
    for number in 1..=3 {
        maps.open::<FrontendKey4, Frontend>(&layout::SVC4)?.insert(
            frontend(number),
            Frontend::default(),
            0,
        )?;
        ranges()?.insert(&range(number.into()), 1, 0)?;
    }

    // A start that was killed after it had created maps without capacity.
    let elsewhere = Maps {
        bpffs: Bpffs::mount(),
    };
    let nothing = MapSizes {
        services: None,
        ..MapSizes::default()
    };
    drop(elsewhere.load(nothing)?);
    for map in [&layout::SVC4, &layout::SOURCE_RANGES] {
        let pin = maps.location().pins().join(map.name);
        std::fs::rename(&pin, pin.with_file_name(format!("{}_former", map.name)))?;
        MapData::from_pin(elsewhere.location().pins().join(map.name))?.pin(&pin)?;
    }

    maps.load(service_sizes(4_096))?.attach(&[])?;
    for map in [&layout::SVC4, &layout::SOURCE_RANGES] {
        assert_eq!(maps.room_of(map)?.1, Vec::<String>::new(), "{map:?}");
    }
    for number in 1..=3 {
        maps.open::<FrontendKey4, Frontend>(&layout::SVC4)?
            .get(&frontend(number), 0)?;
        ranges()?.get(&range(number.into()), 0)?;
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn flows_of_an_earlier_version_move_to_maps_of_another_kind() -> anyhow::Result<()> {
    let maps = Maps {
        bpffs: Bpffs::mount(),
    };
    let sizes = MapSizes::default();
    let pin = maps.location().pins().join(layout::CT4.name);
    maps.load(sizes)?.attach(&[])?;
    std::fs::remove_file(&pin)?;
    let mut bpftool = Command::new("bpftool");
    bpftool.args(["map", "create"]).arg(&pin);
    bpftool.args(["type", "lru_hash", "key", "16", "value", "64"]);
    run(bpftool.args(["entries", "65536", "name", "HEALTH_CT4"]))?.success()?;
    let mut former = maps.open::<Tuple4, CtEntry>(&layout::CT4)?;
    let entry = CtEntry {
        expires: coarse_now_secs() + 3_600,
        ..CtEntry::default()
    };
    for number in 0..FLOWS {
        former.insert(flow(number), entry, 0)?;
    }
    let kind = || -> anyhow::Result<String> {
        let maps = Pinned::open(&maps.location())?.maps()?;
        let map = maps.into_iter().find(|map| map.name == layout::CT4.name);
        Ok(map.context("no such map")?.kind)
    };

    // A start that fails before its programs take over.
    drop(maps.load(sizes)?);
    assert_eq!(
        (kind()?.as_str(), maps.flows()?),
        ("lru_hash", FLOWS as usize)
    );
    maps.load(sizes)?.attach(&[])?;
    assert_eq!((kind()?.as_str(), maps.flows()?), ("hash", FLOWS as usize));
    assert_eq!(maps.room()?, (DEFAULT_ENTRIES, Vec::new()));
    // The keys are in the ring, so the entries can be evicted.
    let pinned = Pinned::open(&maps.location())?;
    let ring = pinned.ring_rows(layout::CT4_RING.name)?;
    let mut noted = 0;
    ring.context("no such ring")?
        .each(|(_, flow)| noted += u32::from(flow.protocol == TCP))?;
    assert_eq!(noted, FLOWS);
    Ok(())
}
