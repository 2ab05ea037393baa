//! What is known about each target, and the facts by which it is judged.

mod diagnose;
mod follow;
mod latency;
mod report;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use health_common::arrivals;
use health_common::probe::Path;
use health_model::api::{self, AgentProblem, FullMap, PolicyLag, RttSource};
use health_registry::nodes::NodeSet;
use health_settings::ProbeIntervals;
use jiff::Timestamp;
use slotmap::{SecondaryMap, SparseSecondaryMap};
use tokio::sync::watch;

use crate::diagnosis::isolation::Isolation;
use crate::diagnosis::{Degradation, ShiftWatch, TargetFacts, Thresholds, Verdict};
use crate::direction::Ways;
use crate::failure::Failure;
use crate::handle::{MeshOptions, Tuning};
use crate::history::{History, Trend, most_results};
use crate::path_mtu::PathMtu;
use crate::proof::KeyAge;
use crate::target::{NodePaths, Protocol, TargetId, TargetKey, Targets};

/// A round trip longer than the smoothed one by this factor triggers a check for a shift.
const UNUSUAL: (u32, u32) = (3, 2);
/// Weight of a new round trip in the smoothed one: one in this many. That is less than the number of results that form
/// a shift, so all of those count as unusual.
const SMOOTHING: u32 = 64;

/// Maximum age of a survey of all peers even though verdicts have changed: while a report is written, its nodes are
/// requested in quick succession.
const SURVEY_AGE: Duration = Duration::from_millis(100);

/// While verdicts on a peer change, its diagnosis waits until all of them are known again, but no longer than this:
/// twice the time it takes to confirm a failure.
const SETTLING: Duration = Duration::from_secs(2);
/// An ICMP error is reported for this long even if silence follows.
const ERROR_MEMORY: Duration = Duration::from_secs(10);

/// What is known about all nodes.
#[derive(Debug)]
pub(super) struct Results {
    local: String,
    public_mesh_key: bool,
    hosts_only: Option<String>,
    full_maps: watch::Receiver<Vec<FullMap>>,
    policy_lag: watch::Receiver<Option<PolicyLag>>,
    problems: watch::Receiver<Vec<AgentProblem>>,
    local_addresses: Vec<IpAddr>,
    uplinks: Vec<String>,
    port: u16,
    thresholds: Thresholds,
    intervals: ProbeIntervals,
    /// The shortest interval, as stretched by the probe rate.
    effective: Option<Duration>,
    set: Arc<NodeSet>,
    /// In the order of `set.nodes`.
    nodes: Vec<NodeTargets>,
    known: SecondaryMap<TargetId, TargetRecord>,
    /// Where probes get lost.
    ways: Ways,
    /// For targets whose latency has shifted.
    shifts: SparseSecondaryMap<TargetId, ShiftWatch>,
    /// Only a few targets have an entry.
    path_mtus: SparseSecondaryMap<TargetId, PathMtu>,
    /// Targets whose path MTU a client is waiting for.
    awaited_paths: HashSet<TargetId>,
    /// Maximum number of results in a history.
    most_results: usize,
    newest: Option<Timestamp>,
    /// Counts changes of verdicts and of the probed targets.
    revision: u64,
    last_survey: Mutex<Option<LastSurvey>>,
}

/// Result of the last survey of all peers.
#[derive(Debug)]
struct LastSurvey {
    /// When it was made.
    at: Duration,
    /// The revision that it is based on.
    revision: u64,
    isolation: Option<Arc<Isolation>>,
}

/// A node and its targets.
#[derive(Debug)]
struct NodeTargets {
    paths: NodePaths,
    host: Vec<AddressTargets>,
    endpoint: Vec<AddressTargets>,
    last_diagnosis: Mutex<Option<LastDiagnosis>>,
}

/// The diagnosis of a node, valid until a verdict changes.
#[derive(Debug)]
struct LastDiagnosis {
    /// The revision that it is based on.
    revision: u64,
    diagnosis: Option<api::Diagnosis>,
}

