//! Answering nodes are who they claim to be: meshes with their own key, rotation of that key, and nodes with a
//! different key.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use anyhow::ensure;
use health_model::api::{NodeStatus, Reachability};
use nix::sys::signal::Signal;
use tests::bed::Node;
use tests::{Bed, PATIENCE, slowness, wait_for};

const OLD: [u8; 16] = [1; 16];
const NEW: [u8; 16] = [2; 16];

/// One node's key files, in a separate folder.
struct Keys(tempfile::TempDir);

impl Keys {
    /// Creates the files with this key only.
    fn new(key: &[u8]) -> anyhow::Result<Self> {
        let keys = Self(tempfile::tempdir()?);
        keys.set(key, None)?;
        Ok(keys)
    }

    /// Replaces the keys. `other` is the suffix of the second file and its key.
    fn set(&self, key: &[u8], other: Option<(&str, &[u8])>) -> anyhow::Result<()> {
        for suffix in [".previous", ".next"] {
            let file = self.0.path().join(format!("key{suffix}"));
            if file.exists() {
                fs::remove_file(file)?;
            }
        }
        write(&self.0.path().join("key"), key)?;
        if let Some((suffix, other)) = other {
            write(&self.0.path().join(format!("key{suffix}")), other)?;
        }
        Ok(())
    }

    fn start(&self, node: &Node) -> anyhow::Result<()> {
        let file = self.0.path().join("key");
        let interval = 200 * slowness();
        node.start_agent_with(&format!(
            "--mesh-key-file {} --probe-interval {interval}ms --probe-timeout {interval}ms",
            file.display()
        ))
    }

    fn restart(&self, node: &Node) -> anyhow::Result<()> {
        node.kill_agent(Signal::SIGTERM)?;
        self.start(node)
    }
}

fn write(file: &Path, key: &[u8]) -> anyhow::Result<()> {
    fs::write(file, key)?;
    Ok(fs::set_permissions(file, Permissions::from_mode(0o600))?)
}

/// The cause that `observer` reports for `peer`.
fn cause(observer: &Node, peer: &Node) -> anyhow::Result<Option<String>> {
    let report = observer.status()?;
    let mut nodes = report.nodes.into_iter();
    let found = nodes.find(|node| node.name == peer.full_name());
    Ok(found.and_then(|node| Some(node.diagnosis?.cause)))
}

/// Waits until `observer` reports this cause for `peer`, or no cause for `None`.
pub(crate) fn wait_for_cause(
    observer: &Node,
    peer: &Node,
    wanted: Option<&str>,
) -> anyhow::Result<()> {
    let what = format!("{} to find {wanted:?}", observer.name());
    wait_for(&what, PATIENCE, || {
        let found = cause(observer, peer)?;
        ensure!(found.as_deref() == wanted, "{found:?}");
        Ok(Some(()))
    })
}

#[test]
#[ignore = "needs root"]
fn a_key_is_exchanged_node_by_node_without_a_failure() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(2).without_agents().start()?;
    let [first, second] = [bed.node(1), bed.node(2)];
    let [first_keys, second_keys] = [Keys::new(&OLD)?, Keys::new(&OLD)?];
    first_keys.start(first)?;
    second_keys.start(second)?;
    bed.wait_all_reachable(PATIENCE)?;
    assert!(!first.cli("status")?.success()?.contains("Mesh key"));
    assert_eq!(
        first.hello(second.ipv4().into())?,
        401,
        "asked without a key"
    );

    // Each node goes first in some step.
    let nodes = [(first, &first_keys, second), (second, &second_keys, first)];
    for (step, (key, other)) in [
        (&OLD, Some((".next", &NEW[..]))),
        (&NEW, Some((".previous", &OLD[..]))),
        (&NEW, None),
    ]
    .into_iter()
    .enumerate()
    {
        let mut order = nodes;
        if step == 1 {
            order.reverse();
        }
        for (turn, (node, keys, peer)) in order.into_iter().enumerate() {
            keys.set(key, other)?;
            keys.restart(node)?;
            bed.wait_all_reachable(PATIENCE)?;
            let is_between = (step, turn) == (1, 0);
            let cause = is_between.then_some("old-key");
            wait_for_cause(node, peer, cause)?;
            wait_for_cause(peer, node, cause)?;
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_node_with_another_key_is_reported_and_one_without_a_key_warns() -> anyhow::Result<()> {
    let bed = Bed::builder()
        .nodes(2)
        .probing(200, 200)
        .without_agents()
        .start()?;
    let [first, second] = [bed.node(1), bed.node(2)];
    let keys = Keys::new(&OLD)?;
    keys.start(first)?;
    let others = Keys::new(&NEW)?;
    others.start(second)?;
    for (observer, peer) in [(first, second), (second, first)] {
        wait_for_cause(observer, peer, Some("wrong-key"))?;
        let report = observer.status()?;
        let is_peer = |node: &&NodeStatus| node.name == peer.full_name();
        let node = report.nodes.iter().find(is_peer);
        let node = node.expect("the peer is in the report");
        assert_eq!(node.host.reachability(), Reachability::Unreachable);
        let icmp = node.host.primary_address.icmp.as_ref();
        assert!(icmp.is_some_and(|icmp| icmp.is_ok()), "{node:?}");
    }

    second.kill_agent(Signal::SIGTERM)?;
    second.start_agent()?;
    wait_for_cause(first, second, Some("wrong-key"))?;
    wait_for_cause(second, first, Some("wrong-key"))?;
    assert_eq!(second.logged(&["mesh key is the public default"])?.len(), 1);
    assert!(first.logged(&["public default"])?.is_empty());
    let warning = "Mesh key:   the public default, anyone can answer for a peer";
    for form in ["status", "status --succinct"] {
        assert!(second.cli(form)?.stdout.contains(warning), "{form}");
        assert!(!first.cli(form)?.stdout.contains(warning), "{form}");
    }
    assert!(second.status()?.local.public_mesh_key);
    assert!(!first.status()?.local.public_mesh_key);
    Ok(())
}
