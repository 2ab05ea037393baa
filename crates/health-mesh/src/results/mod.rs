//! What is known of each target, and what it is judged by.

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
use health_registry::config::ProbeIntervals;
use health_registry::nodes::NodeSet;
use jiff::Timestamp;
use slotmap::{SecondaryMap, SparseSecondaryMap};
use tokio::sync::watch;

use crate::diagnosis::isolation::Isolation;
use crate::diagnosis::{Degradation, ShiftWatch, TargetFacts, Thresholds, Verdict};
use crate::direction::Ways;
use crate::failure::Failure;
use crate::handle::MeshOptions;
use crate::history::{History, Trend, most_results};
use crate::path_mtu::PathMtu;
use crate::proof::KeyAge;
use crate::target::{NodePaths, Protocol, TargetId, TargetKey, Targets};

/// A round trip longer than the smoothed one by this factor makes it worth while to look for a shift.
const UNUSUAL: (u32, u32) = (3, 2);
/// A new round trip counts for one in so many in the smoothed one: for less than the results that make
/// a shift, so that all of those are unusual.
const SMOOTHING: u32 = 64;

/// How old a look at all peers may be though verdicts have changed: while a report is written, its nodes
/// are asked for in quick succession.
const SURVEY_AGE: Duration = Duration::from_millis(100);

/// While verdicts on a peer change, its diagnosis waits until all of them are known anew, but not longer:
/// twice what it takes to confirm a failure.
const SETTLING: Duration = Duration::from_secs(2);
/// An ICMP error is told for so long though silence follows.
const ERROR_MEMORY: Duration = Duration::from_secs(10);

/// What is known of all nodes.
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
    /// The shortest interval as it comes to at the probe rate.
    effective: Option<Duration>,
    set: Arc<NodeSet>,
    /// In the order of `set.nodes`.
    nodes: Vec<NodeTargets>,
    known: SecondaryMap<TargetId, TargetRecord>,
    /// Where probes get lost.
    ways: Ways,
    /// Of targets whose latency has shifted.
    shifts: SparseSecondaryMap<TargetId, ShiftWatch>,
    /// Of few of all targets.
    path_mtus: SparseSecondaryMap<TargetId, PathMtu>,
    /// Targets whose path MTU somebody waits for.
    awaited_paths: HashSet<TargetId>,
    /// Results that a history may hold.
    most_results: usize,
    newest: Option<Timestamp>,
    /// Counts the changes of verdicts and of what is probed.
    revision: u64,
    last_survey: Mutex<Option<LastSurvey>>,
}

/// What came of the last look at all peers.
#[derive(Debug)]
struct LastSurvey {
    /// When that was.
    at: Duration,
    /// What it rests on.
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

/// The diagnosis of a node, which stands until a verdict changes.
#[derive(Debug)]
struct LastDiagnosis {
    /// What it rests on.
    revision: u64,
    diagnosis: Option<api::Diagnosis>,
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
struct TargetRecord {
    key: TargetKey,
    result: Option<TargetResult>,
    history: History,
    smoothed: Option<Duration>,
    degraded: Option<Degradation>,
    /// When its verdict changed, whether and why it is degraded, or what is known of its path's MTU.
    revision: u64,
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
    outcome: Result<Answer, Box<ConfirmedFailure>>,
}

/// An answer to a probe.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    /// The round trip; for HTTP that of the connection's handshake.
    pub(super) rtt: Duration,
    /// Where it was stamped.
    pub(super) source: RttSource,
    /// For HTTP: what the agent saw.
    pub(super) http: Option<HttpTimes>,
    /// For HTTP: which of the peer's keys this node signs with.
    pub(super) key: KeyAge,
}

/// How long an HTTP probe took. Nanoseconds, which take half the room: there is one for each target.
#[derive(Clone, Copy, Debug)]
pub(super) struct HttpTimes {
    /// Until the connection stood.
    pub(super) connect_ns: u64,
    /// Until the answer was there.
    pub(super) total_ns: u64,
}

impl Answer {
    /// Until the answer was there. This is what the target is judged by: the handshake is the work of the
    /// peer's kernel alone.
    pub(super) fn took(&self) -> Duration {
        self.http
            .map_or(self.rtt, |times| Duration::from_nanos(times.total_ns))
    }
}

/// A failure that was confirmed.
#[derive(Debug)]
pub(super) struct ConfirmedFailure {
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
            public_mesh_key: options.keys.hello.accepts_public(),
            hosts_only: options.hosts_only.clone(),
            full_maps: options.full_maps.clone(),
            policy_lag: options.policy_lag.clone(),
            problems: options.problems.clone(),
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

    /// Forgets a target.
    pub(super) fn remove(&mut self, id: TargetId) {
        self.known.remove(id);
        self.ways.forget(id);
        self.shifts.remove(id);
        self.path_mtus.remove(id);
        self.awaited_paths.remove(&id);
        self.revision += 1;
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

    /// A target is reachable: a probe sent at `sent`, by the clock at `probed`, was answered.
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

    /// A target is unreachable, as a probe sent at `sent`, by the clock at `probed`, confirms.
    pub(super) fn unreachable(
        &mut self,
        id: TargetId,
        sent: Duration,
        probed: Timestamp,
        unanswered: ConfirmedFailure,
    ) {
        self.record(id, sent, probed, Err(Box::new(unanswered)));
    }

    /// The MTU of a target's path as it was seen last.
    pub(super) fn path_mtu(&self, id: TargetId) -> Option<&PathMtu> {
        self.path_mtus.get(id)
    }

    /// Somebody waits for the MTU of these targets' paths.
    pub(super) fn await_paths(&mut self, ids: &[TargetId]) {
        self.awaited_paths.extend(ids);
    }

    /// A target's path was looked at. If that told nothing certain, what was known stays.
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
        let mut told = sent;
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
                && sent < result.told + ERROR_MEMORY
            {
                failed.failure.clone_from(&before.failure);
                told = result.told;
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
            told,
            outcome,
        });
    }
}

impl NodeTargets {
    fn targets(&self) -> impl Iterator<Item = TargetId> {
        let addresses = self.host.iter().chain(&self.endpoint);
        addresses.flat_map(|a| a.protocols().into_iter().filter_map(|(_, id)| id))
    }

    /// The ICMP targets on a way, by [`arrivals::way`].
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

    /// What the target is judged by.
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
        // The trend of a target that is not degraded does not matter, and costs time.
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