/// The targets of an address; `None` for a protocol by which it is not probed.
#[derive(Clone, Copy, Debug)]
struct AddressTargets {
    address: IpAddr,
    icmp: Option<TargetId>,
    http: Option<TargetId>,
}

/// What is known about a target.
#[derive(Debug)]
struct TargetRecord {
    key: TargetKey,
    result: Option<TargetResult>,
    history: History,
    smoothed: Option<Duration>,
    degraded: Option<Degradation>,
    /// When its verdict, its degradation or the known MTU of its path last changed.
    revision: u64,
}

/// The confirmed result of a target.
#[derive(Debug)]
struct TargetResult {
    /// When its probe was sent, since the mesh's start.
    sent: Duration,
    probed: Timestamp,
    /// When it last became reachable or unreachable, or was first probed.
    changed: Timestamp,
    /// Like `changed`, but since the mesh's start.
    changed_at: Duration,
    /// When the first probe was sent whose result differs from the previous verdict.
    turned: Duration,
    /// When the probe behind `outcome` was sent.
    reported: Duration,
    outcome: Result<Answer, Box<ConfirmedFailure>>,
}

/// An answer to a probe.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    /// The round-trip time; for HTTP, of the TCP handshake.
    pub(super) rtt: Duration,
    /// Where it was timestamped.
    pub(super) source: RttSource,
    /// HTTP only: the times as seen by the agent.
    pub(super) http: Option<HttpTimes>,
    /// HTTP only: which of the peer's keys this node signs with.
    pub(super) key: KeyAge,
}

/// How long an HTTP probe took. Nanoseconds take half the space of a `Duration`: there is one per target.
#[derive(Clone, Copy, Debug)]
pub(super) struct HttpTimes {
    /// Until the connection was established.
    pub(super) connect_ns: u64,
    /// Until the answer arrived.
    pub(super) total_ns: u64,
}

impl Answer {
    /// Time until the answer arrived. The target is judged by this: the handshake involves only the peer's kernel.
    pub(super) fn took(&self) -> Duration {
        self.http
            .map_or(self.rtt, |times| Duration::from_nanos(times.total_ns))
    }
}

/// A confirmed failure.
#[derive(Debug)]
pub(super) struct ConfirmedFailure {
    /// Why the last probe failed, or a more informative reason from shortly before.
    pub(super) failure: Failure,
    /// Number of probes since the last answer.
    pub(super) probes: u32,
    /// When the first of them was sent, since the mesh's start.
    pub(super) since: Duration,
}

impl Results {
    /// Creates an empty instance.
    pub(super) fn new(options: &MeshOptions) -> Self {
        Self {
            local: options.local.clone(),
            public_mesh_key: options.keys.hello.accepts_public(),
            hosts_only: options.hosts_only.clone(),
            full_maps: options.full_maps.clone(),
            policy_lag: options.policy_lag.clone(),
            problems: options.problems.clone(),
            local_addresses: options.local_addresses.clone(),
            uplinks: options.uplinks.clone(),
            port: options.port,
            thresholds: Thresholds {
                loss: options.tuning.loss_threshold,
                ..Thresholds::default()
            },
            intervals: options.tuning.intervals,
            effective: options.tuning.intervals.iter().min(),
            set: Arc::default(),
            nodes: Vec::new(),
            known: SecondaryMap::new(),
            ways: Ways::default(),
            shifts: SparseSecondaryMap::new(),
            path_mtus: SparseSecondaryMap::new(),
            awaited_paths: HashSet::new(),
            most_results: most_results(0),
            newest: None,
            revision: 0,
            last_survey: Mutex::default(),
        }
    }

    /// Adopts new options for rating results. The effective intervals follow with the next set of nodes.
    pub(super) fn tune(&mut self, tuning: &Tuning) {
        self.thresholds.loss = tuning.loss_threshold;
        self.intervals = tuning.intervals;
        self.revision += 1;
    }

