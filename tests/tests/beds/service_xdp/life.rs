//! The flag loads the program, which outlives its agent; an agent without the flag removes it. Programs of others stay.

use std::fs;

use anyhow::{Context as _, ensure};
use health_datapath::Hook;
use health_model::settings::ServiceXdp;
use health_net::xdp::Mode;
use nix::sys::signal::Signal;
use tests::bed::{FABRIC, ip};
use tests::served::Manifests;
use tests::testrun::TestRun;
use tests::{Node, PATIENCE, wait_for};

use super::{UPLINK, bed, flags, programs, wait_program};

/// Pins, relative to the node's folder.
const LINK: &str = "links/xdp_netdev_eth0";
const PROGRAM: &str = "programs/xdp_netdev";

fn wait_without(node: &Node) -> anyhow::Result<()> {
    wait_for("no XDP program", PATIENCE, || {
        let found = programs(node, UPLINK)?;
        ensure!(found.is_empty(), "{found:?}");
        Ok(Some(()))
    })
}

#[test]
#[ignore = "needs root"]
fn the_program_comes_stays_and_goes_as_those_of_tc_do() -> anyhow::Result<()> {
    let manifests = Manifests::new()?;
    let bed = bed(&manifests, "native")?;
    let node = bed.node(1);
    node.start_agent()?;
    let first = wait_program(node, Mode::Native, None)?;
    // The agent pins the link right after it attaches the program.
    bed.wait_all_reachable(PATIENCE)?;
    node.kill_agent(Signal::SIGKILL)?;
    assert_eq!(programs(node, UPLINK)?, [(Mode::Native, first)]);
    node.start_agent()?;
    let second = wait_program(node, Mode::Native, Some(first))?;
    bed.wait_all_reachable(PATIENCE)?;

    let link = node.pins().join(LINK);
    node.exec(&format!("bpftool link detach pinned {}", link.display()))?;
    wait_program(node, Mode::Native, None)?;
    wait_for("the repair to be reported", PATIENCE, || {
        let reported = node.logged(&["program xdp_netdev of eth0 was detached"])?;
        Ok((!reported.is_empty()).then_some(()))
    })?;
    fs::remove_file(&link).context("the link's pin")?;
    wait_for("the pin to be back", PATIENCE, || {
        Ok(link.exists().then_some(()))
    })?;
    assert_eq!(programs(node, UPLINK)?, [(Mode::Native, second)]);

    node.kill_agent(Signal::SIGTERM)?;
    node.start_agent_with(&flags(&manifests, "generic"))?;
    let third = wait_program(node, Mode::Generic, None)?;
    node.kill_agent(Signal::SIGKILL)?;
    node.start_agent_with(&flags(&manifests, "generic"))?;
    wait_program(node, Mode::Generic, Some(third))?;

    node.kill_agent(Signal::SIGTERM)?;
    node.start_agent_with(&manifests.agent_args())?;
    wait_without(node)?;
    bed.wait_all_reachable(PATIENCE)?;
    for pin in [LINK, PROGRAM] {
        ensure!(!node.pins().join(pin).exists(), "{pin} is there");
    }
    node.kill_agent(Signal::SIGTERM)?;

    node.start_agent()?;
    wait_program(node, Mode::Native, None)?;
    node.kill_agent(Signal::SIGKILL)?;
    node.cli("cleanup")?.success()?;
    wait_without(node)
}

#[test]
#[ignore = "needs root"]
fn a_program_of_somebody_else_stays_and_is_named() -> anyhow::Result<()> {
    let manifests = Manifests::new()?;
    let bed = bed(&manifests, "native")?;
    let node = bed.node(1);
    let mut other = TestRun::load_alone();
    other.datapath.set_xdp(ServiceXdp::Native);
    node.run_in(|| other.datapath.attach(&[Hook::xdp(UPLINK)]))??;
    let foreign = wait_program(node, Mode::Native, None)?;

    node.start_agent()?;
    bed.wait_all_reachable(PATIENCE)?;
    let named = format!("eth0 has another XDP program, xdp_netdev (number {foreign})");
    wait_for("the other program to be named", PATIENCE, || {
        Ok((!node.logged(&[" WARN ", &named])?.is_empty()).then_some(()))
    })?;
    wait_for("the status to name it", PATIENCE, || {
        let shown = node.cli("status --succinct")?.stdout;
        let warning = shown
            .lines()
            .find(|line| line.starts_with("Agent warning:   service-xdp: "));
        ensure!(warning.is_some_and(|line| line.contains(&named)), "{shown}");
        Ok(Some(()))
    })?;
    assert_eq!(programs(node, UPLINK)?, [(Mode::Native, foreign)]);

    node.run_in(|| other.datapath.attach(&[]))??;
    wait_program(node, Mode::Native, Some(foreign))?;
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_device_with_jumbo_frames_is_named_and_gets_the_program_once_it_has_none() -> anyhow::Result<()>
{
    let manifests = Manifests::new()?;
    let bed = bed(&manifests, "native")?;
    let node = bed.node(1);
    let set_mtu = |mtu: &str| ip(node.name(), &format!("link set {UPLINK} mtu {mtu}"));
    set_mtu("9000")?;
    ip(FABRIC, &format!("link set {} mtu 9000", node.name()))?;
    node.start_agent()?;
    bed.wait_all_reachable(PATIENCE)?;
    let named = "device eth0 cannot run an XDP program with its MTU";
    wait_for("the device to be named", PATIENCE, || {
        Ok((!node.logged(&[" WARN ", named])?.is_empty()).then_some(()))
    })?;
    assert_eq!(programs(node, UPLINK)?, []);
    ip(FABRIC, &format!("link set {} mtu 1500", node.name()))?;
    set_mtu("1500")?;
    wait_program(node, Mode::Native, None)?;
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_driver_without_xdp_is_named_in_one_line() -> anyhow::Result<()> {
    let manifests = Manifests::new()?;
    let bed = bed(&manifests, "native --device plain")?;
    let node = bed.node(1);
    node.exec("ip link add plain up type bridge")?;
    // The agent serves its API before it attaches any program.
    let _ = node.start_agent();
    wait_for("the refusal", PATIENCE, || {
        let named = "driver bridge of device plain does not support XDP";
        Ok((node.logged(&["error: ", named])?.len() == 1).then_some(()))
    })?;
    assert_eq!(programs(node, "plain")?, []);
    assert_eq!(programs(node, UPLINK)?, []);
    Ok(())
}
