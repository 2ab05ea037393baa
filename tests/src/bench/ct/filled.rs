//! The agent's maps in a private bpffs, with any number of conntrack entries.

use std::net::Ipv4Addr;

use aya::EbpfLoader;
use aya::maps::{HashMap, Map, MapData};
use health_common::ct::{CtEntry, TUPLE_IN, TUPLE_OUT, Tuple4};
use health_datapath::{layout, programs};
use health_model::settings::Location;

use crate::testrun::Bpffs;

const INSTANCE: &str = "bench-ct";
/// First address of the hosts that open flows.
const SOURCES: Ipv4Addr = Ipv4Addr::new(10, 128, 0, 0);
const DESTINATIONS: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 0);
const IP_PROTOCOL_TCP: u8 = 6;

/// Pinned maps. No program is loaded, so nothing else changes them.
pub(super) struct FilledMaps {
    pub(super) location: Location,
    _bpffs: Bpffs,
}

impl FilledMaps {
    /// Creates maps, with this capacity of `HEALTH_CT4`, and adds this many entries.
    pub(super) fn new(capacity: u32, entries: u32) -> anyhow::Result<Self> {
        let bpffs = Bpffs::mount();
        let location = Location {
            instance: INSTANCE.to_owned(),
            runtime_dir: "/nonexistent".into(),
            state_dir: "/nonexistent".into(),
            bpf_root: bpffs.path().to_owned(),
        };
        std::fs::create_dir_all(location.pins())?;
        EbpfLoader::new()
            .default_map_pin_directory(location.pins())
            .map_max_entries(layout::CT4.name, capacity)
            .load(&programs()?)?;
        let map = MapData::from_pin(location.pins().join(layout::CT4.name))?;
        let mut flows: HashMap<_, Tuple4, CtEntry> = HashMap::try_from(Map::from_map_data(map)?)?;
        for number in 0..entries {
            flows.insert(tuple(number), entry(number), 0)?;
        }
        Ok(Self {
            location,
            _bpffs: bpffs,
        })
    }
}

/// Flows like those of a busy node: all different, a quarter of them to a DNS server, half of them opened by either
/// side.
fn tuple(number: u32) -> Tuple4 {
    let ports = number.wrapping_mul(40_503);
    let is_dns = number % 4 == 3;
    Tuple4 {
        saddr_be: (SOURCES.to_bits() + number).to_be(),
        daddr_be: (DESTINATIONS.to_bits() + number % 250).to_be(),
        sport_be: (32_768 + (ports % 28_000) as u16).to_be(),
        dport_be: if is_dns { 53_u16 } else { 443 }.to_be(),
        protocol: IP_PROTOCOL_TCP,
        direction: if number.is_multiple_of(2) {
            TUPLE_IN
        } else {
            TUPLE_OUT
        },
        pad: 0,
    }
}

fn entry(number: u32) -> CtEntry {
    let packets = u64::from(number % 5_000);
    CtEntry {
        rx_packets: packets,
        rx_bytes: packets * 1_400,
        tx_packets: packets / 2,
        tx_bytes: packets * 60,
        expires: 2_000_000 + number % 8_000,
        last_rx: 1_990_000 + number % 8_000,
        last_tx: 1_990_000 + number % 7_900,
        rx_flags_seen: 0x1b,
        tx_flags_seen: 0x1b,
        source_identity: 256 + number % 1_000,
        ifindex: 5,
        ..CtEntry::default()
    }
}
