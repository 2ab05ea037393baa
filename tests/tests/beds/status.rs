//! Output and exit code of `status` in all output formats, for healthy and unhealthy clusters.

use health_model::api::{PathStatus, Reachability};
use nix::sys::signal::Signal;
use tests::{Bed, PATIENCE, wait_for};

#[test]
#[ignore = "needs root"]
fn a_healthy_cluster_is_reported_in_each_form() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(2).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let node = bed.node(1);

    let full = node.cli("status")?.success()?;
    for text in [
        "Probe time:",
        "2/2 reachable",
        "default/hnode1 (localhost):",
        "Host connectivity to 172.30.0.2:",
        "ICMP to stack:   OK, RTT=",
        "HTTP to agent:   OK, RTT=",
        "Endpoint connectivity to 10.244.2.",
    ] {
        assert!(full.contains(text), "no {text:?} in:\n{full}");
    }
    let succinct = node.cli("status --succinct")?.success()?;
    assert!(
        succinct.starts_with("Cluster health:   2/2 reachable"),
        "{succinct}"
    );
    let verbose = node.cli("status --verbose")?.success()?;
    assert!(
        verbose.contains("Last probed:") && verbose.contains("kernel"),
        "{verbose}"
    );
    let probed = node.cli("status --probe")?.success()?;
    assert!(probed.contains("2/2 reachable"), "{probed}");
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_dead_agent_is_distinguished_from_a_dead_endpoint() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(3).probing(1000, 500).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    bed.node(2).kill_agent(Signal::SIGKILL)?;

    let dead = bed.node(2).full_name();
    for observer in [bed.node(1), bed.node(3)] {
        let paths: Vec<PathStatus> = wait_for("HTTP of the dead agent to fail", PATIENCE, || {
            let status = observer.status()?;
            let node = status.nodes.into_iter().find(|node| node.name == dead);
            let node = node.ok_or_else(|| anyhow::anyhow!("{dead} is not in the report"))?;
            let paths: Vec<PathStatus> = node
                .host
                .paths()
                .chain(node.health_endpoint.iter().flat_map(|group| group.paths()))
                .cloned()
                .collect();
            let all_failed = paths.len() == 2
                && paths
                    .iter()
                    .all(|path| path.reachability() == Reachability::Unreachable);
            Ok(all_failed.then_some(paths))
        })?;
        for path in paths {
            let icmp = path.icmp.expect("a result");
            assert!(icmp.is_ok(), "{}: {}", path.ip, icmp.status);
            let http = path.http.expect("a result");
            assert_eq!(http.status, "Connection refused", "{}", path.ip);
        }
        let ran = observer.cli("status")?;
        assert_eq!(ran.code, Some(3), "{}", ran.stdout);
        assert!(ran.stdout.contains("2/3 reachable"), "{}", ran.stdout);
        let diagnosis = format!("    Diagnosis:   agent down: {dead} answers ICMP on ");
        assert!(ran.stdout.contains(&diagnosis), "{}", ran.stdout);
        let succinct = observer.cli("status --succinct --failing")?.stdout;
        let [_, key, _, line] = succinct.lines().collect::<Vec<_>>()[..] else {
            panic!("more than the dead agent is failing:\n{succinct}");
        };
        assert!(key.starts_with("Mesh key:   the public default"), "{key}");
        assert!(line.ends_with("   agent-down"), "{line}");
        assert_eq!(ran.stderr, "");
        assert_eq!(observer.cli("status -o json")?.code, Some(3));
    }

    bed.node(2).start_agent()?;
    bed.wait_all_reachable(PATIENCE)?;
    assert_eq!(bed.node(1).cli("status")?.code, Some(0));
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn without_an_agent_one_line_says_so() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(1).without_agents().start()?;
    let ran = bed.node(1).cli("status")?;
    assert_eq!(ran.code, Some(1));
    assert_eq!(ran.stderr.lines().count(), 1, "{}", ran.stderr);
    assert!(ran.stderr.starts_with("error: "), "{}", ran.stderr);
    assert!(ran.stderr.contains("health.sock"), "{}", ran.stderr);
    assert_eq!(bed.node(1).cli("status --no-such-flag")?.code, Some(2));
    Ok(())
}
