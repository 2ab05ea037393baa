//! Collection of a million entries, half of them expired: how long it takes, and how much it delays packets.

use std::net::Ipv4Addr;
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use aya::maps::{HashMap, Map, MapData};
use health_common::ct::{CtEntry, TUPLE_OUT, Tuple4};
use health_common::nat::NatEntry4;
use health_common::tuple::Tuple as _;
use health_datapath::conntrack::KernelTables;
use health_datapath::conntrack::{CollectionOutcome, Family, Tables as _};
use health_datapath::dump::Pinned;
use health_datapath::{Datapath, LoadSettings, MapSizes, layout};
use health_model::settings::Location;

use crate::bench::lookups::look_up_all;
use crate::bench::parts::median;
use crate::bench::{Figure, Target};
use crate::testrun::Bpffs;
use crate::{Bed, Node};

const ENTRIES: u32 = 1_000_000;
/// Number of flows with NAT entries.
const TRANSLATED: u32 = 100_000;
/// Map capacity, larger than the number of entries.
const CAPACITY: u32 = 1 << 20;
const ROUNDS: u32 = 5;
/// Duration of a ping in milliseconds, which is also its number of echoes. Longer than a collection takes.
const PINGS: u32 = 2_000;
/// Time between the start of a ping and the start of a collection: the first echo is slower than the others.
const HEAD_START: Duration = Duration::from_millis(100);
/// Limit relative to bare lookups of the same number of entries, without removal.
const TIME_RATIO: f64 = 3.0;
/// Limit relative to the longest round trip without a collection.
const WAIT_RATIO: f64 = 7.0;

