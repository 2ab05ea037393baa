//! The single task that owns the mesh's state: it sends due probes, handles replies, and follows the registry.

mod exchange;
mod http;
mod icmp;
mod outcome;
mod request;
mod targets;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use health_common::arrivals::Prober;
use health_datapath::rtt_store::RttStore;
use health_model::pace::Budget;
use health_registry::nodes::NodeSet;
use slotmap::SparseSecondaryMap;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::sleep_until;

use self::http::HttpProbes;
use crate::accounts::Accounts;
use crate::confirm::{Confirmation, Due};
use crate::handle::{MeshError, MeshOptions, Shared, Tuning};
use crate::http::Asker;
use crate::icmp::{IcmpEvent, IcmpProber, Mark};
use crate::learned::LearnedAddresses;
use crate::path_mtu::PathMtuProber;
use crate::relief::Relief;
use crate::schedule::{DueTarget, Schedule};
use crate::sweep::{Sweep, SweepEvent};
use crate::target::{Protocol, TargetId, TargetKey, Targets};

/// Minimum time between two turns of the engine. Everything that arrives in between is handled together, at a fraction
/// of the cost; no measurement depends on when it is handled.
const TURN: Duration = Duration::from_millis(5);
/// Scheduled probes are sent in batches of this size, if gathering a batch takes no longer than [`MAX_GATHER`].
const BATCH: u32 = 16;
const MAX_GATHER: Duration = Duration::from_millis(50);
/// A batch gathers for at most this fraction of the shortest interval.
const GATHER_DIVISOR: u32 = 8;
/// If nothing is due, the engine still completes a turn this often, so that it is seen to be alive.
const IDLE: Duration = Duration::from_secs(1);

/// A request to the engine.
#[derive(Debug)]
pub(super) enum Command {
    /// Probe all targets.
    Probe(mpsc::UnboundedSender<SweepEvent>),
    /// Measure the MTU of the paths to this node, by its full name, or to all; `done` is dropped when that is finished.
    ProbePathMtu {
        node: Option<String>,
        done: oneshot::Sender<()>,
    },
    /// Change when to probe or how to rate results.
    Tune(Box<Tuning>),
    /// Stop.
    Shutdown(oneshot::Sender<()>),
}

pub(super) struct Engine {
    options: MeshOptions,
    shared: Arc<Shared>,
    nodes: watch::Receiver<Arc<NodeSet>>,
    local_health: watch::Receiver<Vec<IpAddr>>,
    accounts: Accounts,
    learned: LearnedAddresses,
    schedule: Schedule,
    confirmation: Confirmation,
    budget: Budget,
    relief: Relief,
    /// How many times in a row a target's echo probe could not be sent for lack of space. Few targets have an entry.
    deferrals: SparseSecondaryMap<TargetId, u8>,
    /// The nodes from which `targets` was built.
    set: Arc<NodeSet>,
    targets: Targets,
    /// When the targets must be rebuilt.
    rebuild_at: Option<Duration>,
    /// How long the last rebuild took.
    rebuild_took: Duration,
    icmp: IcmpProber,
    /// Processed after each batch; kept to reuse its memory.
    icmp_events: Vec<IcmpEvent>,
    path_mtu: PathMtuProber,
    http: HttpProbes,
    /// Earliest time at which scheduled probes are sent next.
    send_at: Duration,
    sweep: Option<Sweep>,
    /// When clients waiting for the sweep get the next progress report.
    progress_at: Duration,
}

