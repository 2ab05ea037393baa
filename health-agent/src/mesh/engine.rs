//! The one task that owns the mesh's state: it sends what is due, takes in what comes back, and
//! follows the registry.

use std::collections::{HashSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use health_common::arrivals::{Arrivals, Prober, WAYS};
use health_common::probe::Path;
use jiff::Timestamp;
use nix::sys::resource::{Resource, getrlimit};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{JoinError, JoinSet};
use tokio::time::sleep_until;

use super::accounts::{Accounts, nanos};
use super::budget::Budget;
use super::confirm::{Confirmation, Due, Judgement};
use super::direction::{Exchange, OwnCounts};
use super::failure::Failure;
use super::handle::{MeshError, MeshOptions, Shared};
use super::http::{self, Hello};
use super::icmp::{IcmpEvent, IcmpProber, Mark, Probe};
use super::learned::Learned;
use super::path_mtu::{Looked, PathMtu, PathMtuOptions, PathMtuProber};
use super::relief::Relief;
use super::results::{Answer, HttpTimes, Unanswered};
use super::rtt_store::RttStore;
use super::schedule::{DueTarget, Schedule};
use super::sweep::{Sweep, SweepEvent};
use super::target::{NodePaths, Protocol, Target, TargetId, TargetKey, Targets};
use crate::nodes::{Node, NodeSet};

/// Time between two turns of the engine, at least. What comes in between is dealt with together, for a
/// fraction of the cost; no measurement depends on when it is dealt with.
const TURN: Duration = Duration::from_millis(5);
/// Scheduled probes go out so many at a time, if that takes no longer than the time below to gather.
const BATCH: u32 = 16;
const MAX_GATHER: Duration = Duration::from_millis(50);
/// They gather for this part of the shortest interval at most.
const GATHER_DIVISOR: u32 = 8;
/// Time over which the first probes of new targets are spread, at least.
const FIRST_SPREAD: Duration = Duration::from_millis(100);
/// Most and fewest HTTP probes at a time, and the share of this process's file descriptors that
/// they may hold. A dead peer keeps its place until the time-out, so few places would let the dead
/// delay the living.
const HTTP_CONCURRENCY: (usize, usize) = (64, 4096);
const HTTP_DESCRIPTORS_DIVISOR: u64 = 2;
/// Pause before a probe that found no room in the socket is tried again.
const DEFERRED_RETRY: Duration = Duration::from_millis(10);
/// Time in which changes of learned addresses are gathered before the targets are made anew: this at
/// least, and so many times what that took last.
const LEARN_DELAY: Duration = Duration::from_millis(50);
const LEARN_DELAY_FACTOR: u32 = 20;
/// Time between two reports of progress to those who wait for a sweep.
const PROGRESS_PERIOD: Duration = Duration::from_millis(100);
/// Nothing is due: the engine comes round nevertheless, so that others see it alive.
const IDLE: Duration = Duration::from_secs(1);

/// What the engine is asked to do.
#[derive(Debug)]
pub(super) enum Command {
    /// Probe all targets.
    Probe(mpsc::UnboundedSender<SweepEvent>),
    /// Find the MTU of the paths to this node, by its full name, or to all; `done` is dropped then.
    ProbePathMtu {
        node: Option<String>,
        done: oneshot::Sender<()>,
    },
    /// End.
    Shutdown(oneshot::Sender<()>),
}

/// The end of an HTTP probe.
#[derive(Debug)]
struct HttpDone {
    id: TargetId,
    key: TargetKey,
    sent: Duration,
    /// What was counted of the node's ways as it was sent.
    counts: Option<Box<WayCounts>>,
    answer: Result<Hello, Failure>,
}

/// This side's counts of the ways to a node that are followed, by [`health_common::arrivals::way`].
type WayCounts = [Option<OwnCounts>; WAYS];

pub(super) struct Engine {
    options: MeshOptions,
    shared: Arc<Shared>,
    nodes: watch::Receiver<Arc<NodeSet>>,
    local_health: watch::Receiver<Vec<IpAddr>>,
    accounts: Accounts,
    learned: Learned,
    schedule: Schedule,
    confirmation: Confirmation,
    budget: Budget,
    relief: Relief,
    /// The nodes that `targets` was made of.
    set: Arc<NodeSet>,
    targets: Targets,
    /// When the targets are to be made anew.
    rebuild_at: Option<Duration>,
    /// How long that took last.
    rebuild_took: Duration,
    icmp: IcmpProber,
    /// Taken in after each batch; kept for its memory.
    icmp_events: Vec<IcmpEvent>,
    path_mtu: PathMtuProber,
    http: JoinSet<HttpDone>,
    http_places: usize,
    /// Due, while there is no place.
    http_waiting: VecDeque<TargetId>,
    /// The targets in `http_waiting`.
    http_queued: HashSet<TargetId>,
    /// When scheduled probes are sent next, at the earliest.
    send_at: Duration,
    sweep: Option<Sweep>,
    /// When those who wait for the sweep are told how far it is.
    progress_at: Duration,
}

impl Engine {
    /// An engine that knows the nodes of today and has probed none.
    pub(super) fn new(
        options: MeshOptions,
        shared: Arc<Shared>,
        nodes: watch::Receiver<Arc<NodeSet>>,
        store: Arc<dyn RttStore>,
        local_health: watch::Receiver<Vec<IpAddr>>,
    ) -> Result<Self, MeshError> {
        let icmp = IcmpProber::open(
            Mark {
                icmp_id: options.icmp_id,
                session: options.session,
                key: options.probe_key,
                one_way: options.one_way,
            },
            rand::random(),
            shared.ignored.clone(),
        )
        .map_err(MeshError::RawSocket)?;
        let path_mtu = PathMtuProber::open(
            &options.local,
            PathMtuOptions {
                interval: options.path_mtu_interval,
                rate: options.rate,
                timeout: options.timeout,
            },
            other_id(options.icmp_id),
            shared.ignored.clone(),
        )
        .map_err(MeshError::RawSocket)?;
        let mut engine = Self {
            schedule: Schedule::new(&options.local, options.rate),
            confirmation: Confirmation::default(),
            budget: Budget::new(options.rate),
            relief: Relief::new(options.passive_relief),
            learned: Learned::load(&options.state_dir),
            accounts: Accounts::new(store, options.passive_rtt).map_err(MeshError::RttStore)?,
            options,
            shared,
            nodes,
            local_health,
            set: Arc::default(),
            targets: Targets::default(),
            rebuild_at: None,
            rebuild_took: Duration::ZERO,
            icmp,
            icmp_events: Vec::new(),
            path_mtu,
            http: JoinSet::new(),
            http_places: http_places(),
            http_waiting: VecDeque::new(),
            http_queued: HashSet::new(),
            send_at: Duration::ZERO,
            sweep: None,
            progress_at: Duration::ZERO,
        };
        engine.rebuild();
        if !engine.set.nodes.is_empty() {
            let known = engine.targets.iter().map(|(_, target)| target.key);
            engine
                .accounts
                .keep_only(known)
                .map_err(MeshError::RttStore)?;
        }
        Ok(engine)
    }

    /// Probes until it is told to end, or nobody is left to tell it.
    pub(super) async fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        let mut finished = None;
        loop {
            let turned = self.now();
            self.turn();
            let wake = self.shared.start + self.next_wake();
            tokio::select! {
                command = commands.recv() => match command {
                    Some(Command::Probe(waiter)) => self.sweep(waiter),
                    Some(Command::ProbePathMtu { node, done }) => {
                        self.probe_path_mtu(node.as_deref(), done);
                    }
                    Some(Command::Shutdown(done)) => {
                        finished = Some(done);
                        break;
                    }
                    None => break,
                },
                // A source that has gone leaves what it said last.
                Ok(()) = self.nodes.changed() => self.rebuild(),
                Ok(()) = self.local_health.changed() => self.rebuild(),
                _ = self.icmp.readable() => {}
                () = self.path_mtu.ready() => {}
                Some(done) = self.http.join_next() => self.http_done(done),
                () = sleep_until(wake) => {}
            }
            sleep_until(self.shared.start + turned + TURN).await;
        }
        self.learned.close().await;
        if let Some(done) = finished {
            // The asker may have gone.
            let _ = done.send(());
        }
    }

    fn now(&self) -> Duration {
        self.shared.now()
    }

    /// Takes in all that has come, then does all that is due.
    fn turn(&mut self) {
        // First: nothing that has come counts as missing, even if the agent itself was held up.
        self.receive_icmp();
        while let Some(done) = self.http.try_join_next() {
            self.http_done(done);
        }
        let now = self.now();
        self.shared.turned(now);
        if self.rebuild_at.is_some_and(|at| at <= now) {
            self.rebuild();
        }
        self.icmp.expire(now, &mut self.icmp_events);
        self.take_icmp_events();
        self.send_what_is_due();
        self.icmp.flush(&mut self.icmp_events);
        self.take_icmp_events();
        self.begin_http();
        self.look_at_paths();
        self.end_sweep();
    }

    /// Begins confirming and scheduled probes by turns, so that none of them starves the others.
    fn send_what_is_due(&mut self) {
        let scheduled = self.send_at <= self.now();
        let mut sent = false;
        loop {
            let now = self.now();
            let due = self.confirmation.poll(now, &mut self.budget);
            let confirms = due.is_some();
            match due {
                Some(Due::Reprobe(id)) => {
                    if let Some(since) = self.confirmation.first_doubt(id) {
                        self.probe_siblings(id, since);
                    }
                    self.begin(id);
                }
                Some(Due::Unreachable { id, sent, failure }) => {
                    self.schedule.retry(id, now);
                    self.record_failure(id, sent, failure);
                }
                Some(Due::NotRecovered(id)) => self.schedule.retry(id, now),
                None => {}
            }
            let next = scheduled.then(|| self.schedule.pop_due(now, &mut self.budget));
            match next.flatten() {
                Some(due) => {
                    sent = true;
                    if !self.is_left_out(due) {
                        self.begin(due.id);
                    }
                }
                None if !confirms => break,
                None => {}
            }
        }
        if sent {
            self.send_at = self.now() + self.gather_time();
        }
    }

    /// How long scheduled probes gather until they are sent. Somebody waits for those of a sweep.
    fn gather_time(&self) -> Duration {
        if self.sweep.is_some() {
            return TURN;
        }
        let shortest = self.options.intervals.iter().min().unwrap_or(MAX_GATHER);
        self.schedule
            .pace()
            .saturating_mul(BATCH)
            .min(MAX_GATHER)
            .min(shortest / GATHER_DIVISOR)
            .max(TURN)
    }

    fn next_wake(&mut self) -> Duration {
        let sweep = self
            .sweep
            .as_ref()
            .map(|sweep| sweep.deadline().min(self.progress_at));
        [
            self.schedule
                .next_due(&self.budget)
                .map(|due| due.max(self.send_at)),
            self.confirmation.next_due(&self.budget),
            self.icmp.next_expiry(),
            self.path_mtu.next_due(&self.budget),
            self.rebuild_at,
            sweep,
        ]
        .into_iter()
        .flatten()
        .fold(self.now() + IDLE, Duration::min)
    }

    /// The other targets of the node are due at once, unless they were probed since then: what is wrong
    /// with a node is told by all of them together.
    fn probe_siblings(&mut self, id: TargetId, since: Duration) {
        let Some(target) = self.targets.get(id) else {
            return;
        };
        let now = self.now();
        let results = self.shared.results();
        for sibling in results.targets_of(target.node) {
            if self.confirmation.not_probed_since(sibling, since) {
                self.schedule.pull_in(sibling, now);
                // They do not wait for others to gather.
                self.send_at = self.send_at.min(now);
            }
        }
    }

    /// Whether a probe that is due is not needed: connections to its address were answered within the
    /// last interval, and nothing is wrong with the node. HTTP tells of the agent, which they do not.
    fn is_left_out(&mut self, due: DueTarget) -> bool {
        let Some(&target) = self.targets.get(due.id) else {
            return false;
        };
        if !due.routine || target.key.protocol != Protocol::Icmp || self.sweep.is_some() {
            return false;
        }
        let Self {
            relief,
            accounts,
            confirmation,
            shared,
            ..
        } = self;
        let key = target.key;
        let interval = self.options.intervals.get(key.path, key.protocol);
        let interval = self.schedule.effective(interval.unwrap_or_default());
        relief.leave_out(due.id, || {
            let results = shared.results();
            let is_well = |id| results.is_reachable(id) == Some(true) && !confirmation.in_doubt(id);
            results.targets_of(target.node).all(is_well) && accounts.had_traffic(key, interval)
        })
    }

    fn begin(&mut self, id: TargetId) {
        match self.targets.get(id).map(|target| target.key.protocol) {
            Some(Protocol::Icmp) => self.begin_icmp(id),
            Some(Protocol::Http) => self.queue_http(id),
            None => {}
        }
    }

    fn begin_icmp(&mut self, id: TargetId) {
        if let Some(target) = self.targets.get(id) {
            let now = self.now();
            let expiry = now + self.options.timeout;
            let probe = Probe::new(id, target.key, now, expiry);
            self.confirmation.sent(id, now, expiry);
            self.relief.forget(id);
            self.icmp.push(probe, &mut self.icmp_events);
        }
    }

    fn receive_icmp(&mut self) {
        let now = self.now();
        if let Err(error) = self.icmp.receive(now, &mut self.icmp_events) {
            tracing::warn!(%error, "cannot receive ICMP replies");
        }
        self.take_icmp_events();
    }

    fn take_icmp_events(&mut self) {
        let mut events = std::mem::take(&mut self.icmp_events);
        for event in events.drain(..) {
            match event {
                IcmpEvent::Answered { probe, rtt } => {
                    let (rtt, source) = self.accounts.answered(&probe, rtt);
                    let answer = Answer {
                        rtt,
                        source,
                        http: None,
                    };
                    if self.answered(probe.id, probe.sent, answer) {
                        let now = self.now();
                        self.schedule.settle(probe.id, now);
                    }
                    self.note_remote(&probe);
                }
                IcmpEvent::Failed { probe, failure } => {
                    self.lost(&probe, &failure);
                    self.failed(probe.id, probe.sent, failure);
                }
                IcmpEvent::Deferred { id } => {
                    let at = self.now() + DEFERRED_RETRY;
                    self.confirmation.withdrawn(id, at);
                    self.schedule.pull_in(id, at);
                }
            }
        }
        self.icmp_events = events;
    }

    /// Counts a lost probe, and where it was lost if that was in this host.
    fn lost(&self, probe: &Probe, failure: &Failure) {
        let unseen = !self.accounts.lost(probe);
        let unsent = matches!(failure, Failure::Os(_) | Failure::NoFamily);
        if !unseen && !unsent {
            return;
        }
        let mut results = self.shared.results_mut();
        if !results.ways().is_empty()
            && let Some(target) = self.targets.get(probe.id)
            && let Some(way) = results.way_of(target.node, target.key)
        {
            let ways = results.ways();
            if unsent {
                ways.unsent(way);
            } else {
                ways.unseen(way);
            }
        }
    }

    /// Where the time of a latency shift goes, the peer's programs tell.
    fn note_remote(&self, probe: &Probe) {
        if self.shared.results().is_shifted(probe.id)
            && let Some(row) = self.accounts.row(probe.key)
        {
            self.shared.results_mut().note_remote(probe.id, row.remote);
        }
    }

    /// This side's counts of the ways to a node; `None` while none is followed.
    fn way_counts(&self, node: usize) -> Option<Box<WayCounts>> {
        let results = self.shared.results();
        if !results.is_followed(node) {
            return None;
        }
        let counts = std::array::from_fn(|way| self.own_counts(results.way(node, way)));
        Some(Box::new(counts))
    }

    /// This side's counts of the probes to some targets; `None` where they cannot be read.
    fn own_counts(&self, mut targets: impl Iterator<Item = TargetId>) -> Option<OwnCounts> {
        targets.try_fold(OwnCounts::default(), |counts, id| {
            let key = self.targets.get(id)?.key;
            let row = self.accounts.row(key)?;
            let in_flight = u32::try_from(self.icmp.waiting(&key)).ok()?;
            // The low bits: the counts wrap.
            let surplus = row.late + row.duplicates;
            let returned = (row.samples + surplus) as u32;
            let settled = (row.samples + row.lost) as u32;
            Some(OwnCounts {
                settled: counts.settled.wrapping_add(settled),
                in_flight: counts.in_flight + in_flight,
                returned: counts.returned.wrapping_add(returned),
                surplus: counts.surplus.wrapping_add(surplus as u32),
            })
        })
    }

    /// Sets what a node tells of this agent's echo probes against what this side counts. Ways with
    /// losses are followed from here on, and compared from the next time on.
    fn exchange(&self, node: usize, asked: Duration, before: Option<&WayCounts>, hello: &Hello) {
        if hello.told.malformed {
            self.shared.malformed.add();
        }
        let Some(Arrivals { since_ns, ways }) = hello.told.arrivals else {
            return;
        };
        let told = self.now();
        for (way, counts) in ways.into_iter().enumerate() {
            let results = self.shared.results();
            let Some(first) = results.way(node, way).next() else {
                continue;
            };
            let lossy = results.is_lossy(node, way, told);
            if !lossy && !results.is_followed(node) {
                continue;
            }
            let after = before
                .filter(|_| lossy)
                .and_then(|_| self.own_counts(results.way(node, way)));
            drop(results);
            let before = before.and_then(|before| before[way]);
            let mut results = self.shared.results_mut();
            let followed = results.ways();
            if !lossy {
                followed.forget(first);
                continue;
            }
            followed.follow(first);
            if let (Some(before), Some(after)) = (before, after) {
                let exchange = Exchange {
                    asked,
                    before,
                    told,
                    after,
                    since_ns,
                    counts,
                };
                followed.exchanged(first, &exchange);
            }
        }
    }

    /// Queues an HTTP probe, unless one waits already.
    fn queue_http(&mut self, id: TargetId) {
        if self.http_queued.insert(id) {
            self.http_waiting.push_back(id);
        }
    }

    fn begin_http(&mut self) {
        while self.http.len() < self.http_places
            && let Some(id) = self.http_waiting.pop_front()
        {
            self.http_queued.remove(&id);
            let Some(target) = self.targets.get(id) else {
                continue;
            };
            let (key, node) = (target.key, target.node);
            let sent = self.now();
            let counts = self.way_counts(node);
            let expiry = sent + self.options.timeout;
            self.confirmation.sent(id, sent, expiry);
            let peer = SocketAddr::new(key.address, self.options.port);
            let deadline = self.shared.start + expiry;
            let prober = Prober {
                session: self.options.session,
                icmp_id_be: self.options.icmp_id.to_be(),
                pad: 0,
            };
            self.http.spawn(async move {
                let answer = http::get_hello(peer, prober, deadline).await;
                HttpDone {
                    id,
                    key,
                    sent,
                    counts,
                    answer,
                }
            });
        }
    }

    fn http_done(&mut self, done: Result<HttpDone, JoinError>) {
        let HttpDone {
            id,
            key,
            sent,
            counts,
            answer,
        } = match done {
            Ok(done) => done,
            Err(error) => {
                tracing::error!(%error, "an HTTP probe ended without a result");
                return;
            }
        };
        let Some(&target) = self.targets.get(id) else {
            return;
        };
        match answer {
            Ok(hello) => {
                let (rtt, source) = self.accounts.connected(key, &hello);
                let answer = Answer {
                    rtt,
                    source,
                    http: Some(HttpTimes {
                        connect_ns: nanos(hello.connect),
                        total_ns: nanos(hello.total),
                    }),
                };
                self.exchange(target.node, sent, counts.as_deref(), &hello);
                let reachable = self.answered(id, sent, answer);
                let all_told = key.path != Path::Host
                    || self.learn(target, hello.told.health_endpoint.as_deref());
                if reachable && all_told {
                    let now = self.now();
                    self.schedule.settle(id, now);
                }
            }
            Err(failure) => {
                self.accounts.lost_untracked(key);
                self.failed(id, sent, failure);
            }
        }
    }

    /// Takes in an answer. Returns whether the target is reachable.
    fn answered(&mut self, id: TargetId, sent: Duration, answer: Answer) -> bool {
        let now = self.now();
        let took = answer.took();
        let judgement = self.confirmation.answered(id, sent, took, now);
        let mut results = self.shared.results_mut();
        results.note(id, sent, Some(took), now);
        if judgement != Judgement::Reachable {
            drop(results);
            self.unchanged(id, sent);
            return false;
        }
        let was_reachable = results.is_reachable(id);
        results.answered(id, sent, self.wall_clock(sent), answer);
        drop(results);
        if was_reachable == Some(false)
            && let Some(target) = self.targets.get(id)
        {
            let node = self.node_name(target);
            tracing::info!(node, target = %target.key, "reachable again");
            self.probe_siblings(id, sent);
        }
        self.end_wait(id, sent);
        true
    }

    fn failed(&mut self, id: TargetId, sent: Duration, failure: Failure) {
        let now = self.now();
        self.shared.results_mut().note(id, sent, None, now);
        let was_in_doubt = self.confirmation.in_doubt(id);
        match self.confirmation.failed(id, sent, &failure, now) {
            Judgement::Unreachable => {
                if was_in_doubt {
                    self.schedule.retry(id, now);
                }
                self.record_failure(id, sent, failure);
            }
            Judgement::Reachable | Judgement::Unchanged => self.unchanged(id, sent),
        }
    }

    fn record_failure(&mut self, id: TargetId, sent: Duration, failure: Failure) {
        let mut results = self.shared.results_mut();
        if results.is_reachable(id) != Some(false)
            && let Some(target) = self.targets.get(id)
        {
            let node = self.node_name(target);
            tracing::info!(node, target = %target.key, status = %failure, "unreachable");
        }
        let unanswered = Unanswered {
            failure,
            probes: self.confirmation.unanswered(id),
            since: self.confirmation.unanswered_since(id),
        };
        results.unreachable(id, sent, self.wall_clock(sent), unanswered);
        drop(results);
        self.end_wait(id, sent);
    }

    /// A result came that leaves what is shown.
    fn unchanged(&mut self, id: TargetId, sent: Duration) {
        if !self.confirmation.in_doubt(id) {
            self.end_wait(id, sent);
        }
    }

    /// The sweep need not wait for the target any longer if the probe is one of the sweep's.
    fn end_wait(&mut self, id: TargetId, sent: Duration) {
        if let Some(sweep) = &mut self.sweep {
            sweep.result(id, sent);
        }
    }

    fn node_name(&self, target: &Target) -> String {
        let node = self.set.nodes.get(target.node);
        node.map(Node::full_name).unwrap_or_default()
    }

    fn wall_clock(&self, at: Duration) -> Timestamp {
        let ago = self.now().saturating_sub(at);
        let now = Timestamp::now();
        now.checked_sub(ago).unwrap_or(now)
    }

    /// Takes what a node tells of its health endpoint, where the registry does not say. Returns
    /// whether nothing more is to be told: a node that starts may not know yet.
    fn learn(&mut self, target: Target, told: Option<&[IpAddr]>) -> bool {
        let Some(node) = self.set.nodes.get(target.node) else {
            return true;
        };
        let registry_says = !node.health_addresses.is_empty();
        if registry_says || node.full_name() == self.options.local {
            return true;
        }
        let Some(told) = told else {
            return node.pod_cidrs.is_empty() || !self.learned.get(node).is_empty();
        };
        if self.learned.learn(node, told) && self.rebuild_at.is_none() {
            let delay = LEARN_DELAY.max(self.rebuild_took * LEARN_DELAY_FACTOR);
            self.rebuild_at = Some(self.now() + delay);
        }
        true
    }

    /// Goes on finding the MTU of paths.
    fn look_at_paths(&mut self) {
        let now = self.now();
        let looked = self.path_mtu.turn(now, &mut self.budget);
        for Looked { id, found } in looked {
            let mut results = self.shared.results_mut();
            let was_reduced = results.path_mtu(id).is_some_and(PathMtu::is_reduced);
            if let Some(found) = &found
                && found.is_reduced() != was_reduced
                && let Some(target) = self.targets.get(id)
            {
                let node = self.node_name(target);
                let address = target.key.address;
                let (mtu, local_mtu) = (found.mtu, found.way.mtu);
                if was_reduced {
                    tracing::info!(node, %address, mtu, "full path MTU again");
                } else {
                    let told_by = found.told.map(|told| told.from.to_string());
                    tracing::info!(node, %address, mtu, local_mtu, told_by, "reduced path MTU");
                }
            }
            results.path_looked_at(id, found);
            drop(results);
            self.path_mtu.end_wait(id);
        }
    }

    /// Finds the MTU of the paths to a node or to all for the sake of whoever holds the other end of `done`.
    fn probe_path_mtu(&mut self, node: Option<&str>, done: oneshot::Sender<()>) {
        let is_wanted = |target: &Target| {
            node.is_none_or(|name| {
                let known = self.set.nodes.get(target.node);
                known.is_some_and(|known| known.full_name() == name)
            })
        };
        let targets = self.targets.iter();
        let ids: Vec<_> = targets
            .filter(|(id, target)| self.path_mtu.has(*id) && is_wanted(target))
            .map(|(id, _)| id)
            .collect();
        let now = self.now();
        self.path_mtu.request(&ids, now, done);
        self.shared.results_mut().await_paths(&ids);
    }

    /// Begins to probe all targets for the sake of `waiter`, who may also join those who wait already.
    fn sweep(&mut self, waiter: mpsc::UnboundedSender<SweepEvent>) {
        let now = self.now();
        if self.sweep.is_none() {
            let spread = self.rate_time(self.targets.len());
            self.schedule.pull_in_all(now, spread);
            self.send_at = self.send_at.min(now);
            let targets = self.targets.iter().map(|(id, target)| (id, target.node));
            let nodes = self.set.nodes.len();
            let timeout = self.options.timeout;
            self.sweep = Some(Sweep::new(targets, nodes, now, spread, timeout));
            self.progress_at = now + PROGRESS_PERIOD;
        }
        if let Some(sweep) = &mut self.sweep {
            sweep.join(waiter);
        }
    }

    fn end_sweep(&mut self) {
        let now = self.now();
        let Some(sweep) = &mut self.sweep else {
            return;
        };
        if sweep.is_over(now) {
            // Closes the channels of those who wait.
            self.sweep = None;
        } else if self.progress_at <= now {
            self.progress_at = now + PROGRESS_PERIOD;
            if !sweep.tell_progress() {
                self.sweep = None;
            }
        }
    }

    /// Makes the targets anew from the registry, the local endpoint and what was learned.
    fn rebuild(&mut self) {
        let begun = self.now();
        self.rebuild_at = None;
        self.set = self.nodes.borrow_and_update().clone();
        let local_health = self.local_health.borrow_and_update().clone();
        let mut paths = Vec::with_capacity(self.set.nodes.len());
        for node in &self.set.nodes {
            let local = node.full_name() == self.options.local;
            let learned;
            let endpoint = if local && !local_health.is_empty() {
                &local_health
            } else if local || !node.health_addresses.is_empty() {
                &node.health_addresses
            } else {
                learned = self.learned.get(node);
                &learned
            };
            paths.push(NodePaths::new(node, local, endpoint));
        }

        let intervals = self.options.intervals;
        let is_probed = |key: &TargetKey| intervals.get(key.path, key.protocol).is_some();
        let wanted = paths.iter().enumerate().flat_map(|(index, node)| {
            node.targets()
                .filter(is_probed)
                .map(move |key| Target { key, node: index })
        });
        let changes = self.targets.replace(wanted);
        self.drop_targets(&changes.gone);
        self.add_targets(&changes.fresh);
        let leaves_this_host = |target: &Target| {
            let TargetKey {
                address,
                path,
                protocol,
            } = target.key;
            // An endpoint's packets go the way of its host's.
            (path, protocol) == (Path::Host, Protocol::Icmp)
                && paths.get(target.node).is_some_and(|node| !node.local)
                && !self.options.local_addresses.contains(&address)
        };
        let paths_out = self.targets.iter();
        let paths_out = paths_out
            .filter(|(_, target)| leaves_this_host(target))
            .map(|(id, target)| (id, target.key.address));
        self.path_mtu.set_paths(paths_out, begun);
        if let Some(sweep) = &mut self.sweep {
            let targets = &self.targets;
            sweep.renumber(paths.len(), |id| targets.get(id).map(|target| target.node));
        }

        // No nodes at all is what a registry says that has not been reached yet.
        if !self.set.nodes.is_empty() {
            let names: HashSet<&str> = paths.iter().map(|node| node.name.as_str()).collect();
            self.learned.retain(|name| names.contains(name));
        }
        let schedule = &self.schedule;
        self.shared
            .results_mut()
            .set_nodes(self.set.clone(), paths, &self.targets, |interval| {
                schedule.effective(interval)
            });
        self.rebuild_took = self.now().saturating_sub(begun);
    }

    fn drop_targets(&mut self, gone: &[(TargetId, TargetKey)]) {
        let mut results = self.shared.results_mut();
        for (id, key) in gone {
            self.schedule.remove(*id);
            self.confirmation.remove(*id);
            self.relief.forget(*id);
            if let Some(sweep) = &mut self.sweep {
                sweep.remove(*id);
            }
            results.remove(*id);
            self.accounts.close(*key);
        }
        if !gone.is_empty() {
            self.icmp.retain(|id| self.targets.get(id).is_some());
        }
    }

    fn add_targets(&mut self, fresh: &[(TargetId, TargetKey)]) {
        let now = self.now();
        let spread = self.rate_time(fresh.len()).max(FIRST_SPREAD);
        self.accounts.open(fresh.iter().map(|(_, key)| *key));
        // Room for these alone: growing by itself takes up to twice as much.
        self.schedule.reserve(self.targets.len());
        self.confirmation.reserve(self.targets.len());
        for (id, key) in fresh {
            let interval = self.options.intervals.get(key.path, key.protocol);
            if let Some(interval) = interval {
                self.schedule.insert(*id, key, interval, now, spread);
                self.confirmation.insert(*id);
            }
        }
    }

    /// The time that probes of so many targets take at the probe rate.
    fn rate_time(&self, targets: usize) -> Duration {
        Duration::from_secs(targets as u64) / self.options.rate.max(1)
    }
}

/// A random ICMP identifier other than `id`.
fn other_id(id: u16) -> u16 {
    id.wrapping_add(rand::random_range(1..=u16::MAX))
}

/// How many HTTP probes may run at a time under the limit on open files.
fn http_places() -> usize {
    let (fewest, most) = HTTP_CONCURRENCY;
    getrlimit(Resource::RLIMIT_NOFILE).map_or(fewest, |(soft, _)| {
        usize::try_from(soft / HTTP_DESCRIPTORS_DIVISOR).map_or(most, |n| n.clamp(fewest, most))
    })
}
