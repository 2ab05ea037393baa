//! Programs stay on their devices and are replaced there without a gap, whether they are attached by TCX links or as
//! clsact filters.

use std::net::{IpAddr, UdpSocket};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use health_datapath::Hook;
use health_model::settings::AttachMode;
use nix::net::if_::if_nametoindex;
use nix::sys::signal::Signal;
use tests::attached;
use tests::bed::agent_binary;
use tests::ping::{Pace, Pinging};
use tests::process::run;
use tests::testrun::TestRun;
use tests::{Bed, Node, PATIENCE, RaisedAtEnd, Snapshot, slowness, wait_for};

const SENDER_PORT: u16 = 4999;
/// Discard protocol, with no listener (RFC 863).
const DISCARD_PORT: u16 = 9;
/// Deadline for a repair: 2 s are promised, and a busy machine gets ten times that.
const REPAIR: Duration = Duration::from_secs(20);

fn flags(mode: AttachMode) -> String {
    format!("--attach-mode {mode}")
}

fn bed(mode: AttachMode) -> anyhow::Result<(Bed, IpAddr)> {
    let bed = Bed::builder().nodes(2).agent_args(&flags(mode)).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let target = bed.node(1).health_ipv4()?;
    Ok((bed, target))
}

/// Output of `tc` that shows our filters on the uplink and on the health endpoint's device.
fn filters(node: &Node) -> anyhow::Result<String> {
    let mut shown = String::new();
    for device in ["eth0", "lxc_health"] {
        for side in ["ingress", "egress"] {
            shown += &node.exec(&format!("tc filter show dev {device} {side}"))?;
        }
    }
    Ok(shown)
}

/// Waits until the programs are attached in the expected way only.
fn wait_held(node: &Node, mode: AttachMode) -> anyhow::Result<()> {
    let own = format!("health-agent/{}/", node.name());
    wait_for("the programs to be held", REPAIR, || {
        let filters = filters(node)?.matches(&own).count();
        let links = std::fs::read_dir(node.pins().join("links"))?.count();
        let expected = match mode {
            AttachMode::Clsact => (4, 0),
            AttachMode::Auto | AttachMode::Tcx => (0, 4),
        };
        anyhow::ensure!(
            (filters, links) == expected,
            "{filters} filters, {links} links"
        );
        Ok(Some(()))
    })
}

fn echoes_answered(node: &Node) -> anyhow::Result<u64> {
    let metrics = node.listing("bpf metrics list")?;
    let rows = metrics.as_array().context("not a list")?;
    let answered = rows.iter().filter(|row| row["reason"] == "Echo answered");
    Ok(answered.filter_map(|row| row["packets"].as_u64()).sum())
}

fn no_echo_is_lost(mode: AttachMode) -> anyhow::Result<()> {
    let (bed, target) = bed(mode)?;
    let node = bed.node(1);
    wait_held(node, mode)?;
    // An emulated processor must start agents at the same time.
    let pace = Pace {
        interval: slowness(),
        ..Pace::DENSE
    };
    let pinging = Pinging::start(bed.node(2).name(), target, pace);
    // One restart is enough on a machine where each takes half a minute.
    let signals: &[Signal] = match slowness() {
        1 => &[Signal::SIGKILL, Signal::SIGTERM],
        _ => &[Signal::SIGKILL],
    };
    for signal in signals {
        node.kill_agent(*signal)?;
        let answered = echoes_answered(node)?;
        wait_for("answers without an agent", PATIENCE, || {
            Ok((echoes_answered(node)? > answered + 100).then_some(()))
        })?;
        node.start_agent()?;
        bed.wait_all_reachable(PATIENCE)?;
        wait_held(node, mode)?;
    }
    let summary = pinging.end()?;
    assert!(summary.transmitted > 500, "{summary:?}");
    assert_eq!(summary.lost(), 0, "{summary:?}");
    // Data of any length that fits into one packet.
    for len in [0, 1, 56, 1_001, 1_400] {
        let ping = format!("ping -n -q -c 1 -W 30 -s {len} {target}");
        bed.node(2).exec(&ping)?;
    }
    let flows = node.listing(&format!("bpf ct list --proto icmp --dst {target}"))?;
    let flows = flows.as_array().context("no flows")?;
    ensure!(!flows.is_empty(), "echoes are not in conntrack");
    wait_for("a round trip in the kernel", PATIENCE, || {
        let rows = node.listing(&format!("bpf rtt list --peer {}", bed.node(2).name()))?;
        let mut rows = rows.as_array().context("no rows")?.iter();
        Ok(rows
            .any(|row| row["samples"].as_u64() > Some(0))
            .then_some(()))
    })
}

