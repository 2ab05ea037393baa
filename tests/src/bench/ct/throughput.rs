//! Packets per second from a process in an endpoint's namespace to the host: through the bare veth pair, with our
//! conntrack, and with the kernel's own.

use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::time::Instant;

use anyhow::{Context as _, ensure};
use health_datapath::dump::Pinned;
use health_datapath::{Datapath, Hook};
use health_endpoint::health::HealthEndpoint;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use super::netfilter;
use crate::bench::endpoint::{ip, output, with_endpoint};
use crate::bench::parts::median;
use crate::bench::{Figure, Target};

const INSTANCE: &str = "bench-ct";
const ROUNDS: u32 = 9;
/// Datagrams of one flow per round.
const DATAGRAMS: u32 = 300_000;
/// Number of flows opened per round: as many as both tables hold without eviction.
const FLOWS: u32 = 40_000;
/// The host owns all of these addresses.
const DESTINATIONS: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 0);
const DESTINATION_PREFIX: &str = "198.18.0.0/15";
/// Port of the discard service.
const PORT: u16 = 9;
/// Sender and receiver share a CPU, so that the sender's time includes the whole path of each packet.
const CPU: usize = 1;
/// Rules that make nf_conntrack track all incoming packets.
const RULES: &str =
    "chain track { type filter hook prerouting priority 0; ct state new,established accept; }";

/// Which conntrack is on the path.
#[derive(Clone, Copy)]
enum Way {
    Bare,
    Ours,
    Kernel,
}

const WAYS: [Way; 3] = [Way::Bare, Way::Ours, Way::Kernel];

pub(super) fn figures() -> anyhow::Result<Vec<Figure>> {
    with_endpoint(INSTANCE, measure)
}

async fn measure(
    endpoint: &HealthEndpoint,
    datapath: &mut Datapath,
    pinned: &Pinned,
) -> anyhow::Result<Vec<Figure>> {
    ip(&["route", "add", "local", DESTINATION_PREFIX, "dev", "lo"])?;
    // Never read: the kernel drops excess datagrams without an ICMP error.
    let _receiver = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, PORT)).context("cannot receive")?;
    let sender = endpoint
        .netns()
        .run_in(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)))?
        .context("cannot send")?;
    let all_cpus = sched_getaffinity(Pid::from_raw(0))?;
    let mut one_cpu = CpuSet::new();
    one_cpu.set(CPU)?;
    sched_setaffinity(Pid::from_raw(0), &one_cpu)?;
    let rates = (|| {
        // Per path: rates of datagrams of a single flow, and of datagrams that each open a flow.
        let mut rates = [const { [const { Vec::new() }; 2] }; 3];
        for round in 0..=ROUNDS {
            for (way, [known, new]) in WAYS.iter().zip(&mut rates) {
                way.prepare(endpoint, datapath, pinned)?;
                let of_one = rate(&sender, (0..DATAGRAMS).map(|_| DESTINATIONS))?;
                let of_many = rate(&sender, (0..FLOWS).map(destination))?;
                way.check(pinned)?;
                // The first round warms up.
                if round > 0 {
                    known.push(of_one);
                    new.push(of_many);
                }
            }
        }
        anyhow::Ok(rates)
    })();
    sched_setaffinity(Pid::from_raw(0), &all_cpus)?;
    let [bare, ours, kernel] = rates?;
    let mut figures = Vec::new();
    let flows = [
        "UDP datagrams of one flow",
        "UDP datagrams, each of a new flow",
    ];
    for (((what, bare), ours), kernel) in flows.into_iter().zip(bare).zip(ours).zip(kernel) {
        let [bare, ours, kernel] = [median(bare)?, median(ours)?, median(kernel)?];
        figures.push(Figure {
            name: format!("{what}: packets a second, median of {ROUNDS} (other: nf_conntrack)"),
            unit: "k/s",
            ours: ours / 1e3,
            other: Some(kernel / 1e3),
            target: Some(Target::RatioAtLeast(1.0)),
        });
        figures.push(Figure {
            name: format!("{what}: cost of tracking per packet (other: nf_conntrack)"),
            unit: "ns",
            ours: 1e9 / ours - 1e9 / bare,
            other: Some(1e9 / kernel - 1e9 / bare),
            target: None,
        });
    }
    Ok(figures)
}

impl Way {
    /// Sets up this path without any known flows.
    fn prepare(
        self,
        endpoint: &HealthEndpoint,
        datapath: &mut Datapath,
        pinned: &Pinned,
    ) -> anyhow::Result<()> {
        match self {
            Self::Ours => {
                datapath.attach(&Hook::endpoint(endpoint.ifname(), endpoint.ifindex()))?
            }
            Self::Bare | Self::Kernel => datapath.attach(&[])?,
        }
        netfilter::set_rules(match self {
            Self::Kernel => RULES,
            Self::Bare | Self::Ours => "",
        })?;
        match self {
            Self::Bare => {}
            Self::Ours => drop(pinned.flush_conntrack(|_, _| true)?),
            Self::Kernel => drop(output("conntrack", &["-F"], "conntrack")?),
        }
        Ok(())
    }

    /// Checks that the path was set up correctly.
    fn check(self, pinned: &Pinned) -> anyhow::Result<()> {
        let known = match self {
            Self::Bare => return Ok(()),
            Self::Ours => pinned.conntrack()?.len(),
            Self::Kernel => output("conntrack", &["-C"], "conntrack")?.trim().parse()?,
        };
        // Our table is an LRU map, which starts to evict before it is completely full.
        ensure!(
            known >= FLOWS as usize * 9 / 10,
            "{known} of {FLOWS} flows are known"
        );
        Ok(())
    }
}

/// Number of datagrams that the process can send per second.
fn rate(sender: &UdpSocket, destinations: impl Iterator<Item = Ipv4Addr>) -> anyhow::Result<f64> {
    let start = Instant::now();
    let mut sent = 0_u32;
    for destination in destinations {
        sender.send_to(&[0; 18], SocketAddrV4::new(destination, PORT))?;
        sent += 1;
    }
    Ok(f64::from(sent) / start.elapsed().as_secs_f64())
}

fn destination(number: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(DESTINATIONS.to_bits() + number)
}