/// Measures the duration of a collection, and meanwhile the longest round trip through the bed's veth pairs of a ping
/// with an interval of 1 ms.
pub(super) fn figures() -> anyhow::Result<Vec<Figure>> {
    let mut expiring = ExpiringDatapath::new()?;
    let bed = Bed::builder().nodes(2).without_agents().start()?;
    let (mut times, mut lookups) = (Vec::new(), Vec::new());
    let (mut waited, mut waited_without) = (0.0_f64, 0.0_f64);
    for _ in 0..ROUNDS {
        expiring.fill()?;
        lookups.push(millis(look_up_all(&expiring.pinned, layout::CT4.name)?));
        let (without, ()) = while_pinging(bed.node(1), || Ok(()))?;
        let (with, took) = while_pinging(bed.node(1), || {
            let start = Instant::now();
            let collected = expiring.tables.collect(Family::Ipv4)?;
            let took = start.elapsed();
            check(&collected)?;
            Ok(took)
        })?;
        times.push(millis(took));
        waited = waited.max(with);
        waited_without = waited_without.max(without);
    }
    let figure = |what: String, ours, other, limit| Figure {
        name: format!("{ENTRIES} entries, half expired: {what}"),
        unit: "ms",
        ours,
        other: Some(other),
        target: Some(Target::RatioAtMost(limit)),
    };
    let longest = |times: &[f64]| times.iter().copied().fold(0.0, f64::max);
    Ok(vec![
        figure(
            format!("collection, longest of {ROUNDS} (other: the bare look-ups)"),
            longest(&times),
            longest(&lookups),
            TIME_RATIO,
        ),
        figure(
            format!("collection, median of {ROUNDS} (other: the bare look-ups)"),
            median(times)?,
            median(lookups)?,
            TIME_RATIO,
        ),
        figure(
            format!(
                "longest round trip of {} pings at 1 ms meanwhile (other: without a collection)",
                ROUNDS * PINGS
            ),
            waited,
            waited_without,
            WAIT_RATIO,
        ),
    ])
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn check(collected: &CollectionOutcome) -> anyhow::Result<()> {
    let half = u64::from(ENTRIES / 2);
    ensure!(
        collected.flows.removed == half && collected.translations.removed == u64::from(TRANSLATED),
        "expected half of the entries to be removed: {collected:?}"
    );
    Ok(())
}

/// Pings from `node` to the other node while `work` runs. Returns the longest round trip in milliseconds, measured from
/// process to process, so that the effect of busy CPUs is included.
fn while_pinging<T>(
    node: &Node,
    work: impl FnOnce() -> anyhow::Result<T>,
) -> anyhow::Result<(f64, T)> {
    let ping = node
        .command("ping")
        .args(["-U", "-q", "-i", "0.001", "-c"])
        .arg(PINGS.to_string())
        .arg("172.30.0.2")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot run ping")?;
    thread::sleep(HEAD_START);
    let result = work();
    let output = ping.wait_with_output().context("cannot wait for ping")?;
    let text = String::from_utf8_lossy(&output.stdout);
    // rtt min/avg/max/mdev = 0.018/0.025/0.134/0.005 ms
    let longest = text
        .lines()
        .find_map(|line| line.strip_prefix("rtt ")?.split('/').nth(5)?.parse().ok())
        .with_context(|| format!("ping printed no round trips: {text}"))?;
    Ok((longest, result?))
}

/// A datapath with large conntrack and NAT maps.
struct ExpiringDatapath {
    flows: HashMap<MapData, Tuple4, CtEntry>,
    translations: HashMap<MapData, Tuple4, NatEntry4>,
    tables: KernelTables,
    pinned: Pinned,
    _datapath: Datapath,
    _bpffs: Bpffs,
}

impl ExpiringDatapath {
    fn new() -> anyhow::Result<Self> {
        let bpffs = Bpffs::mount();
        let location = Location {
            instance: "bench-collect".to_owned(),
            runtime_dir: "/nonexistent".into(),
            state_dir: "/nonexistent".into(),
            bpf_root: bpffs.path().to_owned(),
        };
        let sizes = MapSizes {
            conntrack: CAPACITY,
            nat: CAPACITY,
            ..MapSizes::default()
        };
        let datapath = Datapath::load(
            &location,
            LoadSettings {
                sizes,
                ..LoadSettings::default()
            },
        )?;
        let map = |layout: layout::MapLayout| {
            Map::from_map_data(MapData::from_pin(location.pins().join(layout.name))?)
        };
        Ok(Self {
            flows: HashMap::try_from(map(layout::CT4)?)?,
            translations: HashMap::try_from(map(layout::NAT4)?)?,
            tables: datapath.tables()?,
            pinned: Pinned::open(&location)?,
            _datapath: datapath,
            _bpffs: bpffs,
        })
    }

    /// Adds all flows, every other one expired, and NAT entries for some of them. NAT entries have the earliest
    /// possible creation time, so that the flow of each is looked up.
    fn fill(&mut self) -> anyhow::Result<()> {
        for number in 0..ENTRIES {
            let flow = flow(number);
            let entry = CtEntry {
                expires: if number.is_multiple_of(2) {
                    0
                } else {
                    u32::MAX
                },
                ..CtEntry::default()
            };
            self.flows.insert(flow, entry, 0)?;
            if number < TRANSLATED {
                let out = NatEntry4 {
                    addr_be: u32::from(Ipv4Addr::new(172, 30, 0, 1)).to_be(),
                    port_be: flow.sport_be,
                    ..NatEntry4::default()
                };
                let back = NatEntry4 {
                    addr_be: flow.saddr_be,
                    ..out
                };
                self.translations.insert(flow, out, 0)?;
                self.translations.insert(flow.reply_key(&out), back, 0)?;
            }
        }
        Ok(())
    }
}

/// Outbound flow `number`.
fn flow(number: u32) -> Tuple4 {
    Tuple4 {
        saddr_be: u32::from(Ipv4Addr::new(10, 244, 1, 7)).to_be(),
        daddr_be: (Ipv4Addr::new(198, 18, 0, 0).to_bits() + number / 50_000).to_be(),
        sport_be: (10_000 + (number % 50_000) as u16).to_be(),
        dport_be: 443_u16.to_be(),
        protocol: 6,
        direction: TUPLE_OUT,
        pad: 0,
    }
}
