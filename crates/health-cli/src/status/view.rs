//! Selects and orders the nodes of a report, sums up their verdicts, and finds the changes since the previous report.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use clap::Args;
use health_model::api::{
    AddressGroupStatus, HealthStatus, NodeStatus, PathKind, PathStatus, Protocol, Reachability,
};

/// Flags that select nodes.
#[derive(Args, Clone, Debug, Default)]
pub(super) struct Filter {
    /// Show only nodes that are unreachable, degraded or unknown
    #[arg(long)]
    pub(super) failing: bool,
    /// Show only this node, `cluster/name` or a name in any cluster (repeatable)
    #[arg(long = "node", value_name = "NAME")]
    pub(super) nodes: Vec<String>,
}

/// The report lacks a requested node.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("no node {0:?} is known; `health-agent node list` shows all")]
pub(crate) struct UnknownNode(pub(crate) String);

/// A report and the nodes to show.
#[derive(Clone, Debug)]
pub(super) struct View<'a> {
    /// The whole report.
    pub(super) status: &'a HealthStatus,
    /// The nodes to show: the local node first, the others by name.
    pub(super) nodes: Vec<&'a NodeStatus>,
}

impl Filter {
    /// The nodes of `status` that pass the filter.
    pub(super) fn apply<'a>(&self, status: &'a HealthStatus) -> Result<View<'a>, UnknownNode> {
        let missing = self
            .nodes
            .iter()
            .find(|wanted| !status.nodes.iter().any(|node| is_named(&node.name, wanted)));
        if let Some(name) = missing {
            return Err(UnknownNode(name.clone()));
        }
        let mut nodes: Vec<&NodeStatus> = status
            .nodes
            .iter()
            .filter(|node| self.lets_through(node))
            .collect();
        nodes.sort_by_key(|node| (node.name != status.local.name, &node.name));
        Ok(View { status, nodes })
    }

    /// Whether `node` passes the filter.
    pub(super) fn lets_through(&self, node: &NodeStatus) -> bool {
        let is_failing =
            || node.reachability() != Reachability::Reachable || node.diagnosis.is_some();
        let is_wanted = |wanted: &String| is_named(&node.name, wanted);
        (self.nodes.is_empty() || self.nodes.iter().any(is_wanted))
            && (!self.failing || is_failing())
    }
}

impl View<'_> {
    /// The report with only the shown nodes.
    pub(super) fn report(&self) -> Cow<'_, HealthStatus> {
        if self.nodes.len() == self.status.nodes.len() {
            return Cow::Borrowed(self.status);
        }
        Cow::Owned(HealthStatus {
            nodes: self.nodes.iter().copied().cloned().collect(),
            timestamp: self.status.timestamp,
            probe_interval: self.status.probe_interval.clone(),
            configured_interval: self.status.configured_interval.clone(),
            local: self.status.local.clone(),
        })
    }

    /// Whether there are nodes, but none to show.
    pub(super) fn has_none_of_many(&self) -> bool {
        self.nodes.is_empty() && !self.status.nodes.is_empty()
    }

    /// Whether any of the shown nodes is unreachable.
    pub(super) fn has_unreachable(&self) -> bool {
        self.nodes
            .iter()
            .any(|node| node.reachability() == Reachability::Unreachable)
    }
}

/// Whether `wanted` names the node `full` (`cluster/name`), by its full name or by its name in any cluster.
pub(crate) fn is_named(full: &str, wanted: &str) -> bool {
    full == wanted
        || full
            .rsplit_once('/')
            .is_some_and(|(_, name)| name == wanted)
}

/// Counts by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    reachable: usize,
    degraded: usize,
    unknown: usize,
    total: usize,
}

impl Tally {
    /// Counts all nodes of a report.
    pub(super) fn of_nodes(status: &HealthStatus) -> Self {
        status.nodes.iter().map(NodeStatus::reachability).collect()
    }

