//! The health endpoint answers echo requests in the kernel: under load, and without any agent.

use std::fs;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use aya::maps::{HashMap, MapInfo};
use aya::programs::links::{FdLink, PinnedLink};
use health_common::ct::CtEntry;
use nix::sys::signal::Signal;
use tests::attached::has_tcx;
use tests::ping::{Pace, Pinging, Summary};
use tests::process::run;
use tests::{Bed, Node, PATIENCE};

/// Size of a conntrack entry.
const CT_ENTRY_LEN: u32 = size_of::<CtEntry>() as u32;

/// Two nodes that know each other, and the address of the first node's health endpoint.
fn bed() -> anyhow::Result<(Bed, IpAddr)> {
    let bed = Bed::builder().nodes(2).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let target = bed.node(1).health_ipv4()?;
    Ok((bed, target))
}

fn ping(from: &Node, arguments: &str) -> anyhow::Result<Summary> {
    let ran = run(from
        .command("ping")
        .args(["-n", "-q"])
        .args(arguments.split(' ')))?;
    Summary::parse(&ran.stdout)
}

#[test]
#[ignore = "needs root"]
fn a_flood_loses_nothing() -> anyhow::Result<()> {
    let (bed, target) = bed()?;
    let summary = ping(bed.node(2), &format!("-f -c 100000 {target}"))?;
    assert_eq!((summary.transmitted, summary.lost()), (100_000, 0));
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn killing_and_starting_the_agent_loses_nothing() -> anyhow::Result<()> {
    const LENGTH_MS: u32 = 10_000;
    let (bed, target) = bed()?;
    let target_node = bed.node(1);
    let pinging = Pinging::start(bed.node(2).name(), target, Pace::DENSE);
    // As often as time allows, but at least twice. Each round is one kill and one start.
    let begin = Instant::now();
    let mut restarts = 0;
    while begin.elapsed() < Duration::from_millis(LENGTH_MS.into()) || restarts < 2 {
        target_node.kill_agent(Signal::SIGKILL)?;
        target_node.take_over(None)?;
        restarts += 1;
    }
    let summary = pinging.end()?;
    assert!(summary.transmitted > 1_000, "{summary:?}");
    assert_eq!(summary.lost(), 0, "{restarts} restarts, {summary:?}");
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn echo_is_answered_without_an_agent() -> anyhow::Result<()> {
    let (bed, target) = bed()?;
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        bed.node(1).kill_agent(signal)?;
        let summary = ping(bed.node(2), &format!("-i 0.01 -c 100 {target}"))?;
        assert_eq!(summary.lost(), 0, "after {signal}");
        bed.node(2)
            .hello(target)
            .expect_err("no agent, so nobody serves HTTP");
        bed.node(1).start_agent()?;
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn an_upgrade_to_another_map_layout_loses_nothing() -> anyhow::Result<()> {
    let (bed, target) = bed()?;
    let node = bed.node(1);
    let pinging = Pinging::start(bed.node(2).name(), target, Pace::DENSE);
    node.kill_agent(Signal::SIGTERM)?;

    // The state that a version with smaller conntrack entries would leave, while the programs are running.
    let pin = node.pins().join("HEALTH_CT4");
    fs::remove_file(&pin)?;
    HashMap::<_, [u8; 16], [u8; 48]>::create(16, 0)?.pin(&pin)?;
    node.take_over(None)?;

    assert_eq!(node.logged(&["a different layout"])?.len(), 1);
    let layout = MapInfo::from_pin(&pin)?;
    assert_eq!(layout.value_size(), CT_ENTRY_LEN);
    let aside = node.pins().with_file_name(format!("{}_old", node.name()));
    assert!(!aside.exists(), "{} is still there", aside.display());
    let summary = pinging.end()?;
    assert_eq!(summary.lost(), 0, "{summary:?}");
    let flows = node.listing("bpf ct list")?;
    assert!(
        flows.as_array().is_some_and(|flows| !flows.is_empty()),
        "{flows}"
    );
    Ok(())
}

/// The new version set the pins aside, created its own, and was killed before or while it attached its programs. Then
/// the old version is started again.
#[test]
#[ignore = "needs root"]
fn an_upgrade_that_was_killed_and_taken_back_loses_nothing() -> anyhow::Result<()> {
    let (bed, target) = bed()?;
    let node = bed.node(1);
    let pinging = Pinging::start(bed.node(2).name(), target, Pace::DENSE);
    let aside = node.pins().with_file_name(format!("{}_old", node.name()));
    let of_tcx = has_tcx()?.then_some(Some("to_endpoint_lxc_health"));
    for attached in [None].into_iter().chain(of_tcx) {
        node.kill_agent(Signal::SIGKILL)?;
        fs::rename(node.pins(), &aside)?;
        fs::create_dir_all(node.pins().join("links"))?;
        let pin = node.pins().join("HEALTH_CT4");
        HashMap::<_, [u8; 16], [u8; 48]>::create(16, 0)?.pin(&pin)?;
        if let Some(name) = attached {
            PinnedLink::from_pin(aside.join("links").join(name))
                .map(FdLink::from)?
                .pin(node.pins().join("links").join(name))?;
        }
        node.take_over(None)?;
        assert_eq!(MapInfo::from_pin(&pin)?.value_size(), CT_ENTRY_LEN);
        assert!(!aside.exists(), "{} is still there", aside.display());
    }
    let summary = pinging.end()?;
    assert!(summary.transmitted > 1_000, "{summary:?}");
    assert_eq!(summary.lost(), 0, "{summary:?}");
    Ok(())
}
