//! What is known of each target, and what it is judged by.

mod report;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use health_common::arrivals::{self, WAYS};
use health_common::probe::Path;
use health_common::rtt::RemoteTime;
use health_datapath::conntrack::Fill;
use health_model::api::{self, RttSource};
use health_net::carrier;
use health_registry::config::ProbeIntervals;
use health_registry::nodes::{Node, NodeSet};
use jiff::Timestamp;
use slotmap::{SecondaryMap, SparseSecondaryMap};
use tokio::sync::watch;

use super::diagnosis::isolation::{Isolation, Survey};
use super::diagnosis::{
    Context, Degraded, PeerFacts, ShiftWatch, TargetFacts, Thresholds, Verdict,
};
use super::direction::{self, Passage, Ways};
use super::failure::Failure;
use super::handle::MeshOptions;
use super::history::{History, Trend, most_results};
use super::path_mtu::PathMtu;
use super::target::{NodePaths, Protocol, TargetId, TargetKey, Targets};

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
    full_maps: watch::Receiver<Vec<Fill>>,
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
struct Known {
    key: TargetKey,
    result: Option<TargetResult>,
    history: History,
    smoothed: Option<Duration>,
    degraded: Option<Degraded>,
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
    outcome: Result<Answer, Box<Unanswered>>,
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
            full_maps: options.full_maps.clone(),
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
                self.known.insert(id, Known::new(target.key));
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

