//! iperf3 from an endpoint with enforced policy to the host, compared with the same path without policy, and with the
//! kernel's own conntrack and filter.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use health_common::LAYOUT_VERSION;
use health_common::config::DatapathConfig;
use health_common::endpoint::{ENDPOINT_ENFORCE_EGRESS, ENDPOINT_ENFORCE_INGRESS, EndpointInfo};
use health_common::identity::{CLUSTER_FIRST, WORLD};
use health_common::policy::{POLICY_EGRESS, PREFIX_PORT, VERDICT_ALLOW};
use health_datapath::dump::Pinned;
use health_datapath::policy::PolicyMatch;
use health_datapath::{Datapath, Hook};
use health_endpoint::health::HealthEndpoint;

use super::netfilter;
use crate::bench::endpoint::{NODE, with_endpoint};
use crate::bench::iperf::received_gigabits;
use crate::bench::parts::median;
use crate::bench::{Figure, Target};
use crate::process::{Running, print_line, run};
use crate::wait_for;

const INSTANCE: &str = "bench-transfer";
/// Runs per path, alternating between the paths.
const ROUNDS: u32 = 21;
const SECONDS: u32 = 1;
const PATIENCE: Duration = Duration::from_secs(10);
/// Port of the iperf3 server.
const PORT: u16 = 5201;
const TCP: u8 = 6;
const TABLE: u32 = 1;

pub(super) fn figures() -> anyhow::Result<Vec<Figure>> {
    with_endpoint(INSTANCE, measure)
}

/// Which conntrack and filter are on the path.
#[derive(Clone, Copy)]
enum Way {
    Bare,
    Kernel,
    Open,
    Policed,
}

const WAYS: [Way; 4] = [Way::Bare, Way::Kernel, Way::Open, Way::Policed];

async fn measure(
    endpoint: &HealthEndpoint,
    datapath: &mut Datapath,
    pinned: &Pinned,
) -> anyhow::Result<Vec<Figure>> {
    // Settings as for a workload, since policy never applies to the health endpoint.
    datapath.configure(DatapathConfig {
        layout_version: LAYOUT_VERSION,
        ..DatapathConfig::default()
    })?;
    let rule = PolicyMatch {
        direction: POLICY_EGRESS,
        identity: WORLD,
        protocol: TCP,
        port_be: PORT.to_be(),
        prefix_len: PREFIX_PORT,
    };
    datapath
        .policy()?
        .install(TABLE, TABLE, [(rule, VERDICT_ALLOW)])?;
    let _server = Running::start(Command::new("iperf3").arg("-s"))?;
    // Also warms up.
    wait_for("iperf3 to serve", PATIENCE, || gigabits(endpoint).map(Some))?;
    let mut rates = [const { Vec::new() }; WAYS.len()];
    for round in 1..=ROUNDS {
        print_line(format_args!("  round {round} of {ROUNDS}"));
        for (way, rates) in WAYS.iter().zip(&mut rates) {
            way.prepare(endpoint, datapath)?;
            rates.push(gigabits(endpoint)?);
        }
    }
    netfilter::set_rules("")?;
    let flows = pinned.conntrack()?;
    ensure!(
        flows.iter().any(|(_, entry)| entry.policy == TABLE),
        "the policy checked no flow"
    );
    let [bare, kernel, open, policed] = rates.map(median);
    let policed = policed?;
    let compared = [
        ("without policy", open?, Some(0.97)),
        (
            "nf_conntrack and nftables, the same policy",
            kernel?,
            Some(1.0),
        ),
        ("neither programs nor filters", bare?, None),
    ];
    let figures = compared.map(|(other, rate, target)| Figure {
        name: format!("iperf3 from an endpoint under policy, median of {ROUNDS} (other: {other})"),
        unit: "Gbit/s",
        ours: policed,
        other: Some(rate),
        target: target.map(Target::RatioAtLeast),
    });
    Ok(figures.into())
}

impl Way {
    fn prepare(self, endpoint: &HealthEndpoint, datapath: &mut Datapath) -> anyhow::Result<()> {
        let hooks = Hook::endpoint(endpoint.ifname(), endpoint.ifindex());
        let device = endpoint.ifname();
        let known = "ct state established,related accept";
        match self {
            Self::Bare | Self::Kernel => datapath.attach(&[])?,
            Self::Open | Self::Policed => datapath.attach(&hooks)?,
        }
        set_endpoint(
            endpoint,
            datapath,
            match self {
                Self::Policed => ENDPOINT_ENFORCE_EGRESS | ENDPOINT_ENFORCE_INGRESS,
                Self::Bare | Self::Kernel | Self::Open => 0,
            },
        )?;
        netfilter::set_rules(&match self {
            Self::Kernel => format!(
                "chain egress {{ type filter hook prerouting priority 0; iifname {device} {known}; \
                 iifname {device} tcp dport {PORT} accept; iifname {device} drop; }}\n\
                 chain ingress {{ type filter hook output priority 0; oifname {device} {known}; \
                 oifname {device} drop; }}"
            ),
            Self::Bare | Self::Open | Self::Policed => String::new(),
        })
    }
}

fn set_endpoint(
    endpoint: &HealthEndpoint,
    datapath: &mut Datapath,
    flags: u32,
) -> anyhow::Result<()> {
    let address = endpoint.ipv4().context("the endpoint has no address")?;
    let info = EndpointInfo {
        identity: CLUSTER_FIRST,
        flags,
        policy: TABLE,
        ..endpoint.info()
    };
    Ok(datapath.set_endpoints(&[(address.into(), info)])?)
}

/// Throughput at the host in Gbit/s.
fn gigabits(endpoint: &HealthEndpoint) -> anyhow::Result<f64> {
    let words = format!("-J -t {SECONDS} -c {NODE}");
    let ran = endpoint
        .netns()
        .run_in(|| run(Command::new("iperf3").args(words.split(' '))))??;
    received_gigabits(&ran.success()?)
}
