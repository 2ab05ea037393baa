//! What is known of each target, and the reports made of it.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use health_common::probe::Path;
use jiff::Timestamp;
use slotmap::SecondaryMap;

use super::diagnosis::isolation::{Isolation, Survey};
use super::diagnosis::{Context, Degraded, Diagnosis, PeerFacts, TargetFacts, Thresholds, Verdict};
use super::failure::Failure;
use super::handle::MeshOptions;
use super::history::{History, Trend, WINDOWS, Window, most_results};
use super::target::{NodePaths, Protocol, TargetId, TargetKey, Targets};
use crate::api::types::{
    self, AddressGroupStatus, ConnectivityStatus, HealthStatus, HistoryWindow, NodeEntry, NodeList,
    NodeStatus, PathKind, PathStatus, RegistryState, RejectedEntry, RttSource, SelfStatus,
    TargetHistory,
};
use crate::config::{ProbeIntervals, duration_text};
use crate::net::carrier;
use crate::nodes::{Node, NodeSet, SourceState};

/// Results that a history lists one by one.
const LISTED_RESULTS: usize = 20;
/// A round trip longer than the smoothed one by this factor makes it worth while to look for a shift.
const UNUSUAL: (u32, u32) = (3, 2);
/// A new round trip counts for one in so many in the smoothed one: for less than the results that make
/// a shift, so that all of those are unusual.
const SMOOTHING: u32 = 64;

/// How old a look at all peers may be: reports of single nodes come in quick succession.
const ISOLATION_AGE: Duration = Duration::from_millis(100);

/// While verdicts on a peer change, its diagnosis waits until all of them are known anew, but not longer:
/// twice what it takes to confirm a failure.
const SETTLING: Duration = Duration::from_secs(2);
/// An ICMP error is told for so long though silence follows.
const ERROR_MEMORY: Duration = Duration::from_secs(10);

/// What is known of all nodes.
#[derive(Debug)]
pub(super) struct Results {
    local: String,
    local_addresses: Vec<IpAddr>,
    uplinks: Vec<String>,
    port: u16,
    thresholds: Thresholds,
    intervals: ProbeIntervals,
    /// The shortest interval as it comes to at the probe rate.
    effective: Option<Duration>,
    set: Arc<NodeSet>,
    /// In the order of `set.nodes`.
    nodes: Vec<NodeTargets>,
    known: SecondaryMap<TargetId, Known>,
    /// Results that a history may hold.
    most_results: usize,
    newest: Option<Timestamp>,
    /// What came of the last look at all peers, and when that was.
    isolation: Mutex<Option<(Duration, Option<Arc<Isolation>>)>>,
}

/// A node and its targets.
#[derive(Debug)]
struct NodeTargets {
    paths: NodePaths,
    host: Vec<AddressTargets>,
    endpoint: Vec<AddressTargets>,
}

/// The targets of an address; `None` for a protocol that it is not probed by.
#[derive(Clone, Copy, Debug)]
struct AddressTargets {
    address: IpAddr,
    icmp: Option<TargetId>,
    http: Option<TargetId>,
}

/// What is known of a target.
#[derive(Debug)]
struct Known {
    key: TargetKey,
    result: Option<TargetResult>,
    history: History,
    smoothed: Option<Duration>,
    degraded: Option<Degraded>,
}

/// The confirmed result of a target.
#[derive(Debug)]
struct TargetResult {
    /// When its probe was sent, since the mesh's start.
    sent: Duration,
    probed: Timestamp,
    /// When it last became reachable or ceased to be, or was probed first.
    changed: Timestamp,
    /// The same, since the mesh's start.
    changed_at: Duration,
    /// When the first probe was sent that the verdict differs by from the one before.
    turned: Duration,
    /// When the probe was sent that the outcome tells of.
    told: Duration,
    outcome: Result<Answer, Box<Unanswered>>,
}

/// An answer to a probe.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    /// The round trip.
    pub(super) rtt: Duration,
    /// Where it was stamped.
    pub(super) source: RttSource,
    /// For HTTP: until the connection stood.
    pub(super) connect: Option<Duration>,
}

