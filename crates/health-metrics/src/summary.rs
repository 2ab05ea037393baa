//! Condenses a report to the numbers for a scrape and the peers that have their own series.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::time::Duration;

use health_common::addr::Addr;
use health_common::probe::Path;
use health_common::rtt::{PROTOCOL_HTTP, PROTOCOL_ICMP, RttKey, RttRow};
use health_model::api::{
    AddressGroupStatus, ConnectivityStatus, HealthStatus, NodeStatus, Reachability,
};
use health_model::duration::parse_duration;

use super::histogram::Histogram;
use super::recent::Quantiles;

/// Number of [`Reachability`]'s values.
const STATUSES: usize = 4;

/// Number of addresses in each state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Statuses([usize; STATUSES]);

impl Statuses {
    /// Name and count of each status.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&'static str, usize)> {
        ["reachable", "degraded", "unreachable", "unknown"]
            .into_iter()
            .zip(self.0)
    }

    fn count(&mut self, reachability: Reachability) {
        self.0[match reachability {
            Reachability::Reachable => 0,
            Reachability::Degraded => 1,
            Reachability::Unreachable => 2,
            Reachability::Unknown => 3,
        }] += 1;
    }
}

/// A report's results for nodes' own addresses, or for those of health endpoints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PathSummary {
    /// Addresses.
    pub(super) addresses: Statuses,
    /// Nodes with at least one address that does not answer.
    pub(super) unreachable: usize,
    /// Nodes whose known addresses all answer, with at least one degraded.
    pub(super) degraded: usize,
}

impl PathSummary {
    fn count(&mut self, group: &AddressGroupStatus) {
        group
            .paths()
            .for_each(|path| self.addresses.count(path.reachability()));
        match group.reachability() {
            Reachability::Unreachable => self.unreachable += 1,
            Reachability::Degraded => self.degraded += 1,
            Reachability::Reachable | Reachability::Unknown => {}
        }
    }
}

/// A node with its own series.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Peer {
    /// Its cluster.
    pub(super) cluster: String,
    /// Its name there.
    pub(super) name: String,
    /// Its location, in Cilium's terms.
    pub(super) kind: &'static str,
    /// The cause of its problem, in one word.
    pub(super) cause: Option<String>,
    /// Its own addresses and those of its health endpoint: the path's name and the known state.
    pub(super) groups: Vec<(&'static str, Reachability)>,
    /// Its probed addresses.
    pub(super) addresses: Vec<Address>,
}

/// A probed address of a [`Peer`].
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Address {
    /// The address.
    pub(super) ip: IpAddr,
    /// `node` or `endpoint`.
    pub(super) path: &'static str,
    /// `primary` or `secondary`.
    pub(super) address_type: &'static str,
    /// The results of each protocol.
    pub(super) protocols: [Target; 2],
    /// The largest packet that gets through and the larger maximum that this host sends, in bytes.
    pub(super) path_mtu: Option<[u32; 2]>,
}

/// One protocol on one address.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Target {
    /// `icmp` or `http`.
    pub(super) protocol: &'static str,
    /// The known state; `None` without a result.
    pub(super) reachability: Option<Reachability>,
    /// The round trip of the last probe in nanoseconds, if the probe was answered.
    pub(super) latency_ns: Option<i64>,
    /// Answered and lost probes, as counted in the row.
    pub(super) counts: Option<(u64, u64)>,
    /// The round trips in the row.
    pub(super) quantiles: Option<Quantiles>,
}

impl Target {
    fn new(protocol: &'static str, result: Option<&ConnectivityStatus>) -> Self {
        Self {
            protocol,
            reachability: result.map(ConnectivityStatus::reachability),
            latency_ns: result
                .filter(|result| result.is_ok())
                .map(|result| result.latency),
            counts: None,
            quantiles: None,
        }
    }
}

/// Known facts about the address of a row of round-trip times.
#[derive(Clone, Copy, Debug)]
struct Place {
    is_secondary: bool,
    /// Indices of the peer and of its address, if the peer has its own series.
    shown: Option<(u32, u32)>,
}

/// A report condensed to numbers.
#[derive(Debug)]
pub(super) struct Summary {
    /// The reporting node's cluster.
    pub(super) cluster: String,
    /// Its name there.
    pub(super) name: String,
    /// The cause of its problem, in one word.
    pub(super) cause: Option<String>,
    /// Time between two probes of a target, if known.
    pub(super) interval: Option<Duration>,
    /// Nodes' own addresses.
    pub(super) hosts: PathSummary,
    /// Health endpoints.
    pub(super) endpoints: PathSummary,
    /// Number of nodes by cluster.
    pub(super) nodes: BTreeMap<String, usize>,
    /// Number of nodes by the cause of their problem.
    pub(super) causes: BTreeMap<String, usize>,
    /// Failing and degraded nodes, or all.
    pub(super) peers: Vec<Peer>,
    /// Whether all nodes have their own series.
    per_target: bool,
    places: HashMap<(Addr, u8), Place>,
}

