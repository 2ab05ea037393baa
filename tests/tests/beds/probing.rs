//! How much an agent probes, counted by the kernel: disabled protocols, the probe rate, results as they arrive, and
//! leftovers of connections.

use std::io::{BufRead as _, BufReader};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use health_model::api::{NodeStatus, Reachability};
use tests::bed::Node;
use tests::process::run_with_input;
use tests::{Bed, PATIENCE, wait_for};

/// The state TIME_WAIT in `/proc/net/tcp`.
const TIME_WAIT: &str = "06";

/// A counter of the node's kernel in `/proc/net/snmp`.
fn counter(node: &Node, protocol: &str, name: &str) -> anyhow::Result<u64> {
    let text = node.exec("cat /proc/net/snmp")?;
    let mut lines = text
        .lines()
        .filter_map(|line| line.strip_prefix(protocol)?.strip_prefix(": "));
    let (names, values) = (lines.next(), lines.next());
    let names = names.with_context(|| format!("no {protocol}"))?.split(' ');
    let values = values.with_context(|| format!("no {protocol}"))?.split(' ');
    let value = names.zip(values).find(|(known, _)| *known == name);
    Ok(value
        .with_context(|| format!("no {protocol} {name}"))?
        .1
        .parse()?)
}

/// Number of echo requests and connection attempts by the node.
fn probes(node: &Node) -> anyhow::Result<(u64, u64)> {
    Ok((
        counter(node, "Icmp", "OutEchos")?,
        counter(node, "Tcp", "ActiveOpens")?,
    ))
}