/// A failure that was confirmed.
#[derive(Debug)]
pub(super) struct Unanswered {
    /// Why the last probe failed, or one shortly before it that tells more.
    pub(super) failure: Failure,
    /// Probes without an answer since the last one.
    pub(super) probes: u32,
    /// When the first of them was sent, since the mesh's start.
    pub(super) since: Duration,
}

impl Results {
    /// Knows nothing.
    pub(super) fn new(options: &MeshOptions) -> Self {
        Self {
            local: options.local.clone(),
            local_addresses: options.local_addresses.clone(),
            uplinks: options.uplinks.clone(),
            port: options.port,
            thresholds: Thresholds {
                loss: options.loss_threshold,
                ..Thresholds::default()
            },
            intervals: options.intervals,
            effective: options.intervals.iter().min(),
            set: Arc::default(),
            nodes: Vec::new(),
            known: SecondaryMap::new(),
            most_results: most_results(0),
            newest: None,
            isolation: Mutex::default(),
        }
    }

    /// Goes over to another set of nodes, whose paths are given in the same order, with their targets.
    /// Results of targets that are still there stay. `effective` is what an interval comes to at the
    /// probe rate.
    pub(super) fn set_nodes(
        &mut self,
        set: Arc<NodeSet>,
        paths: Vec<NodePaths>,
        targets: &Targets,
        effective: impl Fn(Duration) -> Duration,
    ) {
        let resolve = |addresses: &[IpAddr], path| {
            let id = |address, protocol| {
                targets.id(&TargetKey {
                    address,
                    path,
                    protocol,
                })
            };
            let addresses = addresses.iter().map(|&address| AddressTargets {
                address,
                icmp: id(address, Protocol::Icmp),
                http: id(address, Protocol::Http),
            });
            addresses.collect()
        };
        self.nodes = paths
            .into_iter()
            .map(|paths| NodeTargets {
                host: resolve(&paths.host, Path::Host),
                endpoint: resolve(&paths.endpoint, Path::Endpoint),
                paths,
            })
            .collect();
        self.set = set;
        self.effective = self.intervals.iter().min().map(effective);
        self.most_results = most_results(targets.len());
        self.known.set_capacity(targets.len());
        for (id, target) in targets.iter() {
            if !self.known.contains_key(id) {
                self.known.insert(id, Known::new(target.key));
            }
        }
    }

    /// Forgets a target.
    pub(super) fn remove(&mut self, id: TargetId) {
        self.known.remove(id);
    }

    /// Keeps what became of a probe that was sent at `sent`: its round trip, or that it was lost.
    pub(super) fn note(
        &mut self,
        id: TargetId,
        sent: Duration,
        rtt: Option<Duration>,
        now: Duration,
    ) {
        let most_results = self.most_results;
        let Some(known) = self.known.get_mut(id) else {
            return;
        };
        known.history.record(sent, rtt, most_results);
        let (more, than) = UNUSUAL;
        let unusual = match (rtt, known.smoothed) {
            (None, _) => true,
            (Some(rtt), Some(smoothed)) => rtt * than > smoothed * more,
            (Some(_), None) => false,
        };
        if let Some(rtt) = rtt {
            let before = known.smoothed.unwrap_or(rtt);
            known.smoothed = Some((before * (SMOOTHING - 1) + rtt) / SMOOTHING);
        }
        // To look at the whole history at each result would cost more than the probe.
        if unusual || known.degraded.is_some() {
            let degraded = self.known.get(id).and_then(|known| {
                self.context().degraded(&TargetFacts {
                    trend: known.trend(now),
                    ..known.facts(now)
                })
            });
            if let Some(known) = self.known.get_mut(id) {
                known.degraded = degraded;
            }
        }
    }

    /// Whether the target answers; `None` without a result.
    pub(super) fn is_reachable(&self, id: TargetId) -> Option<bool> {
        let result = self.known.get(id)?.result.as_ref()?;
        Some(result.outcome.is_ok())
    }

