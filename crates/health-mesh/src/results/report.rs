//! Builds reports in the API's types.

use std::net::IpAddr;
use std::time::Duration;

use health_common::probe::Path;
use health_model::api::{
    self, AddressGroupStatus, ConnectivityStatus, HealthStatus, HistoryWindow, LargerPackets,
    NodeEntry, NodeList, NodeStatus, PathKind, PathMtuEntry, PathMtuStatus, PathStatus,
    RegistryState, RejectedEntry, SelfStatus, TargetHistory,
};
use health_model::duration::duration_text;
use health_registry::nodes::SourceState;

use super::{AddressTargets, NodeTargets, Results, TargetRecord};
use crate::diagnosis::Diagnosis;
use crate::diagnosis::isolation::Isolation;
use crate::history::{WINDOWS, Window};
use crate::path_mtu::PathMtu;
use crate::target::{Protocol, TargetId};

/// Number of results that a history lists individually.
pub(super) const LISTED_RESULTS: usize = 20;

impl Results {
    /// State of the node registries.
    pub(crate) fn registries(&self) -> Vec<RegistryState> {
        self.set.sources.iter().map(registry_state).collect()
    }

    /// The full report.
    pub(crate) fn report(&self, now: Duration) -> HealthStatus {
        let (nodes, _) = self.some_nodes(None, self.nodes.len(), now);
        self.report_of(nodes, now)
    }

    /// Returns at most `most` nodes, starting after the node with this cluster and name or at the first node. Also
    /// returns the cluster and name of the last of them, unless no more nodes follow.
    pub(crate) fn some_nodes(
        &self,
        after: Option<&(String, String)>,
        most: usize,
        now: Duration,
    ) -> (Vec<NodeStatus>, Option<(String, String)>) {
        let all = &self.set.nodes;
        // The set may have changed since `after` was returned.
        let begin = after.map_or(0, |(cluster, name)| {
            all.partition_point(|node| (&node.cluster, &node.name) <= (cluster, name))
        });
        let end = (begin + most).min(self.nodes.len());
        let isolation = self.isolation(now);
        let some = (begin..end)
            .filter_map(|index| {
                self.node_status(index, &self.nodes[index], isolation.as_deref(), now)
            })
            .collect();
        let last = (end < self.nodes.len()).then(|| {
            let node = &all[end - 1];
            (node.cluster.clone(), node.name.clone())
        });
        (some, last)
    }

    /// A report on `nodes`.
    pub(crate) fn report_of<N>(&self, nodes: N, now: Duration) -> HealthStatus<N> {
        let isolation = self.isolation(now);
        let configured = self.intervals.iter().min();
        let stretched = configured.filter(|configured| self.effective > Some(*configured));
        HealthStatus {
            timestamp: self.newest,
            probe_interval: self.effective.map_or_else(String::new, duration_text),
            configured_interval: stretched.map(duration_text),
            local: SelfStatus {
                name: self.local.clone(),
                diagnosis: isolation.map(|isolation| shown(isolation.diagnosis.clone())),
                public_mesh_key: self.public_mesh_key,
                hosts_only_reason: self.hosts_only.clone(),
                full_maps: self.full_maps.borrow().clone(),
                policy_lag: self.policy_lag.borrow().clone(),
                problems: self.problems.borrow().clone(),
            },
            nodes,
        }
    }

    /// What is known about the node with this index in the current set.
    pub(crate) fn node(&self, index: usize, now: Duration) -> Option<NodeStatus> {
        let isolation = self.isolation(now);
        self.node_status(index, self.nodes.get(index)?, isolation.as_deref(), now)
    }

    fn node_status(
        &self,
        index: usize,
        node: &NodeTargets,
        isolation: Option<&Isolation>,
        now: Duration,
    ) -> Option<NodeStatus> {
        Some(NodeStatus {
            name: node.paths.name.clone(),
            host: self.group(&node.host, Path::Host)?,
            health_endpoint: self.group(&node.endpoint, Path::Endpoint),
            hosts_only: node.paths.hosts_only,
            diagnosis: self.diagnosis(index, node, isolation, now),
        })
    }