#[test]
#[ignore = "needs root"]
fn no_echo_is_lost_through_kills_and_restarts_with_tcx() -> anyhow::Result<()> {
    no_echo_is_lost(AttachMode::Tcx)
}

#[test]
#[ignore = "needs root"]
fn no_echo_is_lost_through_kills_and_restarts_with_clsact() -> anyhow::Result<()> {
    no_echo_is_lost(AttachMode::Clsact)
}

#[test]
#[ignore = "needs root"]
fn a_device_that_took_the_name_of_another_gets_no_programs() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(1).without_agents().start()?;
    let node = bed.node(1);
    let make = || -> anyhow::Result<u32> {
        node.exec("ip link add taken type bridge")?;
        node.run_in(|| if_nametoindex("taken"))?
            .context("no number")
    };
    let before = make()?;
    node.exec("ip link delete taken")?;
    let now = make()?;
    ensure!(before != now, "numbers come again");
    let mut run = TestRun::load_alone();
    let attached = node.run_in(|| run.datapath.attach(&Hook::endpoint("taken", before)))?;
    ensure!(attached.is_err(), "it took one device for another");
    ensure!(attached::programs(node, "taken")? == [vec![], vec![]]);
    node.run_in(|| run.datapath.attach(&Hook::endpoint("taken", now)))??;
    let programs = attached::programs(node, "taken")?;
    ensure!(programs.iter().all(|side| side.len() == 1), "{programs:?}");
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn from_one_kind_to_the_other_no_packet_goes_unhandled() -> anyhow::Result<()> {
    let (bed, target) = bed(AttachMode::Tcx)?;
    let (node, sender) = (bed.node(1), bed.node(2));
    let socket = sender.run_in(|| UdpSocket::bind((sender.ipv4(), SENDER_PORT)))??;
    let stop = AtomicBool::new(false);
    let sent = thread::scope(|scope| -> anyhow::Result<u64> {
        // Stops the sender on every exit path.
        let stopping = RaisedAtEnd(&stop);
        let sending = scope.spawn(|| {
            let mut sent = 0;
            while !stop.load(Ordering::Relaxed) {
                sent += u64::from(socket.send_to(&[0; 8], (target, DISCARD_PORT)).is_ok());
                thread::sleep(Duration::from_millis(1));
            }
            sent
        });
        for mode in [AttachMode::Clsact, AttachMode::Tcx, AttachMode::Clsact] {
            node.kill_agent(Signal::SIGTERM)?;
            node.start_agent_with(&flags(mode))?;
            bed.wait_all_reachable(PATIENCE)?;
            wait_held(node, mode)?;
        }
        drop(stopping);
        Ok(sending.join().expect("a sender that does not panic"))
    })?;
    assert!(sent > 500, "{sent} datagrams");
    // For a moment, packets pass both kinds of programs.
    let counted = counted(node)?;
    assert!(counted >= sent, "{counted} of {sent} datagrams");
    Ok(())
}

/// Number of the sender's datagrams that reached the programs on the health endpoint's device.
fn counted(node: &Node) -> anyhow::Result<u64> {
    let flows = node.listing("bpf ct list")?;
    let flows = flows.as_array().context("not a list")?;
    let flow = flows.iter().find(|flow| {
        flow["protocol"] == "UDP" && flow["destination-port"] == u64::from(DISCARD_PORT)
    });
    let flow = flow.with_context(|| format!("no flow among {flows:#?}"))?;
    flow["rx-packets"].as_u64().context("no number")
}