    /// A target is reachable: a probe sent at `sent`, by the clock at `probed`, was answered.
    pub(super) fn answered(
        &mut self,
        id: TargetId,
        sent: Duration,
        probed: Timestamp,
        answer: Answer,
    ) {
        self.record(id, sent, probed, Ok(answer));
    }

    /// A target is unreachable, as a probe sent at `sent`, by the clock at `probed`, confirms.
    pub(super) fn unreachable(
        &mut self,
        id: TargetId,
        sent: Duration,
        probed: Timestamp,
        unanswered: Unanswered,
    ) {
        self.record(id, sent, probed, Err(Box::new(unanswered)));
    }

    /// The targets of the node with this index in the set in force.
    pub(super) fn targets_of(&self, index: usize) -> impl Iterator<Item = TargetId> {
        self.nodes
            .get(index)
            .into_iter()
            .flat_map(NodeTargets::targets)
    }

    /// Keeps a result, unless that of a later probe is there.
    fn record(
        &mut self,
        id: TargetId,
        sent: Duration,
        probed: Timestamp,
        mut outcome: Result<Answer, Box<Unanswered>>,
    ) {
        self.newest = self.newest.max(Some(probed));
        let Some(known) = self.known.get_mut(id) else {
            return;
        };
        let (mut changed, mut changed_at) = (Timestamp::now(), sent);
        let mut turned = outcome
            .as_ref()
            .map_or_else(|failed| failed.since, |_| sent);
        let mut told = sent;
        if let Some(result) = &mut known.result {
            if result.sent > sent {
                return;
            }
            if result.outcome.is_ok() == outcome.is_ok() {
                (changed, changed_at) = (result.changed, result.changed_at);
                turned = result.turned;
            }
            if let (Err(before), Err(failed)) = (&mut result.outcome, &mut outcome)
                && before.failure.outlives(&failed.failure)
                && sent < result.told + ERROR_MEMORY
            {
                std::mem::swap(&mut before.failure, &mut failed.failure);
                told = result.told;
            }
        }
        if outcome.is_err() {
            known.degraded = None;
        }
        known.result = Some(TargetResult {
            sent,
            probed,
            changed,
            changed_at,
            turned,
            told,
            outcome,
        });
    }

