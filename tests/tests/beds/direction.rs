//! Lost echo probes, and the part of the path where they were lost, as shown by the counters of both agents.

use std::process::Command;

use anyhow::Context as _;
use health_model::api::Diagnosis;
use tests::bed::{FABRIC, Node};
use tests::process::run_with_input;
use tests::{Bed, PATIENCE, wait_for};

const SOME: &str = "numgen random mod 100 < 30";

fn bed(nodes: u8) -> anyhow::Result<Bed> {
    let bed = Bed::builder().nodes(nodes).probing(200, 200).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    Ok(bed)
}

/// Drops packets from a node between the programs on its uplink and those on other nodes' uplinks.
fn lose_from(node: &Node, packets: &str) -> anyhow::Result<()> {
    let device = node.name();
    let table = format!(
        "table netdev from_{device} {{\nchain drops {{\n\
         type filter hook ingress device {device} priority 0;\n{packets} drop;\n}}\n}}\n"
    );
    let mut nft = Command::new("ip");
    nft.args(["netns", "exec", FABRIC, "nft", "-f", "-"]);
    run_with_input(&mut nft, &table)?.success()?;
    Ok(())
}

/// Drops packets inside a node, after the programs on its uplink.
fn lose_in(node: &Node, packets: &str) -> anyhow::Result<()> {
    let table = format!(
        "table inet fault {{\nchain drops {{\ntype filter hook input priority 0;\n{packets} drop;\n}}\n}}\n"
    );
    run_with_input(node.command("nft").args(["-f", "-"]), &table)?.success()?;
    Ok(())
}

/// Waits until the first node's diagnosis of another node has this cause and contains this string.
fn diagnosed(bed: &Bed, index: usize, cause: &str, part: &str) -> anyhow::Result<Diagnosis> {
    let name = bed.node(index).full_name();
    let mut last = None;
    let found = wait_for(part, PATIENCE, || {
        let status = bed.node(1).status()?;
        let peer = status.nodes.into_iter().find(|node| node.name == name);
        last = peer.and_then(|peer| peer.diagnosis);
        let wanted =
            |reported: &Diagnosis| reported.cause == cause && reported.message.contains(part);
        Ok(last.clone().filter(wanted))
    });
    let found = found.with_context(|| format!("{name}: {last:#?}"))?;
    println!("{}\n  - {}", found.message, found.evidence.join("\n  - "));
    Ok(found)
}

#[test]
#[ignore = "needs root"]
fn loss_is_reported_with_the_part_of_the_way() -> anyhow::Result<()> {
    let bed = bed(5)?;
    let address = |index| bed.node(index).ipv4();
    lose_from(
        bed.node(1),
        &format!("ip daddr {} icmp type echo-request {SOME}", address(2)),
    )?;
    lose_from(
        bed.node(3),
        &format!("ip daddr {} icmp type echo-reply {SOME}", address(1)),
    )?;
    lose_in(
        bed.node(4),
        &format!("ip saddr {} icmp type echo-request {SOME}", address(1)),
    )?;
    lose_in(
        bed.node(1),
        &format!("ip saddr {} icmp type echo-reply {SOME}", address(5)),
    )?;
    for (index, part) in [
        (2, ", all on the way there: "),
        (3, ", all on the way back: "),
        (4, ", all in the peer's host: "),
        (5, ", all in this host: "),
    ] {
        let reported = diagnosed(&bed, index, "loss", part)?;
        let counts = "arrived there";
        assert!(reported.evidence[0].contains(counts), "{reported:#?}");
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn silence_is_reported_with_what_arrives() -> anyhow::Result<()> {
    let bed = bed(4)?;
    lose_from(bed.node(2), "icmp type echo-reply")?;
    let requests = format!("ip daddr {} icmp type echo-request", bed.node(3).ipv4());
    lose_from(bed.node(1), &requests)?;
    lose_in(bed.node(4), "icmp type echo-request")?;
    for (index, part) in [
        (2, "replies do not come back"),
        (3, "echo requests do not arrive there (0 of "),
        (4, "replies left through its uplinks"),
    ] {
        diagnosed(&bed, index, "icmp-filtered", part)?;
    }
    Ok(())
}