    /// Returns `None` without an address.
    fn group(&self, addresses: &[AddressTargets], path: Path) -> Option<AddressGroupStatus> {
        let (primary, secondary) = addresses.split_first()?;
        Some(AddressGroupStatus {
            primary_address: self.path(primary, path),
            secondary_addresses: secondary.iter().map(|ip| self.path(ip, path)).collect(),
        })
    }

    fn path(&self, targets: &AddressTargets, path: Path) -> PathStatus {
        let status = |id: Option<TargetId>| self.known.get(id?)?.status();
        let is_off = |protocol| self.intervals.get(path, protocol).is_none();
        let protocols = [
            (Protocol::Icmp, api::Protocol::Icmp),
            (Protocol::Http, api::Protocol::Http),
        ];
        PathStatus {
            ip: targets.address,
            icmp: status(targets.icmp),
            http: status(targets.http),
            off: protocols
                .into_iter()
                .filter(|(protocol, _)| is_off(*protocol))
                .map(|(_, shown)| shown)
                .collect(),
            path_mtu: targets
                .icmp
                .and_then(|id| self.path_mtu(id))
                .filter(|seen| seen.is_reduced())
                .map(|seen| Box::new(path_mtu_status(seen))),
        }
    }

    /// The MTU of the paths to the node with this full name or to all nodes, excluding this node's own.
    pub(crate) fn path_mtus(&self, node: Option<&str>) -> Vec<PathMtuEntry> {
        let wanted = |known: &&NodeTargets| {
            !known.paths.local && node.is_none_or(|name| known.paths.name == name)
        };
        let mut entries = Vec::new();
        for node in self.nodes.iter().filter(wanted) {
            entries.extend(node.host.iter().filter_map(|address| {
                let id = address.icmp?;
                Some(PathMtuEntry {
                    node: node.paths.name.clone(),
                    ip: address.address,
                    probing: self.awaited_paths.contains(&id),
                    path_mtu: self.path_mtu(id).map(path_mtu_status),
                })
            }));
        }
        entries
    }

    /// Probe results of the last hour, for the node with this full name or for all nodes.
    pub(crate) fn history(&self, node: Option<&str>, now: Duration) -> Vec<TargetHistory> {
        let mut histories = Vec::new();
        let wanted = |known: &&NodeTargets| node.is_none_or(|name| known.paths.name == name);
        for node in self.nodes.iter().filter(wanted) {
            for (addresses, path) in [
                (&node.host, PathKind::Host),
                (&node.endpoint, PathKind::Endpoint),
            ] {
                for targets in addresses {
                    for (protocol, id) in targets.protocols() {
                        let known = id.and_then(|id| self.known.get(id));
                        histories.extend(known.map(|known| TargetHistory {
                            node: node.paths.name.clone(),
                            ip: targets.address,
                            path,
                            protocol: match protocol {
                                Protocol::Icmp => api::Protocol::Icmp,
                                Protocol::Http => api::Protocol::Http,
                            },
                            windows: known.windows(now),
                            last_results_ns: known.last_results(),
                        }));
                    }
                }
            }
        }
        histories
    }

    /// The registry as it is probed.
    pub(crate) fn node_list(&self) -> NodeList {
        let nodes = self.set.nodes.iter().zip(&self.nodes);
        NodeList {
            registries: self.registries(),
            nodes: nodes
                .map(|(node, targets)| NodeEntry {
                    name: targets.paths.name.clone(),
                    local: targets.paths.local,
                    addresses: targets.paths.host.clone(),
                    pod_cidrs: node.pod_cidrs.clone(),
                    health_addresses: targets.paths.endpoint.clone(),
                    not_probed: targets.not_probed(),
                })
                .collect(),
        }
    }
}

