//! iperf3 from an endpoint whose policy is enforced to the host, against the same veth pair without programs.

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

use crate::bench::endpoint::{NODE, with_endpoint};
use crate::bench::iperf::received_gigabits;
use crate::bench::parts::median;
use crate::bench::{Figure, Target};
use crate::process::{Running, run, tell};
use crate::wait_for;

const INSTANCE: &str = "bench-transfer";
/// Runs of each kind, taking turns.
const ROUNDS: u32 = 21;
const SECONDS: u32 = 1;
const PATIENCE: Duration = Duration::from_secs(10);
/// The port of iperf3.
const PORT: u16 = 5201;
const TCP: u8 = 6;
const TABLE: u32 = 1;
const RATIO: f64 = 0.97;

pub(super) fn figures() -> anyhow::Result<Vec<Figure>> {
    with_endpoint(INSTANCE, measure)
}

async fn measure(
    endpoint: &HealthEndpoint,
    datapath: &mut Datapath,
    pinned: &Pinned,
) -> anyhow::Result<Vec<Figure>> {
    // A workload's: policy never applies to the health endpoint.
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
    let hooks = Hook::endpoint(endpoint.ifname(), endpoint.ifindex());
    let enforced = ENDPOINT_ENFORCE_EGRESS | ENDPOINT_ENFORCE_INGRESS;
    let _server = Running::start(Command::new("iperf3").arg("-s"))?;
    // Warms up, too.
    wait_for("iperf3 to serve", PATIENCE, || gigabits(endpoint).map(Some))?;
    let (mut bare, mut open, mut policed) = (Vec::new(), Vec::new(), Vec::new());
    for round in 1..=ROUNDS {
        tell(format_args!("  round {round} of {ROUNDS}"));
        datapath.attach(&[])?;
        bare.push(gigabits(endpoint)?);
        datapath.attach(&hooks)?;
        for (flags, rates) in [(0, &mut open), (enforced, &mut policed)] {
            set_endpoint(endpoint, datapath, flags)?;
            rates.push(gigabits(endpoint)?);
        }
    }
    let flows = pinned.conntrack()?;
    ensure!(
        flows.iter().any(|(_, entry)| entry.policy == TABLE),
        "no flow was judged by the policy"
    );
    let bare = median(bare)?;
    let target = Some(Target::RatioAtLeast(RATIO));
    [("no policy", open, None), ("policy", policed, target)]
        .into_iter()
        .map(|(what, rates, target)| {
            Ok(Figure {
                name: format!(
                    "iperf3 from an endpoint with {what}, median of {ROUNDS} (other: without the programs)"
                ),
                unit: "Gbit/s",
                ours: median(rates)?,
                other: Some(bare),
                target,
            })
        })
        .collect()
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

/// What the host received.
fn gigabits(endpoint: &HealthEndpoint) -> anyhow::Result<f64> {
    let words = format!("-J -t {SECONDS} -c {NODE}");
    let ran = endpoint
        .netns()
        .run_in(|| run(Command::new("iperf3").args(words.split(' '))))??;
    received_gigabits(&ran.success()?)
}