    /// Counts all addresses of a group.
    pub(super) fn of_addresses(group: &AddressGroupStatus) -> Self {
        group.paths().map(PathStatus::reachability).collect()
    }

    /// `2/3 reachable`, plus the numbers of degraded and unknown ones.
    pub(super) fn headline(self) -> String {
        let notes: String = self
            .notes()
            .iter()
            .map(|note| format!(", {note}"))
            .collect();
        format!("{}/{} reachable{notes}", self.reachable, self.total)
    }

    fn notes(self) -> Vec<String> {
        [(self.degraded, "degraded"), (self.unknown, "unknown")]
            .into_iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, what)| format!("{count} {what}"))
            .collect()
    }
}

impl FromIterator<Reachability> for Tally {
    fn from_iter<I: IntoIterator<Item = Reachability>>(all: I) -> Self {
        let mut tally = Self::default();
        for one in all {
            tally.total += 1;
            match one {
                Reachability::Reachable => tally.reachable += 1,
                Reachability::Degraded => {
                    tally.reachable += 1;
                    tally.degraded += 1;
                }
                Reachability::Unknown => tally.unknown += 1,
                Reachability::Unreachable => {}
            }
        }
        tally
    }
}

/// `reachable/total (k unknown)`, for a cell.
impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.reachable, self.total)?;
        match self.notes().join(", ") {
            notes if notes.is_empty() => Ok(()),
            notes => write!(f, " ({notes})"),
        }
    }
}

/// A probed address of a node, and how it is probed.
pub(super) type Target = (IpAddr, PathKind, Protocol);

/// The differences between two reports, apart from figures that always differ.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Changes<'a> {
    /// Nodes with a changed verdict or diagnosis, and their changed targets.
    nodes: BTreeMap<&'a str, Vec<Target>>,
    /// Nodes that no longer exist.
    pub(super) gone: Vec<&'a str>,
}

impl<'a> Changes<'a> {
    /// The changes from `before` to `now`.
    pub(super) fn between(before: &'a HealthStatus, now: &'a HealthStatus) -> Self {
        let mut old: BTreeMap<&str, &NodeStatus> = by_name(before);
        let mut changes = Self::default();
        for node in &now.nodes {
            let Some(old) = old.remove(node.name.as_str()) else {
                changes.nodes.insert(&node.name, Vec::new());
                continue;
            };
            let known: Vec<_> = verdicts(old).collect();
            let targets: Vec<Target> = verdicts(node)
                .filter(|verdict| !known.contains(verdict))
                .map(|(target, _)| target)
                .collect();
            if !targets.is_empty()
                || old.reachability() != node.reachability()
                || cause(old) != cause(node)
            {
                changes.nodes.insert(&node.name, targets);
            }
        }
        changes.gone = old.into_keys().collect();
        changes
    }

    /// Whether anything about the node changed.
    pub(super) fn has_node(&self, node: &str) -> bool {
        self.nodes.contains_key(node)
    }

    /// Whether the verdict on a target of the node changed.
    pub(super) fn has_target(&self, node: &str, target: Target) -> bool {
        self.nodes
            .get(node)
            .is_some_and(|targets| targets.contains(&target))
    }
}

fn by_name(status: &HealthStatus) -> BTreeMap<&str, &NodeStatus> {
    let nodes = status.nodes.iter();
    nodes.map(|node| (node.name.as_str(), node)).collect()
}

fn cause(node: &NodeStatus) -> Option<&str> {
    node.diagnosis
        .as_ref()
        .map(|diagnosis| diagnosis.cause.as_str())
}

/// All targets with the verdicts on their results.
fn verdicts(node: &NodeStatus) -> impl Iterator<Item = (Target, Option<(Reachability, &str)>)> {
    let endpoint = node
        .health_endpoint
        .iter()
        .flat_map(AddressGroupStatus::paths);
    let host = node.host.paths().map(|path| (PathKind::Host, path));
    host.chain(endpoint.map(|path| (PathKind::Endpoint, path)))
        .flat_map(|(kind, path)| {
            [(Protocol::Icmp, &path.icmp), (Protocol::Http, &path.http)].map(
                |(protocol, result)| {
                    let verdict = result
                        .as_ref()
                        .map(|r| (r.reachability(), r.status.as_str()));
                    ((path.ip, kind, protocol), verdict)
                },
            )
        })
}

