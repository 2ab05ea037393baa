//! The last result of each target, and the report made of them.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use health_common::probe::Path;
use jiff::Timestamp;

use super::target::{NodePaths, Protocol, TargetKey};
use crate::api::types::{
    AddressGroupStatus, ConnectivityStatus, HealthStatus, NodeEntry, NodeList, NodeStatus,
    PathStatus, RegistryState, RejectedEntry, SelfStatus, go_duration,
};
use crate::nodes::{NodeSet, SourceState};

/// What is known of all nodes.
#[derive(Debug)]
pub(super) struct Results {
    local: String,
    interval: Duration,
    set: Arc<NodeSet>,
    /// In the order of `set.nodes`.
    paths: Vec<NodePaths>,
    last: HashMap<TargetKey, Last>,
    newest: Option<Timestamp>,
}

#[derive(Debug)]
struct Last {
    /// When the probe was sent, since the mesh's start.
    sent: Duration,
    status: ConnectivityStatus,
}

impl Results {
    /// Knows nothing. `local` is the full name of the node that reports.
    pub(super) fn new(local: String, interval: Duration) -> Self {
        Self {
            local,
            interval,
            set: Arc::default(),
            paths: Vec::new(),
            last: HashMap::new(),
            newest: None,
        }
    }

    /// Goes over to another set of nodes, whose paths are given in the same order. Results of
    /// targets that are still there stay.
    pub(super) fn set_nodes(&mut self, set: Arc<NodeSet>, paths: Vec<NodePaths>) {
        self.set = set;
        self.paths = paths;
    }

    /// Forgets a target's result.
    pub(super) fn remove(&mut self, key: &TargetKey) {
        self.last.remove(key);
    }

    /// Keeps a result, unless that of a later probe is there. The time of the last change is that of
    /// `status` if it is one, else the one known.
    pub(super) fn record(
        &mut self,
        key: TargetKey,
        sent: Duration,
        mut status: ConnectivityStatus,
    ) {
        self.newest = self.newest.max(Some(status.last_probed));
        if let Some(last) = self.last.get(&key) {
            if last.sent > sent {
                return;
            }
            if last.status.is_ok() == status.is_ok() {
                status.last_change = last.status.last_change;
            }
        }
        self.last.insert(key, Last { sent, status });
    }

    /// Whether the target answers; `None` without a result.
    pub(super) fn is_ok(&self, key: &TargetKey) -> Option<bool> {
        self.last.get(key).map(|last| last.status.is_ok())
    }

    /// How the node registries do.
    pub(super) fn registries(&self) -> Vec<RegistryState> {
        let state = |source: &SourceState| RegistryState {
            registry: source.registry.clone(),
            cluster: source.cluster.clone(),
            stale: source.stale.as_ref().map(|stale| stale.reason.clone()),
            stale_since: source.stale.as_ref().map(|stale| stale.since),
            rejected: source
                .rejected
                .iter()
                .map(|entry| RejectedEntry {
                    key: entry.key.clone(),
                    reason: entry.reason.clone(),
                })
                .collect(),
        };
        self.set.sources.iter().map(state).collect()
    }

    /// All that is known.
    pub(super) fn report(&self) -> HealthStatus {
        let nodes = self
            .paths
            .iter()
            .filter_map(|node| {
                Some(NodeStatus {
                    name: node.name.clone(),
                    host: self.group(&node.host, Path::Host)?,
                    health_endpoint: self.group(&node.endpoint, Path::Endpoint),
                    diagnosis: None,
                })
            })
            .collect();
        HealthStatus {
            timestamp: self.newest,
            configured_interval: None,
            probe_interval: go_duration(self.interval.as_nanos().try_into().unwrap_or(i64::MAX)),
            local: SelfStatus {
                name: self.local.clone(),
                diagnosis: None,
            },
            nodes,
        }
    }

    /// `None` without an address.
    fn group(&self, addresses: &[IpAddr], path: Path) -> Option<AddressGroupStatus> {
        let (&primary, secondary) = addresses.split_first()?;
        Some(AddressGroupStatus {
            primary_address: self.path(primary, path),
            secondary_addresses: secondary.iter().map(|&ip| self.path(ip, path)).collect(),
        })
    }