    fn context(&self) -> Context<'_> {
        Context {
            port: self.port,
            local_addresses: &self.local_addresses,
            thresholds: self.thresholds,
        }
    }

    /// How the node registries do.
    pub(super) fn registries(&self) -> Vec<RegistryState> {
        self.set.sources.iter().map(registry_state).collect()
    }

    /// All that is known.
    pub(super) fn report(&self, now: Duration) -> HealthStatus {
        let (nodes, _) = self.some_nodes(None, self.nodes.len(), now);
        HealthStatus {
            nodes,
            ..self.report_head(now)
        }
    }

    /// At most `most` nodes, those after the one with this cluster and name or the first; and the
    /// last of them, unless there are no more.
    pub(super) fn some_nodes(
        &self,
        after: Option<&(String, String)>,
        most: usize,
        now: Duration,
    ) -> (Vec<NodeStatus>, Option<(String, String)>) {
        let all = &self.set.nodes;
        // The set may be another than when `after` was told.
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

    /// A report without its nodes.
    pub(super) fn report_head(&self, now: Duration) -> HealthStatus {
        let isolation = self.isolation(now);
        let configured = self.intervals.iter().min();
        let stretched = configured.filter(|configured| self.effective > Some(*configured));
        HealthStatus {
            timestamp: self.newest,
            probe_interval: self.effective.map_or_else(String::new, duration_text),
            configured_interval: stretched.map(duration_text),
            local: SelfStatus {
                name: self.local.clone(),
                diagnosis: isolation.map(|isolation| shown(&isolation.diagnosis)),
            },
            nodes: Vec::new(),
        }
    }

    /// What is known of the node with this index in the set in force.
    pub(super) fn node(&self, index: usize, now: Duration) -> Option<NodeStatus> {
        let isolation = self.isolation(now);
        self.node_status(index, self.nodes.get(index)?, isolation.as_deref(), now)
    }

    /// Whether it is this node that is cut off.
    fn isolation(&self, now: Duration) -> Option<Arc<Isolation>> {
        let mut last = self
            .isolation
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some((at, isolation)) = &*last
            && now.saturating_sub(*at) < ISOLATION_AGE
        {
            return isolation.clone();
        }
        let context = self.context();
        let mut survey = Survey::default();
        for (index, node) in self.nodes.iter().enumerate() {
            survey.add(&context, &self.peer(index, node, &self.facts(node, now)));
        }
        // The devices are only looked at when it matters.
        let isolation = survey
            .diagnose(&context, &self.local, &[])
            .and_then(|_| {
                let without_carrier = carrier::without(&self.uplinks);
                survey.diagnose(&context, &self.local, &without_carrier)
            })
            .map(Arc::new);
        *last = Some((now, isolation.clone()));
        isolation
    }

    fn node_status(
        &self,
        index: usize,
        node: &NodeTargets,
        isolation: Option<&Isolation>,
        now: Duration,
    ) -> Option<NodeStatus> {
        let facts = self.facts(node, now);
        let peer = self.peer(index, node, &facts);
        let diagnosis = match self.is_settled(node, now) {
            true => self.context().diagnose(&peer, isolation),
            false => None,
        };
        Some(NodeStatus {
            name: node.paths.name.clone(),
            host: self.group(&node.host, Path::Host)?,
            health_endpoint: self.group(&node.endpoint, Path::Endpoint),
            diagnosis: diagnosis.map(|diagnosis| shown(&diagnosis)),
        })
    }

    /// Whether each verdict on the node's targets rests on a probe since the last one of them began to
    /// change, or had the time to: one from before says nothing of what has happened.
    fn is_settled(&self, node: &NodeTargets, now: Duration) -> bool {
        let results = || {
            let known = node.targets().filter_map(|id| self.known.get(id));
            known.filter_map(|known| known.result.as_ref())
        };
        let failing = results().any(|result| result.outcome.is_err());
        let turned = results().map(|result| result.turned).max();
        let probed = results().map(|result| result.sent).min();
        !failing || probed >= turned || turned.is_none_or(|turned| now >= turned + SETTLING)
    }

    /// What a node's targets are judged by.
    fn facts(&self, node: &NodeTargets, now: Duration) -> Vec<TargetFacts<'_>> {
        let mut facts = Vec::with_capacity(2 * (node.host.len() + node.endpoint.len()));
        for (addresses, path) in [(&node.host, Path::Host), (&node.endpoint, Path::Endpoint)] {
            for targets in addresses {
                for (protocol, id) in targets.protocols() {
                    facts.push(match id.and_then(|id| self.known.get(id)) {
                        Some(known) => known.facts(now),
                        None => TargetFacts {
                            key: TargetKey {
                                address: targets.address,
                                path,
                                protocol,
                            },
                            verdict: Verdict::Off,
                            trend: Trend::default(),
                        },
                    });
                }
            }
        }
        facts
    }

    fn peer<'a>(
        &'a self,
        index: usize,
        node: &'a NodeTargets,
        targets: &'a [TargetFacts<'a>],
    ) -> PeerFacts<'a> {
        let expects_endpoint =
            |node: &Node| !node.pod_cidrs.is_empty() || !node.health_addresses.is_empty();
        PeerFacts {
            name: &node.paths.name,
            local: node.paths.local,
            endpoint_expected: self.set.nodes.get(index).is_some_and(expects_endpoint),
            targets,
        }
    }

    /// `None` without an address.
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
            (Protocol::Icmp, types::Protocol::Icmp),
            (Protocol::Http, types::Protocol::Http),
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
        }
    }

    /// What became of the probes of the last hour, of the node with this full name or of all.
    pub(super) fn history(&self, node: Option<&str>, now: Duration) -> Vec<TargetHistory> {
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
                                Protocol::Icmp => types::Protocol::Icmp,
                                Protocol::Http => types::Protocol::Http,
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
    pub(super) fn node_list(&self) -> NodeList {
        let nodes = self.set.nodes.iter().zip(&self.nodes);
        NodeList {
            registries: self.registries(),
            nodes: nodes
                .map(|(node, NodeTargets { paths, .. })| NodeEntry {
                    name: paths.name.clone(),
                    local: paths.local,
                    addresses: paths.host.clone(),
                    pod_cidrs: node.pod_cidrs.clone(),
                    health_addresses: paths.endpoint.clone(),
                })
                .collect(),
        }
    }
}