#[cfg(test)]
mod tests {
    use health_model::api::Diagnosis;

    use super::*;
    use crate::status::fixture::{degraded, failed, ok, status};

    fn shown(filter: &Filter) -> Vec<String> {
        let status = status();
        let view = filter.apply(&status).expect("the nodes are known");
        view.nodes.iter().map(|node| node.name.clone()).collect()
    }

    fn filter(failing: bool, nodes: &[&str]) -> Filter {
        Filter {
            failing,
            nodes: nodes.iter().map(|&name| name.to_owned()).collect(),
        }
    }

    #[test]
    fn the_local_node_comes_first_and_the_others_by_name() {
        assert_eq!(
            shown(&filter(false, &[])),
            ["default/hnode2", "default/hnode1", "default/hnode3"]
        );
    }

    #[test]
    fn failing_leaves_out_nodes_that_nothing_is_wrong_with() {
        assert_eq!(
            shown(&filter(true, &[])),
            ["default/hnode1", "default/hnode3"]
        );
        let mut status = status();
        status.nodes[1].host.primary_address.icmp = degraded("3 of 20 probes lost");
        let view = filter(true, &[]).apply(&status).unwrap();
        assert_eq!(view.nodes[0].name, "default/hnode2");
        assert_eq!(view.report().nodes.len(), 3);
    }

    #[test]
    fn nodes_are_chosen_by_full_name_or_by_name_in_any_cluster() {
        assert_eq!(shown(&filter(false, &["hnode3"])), ["default/hnode3"]);
        assert_eq!(
            shown(&filter(false, &["default/hnode1", "hnode2"])),
            ["default/hnode2", "default/hnode1"]
        );
        assert!(shown(&filter(true, &["hnode2"])).is_empty());
        let unknown = filter(false, &["hnode2", "node3"]).apply(&status()).err();
        assert_eq!(unknown, Some(UnknownNode("node3".into())));
    }

    #[test]
    fn degraded_counts_as_reachable_and_is_said() {
        use Reachability::{Degraded, Reachable, Unknown, Unreachable};
        let tally = Tally::from_iter([Reachable, Degraded, Unreachable, Unknown, Unknown]);
        assert_eq!(tally.headline(), "2/5 reachable, 1 degraded, 2 unknown");
        assert_eq!(tally.to_string(), "2/5 (1 degraded, 2 unknown)");
        let tally = Tally::from_iter([Reachable, Unreachable]);
        assert_eq!(tally.headline(), "1/2 reachable");
        assert_eq!(tally.to_string(), "1/2");
    }

    #[test]
    fn verdicts_causes_and_comings_and_goings_are_changes_and_times_are_none() {
        let before = status();
        let mut now = status();
        now.nodes[1].host.primary_address.http = ok(77);
        assert_eq!(Changes::between(&before, &now), Changes::default());

        now.nodes[1].host.primary_address.http = failed("Connection refused");
        now.nodes[2].diagnosis = Some(Diagnosis {
            cause: "agent-down".into(),
            message: String::new(),
            evidence: vec![],
        });
        now.nodes[0].name = "default/hnode4".into();
        let changes = Changes::between(&before, &now);
        assert_eq!(changes.gone, ["default/hnode1"]);
        for node in ["hnode2", "hnode3", "hnode4"] {
            assert!(changes.has_node(&format!("default/{node}")), "{node}");
        }
        let target = |protocol| ("172.30.0.2".parse().unwrap(), PathKind::Host, protocol);
        assert!(changes.has_target("default/hnode2", target(Protocol::Http)));
        assert!(!changes.has_target("default/hnode2", target(Protocol::Icmp)));
    }
}