    /// What a target is judged by, trend and all.
    fn judged(&self, id: TargetId, now: Duration) -> Option<TargetFacts<'_>> {
        let known = self.known.get(id)?;
        Some(TargetFacts {
            trend: known.trend(now),
            shift: self.shifts.get(id).map(ShiftWatch::shift),
            ..known.facts(now)
        })
    }

    /// Begins or ends to look where the time of a latency shift goes.
    fn watch_shift(&mut self, id: TargetId, now: Duration) {
        let watch = self.shifts.get(id);
        if watch.is_some_and(|watch| watch.is_outdated(now)) {
            self.shifts.remove(id);
        }
        let shifted = self
            .judged(id, now)
            .and_then(|facts| self.context().shifted(&facts));
        let (Some((_, usual)), Some(known)) = (shifted, self.known.get(id)) else {
            self.shifts.remove(id);
            return;
        };
        if self.is_shifted(id) {
            return;
        }
        let since = known.history.risen_since(usual.p90).unwrap_or(now);
        let wall_clock = Timestamp::now();
        let since = wall_clock.checked_sub(now.saturating_sub(since));
        let watch = ShiftWatch::new(since.unwrap_or(wall_clock), now, usual);
        self.shifts.insert(id, watch);
    }

    /// Whether the target's latency has shifted.
    pub(super) fn is_shifted(&self, id: TargetId) -> bool {
        self.shifts.contains_key(id)
    }

    /// Takes in the time that a target whose latency has shifted spends in the peer's host.
    pub(super) fn note_remote(&mut self, id: TargetId, remote: RemoteTime) {
        if let Some(watch) = self.shifts.get_mut(id) {
            watch.note(remote);
        }
    }

    /// The ways that are followed.
    pub(super) fn ways(&mut self) -> &mut Ways {
        &mut self.ways
    }

    /// The ICMP targets on a way to the node with this index in the set in force; the first one stands
    /// for the way.
    pub(super) fn way(&self, node: usize, way: usize) -> impl Iterator<Item = TargetId> {
        let node = self.nodes.get(node).into_iter();
        node.flat_map(move |node| node.way(way))
    }

    /// The target that stands for a target's way.
    pub(super) fn way_of(&self, node: usize, key: TargetKey) -> Option<TargetId> {
        let way = arrivals::way(key.address.is_ipv4(), key.path as u8);
        self.way(node, way).next()
    }

    /// Whether any way to the node is followed.
    pub(super) fn is_followed(&self, node: usize) -> bool {
        let of_node = |node| self.is_node_followed(node);
        !self.ways.is_empty() && self.nodes.get(node).is_some_and(of_node)
    }

    fn is_node_followed(&self, node: &NodeTargets) -> bool {
        let followed = |way| {
            let first = node.way(way).next();
            first.is_some_and(|first| self.ways.is_followed(first))
        };
        !self.ways.is_empty() && (0..WAYS).any(followed)
    }

    /// Whether probes on a way were lost of late.
    pub(super) fn is_lossy(&self, node: usize, way: usize, now: Duration) -> bool {
        self.way(node, way).any(|id| {
            let known = self.known.get(id);
            known.is_some_and(|known| known.history.has_losses(now, direction::WINDOWS[0]))
        })
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
        unanswered: Unanswered,
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
                (Ok(_), Ok(_)) => false,
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

    fn context(&self) -> Context<'_> {
        Context {
            port: self.port,
            local_addresses: &self.local_addresses,
            thresholds: self.thresholds,
        }
    }

    /// Whether it is this node that is cut off.
    fn isolation(&self, now: Duration) -> Option<Arc<Isolation>> {
        let mut last = self
            .last_survey
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(last) = &*last {
            // Of a node that is cut off, the devices are looked at as well.
            let stands = last.isolation.is_none() && last.revision == self.revision;
            if stands || now.saturating_sub(last.at) < SURVEY_AGE {
                return last.isolation.clone();
            }
        }
        let context = self.context();
        let mut survey = Survey::default();
        let mut facts = Vec::new();
        for (index, node) in self.nodes.iter().enumerate() {
            self.facts(node, now, &mut facts);
            survey.add(&context, &self.peer(index, node, &facts));
        }
        // The devices are only looked at when it matters.
        let isolation = survey
            .diagnose(&context, &self.local, &[])
            .and_then(|_| {
                let without_carrier = carrier::without(&self.uplinks);
                survey.diagnose(&context, &self.local, &without_carrier)
            })
            .map(Arc::new);
        *last = Some(LastSurvey {
            at: now,
            revision: self.revision,
            isolation: isolation.clone(),
        });
        isolation
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

    /// What the node's diagnosis rests on; `None` before all its targets are known.
    fn revision(&self, node: &NodeTargets) -> Option<u64> {
        let mut revisions = node.targets().map(|id| Some(self.known.get(id)?.revision));
        revisions.try_fold(0, |newest, revision| Some(revision?.max(newest)))
    }

    /// What is wrong with the node with this index.
    fn diagnosis(
        &self,
        index: usize,
        node: &NodeTargets,
        isolation: Option<&Isolation>,
        now: Duration,
    ) -> Option<api::Diagnosis> {
        let revision = self.revision(node);
        let mut last = node
            .last_diagnosis
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        // What peers tell of losses changes from exchange to exchange.
        let lasts = isolation.is_none() && !self.is_node_followed(node);
        if lasts
            && let Some(last) = &*last
            && Some(last.revision) == revision
        {
            return last.diagnosis.clone();
        }
        *last = None;
        if !self.is_settled(node, now) {
            return None;
        }
        let mut facts = Vec::new();
        self.facts(node, now, &mut facts);
        let peer = self.peer(index, node, &facts);
        let diagnosis = self.context().diagnose(&peer, isolation);
        let diagnosis = diagnosis.map(report::shown);
        // Of a degraded target is told what became of its probes of late.
        if lasts
            && !self.is_degraded(node)
            && let Some(revision) = revision
        {
            *last = Some(LastDiagnosis {
                revision,
                diagnosis: diagnosis.clone(),
            });
        }
        diagnosis
    }

    fn is_degraded(&self, node: &NodeTargets) -> bool {
        let mut known = node.targets().filter_map(|id| self.known.get(id));
        known.any(|known| known.degraded.is_some())
    }

    /// Sets `facts` to what a node's targets are judged by.
    fn facts<'a>(&'a self, node: &NodeTargets, now: Duration, facts: &mut Vec<TargetFacts<'a>>) {
        facts.clear();
        for (addresses, path) in [(&node.host, Path::Host), (&node.endpoint, Path::Endpoint)] {
            for targets in addresses {
                for (protocol, id) in targets.protocols() {
                    let known = id.and_then(|id| Some((id, self.known.get(id)?)));
                    facts.push(match known {
                        Some((id, known)) => TargetFacts {
                            passages: self.passages(node, known, now),
                            shift: self.shifts.get(id).map(ShiftWatch::shift),
                            path_mtu: self.path_mtu(id),
                            ..known.facts(now)
                        },
                        None => TargetFacts {
                            key: TargetKey {
                                address: targets.address,
                                path,
                                protocol,
                            },
                            verdict: Verdict::Off,
                            trend: Trend::default(),
                            passages: Default::default(),
                            shift: None,
                            path_mtu: None,
                        },
                    });
                }
            }
        }
    }

    /// What became of a target's echo probes since its verdict stands, in each window.
    fn passages(
        &self,
        node: &NodeTargets,
        known: &Known,
        now: Duration,
    ) -> [Option<Passage>; direction::WINDOWS.len()] {
        let key = known.key;
        let way = arrivals::way(key.address.is_ipv4(), key.path as u8);
        let followed = || {
            let first = (!self.ways.is_empty()).then(|| node.way(way).next())??;
            Some((first, known.result.as_ref()?.turned))
        };
        let Some((first, turned)) = followed().filter(|_| key.protocol == Protocol::Icmp) else {
            return Default::default();
        };
        direction::WINDOWS.map(|window| {
            let from = now.saturating_sub(window).max(turned);
            self.ways.passage(first, from)
        })
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

impl Known {
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
        // The trend of a target that is not degraded does not matter, and costs time.
        let trend = match &self.degraded {
            Some(_) => self.trend(now),
            None => Trend::default(),
        };
        TargetFacts {
            key: self.key,
            verdict,
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