impl NodeTargets {
    fn targets(&self) -> impl Iterator<Item = TargetId> {
        let addresses = self.host.iter().chain(&self.endpoint);
        addresses.flat_map(|a| a.protocols().into_iter().filter_map(|(_, id)| id))
    }
}

impl AddressTargets {
    fn protocols(&self) -> [(Protocol, Option<TargetId>); 2] {
        [(Protocol::Icmp, self.icmp), (Protocol::Http, self.http)]
    }
}

impl Known {
    fn new(key: TargetKey) -> Self {
        Self {
            key,
            result: None,
            history: History::default(),
            smoothed: None,
            degraded: None,
        }
    }

    /// What the target is judged by.
    fn facts(&self, now: Duration) -> TargetFacts<'_> {
        let verdict = match &self.result {
            None => Verdict::Unknown,
            Some(result) => match &result.outcome {
                Ok(_) => Verdict::Reachable,
                Err(unanswered) => Verdict::Unreachable(&unanswered.failure),
            },
        };
        // The trend of a target that is not degraded does not matter, and costs time.
        let trend = match &self.degraded {
            Some(_) => self.trend(now),
            None => Trend::default(),
        };
        TargetFacts {
            key: self.key,
            verdict,
            trend,
        }
    }

    fn trend(&self, now: Duration) -> Trend {
        let since = self.result.as_ref().map(|result| result.changed_at);
        self.history.trend(now, since.unwrap_or_default())
    }

    fn status(&self) -> Option<ConnectivityStatus> {
        let result = self.result.as_ref()?;
        let status = ConnectivityStatus {
            latency: 0,
            status: String::new(),
            last_probed: result.probed,
            rtt_source: None,
            connect_latency: None,
            consecutive_failures: 0,
            last_change: Some(result.changed),
            degraded: None,
        };
        Some(match &result.outcome {
            Ok(answer) => ConnectivityStatus {
                latency: nanos(answer.rtt),
                rtt_source: Some(answer.source),
                connect_latency: answer.connect.map(nanos),
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

fn registry_state(source: &SourceState) -> RegistryState {
    let rejected = source.rejected.iter().map(|entry| RejectedEntry {
        key: entry.key.clone(),
        reason: entry.reason.clone(),
    });
    RegistryState {
        registry: source.registry.clone(),
        cluster: source.cluster.clone(),
        stale: source.stale.as_ref().map(|stale| stale.reason.clone()),
        stale_since: source.stale.as_ref().map(|stale| stale.since),
        rejected: rejected.collect(),
    }
}

fn shown(diagnosis: &Diagnosis) -> types::Diagnosis {
    types::Diagnosis {
        cause: diagnosis.cause.to_string(),
        message: diagnosis.message.clone(),
        evidence: diagnosis.evidence.clone(),
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
    duration.as_nanos().try_into().unwrap_or(i64::MAX)
}

fn unsigned_nanos(duration: Duration) -> u64 {
    duration.as_nanos().try_into().unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use nix::errno::Errno;

    use super::super::failure::IcmpError;
    use super::super::target::Target;
    use super::*;
    use crate::api::types::Reachability;

    const SECOND: Duration = Duration::from_secs(1);

    fn options() -> MeshOptions {
        MeshOptions {
            local: "default/a".to_owned(),
            local_addresses: Vec::new(),
            uplinks: Vec::new(),
            intervals: ProbeIntervals::all(Duration::from_secs(10)),
            rate: 1000,
            timeout: SECOND,
            loss_threshold: 0.05,
            port: 4240,
            icmp_id: 1,
            magic: 1,
            state_dir: "/nonexistent".into(),
        }
    }

    /// Results of one node with three addresses, and its six targets.
    fn results() -> (Results, Vec<TargetId>) {
        let node = Node {
            name: "a".to_owned(),
            cluster: "default".to_owned(),
            addresses: vec!["fd00::1".parse().unwrap(), "10.0.0.1".parse().unwrap()],
            secondary_addresses: Vec::new(),
            pod_cidrs: Vec::new(),
            health_addresses: Vec::new(),
        };
        let paths = NodePaths::new(&node, true, &["10.1.0.7".parse().unwrap()]);
        let mut targets = Targets::default();
        let wanted = paths.targets().map(|key| Target {
            key,
            node: 0,
            remote: false,
        });
        let ids = targets.replace(wanted).fresh;
        let set = NodeSet {
            nodes: vec![node],
            sources: Vec::new(),
        };
        let mut results = Results::new(&options());
        results.set_nodes(Arc::new(set), vec![paths], &targets, |interval| interval);
        (results, ids.into_iter().map(|(id, _)| id).collect())
    }

    fn at(second: u64) -> (Duration, Timestamp) {
        let probed = Timestamp::from_second(second as i64).unwrap();
        (Duration::from_secs(second), probed)
    }

    fn answered(results: &mut Results, id: TargetId, second: u64) {
        let (sent, probed) = at(second);
        let answer = Answer {
            rtt: Duration::from_micros(1),
            source: RttSource::Socket,
            connect: None,
        };
        results.note(id, sent, Some(answer.rtt), sent);
        results.answered(id, sent, probed, answer);
    }

    fn failed(results: &mut Results, id: TargetId, second: u64) {
        let (sent, probed) = at(second);
        results.note(id, sent, None, sent);
        let unanswered = Unanswered {
            failure: Failure::TimedOut,
            probes: 5,
            since: sent,
        };
        results.unreachable(id, sent, probed, unanswered);
    }

    #[test]
    fn a_report_says_what_is_known_and_no_more() {
        let (mut results, ids) = results();
        let report = results.report(SECOND);
        assert_eq!(report.timestamp, None);
        assert_eq!(report.probe_interval, "10s");
        assert_eq!(report.configured_interval, None);
        assert_eq!(report.nodes[0].reachability(), Reachability::Unknown);
        let primary = &report.nodes[0].host.primary_address;
        assert_eq!(primary.ip, IpAddr::from([10, 0, 0, 1]));
        assert_eq!(report.nodes[0].host.secondary_addresses.len(), 1);

        assert_eq!(ids.len(), 6);
        for (second, &id) in ids.iter().enumerate() {
            answered(&mut results, id, second as u64);
        }
        let report = results.report(SECOND * 9);
        assert_eq!(report.nodes[0].reachability(), Reachability::Reachable);
        assert_eq!(report.timestamp, Timestamp::from_second(5).ok());
        assert_eq!(report.nodes[0].diagnosis, None);
        results.remove(ids[0]);
        assert_eq!(
            results.report(SECOND * 9).nodes[0].reachability(),
            Reachability::Unknown
        );
    }

    #[test]
    fn a_diagnosis_waits_until_all_targets_were_probed_since_the_failure() {
        let (mut results, ids) = results();
        let cause = |results: &Results, now: u64| {
            let diagnosis = results.report(SECOND * now as u32).nodes[0]
                .diagnosis
                .clone();
            diagnosis.map(|diagnosis| diagnosis.cause)
        };
        for &id in &ids {
            answered(&mut results, id, 1);
        }
        failed(&mut results, ids[0], 10);
        assert_eq!(cause(&results, 10), None);
        for &id in &ids[1..5] {
            answered(&mut results, id, 10);
        }
        assert_eq!(cause(&results, 11), None);
        answered(&mut results, ids[5], 10);
        assert!(cause(&results, 11).is_some());

        // What began to fail later makes all others old; but nobody waits for them for ever.
        failed(&mut results, ids[1], 12);
        assert_eq!(cause(&results, 13), None);
        assert!(cause(&results, 14).is_some());

        // An end of the failure is a change like its beginning.
        answered(&mut results, ids[1], 20);
        assert_eq!(cause(&results, 20), None);
        for &id in &ids[2..] {
            answered(&mut results, id, 20);
        }
        failed(&mut results, ids[0], 20);
        assert!(cause(&results, 20).is_some());
    }

    #[test]
    fn an_icmp_error_is_told_for_a_while_though_silence_follows() {
        let (mut results, ids) = results();
        let fail = |results: &mut Results, second: u64, failure: Failure| {
            let (sent, probed) = at(second);
            let unanswered = Unanswered {
                failure,
                probes: 5,
                since: sent,
            };
            results.unreachable(ids[0], sent, probed, unanswered);
            let result = results.known[ids[0]].result.as_ref().unwrap();
            result.outcome.as_ref().unwrap_err().failure.clone()
        };
        let prohibited = Failure::Icmp(IcmpError {
            kind: 3,
            code: 13,
            from: IpAddr::from([10, 0, 0, 9]),
        });
        let refused = Failure::Os(Errno::ECONNREFUSED);
        let silence = Failure::TimedOut;
        assert_eq!(fail(&mut results, 1, prohibited.clone()), prohibited);
        assert_eq!(fail(&mut results, 3, silence.clone()), prohibited);
        assert_eq!(fail(&mut results, 10, silence.clone()), prohibited);
        assert_eq!(fail(&mut results, 11, silence.clone()), silence);
        assert_eq!(fail(&mut results, 12, prohibited.clone()), prohibited);
        assert_eq!(fail(&mut results, 13, refused.clone()), refused);
        assert_eq!(fail(&mut results, 14, silence.clone()), silence);
    }

    #[test]
    fn the_result_of_a_later_probe_stands() {
        let (mut results, ids) = results();
        answered(&mut results, ids[0], 7);
        failed(&mut results, ids[0], 6);
        assert_eq!(results.is_reachable(ids[0]), Some(true));
        failed(&mut results, ids[0], 8);
        assert_eq!(results.is_reachable(ids[0]), Some(false));
    }

    #[test]
    fn the_last_change_is_that_of_the_verdict() {
        let (mut results, ids) = results();
        let changed = |results: &Results| {
            let result = results.known[ids[0]].result.as_ref().unwrap();
            result.changed_at.as_secs()
        };
        for (second, ok, since) in [(1, true, 1), (2, true, 1), (3, false, 3), (4, false, 3)] {
            if ok {
                answered(&mut results, ids[0], second);
            } else {
                failed(&mut results, ids[0], second);
            }
            assert_eq!(changed(&results), since);
        }
        answered(&mut results, ids[0], 5);
        assert_eq!(changed(&results), 5);
    }

    #[test]
    fn lasting_loss_degrades_a_target_that_answers() {
        let (mut results, ids) = results();
        for (second, &id) in (1..).zip(ids.iter().cycle()).take(1200) {
            answered(&mut results, id, second);
        }
        // Every third probe of one target.
        for second in 1201..1300 {
            if second % 3 == 0 {
                let (sent, _) = at(second);
                results.note(ids[0], sent, None, sent);
            } else {
                answered(&mut results, ids[0], second);
            }
        }
        let report = results.report(SECOND * 1300);
        let node = &report.nodes[0];
        assert_eq!(node.reachability(), Reachability::Degraded);
        let degraded = node.host.primary_address.icmp.as_ref().unwrap();
        let reason = degraded.degraded.as_deref().unwrap_or_default();
        assert!(reason.starts_with("lost "), "{reason}");
        assert_eq!(node.diagnosis.as_ref().unwrap().cause, "loss");
        let history = results.history(Some("default/a"), SECOND * 1300);
        assert_eq!(history.len(), 6);
        assert!(history[0].windows[0].lost >= 15, "{:?}", history[0]);
        assert_eq!(history[0].last_results_ns.len(), LISTED_RESULTS);
        assert!(results.history(Some("default/b"), SECOND).is_empty());
    }
}
