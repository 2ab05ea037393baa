//! Listing the rows of very many peers with the agent's command line.

use std::net::{IpAddr, Ipv4Addr};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use aya::maps::{HashMap, Map, MapData};
use health_common::probe::Path;
use health_common::rtt::{PROTOCOL_ICMP, RttKey, RttRow, SOURCE_KERNEL};
use health_datapath::layout;

use super::median;
use crate::bed::agent_binary;
use crate::bench::lookups::look_up_all;
use crate::bench::{Figure, MIB, Target};
use crate::process::Running;
use crate::testrun::TestRun;

const PEERS: u32 = 50_000;
const ROUNDS: u32 = 11;
/// Number of round trips in each row.
const SAMPLES: u64 = 200;
const FIRST: Ipv4Addr = Ipv4Addr::new(10, 128, 0, 0);
/// Limits relative to bare lookups of all rows.
const JSON_RATIO: f64 = 6.0;
const TABLE_RATIO: f64 = 20.0;

pub(super) fn figures() -> anyhow::Result<Vec<Figure>> {
    let bed = TestRun::load_alone();
    fill(&bed)?;
    let maps = bed.maps().maps()?;
    let map = maps.iter().find(|map| map.name == layout::RTT.name);
    let map = map.context("the map is not pinned")?;
    ensure!(map.entries == Some(u64::from(2 * PEERS)), "{map:?}");
    Ok(vec![
        listing(&bed, "json", JSON_RATIO)?,
        listing(&bed, "table", TABLE_RATIO)?,
        listing(&bed, "wide", TABLE_RATIO)?,
        Figure {
            name: format!("{PEERS} peers, both paths: memory of {}", map.name),
            unit: MIB,
            ours: map.memory_bytes as f64 / f64::from(1 << 20),
            other: None,
            target: None,
        },
    ])
}

/// Measures a list command with this output format.
fn listing(bed: &TestRun, form: &str, limit: f64) -> anyhow::Result<Figure> {
    let pinned = bed.maps();
    let (mut times, mut lookups) = (Vec::new(), Vec::new());
    // The first round warms up.
    for round in 0..=ROUNDS {
        let start = Instant::now();
        Running::start(&mut list(bed, form)?)?.success()?;
        let elapsed = start.elapsed();
        let looked_up = look_up_all(&pinned, layout::RTT.name)?;
        if round > 0 {
            times.push(elapsed.as_secs_f64() * 1e3);
            lookups.push(looked_up.as_secs_f64() * 1e3);
        }
    }
    Ok(Figure {
        name: format!(
            "{PEERS} peers, both paths: bpf rtt list -o {form}, median of {ROUNDS} (other: the bare look-ups)"
        ),
        unit: "ms",
        ours: median(times)?,
        other: Some(median(lookups)?),
        target: Some(Target::RatioAtMost(limit)),
    })
}

fn list(bed: &TestRun, form: &str) -> anyhow::Result<Command> {
    let mut command = Command::new(agent_binary()?);
    command
        .args(["--instance", &bed.location.instance, "--bpf-root"])
        .arg(&bed.location.bpf_root)
        .args(["bpf", "rtt", "list", "-o", form]);
    Ok(command)
}

/// Adds rows that look as if the agent had run for some time, all of them different.
fn fill(bed: &TestRun) -> anyhow::Result<()> {
    let map = MapData::from_pin(bed.location.pins().join(layout::RTT.name))?;
    let mut rows: HashMap<_, RttKey, RttRow> = HashMap::try_from(Map::from_map_data(map)?)?;
    for peer in 0..PEERS {
        for path in [Path::Host, Path::Endpoint] {
            let address = Ipv4Addr::from_bits(FIRST.to_bits() + 2 * peer + path as u32);
            let key = RttKey {
                peer: IpAddr::from(address).into(),
                path: path as u8,
                protocol: PROTOCOL_ICMP,
                pad: 0,
            };
            let mut row = RttRow::EMPTY;
            let base = 50_000 + u64::from(peer) * 7;
            for sample in 0..SAMPLES {
                let rtt_ns = base + (sample * sample * 37) % base;
                row.record(rtt_ns, sample, sample as u16, SOURCE_KERNEL);
            }
            rows.insert(key, row, 0)?;
        }
    }
    Ok(())
}