impl Engine {
    /// Creates an engine that knows the current nodes but has probed none.
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
                key: options.keys.probe,
                one_way: options.one_way,
            },
            rand::random(),
            shared.ignored.clone(),
        )
        .map_err(MeshError::RawSocket)?;
        let path_mtu = PathMtuProber::open(
            &options.local,
            options.tuning.path_mtu(),
            other_id(options.icmp_id),
            shared.ignored.clone(),
        )
        .map_err(MeshError::RawSocket)?;
        let asker = Asker {
            name: options.local.clone(),
            prober: Prober {
                session: options.session,
                icmp_id_be: options.icmp_id.to_be(),
                pad: 0,
            },
            keys: options.keys.hello.clone(),
        };
        let mut engine = Self {
            schedule: Schedule::new(&options.local, options.tuning.rate),
            confirmation: Confirmation::default(),
            budget: Budget::new(options.tuning.rate),
            relief: Relief::new(options.tuning.passive_relief),
            deferrals: SparseSecondaryMap::new(),
            learned: LearnedAddresses::load(&options.state_dir),
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
            http: HttpProbes::new(asker),
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

    /// Probes until it gets a shutdown command or all handles are gone.
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
                    Some(Command::Tune(tuning)) => self.tune(*tuning),
                    Some(Command::Shutdown(done)) => {
                        finished = Some(done);
                        break;
                    }
                    None => break,
                },
                // If a source is gone, its last value stays in use.
                Ok(()) = self.nodes.changed() => self.rebuild(),
                Ok(()) = self.local_health.changed() => self.rebuild(),
                _ = self.icmp.readable() => {}
                () = self.path_mtu.ready() => {}
                Some(done) = self.http.running.join_next() => self.http_done(done),
                () = sleep_until(wake) => {}
            }
            sleep_until(self.shared.start + turned + TURN).await;
        }
        self.learned.close().await;
        if let Some(done) = finished {
            // The requester may be gone.
            let _ = done.send(());
        }
    }

    fn now(&self) -> Duration {
        self.shared.now()
    }

    /// Adopts new options. Probes in flight keep their time-out.
    fn tune(&mut self, tuning: Tuning) {
        let now = self.now();
        self.options.tuning = tuning;
        self.budget = Budget::new(tuning.rate);
        self.relief = Relief::new(tuning.passive_relief);
        self.path_mtu.tune(tuning.path_mtu(), now);
        self.schedule.set_rate(tuning.rate);
        for (id, target) in self.targets.iter() {
            let TargetKey { path, protocol, .. } = target.key;
            if let Some(interval) = tuning.intervals.get(path, protocol) {
                self.schedule.set_interval(id, interval, now);
            }
        }
        self.shared.results_mut().tune(&tuning);
        // Adds and removes targets whose interval was or is now off.
        self.rebuild();
    }

    /// Handles everything received, then performs all due actions.
    fn turn(&mut self) {
        // Receives first: no reply that has already arrived may count as missing, even if the agent itself was delayed.
        self.receive_icmp();
        while let Some(done) = self.http.running.try_join_next() {
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

    /// Alternates between confirming and scheduled probes, so that neither kind starves the other.
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
                    self.begin(id, Duration::ZERO);
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
                        self.begin(due.id, self.delay_of(due));
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

    /// How long scheduled probes gather before they are sent: briefly during a sweep, since a client waits for it.
    fn gather_time(&self) -> Duration {
        if self.sweep.is_some() {
            return TURN;
        }
        let shortest = self
            .options
            .tuning
            .intervals
            .iter()
            .min()
            .unwrap_or(MAX_GATHER);
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

    /// Makes the node's other targets due immediately, unless they were probed since `since`: only all of them together
    /// show what is wrong with a node.
    fn probe_siblings(&mut self, id: TargetId, since: Duration) {
        let Some(target) = self.targets.get(id) else {
            return;
        };
        let now = self.now();
        let results = self.shared.results();
        for sibling in results.targets_of(target.node) {
            if self.confirmation.not_probed_since(sibling, since) {
                self.schedule.pull_in(sibling, now);
                // The siblings do not wait for a batch to gather.
                self.send_at = self.send_at.min(now);
            }
        }
    }

    /// Whether a due probe is unnecessary: connections to its address were answered within the last interval, and
    /// nothing is wrong with the node. HTTP probes are always needed: they test the agent, which connections do not.
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
        let interval = self.options.tuning.intervals.get(key.path, key.protocol);
        let interval = self.schedule.effective(interval.unwrap_or_default());
        relief.leave_out(due.id, || {
            let results = shared.results();
            let is_well = |id| results.is_reachable(id) == Some(true) && !confirmation.in_doubt(id);
            results.targets_of(target.node).all(is_well) && accounts.had_traffic(key, interval)
        })
    }

    /// How late a probe is. In a sweep, all targets are due at once and probed over some time, as the rate allows.
    fn delay_of(&self, due: DueTarget) -> Duration {
        match due.routine && self.sweep.is_none() {
            true => due.late,
            false => Duration::ZERO,
        }
    }

    /// Starts a probe that was due `late` ago.
    fn begin(&mut self, id: TargetId, late: Duration) {
        match self.targets.get(id).map(|target| target.key.protocol) {
            Some(Protocol::Icmp) => self.begin_icmp(id, late),
            Some(Protocol::Http) => {
                let due = self.now().saturating_sub(late);
                self.http.queue(id, due);
            }
            None => {}
        }
    }
}

/// A random ICMP identifier other than `id`.
fn other_id(id: u16) -> u16 {
    id.wrapping_add(rand::random_range(1..=u16::MAX))
}