    /// Switches to another set of nodes. `paths` are in the same order as its nodes. Results of remaining targets are
    /// kept. `effective` maps a configured interval to its effective length at the probe rate.
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
                last_diagnosis: Mutex::default(),
            })
            .collect();
        self.revision += 1;
        self.set = set;
        self.effective = self.intervals.iter().min().map(effective);
        self.most_results = most_results(targets.len());
        self.known.set_capacity(targets.len());
        for (id, target) in targets.iter() {
            if !self.known.contains_key(id) {
                self.known.insert(id, TargetRecord::new(target.key));
            }
        }
    }

    /// Removes a target.
    pub(super) fn remove(&mut self, id: TargetId) {
        self.known.remove(id);
        self.ways.forget(id);
        self.shifts.remove(id);
        self.path_mtus.remove(id);
        self.awaited_paths.remove(&id);
        self.revision += 1;
    }

    /// Records the outcome of a probe sent at `sent`: its round-trip time, or that it was lost.
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
        // Scanning the whole history for each result would cost more than the probe.
        if unusual || known.degraded.is_some() || self.is_shifted(id) {
            self.watch_shift(id, now);
            let degraded = self
                .judged(id, now)
                .and_then(|facts| self.context().degraded(&facts));
            if let Some(known) = self.known.get_mut(id)
                && known.degraded != degraded
            {
                known.degraded = degraded;
                self.revision += 1;
                known.revision = self.revision;
            }
        }
    }

    /// Whether the target answers; `None` without a result.
    pub(super) fn is_reachable(&self, id: TargetId) -> Option<bool> {
        let result = self.known.get(id)?.result.as_ref()?;
        Some(result.outcome.is_ok())
    }

    /// Marks a target as reachable: a probe sent at `sent`, or `probed` in wall-clock time, was answered.
    pub(super) fn answered(
        &mut self,
        id: TargetId,
        sent: Duration,
        probed: Timestamp,
        answer: Answer,
    ) {
        if let (Some(times), RttSource::Kernel) = (answer.http, answer.source)
            && let Some(watch) = self.shifts.get_mut(id)
        {
            let [connect, total] = [times.connect_ns, times.total_ns].map(Duration::from_nanos);
            watch.note_request(answer.rtt, connect, total);
        }
        self.record(id, sent, probed, Ok(answer));
    }

    /// Marks a target as unreachable, as confirmed by a probe sent at `sent`, or `probed` in wall-clock time.
    pub(super) fn unreachable(
        &mut self,
        id: TargetId,
        sent: Duration,
        probed: Timestamp,
        unanswered: ConfirmedFailure,
    ) {
        self.record(id, sent, probed, Err(Box::new(unanswered)));
    }

    /// The last observed MTU of a target's path.
    pub(super) fn path_mtu(&self, id: TargetId) -> Option<&PathMtu> {
        self.path_mtus.get(id)
    }

    /// Records that a client is waiting for the MTU of these targets' paths.
    pub(super) fn await_paths(&mut self, ids: &[TargetId]) {
        self.awaited_paths.extend(ids);
    }

    /// Records the result of a path check. If it was inconclusive, the previous result stays.
    pub(super) fn path_looked_at(&mut self, id: TargetId, found: Option<PathMtu>) {
        self.awaited_paths.remove(&id);
        let Some(found) = found else {
            return;
        };
        let is_reduced = found.is_reduced();
        let before = self.path_mtus.insert(id, found);
        if (is_reduced || before.is_some_and(|before| before.is_reduced()))
            && let Some(known) = self.known.get_mut(id)
        {
            self.revision += 1;
            known.revision = self.revision;
        }
    }

    /// The targets of the node with this index in the current set.
    pub(super) fn targets_of(&self, index: usize) -> impl Iterator<Item = TargetId> {
        self.nodes
            .get(index)
            .into_iter()
            .flat_map(NodeTargets::targets)
    }

    /// Stores a result, unless a later probe already has one.
    fn record(
        &mut self,
        id: TargetId,
        sent: Duration,
        probed: Timestamp,
        mut outcome: Result<Answer, Box<ConfirmedFailure>>,
    ) {
        self.newest = self.newest.max(Some(probed));
        let Some(known) = self.known.get_mut(id) else {
            return;
        };
        let (mut changed, mut changed_at) = (Timestamp::now(), sent);
        let mut turned = outcome
            .as_ref()
            .map_or_else(|failed| failed.since, |_| sent);
        let mut reported = sent;
        let mut revised = true;
        if let Some(result) = &known.result {
            if result.sent > sent {
                return;
            }
            if result.outcome.is_ok() == outcome.is_ok() {
                (changed, changed_at) = (result.changed, result.changed_at);
                turned = result.turned;
            }
            if let (Err(before), Err(failed)) = (&result.outcome, &mut outcome)
                && before.failure.outlives(&failed.failure)
                && sent < result.reported + ERROR_MEMORY
            {
                failed.failure.clone_from(&before.failure);
                reported = result.reported;
            }
            revised = match (&result.outcome, &outcome) {
                (Ok(before), Ok(answer)) => before.key != answer.key,
                (Err(before), Err(failed)) => before.failure != failed.failure,
                _ => true,
            };
        }
        if outcome.is_err() {
            known.degraded = None;
            self.shifts.remove(id);
        }
        if revised {
            self.revision += 1;
            known.revision = self.revision;
        }
        known.result = Some(TargetResult {
            sent,
            probed,
            changed,
            changed_at,
            turned,
            reported,
            outcome,
        });
    }
}