impl Summary {
    /// Creates the summary of a report whose nodes are added later. With `per_target`, each node gets its own series.
    pub(super) fn new<N>(report: &HealthStatus<N>, per_target: bool) -> Self {
        let (cluster, name) = split_name(&report.local.name);
        Self {
            cluster: cluster.to_owned(),
            name: name.to_owned(),
            cause: cause(report.local.diagnosis.as_ref()),
            interval: parse_duration(&report.probe_interval).ok(),
            hosts: PathSummary::default(),
            endpoints: PathSummary::default(),
            nodes: BTreeMap::new(),
            causes: BTreeMap::new(),
            peers: Vec::new(),
            per_target,
            places: HashMap::new(),
        }
    }

    /// Adds a node of the report.
    pub(super) fn add(&mut self, node: &NodeStatus) {
        let (cluster, name) = split_name(&node.name);
        match self.nodes.get_mut(cluster) {
            Some(count) => *count += 1,
            None => drop(self.nodes.insert(cluster.to_owned(), 1)),
        }
        let cause = cause(node.diagnosis.as_ref());
        if let Some(cause) = &cause {
            *self.causes.entry(cause.clone()).or_default() += 1;
        }
        self.hosts.count(&node.host);
        if let Some(endpoint) = &node.health_endpoint {
            self.endpoints.count(endpoint);
        }
        let groups = || {
            let endpoint = node.health_endpoint.iter();
            std::iter::once((Path::Host, &node.host))
                .chain(endpoint.map(|group| (Path::Endpoint, group)))
        };
        // Do not use the node's overall state, which is unknown while the state of its health endpoint is unknown.
        let ails = |(_, group): (Path, &AddressGroupStatus)| {
            let reachability = group.reachability();
            matches!(
                reachability,
                Reachability::Unreachable | Reachability::Degraded
            )
        };
        let is_shown = self.per_target || cause.is_some() || groups().any(ails);
        let mut peer = is_shown.then(|| Peer {
            cluster: cluster.to_owned(),
            name: name.to_owned(),
            kind: match () {
                () if cluster != self.cluster => "remote_inter_cluster",
                () if name != self.name => "remote_intra_cluster",
                () => "local_node",
            },
            cause,
            groups: groups()
                .map(|(path, group)| (path_name(path), group.reachability()))
                .collect(),
            addresses: Vec::new(),
        });
        for (path, group) in groups() {
            for (index, shown) in group.paths().enumerate() {
                let is_secondary = index > 0;
                let mut place = Place {
                    is_secondary,
                    shown: None,
                };
                if let Some(peer) = &mut peer {
                    let indices = (self.peers.len(), peer.addresses.len());
                    place.shown = indices.0.try_into().ok().zip(indices.1.try_into().ok());
                    peer.addresses.push(Address {
                        ip: shown.ip,
                        path: path_name(path),
                        address_type: address_type(is_secondary),
                        protocols: [
                            Target::new("icmp", shown.icmp.as_ref()),
                            Target::new("http", shown.http.as_ref()),
                        ],
                        path_mtu: shown
                            .path_mtu
                            .as_ref()
                            .map(|seen| [seen.mtu, seen.local_mtu]),
                    });
                }
                self.places.insert((shown.ip.into(), path as u8), place);
            }
        }
        self.peers.extend(peer);
    }

    /// Whether a row's address is `primary` or `secondary`; `None` if the report does not contain it.
    pub(super) fn address_type(&self, key: &RttKey) -> Option<&'static str> {
        let place = self.places.get(&(key.peer, key.path))?;
        Some(address_type(place.is_secondary))
    }

    /// Keeps the counts of a row if its target has its own series.
    pub(super) fn note(&mut self, key: &RttKey, row: &RttRow) {
        let Some((peer, address)) = self
            .places
            .get(&(key.peer, key.path))
            .and_then(|place| place.shown)
        else {
            return;
        };
        let protocol = match key.protocol {
            PROTOCOL_ICMP => 0,
            PROTOCOL_HTTP => 1,
            _ => return,
        };
        if let Some(address) = self
            .peers
            .get_mut(peer as usize)
            .and_then(|peer| peer.addresses.get_mut(address as usize))
        {
            let target = &mut address.protocols[protocol];
            target.counts = Some((row.samples, row.lost));
            let histogram = Histogram::from(&row.histogram);
            target.quantiles = Some(Quantiles::of(&histogram, row.sum_ns, row.samples));
        }
    }
}

fn cause(diagnosis: Option<&health_model::api::Diagnosis>) -> Option<String> {
    diagnosis.map(|diagnosis| diagnosis.cause.clone())
}

pub(super) const fn path_name(path: Path) -> &'static str {
    match path {
        Path::Host => "node",
        Path::Endpoint => "endpoint",
    }
}

const fn address_type(is_secondary: bool) -> &'static str {
    if is_secondary { "secondary" } else { "primary" }
}

/// Splits `cluster/node`.
fn split_name(name: &str) -> (&str, &str) {
    name.rsplit_once('/').unwrap_or(("default", name))
}