#[test]
#[ignore = "needs root"]
fn removed_filters_and_qdiscs_are_put_back() -> anyhow::Result<()> {
    let (bed, target) = bed(AttachMode::Clsact)?;
    let node = bed.node(1);
    for command in [
        "tc filter delete dev eth0 egress",
        "tc qdisc delete dev eth0 clsact",
        "tc qdisc delete dev lxc_health clsact",
    ] {
        node.exec(command)?;
        wait_held(node, AttachMode::Clsact).context(command)?;
    }
    assert!(!node.logged(&["to_netdev at egress of eth0"])?.is_empty());
    assert!(bed.node(2).pings(target)?);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn what_others_attached_stays() -> anyhow::Result<()> {
    for had_qdisc in [true, false] {
        let bed = Bed::builder()
            .nodes(1)
            .without_agents()
            .agent_args(&flags(AttachMode::Clsact))
            .start()?;
        let node = bed.node(1);
        // Filters of another kind cannot have the same priority as ours.
        let priority = if had_qdisc { 1 } else { 7 };
        let add = &format!(
            "tc filter add dev eth0 ingress prio {priority} protocol ip u32 match ip protocol 132 0xff classid 1:1"
        );
        if had_qdisc {
            node.exec("tc qdisc add dev eth0 clsact")?;
            node.exec(add)?;
        }
        node.start_agent()?;
        bed.wait_all_reachable(PATIENCE)?;
        wait_held(node, AttachMode::Clsact)?;
        if !had_qdisc {
            node.exec(add)?;
        }
        node.kill_agent(Signal::SIGTERM)?;
        node.cli("cleanup")?.success()?;
        let left = filters_of(node, "eth0")?;
        assert!(left.contains("u32"), "{left}");
        assert!(!left.contains("health-agent"), "{left}");
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_qdisc_that_was_made_goes_with_the_programs() -> anyhow::Result<()> {
    let (bed, _) = bed(AttachMode::Clsact)?;
    let node = bed.node(1);
    let qdiscs = || node.exec("tc qdisc show dev eth0");
    assert!(qdiscs()?.contains("clsact"));
    node.kill_agent(Signal::SIGKILL)?;
    node.cli("cleanup")?.success()?;
    assert!(!qdiscs()?.contains("clsact"), "{}", qdiscs()?);
    Ok(())
}

fn filters_of(node: &Node, device: &str) -> anyhow::Result<String> {
    node.exec(&format!("tc filter show dev {device} ingress"))
}

#[test]
#[ignore = "needs root"]
fn a_device_with_an_ingress_qdisc_is_refused_in_one_line() -> anyhow::Result<()> {
    let bed = Bed::builder()
        .nodes(1)
        .without_agents()
        .agent_args(&flags(AttachMode::Clsact))
        .start()?;
    let node = bed.node(1);
    node.exec("tc qdisc add dev eth0 ingress")?;
    // The agent serves its API before it attaches its programs.
    let _ = node.start_agent();
    wait_for("the refusal", PATIENCE, || {
        let reported = node.logged(&["error: ", "eth0: the device has an ingress qdisc"])?;
        Ok((reported.len() == 1).then_some(()))
    })?;
    assert!(node.exec("tc qdisc show dev eth0")?.contains("ingress"));
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn probing_the_kernel_names_every_feature_and_leaves_nothing() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(1).without_agents().start()?;
    let node = bed.node(1);
    let before = Snapshot::node(node)?;
    let reported = node.cli("config --probe-kernel -o json")?.success()?;
    let report: serde_json::Value = serde_json::from_str(&reported)?;
    let features = report["features"].as_array().context("not a list")?;
    for name in [
        "bpffs",
        "tcx",
        "clsact",
        "csum-ipv6",
        "helper-ktime-get-tai-ns",
    ] {
        let feature = features.iter().find(|feature| feature["name"] == name);
        let feature = feature.with_context(|| format!("no {name} in {reported}"))?;
        assert!(feature["available"].is_boolean(), "{feature}");
        assert_ne!(feature["without"], "", "{feature}");
    }
    before.wait_same(|| Snapshot::node(node))
}

#[test]
#[ignore = "needs root"]
fn probing_the_kernel_fails_where_an_agent_would_not_start() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let mut probe = Command::new(agent_binary()?);
    probe
        .arg("--bpf-root")
        .arg(folder.path())
        .args(["config", "--probe-kernel"]);
    let ran = run(&mut probe)?;
    assert_eq!(ran.code, Some(1), "{}", ran.stderr);
    assert!(ran.stdout.contains("bpffs"), "{}", ran.stdout);
    assert!(
        ran.stderr.starts_with("error: no bpffs is mounted at "),
        "{}",
        ran.stderr
    );
    Ok(())
}