impl NodeTargets {
    fn targets(&self) -> impl Iterator<Item = TargetId> {
        let addresses = self.host.iter().chain(&self.endpoint);
        addresses.flat_map(|a| a.protocols().into_iter().filter_map(|(_, id)| id))
    }

    /// The ICMP targets on a way, indexed by [`arrivals::way`].
    fn way(&self, way: usize) -> impl Iterator<Item = TargetId> {
        let ways = [(&self.host, Path::Host), (&self.endpoint, Path::Endpoint)];
        ways.into_iter().flat_map(move |(addresses, path)| {
            let on_way =
                move |a: &&AddressTargets| arrivals::way(a.address.is_ipv4(), path as u8) == way;
            addresses.iter().filter(on_way).filter_map(|a| a.icmp)
        })
    }
}

impl AddressTargets {
    fn protocols(&self) -> [(Protocol, Option<TargetId>); 2] {
        [(Protocol::Icmp, self.icmp), (Protocol::Http, self.http)]
    }
}

impl TargetRecord {
    fn new(key: TargetKey) -> Self {
        Self {
            key,
            result: None,
            history: History::default(),
            smoothed: None,
            degraded: None,
            revision: 0,
        }
    }

    /// The facts by which the target is judged.
    fn facts(&self, now: Duration) -> TargetFacts<'_> {
        let verdict = match &self.result {
            None => Verdict::Unknown,
            Some(result) => match &result.outcome {
                Ok(_) => Verdict::Reachable,
                Err(unanswered) => Verdict::Unreachable(&unanswered.failure),
            },
        };
        let answer = self.result.as_ref().map(|result| &result.outcome);
        let mesh_key = match answer {
            Some(Ok(answer)) => answer.key,
            _ => KeyAge::Current,
        };
        // The trend of a target that is not degraded is irrelevant, and costs time.
        let trend = match &self.degraded {
            Some(_) => self.trend(now),
            None => Trend::default(),
        };
        TargetFacts {
            key: self.key,
            verdict,
            mesh_key,
            trend,
            passages: Default::default(),
            shift: None,
            path_mtu: None,
        }
    }

    fn trend(&self, now: Duration) -> Trend {
        let since = self.result.as_ref().map(|result| result.changed_at);
        self.history.trend(now, since.unwrap_or_default())
    }
}
