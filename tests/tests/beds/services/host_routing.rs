//! Host routing: packets between endpoints of one node bypass its stack, and everything else works as without it.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context as _, ensure};
use tests::bed::command_in;
use tests::process::run_with_input;
use tests::{Member, PATIENCE, served, wait_for};

use super::{Mode, Row, Stand, policy, show, targets, wait_answered_by};

/// Disables host routing.
const FLAGS: &str = "--host-routing kernel";

pub(super) const ROWS: &[Row] = &[
    ("netfilter_does_not_see_what_stays_on_a_node", unseen),
    ("a_packet_that_came_too_far_is_answered", too_far),
    (
        "answers_to_what_the_host_translated_are_translated_back",
        translated,
    ),
];

#[test]
#[ignore = "needs root"]
fn every_row_comes_true_through_the_hosts_stack() -> anyhow::Result<()> {
    let stand = Stand::start_with(Mode::Ebpf, ["", ""], FLAGS)?;
    show(&stand, &super::ROWS.concat())
}

#[test]
#[ignore = "needs root"]
fn through_the_hosts_stack_nothing_is_reached_that_policy_refuses() -> anyhow::Result<()> {
    policy::refused(FLAGS)
}

/// TCP traffic between a client and a backend on its own node bypasses the forward chain in both directions; traffic to
/// a backend on another node does not.
fn unseen(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let [client, _] = &stand.clients;
    let node = stand.node_of(client);
    let service = stand.service("unseen", number);
    stand.write(&service)?;
    let [near, far] = ["web-1", "web-2"].map(|name| stand.backend(name));
    let [near, far] = [&near?.member, &far?.member];
    let mut rules = String::from(
        "add table inet seen\nadd chain inet seen forward { type filter hook forward priority 0; }\n",
    );
    for (name, backend) in [("near", near), ("far", far)] {
        rules += &format!("add counter inet seen {name}\n");
        for (one, other) in client.addresses().iter().zip(backend.addresses()) {
            for (from, to) in [(*one, other), (other, *one)] {
                let ip = if from.is_ipv4() { "ip" } else { "ip6" };
                rules += &format!(
                    "add rule inet seen forward {ip} saddr {from} {ip} daddr {to} meta l4proto tcp counter name {name}\n"
                );
            }
        }
    }
    run_with_input(node.command("nft").args(["-f", "-"]), &rules)?.success()?;
    for target in targets(&service) {
        wait_answered_by(&client.name, target, &["web-1", "web-2", "web-3"])?;
    }
    let seen = |name: &str| -> anyhow::Result<u64> {
        let listed = node.exec(&format!("nft -j list counter inet seen {name}"))?;
        let listed: serde_json::Value = serde_json::from_str(&listed)?;
        let counters = listed["nftables"].as_array().context("no list")?;
        let mut packets = counters
            .iter()
            .filter_map(|it| it["counter"]["packets"].as_u64());
        packets.next().context("no counter")
    };
    ensure!(seen("far")? > 0, "the rules count nothing");
    ensure!(seen("near")? == 0, "{} packets were seen", seen("near")?);
    Ok(())
}

/// A port of the node that netfilter redirects to an endpoint, as for a `hostPort`, also works for endpoints on the
/// same node.
fn translated(stand: &Stand, _number: u8) -> anyhow::Result<()> {
    const PORT: u16 = 18_080;
    // The other row counts the packets of the first client.
    let [_, client] = &stand.clients;
    let node = stand.node_of(client);
    let backend = stand.backend("web-2")?;
    let mut rules = String::from(
        "add table inet ports\nadd chain inet ports hosts { type nat hook prerouting priority -100; }\n",
    );
    let nodes = node.addresses();
    for (at, to) in nodes.iter().zip(backend.member.addresses()) {
        let family = if at.is_ipv4() { "ip" } else { "ip6" };
        let to = SocketAddr::new(to, served::PORT);
        rules += &format!(
            "add rule inet ports hosts {family} daddr {at} tcp dport {PORT} dnat {family} to {to}\n"
        );
    }
    run_with_input(node.command("nft").args(["-f", "-"]), &rules)?.success()?;
    for at in nodes {
        wait_answered_by(&client.name, SocketAddr::new(at, PORT), &["web-2"])?;
    }
    Ok(())
}

/// A router decrements the TTL, and reports an expired packet to its sender.
fn too_far(stand: &Stand, _number: u8) -> anyhow::Result<()> {
    let [client, _] = &stand.clients;
    let backend = &stand.backend("web-1")?.member;
    for address in backend.addresses() {
        wait_for("an echo to come back", PATIENCE, || {
            Ok(ping(client, address, 2)?
                .contains("1 received")
                .then_some(()))
        })?;
        // The kernel limits the rate of such errors (`net.ipv4.icmp_ratelimit`), and other rows cause some too.
        wait_for("an error to be reported", PATIENCE, || {
            let answer = ping(client, address, 1)?;
            assert!(answer.contains("0 received"), "{answer}");
            let reported = ["Time to live exceeded", "Hop limit"];
            ensure!(
                reported.iter().any(|text| answer.contains(text)),
                "{answer}"
            );
            Ok(Some(()))
        })?;
    }
    Ok(())
}

fn ping(from: &Member, to: IpAddr, ttl: u8) -> anyhow::Result<String> {
    let reported = command_in(&from.name, "ping")
        .args([
            "-n",
            "-c",
            "1",
            "-W",
            "1",
            "-t",
            &ttl.to_string(),
            &to.to_string(),
        ])
        .output()?;
    Ok(String::from_utf8(reported.stdout)?)
}
