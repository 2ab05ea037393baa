//! Checks that every probe of an agent is counted once in the map: as a sample, as lost or as in flight.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use health_datapath::dump::Pinned;
use health_model::settings::Location;
use nix::sys::signal::Signal;

use crate::bed::BPFFS;
use crate::bench::cluster::{Cluster, DeadPeers, is_peer};
use crate::bench::{Figure, Options, Target};
use crate::process::{print_line, run_with_input};
use crate::{Node, wait_for};

const PROBES: u64 = 1_000_000;
const PEERS: u32 = 50_000;
/// A rate beyond the agent's capacity, so that it probes as fast as it can; and no probes of other kinds, which are not
/// counted in the map.
const FLAGS: &str =
    "--probe http=off --probe-interval 5s --probe-rate 50000 --path-mtu-interval off";
/// How long to wait for the probes to be sent.
const PATIENCE: Duration = Duration::from_secs(900);
/// Number of probes between two progress lines.
const PROGRESS_STEP: u64 = 100_000;

pub(super) fn figures(options: &Options) -> anyhow::Result<Vec<Figure>> {
    let wanted = options.probes.unwrap_or(PROBES);
    let cluster = Cluster::new(PEERS, DeadPeers::ThreeOfTen, FLAGS)?;
    count_requests(cluster.rest())?;
    cluster.node().start_agent()?;
    let mut reported = 0;
    wait_for("the probes to be sent", PATIENCE, || {
        let sent = counted(cluster.rest())?;
        if sent >= reported + PROGRESS_STEP {
            reported = sent - sent % PROGRESS_STEP;
            print_line(format_args!("  {reported} of {wanted} probes"));
        }
        Ok((sent >= wanted).then_some(()))
    })?;
    cluster.node().kill_agent(Signal::SIGTERM)?;
    let sent = counted(cluster.rest())?;

    let Totals {
        samples,
        lost,
        inflight,
    } = Totals::read(cluster.node())?;
    ensure!(samples > 0 && lost > 0, "{samples} samples, {lost} lost");
    let figure = |name: &str, ours: u64, other, target| Figure {
        name: format!("{PEERS} peers: {name}"),
        unit: "probes",
        ours: ours as f64,
        other,
        target,
    };
    Ok(vec![
        figure(
            "samples + lost + in flight (other: sent)",
            samples + lost + inflight,
            Some(sent as f64),
            Some(Target::Equal),
        ),
        figure("samples", samples, None, None),
        figure("lost", lost, None, None),
        figure("in flight", inflight, None, None),
    ])
}

/// Totals over all peers in the agent's maps.
struct Totals {
    samples: u64,
    lost: u64,
    inflight: u64,
}

impl Totals {
    fn read(node: &Node) -> anyhow::Result<Self> {
        let pinned = Pinned::open(&Location {
            instance: node.name().to_owned(),
            runtime_dir: node.runtime_dir(),
            state_dir: node.runtime_dir(),
            bpf_root: BPFFS.into(),
        })?;
        let mut totals = Self {
            samples: 0,
            lost: 0,
            inflight: 0,
        };
        // Probes of the node's own addresses do not leave through the uplink.
        pinned.each_rtt(&mut |key, row| {
            if is_peer(key.peer.to_ip()) {
                totals.samples += row.samples;
                totals.lost += row.lost;
            }
        })?;
        let inflight = pinned.inflight()?;
        let to_peers = inflight
            .iter()
            .filter(|(_, probe)| is_peer(probe.peer.to_ip()));
        totals.inflight = to_peers.count() as u64;
        Ok(totals)
    }
}

/// Makes the far end count incoming echo requests, whether or not it answers them.
fn count_requests(node: &Node) -> anyhow::Result<()> {
    let rules = "table ip bench {\nchain requests {\ntype filter hook prerouting priority raw;\n\
                 icmp type echo-request counter\n}\n}\n";
    run_with_input(node.command("nft").args(["-f", "-"]), rules)?.success()?;
    Ok(())
}

fn counted(node: &Node) -> anyhow::Result<u64> {
    let text = node.exec("nft list chain ip bench requests")?;
    let packets = text.split_once("counter packets ");
    let packets = packets.and_then(|(_, rest)| rest.split(' ').next()?.parse().ok());
    packets.with_context(|| format!("nft printed no count: {text}"))
}
