//! Round-trip times as the command line shows them: with and without an agent.

use anyhow::Context as _;
use nix::sys::signal::Signal;
use tests::bed::Node;
use tests::{Bed, PATIENCE, wait_for};

fn bed() -> anyhow::Result<Bed> {
    let bed = Bed::builder()
        .nodes(3)
        .agent_args("--probe-interval 200ms --probe-timeout 100ms")
        .start()?;
    bed.wait_all_reachable(PATIENCE)?;
    Ok(bed)
}

fn rows(node: &Node, flags: &str) -> anyhow::Result<Vec<serde_json::Value>> {
    let text = node
        .cli(&format!("bpf rtt list {flags} -o json"))?
        .success()?;
    Ok(serde_json::from_str(&text)?)
}

#[test]
#[ignore = "needs root"]
fn rows_are_named_sorted_and_filtered_and_their_histograms_add_up() -> anyhow::Result<()> {
    let bed = bed()?;
    let node = bed.node(1);
    let peer = bed.node(2);
    wait_for("a few round trips", PATIENCE, || {
        let rows = rows(node, "--protocol icmp")?;
        let all = rows.len() == 6 && rows.iter().all(|row| row["samples"].as_u64() >= Some(3));
        Ok(all.then_some(()))
    })?;
    let of_peer = rows(node, &format!("--peer {} --sort max", peer.name()))?;
    // TCP has rows of its own where connections are followed.
    let probed: Vec<_> = of_peer
        .iter()
        .filter(|row| row["protocol"] != "TCP")
        .collect();
    assert_eq!(probed.len(), 4, "{of_peer:?}");
    for row in &probed {
        assert_eq!(row["node"], format!("default/{}", peer.name()));
        let buckets = row["histogram-ns"].as_array().context("no histogram")?;
        let counts = buckets.iter().filter_map(|bucket| bucket[2].as_u64());
        assert_eq!(Some(counts.sum::<u64>()), row["samples"].as_u64(), "{row}");
    }
    let longest: Vec<_> = of_peer.iter().map(|row| row["max-ns"].as_u64()).collect();
    assert!(longest.is_sorted_by(|a, b| a >= b), "{longest:?}");
    let hosts = rows(
        node,
        "--path host --protocol icmp --peer 172.30.0.0/24 --top 2",
    )?;
    let peers: Vec<_> = hosts.iter().map(|row| row["peer"].clone()).collect();
    assert_eq!(peers, ["172.30.0.1", "172.30.0.2"]);
    assert_eq!(rows(node, "--min-loss 50")?.len(), 0);

    let table = node.cli("bpf rtt list --peer 172.30.0.2")?.success()?;
    assert!(table.starts_with("PEER "), "{table}");
    assert!(
        table.contains(&format!("default/{}", peer.name())),
        "{table}"
    );
    let plot = node.cli("bpf rtt list --histogram 172.30.0.2 --protocol icmp")?;
    let plot = plot.success()?;
    assert!(plot.contains('█') && plot.contains("p50"), "{plot}");
    assert!(!plot.contains('\u{1b}'), "{plot}");
    let unknown = node.cli("bpf rtt list --peer nobody")?;
    assert_eq!(unknown.code, Some(1));
    assert!(unknown.stderr.contains("nobody"), "{unknown:?}");
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn rows_are_reset_by_name_alone_and_listed_without_an_agent() -> anyhow::Result<()> {
    let bed = bed()?;
    let node = bed.node(1);
    assert_eq!(node.cli("bpf rtt reset")?.code, Some(2));
    let nobody = node.cli("bpf rtt reset 172.30.0.2 10.99.0.1")?;
    assert_eq!(nobody.code, Some(1));
    assert!(nobody.stderr.contains("10.99.0.1"), "{nobody:?}");

    node.kill_agent(Signal::SIGKILL)?;
    let of_peer = "--peer 172.30.0.2 --protocol icmp";
    let before = rows(node, "")?;
    assert!(rows(node, of_peer)?[0]["samples"].as_u64() > Some(0));
    let by_name = node.cli(&format!("bpf rtt reset {}", bed.node(2).name()))?;
    assert_eq!(by_name.code, Some(1));
    assert!(by_name.stderr.contains("no agent"), "{by_name:?}");

    let said = node
        .cli("bpf rtt reset 172.30.0.2 --protocol icmp")?
        .success()?;
    assert_eq!(said, "1 row reset\n");
    let [row] = &rows(node, of_peer)?[..] else {
        panic!("one row");
    };
    assert_eq!(row["samples"], 0);
    assert_eq!(row["histogram-ns"], serde_json::json!([]));
    assert_eq!(row["node"], serde_json::Value::Null);
    let others = |rows: &[serde_json::Value]| {
        let measured = rows.iter().filter(|row| row["samples"].as_u64() > Some(0));
        measured.count()
    };
    assert_eq!(others(&rows(node, "")?), others(&before) - 1);
    let all = node.cli("bpf rtt reset --all")?.success()?;
    assert_eq!(all, format!("{} rows reset\n", before.len()));
    assert_eq!(others(&rows(node, "")?), 0);
    Ok(())
}
