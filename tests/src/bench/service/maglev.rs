//! Maglev: the backend of each flow according to the agent's tables and the programs' hash, before and after a backend
//! is removed.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv4Addr};

use anyhow::{Context as _, ensure};
use health_common::addr::Addr;
use health_common::service::choice::flow_hash;
use health_common::service::{ALGORITHM_MAGLEV, Backend};
use health_datapath::layout;
use health_datapath::services::PortSpec;

use super::tables::{PORT, TCP, cluster_ip, maglev, port};
use crate::bench::{Figure, Target};
use crate::testrun::TestRun;

const CLIENTS: u32 = 1_000;
const PORTS: u16 = 1_000;
const FIRST_PORT: u16 = 32_768;
/// Number of backends, and whether the target applies: with many backends, a million random flows are not spread evenly
/// enough.
const POOLS: [(u8, bool); 4] = [(3, true), (10, true), (64, false), (100, false)];
/// Maximum deviation of a backend's share from an even share, in percent of the even share.
const SPREAD_PERCENT: f64 = 2.0;
/// Limit for the number of flows that move relative to the number that must move.
const MOVED_LIMIT: f64 = 2.0;

pub(super) fn figures() -> anyhow::Result<Vec<Figure>> {
    let bed = TestRun::load_alone();
    let mut tables = bed.datapath.services()?;
    let mut figures = Vec::new();
    for (number, (count, is_even)) in (0..).zip(POOLS) {
        let mut fill = maglev()?;
        let mut change = tables.change(0);
        let known = change.set(None, &pool(number, count), &mut fill)?;
        change.commit()?;
        let before = choose_all(&bed, number)?;
        let mut change = tables.change(0);
        change.set(Some(known), &pool(number, count - 1), &mut fill)?;
        change.commit()?;
        let after = choose_all(&bed, number)?;

        let flows = before.len() as f64;
        let moved = before
            .iter()
            .zip(&after)
            .filter(|(one, other)| one != other);
        let even = 100.0 / f64::from(count);
        figures.push(Figure {
            name: format!(
                "1 of {count} backends is removed: flows that move (other: an even share)"
            ),
            unit: "%",
            ours: moved.count() as f64 / flows * 100.0,
            other: Some(even),
            target: Some(Target::RatioAtMost(MOVED_LIMIT)),
        });
        let mut counts: BTreeMap<IpAddr, u32> = BTreeMap::new();
        for backend in before {
            *counts.entry(backend).or_default() += 1;
        }
        ensure!(
            counts.len() == usize::from(count),
            "backends without a flow"
        );
        let share = flows / f64::from(count);
        let off = counts
            .values()
            .map(|count| (f64::from(*count) - share).abs() / share * 100.0);
        figures.push(Figure {
            name: format!(
                "{flows} flows over {count} backends: largest deviation from an even share (other: the limit)"
            ),
            unit: "%",
            ours: off.fold(0.0, f64::max),
            other: Some(SPREAD_PERCENT),
            target: is_even.then_some(Target::RatioAtMost(1.0)),
        });
    }
    Ok(figures)
}

fn pool(number: u32, count: u8) -> PortSpec {
    let backends: Vec<IpAddr> = (1..=count)
        .map(|last| Ipv4Addr::new(10, 244, 2, last).into())
        .collect();
    PortSpec {
        algorithm: ALGORITHM_MAGLEV,
        ..port(number, &backends)
    }
}

/// Determines the backend of each flow from the maps.
fn choose_all(bed: &TestRun, number: u32) -> anyhow::Result<Vec<IpAddr>> {
    let maps = bed.maps();
    let places: HashMap<u32, u32> = maps
        .slot_rows(&layout::MAGLEV)?
        .collect()?
        .into_iter()
        .collect();
    let backends: HashMap<u32, Backend> = maps.backend_rows()?.collect()?.into_iter().collect();
    let service = cluster_ip(number, true);
    let frontends = maps.frontend4_rows()?.collect()?;
    let found = frontends
        .iter()
        .find(|(key, _)| IpAddr::from(Ipv4Addr::from_bits(u32::from_be(key.addr_be))) == service);
    let (_, frontend) = found.context("the service is not in the maps")?;
    let pool = frontend.inside;
    let destination = Addr::from(service).words_be;
    let flows = (0..CLIENTS).flat_map(|client| (0..PORTS).map(move |port| (client, port)));
    flows
        .map(|(client, port)| {
            let client = IpAddr::from(Ipv4Addr::from_bits(0x0af4_0101 + client));
            let ports = u64::from(FIRST_PORT + port) << 24 | u64::from(PORT) << 40;
            let hash = flow_hash(
                &Addr::from(client).words_be,
                &destination,
                ports | u64::from(TCP),
            );
            let index = places.get(&(pool.at + hash % pool.len));
            let backend = index.and_then(|index| backends.get(index));
            let backend = backend.context("a slot without a backend")?;
            Ok(backend.addr.to_ip())
        })
        .collect()
}