impl NodeTargets {
    /// Addresses without a target.
    fn not_probed(&self) -> Vec<IpAddr> {
        let is_probed = |targets: &[AddressTargets], address: IpAddr| {
            targets.iter().any(|one| {
                one.address == address && one.protocols().iter().any(|(_, id)| id.is_some())
            })
        };
        let of_host = self.paths.host.iter().copied();
        let of_host = of_host.filter(|address| !is_probed(&self.host, *address));
        let of_endpoint = self.paths.endpoint.iter().copied();
        let of_endpoint = of_endpoint.filter(|address| !is_probed(&self.endpoint, *address));
        of_host.chain(of_endpoint).collect()
    }
}

impl TargetRecord {
    fn status(&self) -> Option<ConnectivityStatus> {
        let result = self.result.as_ref()?;
        let status = ConnectivityStatus {
            latency: 0,
            status: String::new(),
            last_probed: result.probed,
            rtt_source: None,
            connect_latency: None,
            total_latency: None,
            consecutive_failures: 0,
            last_change: Some(result.changed),
            degraded: None,
        };
        Some(match &result.outcome {
            Ok(answer) => ConnectivityStatus {
                latency: nanos(answer.rtt),
                rtt_source: Some(answer.source),
                connect_latency: answer.http.map(|times| signed(times.connect_ns)),
                total_latency: answer.http.map(|times| signed(times.total_ns)),
                degraded: self.degraded.map(|degraded| degraded.to_string()),
                ..status
            },
            Err(unanswered) => ConnectivityStatus {
                status: unanswered.failure.to_string(),
                consecutive_failures: unanswered.probes,
                ..status
            },
        })
    }

    fn windows(&self, now: Duration) -> Vec<HistoryWindow> {
        let window = |length| Some((length, self.history.window(now, length)?));
        WINDOWS
            .into_iter()
            .filter_map(window)
            .map(|(length, window)| shown_window(length, &window))
            .collect()
    }

    fn last_results(&self) -> Vec<Option<u64>> {
        let results = self.history.recent(LISTED_RESULTS);
        results
            .map(|result| result.rtt.map(unsigned_nanos))
            .collect()
    }
}

fn path_mtu_status(seen: &PathMtu) -> PathMtuStatus {
    PathMtuStatus {
        mtu: seen.mtu,
        local_mtu: seen.way.mtu,
        device: seen.way.device.clone(),
        larger: match seen.notice {
            _ if !seen.is_reduced() => LargerPackets::None,
            Some(_) => LargerPackets::Rejected,
            None => LargerPackets::Vanish,
        },
        rejected_by: seen.notice.map(|notice| notice.from),
        last_probed: seen.probed,
    }
}

fn registry_state(source: &SourceState) -> RegistryState {
    let rejected = source.rejected.iter().map(|entry| RejectedEntry {
        key: entry.key.clone(),
        reason: entry.reason.clone(),
    });
    RegistryState {
        registry: source.registry.clone(),
        cluster: source.cluster.clone(),
        last_read: source.heard.time(),
        stale: source.stale.as_ref().map(|stale| stale.reason.clone()),
        stale_since: source.stale.as_ref().map(|stale| stale.since),
        rejected: rejected.collect(),
    }
}

pub(super) fn shown(diagnosis: Diagnosis) -> api::Diagnosis {
    api::Diagnosis {
        cause: diagnosis.cause.to_string(),
        message: diagnosis.message,
        evidence: diagnosis.evidence,
    }
}

fn shown_window(length: Duration, window: &Window) -> HistoryWindow {
    HistoryWindow {
        length_ns: unsigned_nanos(length),
        covered_ns: unsigned_nanos(window.covered),
        probes: window.probes,
        lost: window.lost,
        p50_ns: window.p50.map(unsigned_nanos),
        p90_ns: window.p90.map(unsigned_nanos),
        p99_ns: window.p99.map(unsigned_nanos),
        max_ns: window.max.map(unsigned_nanos),
        jitter_ns: window.jitter.map(unsigned_nanos),
    }
}

fn nanos(duration: Duration) -> i64 {
    signed(unsigned_nanos(duration))
}

fn signed(nanos: u64) -> i64 {
    nanos.try_into().unwrap_or(i64::MAX)
}

fn unsigned_nanos(duration: Duration) -> u64 {
    duration.as_nanos().try_into().unwrap_or(u64::MAX)
}