#[test]
#[ignore = "needs root"]
fn what_is_switched_off_is_not_sent() -> anyhow::Result<()> {
    for (switch, icmp_off) in [("http=off", false), ("icmp=off", true)] {
        let bed = Bed::builder()
            .nodes(2)
            .agent_args(&format!(
                "--probe-interval 100ms --probe-timeout 100ms --probe {switch}"
            ))
            .start()?;
        let node = bed.node(1);
        wait_for("probes of the other protocol", PATIENCE, || {
            let (echos, connections) = probes(node)?;
            let sent = if icmp_off { connections } else { echos };
            Ok((sent >= 50).then_some(()))
        })?;
        let (echos, connections) = probes(node)?;
        let off = if icmp_off { echos } else { connections };
        assert_eq!(off, 0, "{switch}");
        let status = node.status()?;
        for path in status.nodes.iter().flat_map(|node| node.host.paths()) {
            let (icmp, http) = (path.icmp.is_some(), path.http.is_some());
            assert_eq!((icmp, http), (!icmp_off, icmp_off), "{switch}: {path:?}");
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn the_probe_rate_bounds_the_packets_whether_they_are_answered_or_not() -> anyhow::Result<()> {
    const RATE: u64 = 20;
    const ENOUGH: u64 = 100;
    let bed = Bed::builder()
        .nodes(3)
        .agent_args(&format!(
            "--probe-interval 100ms --probe-timeout 100ms --probe-rate {RATE}"
        ))
        .start()?;
    let node = bed.node(1);
    // Twelve targets use nine tenths of the rate.
    let status = wait_for("all targets to be known", PATIENCE, || {
        let status = node.status()?;
        let known = status.nodes.len() == 3
            && status
                .nodes
                .iter()
                .all(|node| node.health_endpoint.is_some());
        Ok(known.then_some(status))
    })?;
    assert_eq!(status.configured_interval.as_deref(), Some("100ms"));
    let effective = status.probe_interval.trim_end_matches("ms").to_owned();
    let effective: f64 = effective
        .parse()
        .with_context(|| status.probe_interval.clone())?;
    assert!((666.0..667.0).contains(&effective), "{effective} ms");

    // Waits until enough probes were sent to compute a rate. Returns the number of probes and the elapsed time.
    let sent_meanwhile = || -> anyhow::Result<(u64, Duration)> {
        let ((echos, connections), start) = (probes(node)?, Instant::now());
        wait_for("probes to be sent", PATIENCE, || {
            let (more_echos, more_connections) = probes(node)?;
            let sent = more_echos - echos + more_connections - connections;
            Ok((sent >= ENOUGH).then(|| (sent, start.elapsed())))
        })
    };
    // The limit allows a burst of one second's worth of probes.
    let most = |time: Duration| (time.as_secs_f64() + 1.0) * RATE as f64;
    let (sent, time) = sent_meanwhile()?;
    assert!(sent as f64 <= most(time), "{sent} probes in {time:?}");

    for peer in [bed.node(2), bed.node(3)] {
        drop_all(peer)?;
    }
    let (sent, time) = sent_meanwhile()?;
    assert!(
        sent as f64 <= most(time),
        "{sent} probes in {time:?} while all fails"
    );
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn nodes_are_printed_as_their_results_come() -> anyhow::Result<()> {
    // Probes with TCP only, since connections succeed as soon as the fault is gone.
    let bed = Bed::builder()
        .nodes(3)
        .agent_args("--probe-interval 60s --probe-timeout 20s --probe icmp=off")
        .start()?;
    wait_for("all to answer", PATIENCE, || {
        let status = bed.node(1).status()?;
        let answers = |node: &NodeStatus| {
            node.health_endpoint.is_some() && node.reachability() == Reachability::Reachable
        };
        let all = status.nodes.len() == 3 && status.nodes.iter().all(answers);
        Ok(all.then_some(()))
    })?;
    drop_all(bed.node(3))?;

    let mut cli = bed.node(1).cli_command();
    let mut child = cli
        .args(["status", "--probe", "-o", "jsonl"])
        .stdout(Stdio::piped())
        .spawn()?;
    let stdout = child.stdout.take().context("no standard output")?;
    let mut lines = BufReader::new(stdout).lines();
    let mut next = || -> anyhow::Result<serde_json::Value> {
        let line = lines.next().context("no more nodes")?;
        Ok(serde_json::from_str(&line?)?)
    };
    let living = [next()?, next()?];
    // Had these two waited for the third node, its probes would have failed by now.
    drop_nothing(bed.node(3))?;
    let third = next()?;
    assert!(next().is_err());
    assert_eq!(child.wait()?.code(), Some(0), "{third}");
    let names = living.iter().map(|node| node["name"].as_str());
    let own = [1, 2].map(|index| bed.node(index).full_name());
    ensure!(
        names
            .clone()
            .all(|name| name.is_some_and(|name| own.iter().any(|own| own == name))),
        "{living:?}"
    );
    assert_eq!(third["name"], bed.node(3).full_name());
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn echo_requests_that_this_host_drops_itself_time_out() -> anyhow::Result<()> {
    let bed = Bed::builder()
        .nodes(2)
        .agent_args("--probe http=off")
        .probing(500, 400)
        .start()?;
    let (node, other) = (bed.node(1), bed.node(2));
    // The status is empty if the other node's host answers.
    let wait_icmp = |what: &str, is: fn(&str) -> bool| {
        wait_for(what, PATIENCE, || {
            let status = node.status()?;
            let of_other = status.nodes.iter().find(|n| n.name == other.full_name());
            let host = of_other.and_then(|node| node.host.paths().next());
            let icmp = host.and_then(|host| host.icmp.as_ref());
            let status = icmp.map(|icmp| icmp.status.as_str());
            Ok(status.is_some_and(is).then_some(()))
        })
    };
    wait_icmp("an answer", str::is_empty)?;
    // A queue without capacity drops all packets. Raw sockets hide that (`raw_sendmsg` in net/ipv4/raw.c), so nothing
    // else reports the loss.
    node.exec("tc qdisc add dev eth0 root pfifo limit 0")?;
    wait_icmp("the loss to be shown", |status| {
        status == "Connection timed out"
    })?;
    node.exec("tc qdisc del dev eth0 root")?;
    wait_icmp("an answer again", str::is_empty)
}

#[test]
#[ignore = "needs root"]
fn connections_leave_nothing_behind() -> anyhow::Result<()> {
    let bed = Bed::builder()
        .nodes(2)
        .agent_args("--probe-interval 100ms --probe-timeout 100ms")
        .start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let node = bed.node(1);
    let (before, open) = (probes(node)?.1, node.open_files()?);
    wait_for("200 connections", PATIENCE, || {
        Ok((probes(node)?.1 >= before + 200).then_some(()))
    })?;
    for node in bed.nodes() {
        let table = node.exec("cat /proc/net/tcp")?;
        let waiting = table
            .lines()
            .filter(|line| line.split_whitespace().nth(3) == Some(TIME_WAIT))
            .count();
        assert_eq!(waiting, 0, "{}:\n{table}", node.name());
    }
    // At most the current ones of the 200 connections remain, each until its timeout on a busy machine.
    wait_for("as many open files as before", PATIENCE, || {
        let now = node.open_files()?;
        ensure!(now <= open, "{now} open files, before it were {open}");
        Ok(Some(()))
    })
}

/// Makes the node drop all incoming packets.
fn drop_all(node: &Node) -> anyhow::Result<()> {
    let table = "table ip fault {\nchain in {\n\
                 type filter hook prerouting priority raw; iifname eth0 drop;\n}\n}\n";
    run_with_input(node.command("nft").args(["-f", "-"]), table)?.success()?;
    Ok(())
}

/// Undoes [`drop_all`].
fn drop_nothing(node: &Node) -> anyhow::Result<()> {
    run_with_input(
        node.command("nft").args(["-f", "-"]),
        "delete table ip fault\n",
    )?
    .success()?;
    Ok(())
}
