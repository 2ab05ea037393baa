//! Wall clocks that jump by a day, forwards or backwards. The node whose clock is wrong is reported, policy and
//! identities stay in force, and everything is as before once the clock is right again.

use std::collections::BTreeMap;
use std::fs;
use std::net::Ipv4Addr;
use std::path::Path;

use anyhow::ensure;
use serde_json::Value;
use tempfile::TempDir;
use tests::bed::Etcd;
use tests::ping::is_answered;
use tests::{Bed, Member, Node, PATIENCE, wait_for};

use crate::endpoint_report::rows;
use crate::mesh_key::wait_for_cause;

const STORE: Ipv4Addr = Ipv4Addr::new(172, 30, 0, 254);
/// Clock jumps, in seconds.
const JUMPS: [i64; 2] = [86_400, -86_400];
const CLUSTER_FIRST: u64 = 256;

const RULES: &str = r#"[{"labels": ["name=web"], "endpointSelector": {"matchLabels": {"app": "web"}},
    "ingress": [{"fromEndpoints": [{"matchLabels": {"role": "friend"}}]}]}]"#;

fn bed(store: &str) -> anyhow::Result<Bed> {
    Bed::builder()
        .nodes(2)
        .ipv6(true)
        .probing(200, 200)
        .agent_args(&format!("--identity-store {store}"))
        .own_clocks()
        .without_agents()
        .start()
}

/// An endpoint on the first node that only its friend on the second node may reach.
struct Scene<'a> {
    bed: &'a Bed,
    web: Member,
    friend: Member,
    stranger: Member,
    identities: BTreeMap<u64, Value>,
    _folder: TempDir,
}

impl<'a> Scene<'a> {
    fn new(bed: &'a Bed) -> anyhow::Result<Self> {
        for node in bed.nodes() {
            node.start_agent()?;
        }
        bed.wait_all_reachable(PATIENCE)?;
        let [first, second] = [bed.node(1), bed.node(2)];
        let folder = tempfile::tempdir()?;
        import(first, folder.path())?;
        let mut scene = Self {
            bed,
            web: Member::on(first, "web", "--label app=web")?,
            friend: Member::on(second, "friend", "--label role=friend")?,
            stranger: Member::on(second, "stranger", "--label role=stranger")?,
            identities: BTreeMap::new(),
            _folder: folder,
        };
        scene.wait_verdicts()?;
        scene.identities = wait_for("all references", PATIENCE, || {
            let known = identities(first)?;
            let is_used = |labels: &Value| rows(&labels["references"]).next().is_some();
            let all = known.len() == 3 && known.values().all(is_used);
            Ok(all.then_some(known))
        })?;
        Ok(scene)
    }

    /// Waits until exactly the allowed packets pass, over IPv4 and IPv6.
    fn wait_verdicts(&self) -> anyhow::Result<()> {
        wait_for("the policy's verdicts", PATIENCE, || {
            self.verdicts().map(Some)
        })
    }

    fn verdicts(&self) -> anyhow::Result<()> {
        for (from, passes) in [(&self.friend, true), (&self.stranger, false)] {
            for address in self.web.addresses() {
                let is_answered = is_answered(&from.name, address)?;
                ensure!(is_answered == passes, "{} to {address}", from.name);
            }
        }
        Ok(())
    }

    /// Waits until the nodes report the original identities, used by the same nodes.
    fn wait_identities(&self) -> anyhow::Result<()> {
        for node in self.bed.nodes() {
            wait_for("the same identities", PATIENCE, || {
                let mut known = identities(node)?;
                known.retain(|id, _| self.identities.contains_key(id));
                ensure!(known == self.identities, "{}: {known:?}", node.name());
                Ok(Some(()))
            })?;
        }
        Ok(())
    }
}

fn import(node: &Node, folder: &Path) -> anyhow::Result<()> {
    let file = folder.join("policy");
    fs::write(&file, RULES)?;
    let words = format!("policy import {}", file.display());
    node.cli(&words)?.success().map(drop)
}

/// The cluster identities that a node reports, by number.
fn identities(node: &Node) -> anyhow::Result<BTreeMap<u64, Value>> {
    let listed = node.listing("identity list")?;
    let numbered = rows(&listed).filter_map(|one| Some((one["id"].as_u64()?, one.clone())));
    Ok(numbered.filter(|(id, _)| *id >= CLUSTER_FIRST).collect())
}

#[test]
#[ignore = "needs root"]
fn a_node_whose_clock_jumps_is_reported_and_enforces_policy_all_the_while() -> anyhow::Result<()> {
    let bed = bed(&format!("etcd:http://{STORE}:2379"))?;
    let _store = Etcd::start(&bed, STORE, "")?;
    let scene = Scene::new(&bed)?;
    let [right, off] = [bed.node(1), bed.node(2)];
    for seconds in JUMPS {
        off.shift_clock(seconds)?;
        wait_for_cause(right, off, Some("clock-differs"))?;
        wait_for_cause(off, right, Some("clock-differs"))?;
        scene.verdicts()?;
        scene.wait_identities()?;
        // A new endpoint gets the identity number that the other nodes know.
        let late = Member::on(off, "late", "--label role=friend")?;
        ensure!(
            late.endpoint.identity == scene.friend.endpoint.identity,
            "{:?}",
            late.endpoint
        );
        wait_for("the new one's address to be known", PATIENCE, || {
            Ok(is_answered(&late.name, scene.web.ipv4()?)?.then_some(()))
        })?;
        let deleted = format!("endpoint delete --netns {}", late.netns.path().display());
        off.cli(&deleted)?.success()?;

        off.shift_clock(0)?;
        wait_for_cause(right, off, None)?;
        wait_for_cause(off, right, None)?;
        bed.wait_all_reachable(PATIENCE)?;
        scene.verdicts()?;
        scene.wait_identities()?;
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn identities_in_a_file_outlive_jumps_of_the_machines_clock() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let store = folder.path().join("identities.json");
    let bed = bed(&format!("file:{}", store.display()))?;
    let scene = Scene::new(&bed)?;
    for seconds in JUMPS.into_iter().flat_map(|seconds| [seconds, 0]) {
        for node in bed.nodes() {
            node.shift_clock(seconds)?;
            // For a moment, the other node's clock appears wrong, as if its agent had not checked it yet.
            scene.verdicts()?;
        }
        scene.wait_identities()?;
        scene.verdicts()?;
        // This identity is written while the clock is shifted.
        let late = Member::on(bed.node(1), "late", &format!("--label jump=by{seconds}"))?;
        let deleted = format!("endpoint delete --netns {}", late.netns.path().display());
        bed.node(1).cli(&deleted)?.success()?;
        scene.verdicts()?;
    }
    bed.wait_all_reachable(PATIENCE)
}
