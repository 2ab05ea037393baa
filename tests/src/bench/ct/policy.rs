//! Cost of policy per packet, measured by test runs: the same packets with tables of several sizes and without policy.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use health_common::LAYOUT_VERSION;
use health_common::config::DatapathConfig;
use health_common::endpoint::{ENDPOINT_ENFORCE_EGRESS, ENDPOINT_ENFORCE_INGRESS, EndpointInfo};
use health_common::identity::CLUSTER_FIRST;
use health_common::ipcache::IpcacheEntry;
use health_common::policy::{POLICY_EGRESS, POLICY_INGRESS, PREFIX_PORT, VERDICT_ALLOW};
use health_datapath::policy::PolicyMatch;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::cost::net;
use crate::bench::Figure;
use crate::bench::parts::median;
use crate::bench::program_cost::{PACKETS, ProgramCost};
use crate::packet::{Tcp, timestamps};
use crate::testrun::{IFINDEX, TestRun};

const ROUNDS: usize = 51;
const ENDPOINT4: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 9);
const ENDPOINT6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x10, 0x244, 1, 0, 0, 0, 9);
/// Numbers of entries in the compared tables: one entry per identity, and as many prefixes.
const SIZES: [u32; 3] = [1, 1_000, 100_000];
const PORT: u16 = 443;
const FIRST_PORT: u16 = 20_000;
const ACK: u8 = 0x10;
const TCP: u8 = 6;

pub(super) fn figures() -> anyhow::Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for is_v4 in [true, false] {
        for (program, is_out) in [("from_endpoint", true), ("to_endpoint", false)] {
            figures.extend(program_figures(program, is_out, is_v4)?);
        }
    }
    Ok(figures)
}

/// Measures segments of [`PACKETS`] established connections, sent or received by the endpoint.
fn program_figures(program: &str, is_out: bool, is_v4: bool) -> anyhow::Result<Vec<Figure>> {
    let mut bed = TestRun::load_alone();
    bed.datapath.configure(DatapathConfig {
        layout_version: LAYOUT_VERSION,
        ..DatapathConfig::default()
    })?;
    let most = SIZES.into_iter().max().unwrap_or_default();
    let prefixes: BTreeMap<IpNet, IpcacheEntry> = (0..most).map(|n| prefix(n, is_v4)).collect();
    bed.datapath.ipcache()?.set_all(&prefixes)?;
    let mut tables = bed.datapath.policy()?;
    for (table, size) in (1..).zip(SIZES) {
        tables.install(
            table,
            table,
            (0..size).map(|n| (rule(n, is_out), VERDICT_ALLOW)),
        )?;
    }
    let under_test = bed.program(program);
    let packets = segments(is_out, is_v4);
    let mut cost = ProgramCost::new(&bed, &packets)?;
    let mut without = Vec::new();
    let mut with = SIZES.map(|_| Vec::new());
    for round in 0..=ROUNDS {
        set_endpoint(&mut bed, 0, 0)?;
        let floor = net(&mut cost, &under_test, &packets)?;
        let mut times = [0.0; SIZES.len()];
        for (table, time) in (1..).zip(&mut times) {
            let both = ENDPOINT_ENFORCE_INGRESS | ENDPOINT_ENFORCE_EGRESS;
            set_endpoint(&mut bed, both, table)?;
            *time = net(&mut cost, &under_test, &packets)?;
        }
        // The first round creates the conntrack entries of the flows.
        if round > 0 {
            without.push(floor);
            for (with, time) in with.iter_mut().zip(times) {
                with.push(time);
            }
        }
    }
    let family = if is_v4 { "IPv4" } else { "IPv6" };
    let without = median(without)?;
    SIZES
        .into_iter()
        .zip(with)
        .map(|(size, times)| {
            Ok(Figure {
                name: format!(
                    "TCP segment by {family} ({program}), policy of {size} entries, net (other: not enforced)"
                ),
                unit: "ns",
                ours: median(times)?,
                other: Some(without),
                target: None,
            })
        })
        .collect()
}

fn set_endpoint(bed: &mut TestRun, flags: u32, policy: u32) -> anyhow::Result<()> {
    let info = EndpointInfo {
        ifindex: IFINDEX,
        identity: CLUSTER_FIRST,
        flags,
        policy,
        id: 99,
        ..EndpointInfo::default()
    };
    let endpoints = [(ENDPOINT4.into(), info), (ENDPOINT6.into(), info)];
    Ok(bed.datapath.set_endpoints(&endpoints)?)
}

/// The address of peer `number`.
fn peer(number: u32, is_v4: bool) -> IpAddr {
    if is_v4 {
        Ipv4Addr::from(0x0a01_0000 + number).into()
    } else {
        Ipv6Addr::from((0x2001_0db8_u128 << 96) + u128::from(number)).into()
    }
}

fn prefix(number: u32, is_v4: bool) -> (IpNet, IpcacheEntry) {
    let net = match peer(number, is_v4) {
        IpAddr::V4(addr) => Ipv4Net::from(addr).into(),
        IpAddr::V6(addr) => Ipv6Net::from(addr).into(),
    };
    let entry = IpcacheEntry {
        identity: CLUSTER_FIRST + number,
        ..IpcacheEntry::default()
    };
    (net, entry)
}

fn rule(number: u32, is_out: bool) -> PolicyMatch {
    PolicyMatch {
        direction: if is_out {
            POLICY_EGRESS
        } else {
            POLICY_INGRESS
        },
        identity: CLUSTER_FIRST + number,
        protocol: TCP,
        port_be: PORT.to_be(),
        prefix_len: PREFIX_PORT,
    }
}

/// Segments to the allowed port, from or to the first peer, which is in all tables.
fn segments(is_out: bool, is_v4: bool) -> Vec<Vec<u8>> {
    let endpoint = if is_v4 {
        ENDPOINT4.into()
    } else {
        ENDPOINT6.into()
    };
    let peer = peer(0, is_v4);
    let (source, destination) = if is_out {
        (endpoint, peer)
    } else {
        (peer, endpoint)
    };
    let segment = |port| Tcp {
        source: port,
        destination: PORT,
        flags: ACK,
        options: timestamps(7, 8),
        ..Tcp::default()
    };
    (FIRST_PORT..)
        .take(PACKETS as usize)
        .map(|port| segment(port).frame(source, destination))
        .collect()
}