    fn path(&self, address: IpAddr, path: Path) -> PathStatus {
        let last = |protocol| {
            let key = TargetKey {
                address,
                path,
                protocol,
            };
            self.last.get(&key).map(|last| last.status.clone())
        };
        PathStatus {
            ip: address,
            icmp: last(Protocol::Icmp),
            http: last(Protocol::Http),
            off: Vec::new(),
        }
    }

    /// The registry as it is probed.
    pub(super) fn node_list(&self) -> NodeList {
        let entry = |(node, paths): (&crate::nodes::Node, &NodePaths)| NodeEntry {
            name: paths.name.clone(),
            local: paths.local,
            addresses: paths.host.clone(),
            pod_cidrs: node.pod_cidrs.clone(),
            health_addresses: paths.endpoint.clone(),
        };
        NodeList {
            registries: self.registries(),
            nodes: self.set.nodes.iter().zip(&self.paths).map(entry).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::types::Reachability;
    use crate::nodes::Node;

    fn status(text: &str, at: i64) -> ConnectivityStatus {
        ConnectivityStatus {
            latency: 1,
            status: text.to_owned(),
            last_probed: Timestamp::from_second(at).unwrap(),
            rtt_source: None,
            connect_latency: None,
            consecutive_failures: 0,
            last_change: None,
            degraded: None,
        }
    }

    fn results() -> Results {
        let mut results = Results::new("default/a".to_owned(), Duration::from_secs(10));
        let node = Node {
            name: "a".to_owned(),
            cluster: "default".to_owned(),
            addresses: vec!["fd00::1".parse().unwrap(), "10.0.0.1".parse().unwrap()],
            secondary_addresses: Vec::new(),
            pod_cidrs: Vec::new(),
            health_addresses: Vec::new(),
        };
        let paths = vec![NodePaths::new(&node, true, &["10.1.0.7".parse().unwrap()])];
        let set = NodeSet {
            nodes: vec![node],
            sources: Vec::new(),
        };
        results.set_nodes(Arc::new(set), paths);
        results
    }

    #[test]
    fn a_report_says_what_is_known_and_no_more() {
        let mut results = results();
        let report = results.report();
        assert_eq!(report.timestamp, None);
        assert_eq!(report.probe_interval, "10s");
        assert_eq!(report.nodes[0].reachability(), Reachability::Unknown);
        assert_eq!(
            report.nodes[0].host.primary_address.ip,
            IpAddr::from([10, 0, 0, 1])
        );
        assert_eq!(report.nodes[0].host.secondary_addresses.len(), 1);

        let keys: Vec<_> = results.paths[0].targets().collect();
        assert_eq!(keys.len(), 6);
        for (second, &key) in keys.iter().enumerate() {
            results.record(key, Duration::from_secs(5), status("", second as i64));
        }
        let report = results.report();
        assert_eq!(report.nodes[0].reachability(), Reachability::Reachable);
        assert_eq!(report.timestamp, Timestamp::from_second(5).ok());
        results.remove(&keys[0]);
        assert_eq!(
            results.report().nodes[0].reachability(),
            Reachability::Unknown
        );
    }

    #[test]
    fn the_result_of_a_later_probe_stands() {
        let mut results = results();
        let key = results.paths[0].targets().next().unwrap();
        results.record(key, Duration::from_secs(7), status("", 7));
        results.record(
            key,
            Duration::from_secs(6),
            status("Connection timed out", 6),
        );
        assert_eq!(results.is_ok(&key), Some(true));
        results.record(
            key,
            Duration::from_secs(8),
            status("Connection timed out", 8),
        );
        assert_eq!(results.is_ok(&key), Some(false));
    }

    #[test]
    fn the_last_change_is_that_of_the_verdict() {
        let mut results = results();
        let key = results.paths[0].targets().next().unwrap();
        let mut last_change = |text: &str, second: u64| {
            let at = Timestamp::from_second(second as i64).ok();
            let status = ConnectivityStatus {
                last_change: at,
                ..status(text, second as i64)
            };
            results.record(key, Duration::from_secs(second), status);
            let known = results.last[&key].status.last_change.unwrap();
            known.as_second()
        };
        assert_eq!(last_change("", 1), 1);
        assert_eq!(last_change("", 2), 1);
        assert_eq!(last_change("Connection timed out", 3), 3);
        assert_eq!(last_change("Connection refused", 4), 3);
        assert_eq!(last_change("", 5), 5);
    }
}
