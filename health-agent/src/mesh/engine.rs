//! The one task that owns the mesh's state: it sends what is due, takes in what comes back, and
//! follows the registry.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use health_common::probe::Path;
use jiff::Timestamp;
use nix::sys::resource::{Resource, getrlimit};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, sleep_until};

use super::accounts::Accounts;
use super::confirm::{Confirmation, Due, Judgement};
use super::failure::Failure;
use super::http::{self, Hello};
use super::icmp::{IcmpEvent, IcmpProber, Probe};
use super::learned::Learned;
use super::results::Results;
use super::rtt_store::RttStore;
use super::schedule::Schedule;
use super::target::{NodePaths, Protocol, TargetKey};
use crate::api::types::{ConnectivityStatus, HealthStatus, NodeList, RegistryState, RttSource};
use crate::nodes::NodeSet;

/// Time over which the first probes of new targets are spread.
const FIRST_SPREAD: Duration = Duration::from_millis(100);
/// Most probes a second that are begun for many targets at once (new ones, or all on request).
const BURST_RATE: u32 = 20_000;
/// Most and fewest HTTP probes at a time, and the share of this process's file descriptors that
/// they may hold. A dead peer keeps its place until the time-out, so few places would let the dead
/// delay the living.
const HTTP_CONCURRENCY: (usize, usize) = (64, 4096);
const HTTP_DESCRIPTORS_DIVISOR: u64 = 2;
/// Pause before a probe that found no room in the socket is tried again.
const DEFERRED_RETRY: Duration = Duration::from_millis(10);
/// Time in which changes of learned addresses are gathered before the targets are made anew.
const LEARN_DELAY: Duration = Duration::from_millis(50);
/// Time between the end of the probes made on request and the answer to the request.
const SWEEP_MARGIN: Duration = Duration::from_millis(50);
/// Nothing is due: sleep until something happens.
const IDLE: Duration = Duration::from_secs(3600);

/// How to probe, and as whom.
#[derive(Clone, Debug)]
pub struct MeshOptions {
    /// Full name (`cluster/node`) of this node.
    pub local: String,
    /// This node's own addresses: probes to them cross no uplink.
    pub local_addresses: Vec<IpAddr>,
    /// Time between two probes of one target.
    pub interval: Duration,
    /// How long a probe waits for its answer.
    pub timeout: Duration,
    /// TCP port of the responders, on all nodes.
    pub port: u16,
    /// ICMP identifier, host byte order. As in `HEALTH_CONFIG`; random for each start.
    pub icmp_id: u16,
    /// Marks the payload of ICMP probes. As in `HEALTH_CONFIG`.
    pub magic: u64,
    /// Folder of what is kept over a restart.
    pub state_dir: PathBuf,
}

/// Why the mesh cannot start.
#[derive(Debug, thiserror::Error)]
pub enum MeshError {
    /// No raw sockets.
    #[error("cannot open a raw ICMP socket: {0}; run as root or with CAP_NET_RAW")]
    RawSocket(io::Error),
    /// The rows of round-trip times cannot be read.
    #[error("cannot list the rows of HEALTH_RTT: {0}")]
    RttStore(io::Error),
}

/// The prober.
#[derive(Debug)]
pub struct Mesh;

impl Mesh {
    /// Starts to probe the nodes of each set that `nodes` brings. `local_health` tells the addresses
    /// of this node's own health endpoint; while it is empty, the registry's stand. Rows of `store`
    /// that belong to no known peer are removed. Must be called in a tokio runtime, in the network
    /// namespace to probe from.
    pub fn start(
        options: MeshOptions,
        nodes: watch::Receiver<Arc<NodeSet>>,
        store: Arc<dyn RttStore>,
        local_health: watch::Receiver<Vec<IpAddr>>,
    ) -> Result<MeshHandle, MeshError> {
        let icmp = IcmpProber::open(options.icmp_id, options.magic, rand::random())
            .map_err(MeshError::RawSocket)?;
        let results = Arc::new(RwLock::new(Results::new(
            options.local.clone(),
            options.interval,
        )));
        let (commands, received) = mpsc::channel(16);
        let mut engine = Engine {
            start: Instant::now(),
            schedule: Schedule::new(&options.local, options.interval),
            confirmation: Confirmation::default(),
            learned: Learned::load(&options.state_dir),
            accounts: Accounts::new(store, options.icmp_id, options.local_addresses.clone()),
            options,
            nodes,
            local_health,
            results: results.clone(),
            set: Arc::default(),
            targets: HashMap::new(),
            rebuild_at: None,
            icmp,
            icmp_events: Vec::new(),
            http: JoinSet::new(),
            http_places: http_places(),
            http_waiting: VecDeque::new(),
            http_queued: HashSet::new(),
            sweep: None,
        };
        engine.rebuild();
        if !engine.set.nodes.is_empty() {
            let known = engine.targets.keys().copied();
            engine
                .accounts
                .keep_only(known)
                .map_err(MeshError::RttStore)?;
        }
        tokio::spawn(engine.run(received));
        Ok(MeshHandle { results, commands })
    }
}

/// Speaks to a running mesh. The mesh ends when the last handle is dropped.
#[derive(Clone, Debug)]
pub struct MeshHandle {
    results: Arc<RwLock<Results>>,
    commands: mpsc::Sender<Command>,
}

#[derive(Debug)]
enum Command {
    Probe(oneshot::Sender<()>),
    Shutdown(oneshot::Sender<()>),
}

impl MeshHandle {
    /// What is known now.
    pub fn report(&self) -> HealthStatus {
        self.results
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .report()
    }

    /// How the node registries do.
    pub fn registries(&self) -> Vec<RegistryState> {
        self.results
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .registries()
    }

    /// The registry as it is probed.
    pub fn nodes(&self) -> NodeList {
        self.results
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .node_list()
    }

    /// Probes all targets and reports when all results are there, at the latest after the probe
    /// time-out, with what is known then. Requests that come while one is served share its probes.
    pub async fn probe_now(&self) -> HealthStatus {
        let (done, wait) = oneshot::channel();
        if self.commands.send(Command::Probe(done)).await.is_ok() {
            // An error means that the mesh has ended; what was known stays true.
            let _ = wait.await;
        }
        self.report()
    }

    /// Ends the mesh; returns when what it learned is written. Reports stay available.
    pub async fn shutdown(&self) {
        let (done, wait) = oneshot::channel();
        if self.commands.send(Command::Shutdown(done)).await.is_ok() {
            let _ = wait.await;
        }
    }
}

/// What there is to know about a target besides its results.
#[derive(Clone, Copy, Debug)]
struct Target {
    /// Index in the node set in force.
    node: usize,
    /// Whether its probes cross an uplink.
    remote: bool,
}

/// A request to probe all targets.
#[derive(Debug)]
struct Sweep {
    begun: Duration,
    /// When the requests are answered at the latest.
    deadline: Duration,
    /// When its probes are given up: a little earlier, so that the answer holds their results.
    expires: Duration,
    awaited: HashSet<TargetKey>,
    waiters: Vec<oneshot::Sender<()>>,
}

/// The end of an HTTP probe.
#[derive(Debug)]
struct HttpDone {
    key: TargetKey,
    sent: Duration,
    answer: Result<Hello, Failure>,
}

struct Engine {
    options: MeshOptions,
    /// All times are durations since this.
    start: Instant,
    nodes: watch::Receiver<Arc<NodeSet>>,
    local_health: watch::Receiver<Vec<IpAddr>>,
    accounts: Accounts,
    results: Arc<RwLock<Results>>,
    learned: Learned,
    schedule: Schedule,
    confirmation: Confirmation,
    /// The nodes that `targets` was made of.
    set: Arc<NodeSet>,
    targets: HashMap<TargetKey, Target>,
    /// When the targets are to be made anew.
    rebuild_at: Option<Duration>,
    icmp: IcmpProber,
    /// Taken in after each batch; kept for its memory.
    icmp_events: Vec<IcmpEvent>,
    http: JoinSet<HttpDone>,
    http_places: usize,
    /// Due, while there is no place.
    http_waiting: VecDeque<TargetKey>,
    /// The targets in `http_waiting`.
    http_queued: HashSet<TargetKey>,
    sweep: Option<Sweep>,
}

impl Engine {
    async fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        let mut finished = None;
        loop {
            self.work();
            let wake = self.start + self.next_wake();
            tokio::select! {
                command = commands.recv() => match command {
                    Some(Command::Probe(waiter)) => self.sweep(waiter),
                    Some(Command::Shutdown(done)) => {
                        finished = Some(done);
                        break;
                    }
                    None => break,
                },
                // A source that has gone leaves what it said last.
                Ok(()) = self.nodes.changed() => self.rebuild(),
                Ok(()) = self.local_health.changed() => self.rebuild(),
                _ = self.icmp.readable() => self.receive_icmp(),
                Some(done) = self.http.join_next() => self.http_done(done),
                () = sleep_until(wake) => {}
            }
        }
        self.learned.close().await;
        if let Some(done) = finished {
            // The asker may have gone.
            let _ = done.send(());
        }
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// Does all that is due.
    fn work(&mut self) {
        let now = self.now();
        if self.rebuild_at.is_some_and(|at| at <= now) {
            self.rebuild();
        }
        if self.icmp.next_expiry().is_some_and(|at| at <= now) {
            // A reply that is there has come in time, even if the agent itself was held up.
            self.receive_icmp();
            self.icmp.expire(now, &mut self.icmp_events);
            self.take_icmp_events();
        }
        if self.confirmation.next_due().is_some_and(|at| at <= now) {
            self.confirm();
        }
        while let Some(key) = self.schedule.pop_due(now) {
            self.begin(key);
        }
        self.icmp.flush(&mut self.icmp_events);
        self.take_icmp_events();
        self.begin_http();
        let done = |sweep: &Sweep| sweep.awaited.is_empty() || sweep.deadline <= now;
        if let Some(sweep) = self.sweep.take_if(|sweep| done(sweep)) {
            for waiter in sweep.waiters {
                // The asker may have gone.
                let _ = waiter.send(());
            }
        }
    }

    fn next_wake(&mut self) -> Duration {
        let sweep = self.sweep.as_ref().map(|sweep| sweep.deadline);
        [
            self.schedule.next_due(),
            self.confirmation.next_due(),
            self.icmp.next_expiry(),
            self.rebuild_at,
            sweep,
        ]
        .into_iter()
        .flatten()
        .min()
        .unwrap_or_else(|| self.now() + IDLE)
    }

    /// When a probe sent now is given up.
    fn expiry(&self, now: Duration) -> Duration {
        let regular = now + self.options.timeout;
        match &self.sweep {
            // One that was held up, so that little time would be left, gets its full time.
            Some(sweep) if sweep.expires >= now + self.options.timeout / 2 => {
                regular.min(sweep.expires)
            }
            _ => regular,
        }
    }

    /// Probes again where a change is to be confirmed, and takes in what is confirmed.
    fn confirm(&mut self) {
        // Nothing that has come counts as missing, even if the agent itself was held up.
        self.receive_icmp();
        while let Some(done) = self.http.try_join_next() {
            self.http_done(done);
        }
        let now = self.now();
        while let Some(due) = self.confirmation.poll(now) {
            match due {
                Due::Reprobe(key) => self.begin(key),
                Due::Unreachable { key, sent, failure } => {
                    self.schedule.retry(&key, now);
                    self.record_failure(key, sent, &failure);
                }
                Due::NotRecovered(key) => self.schedule.retry(&key, now),
            }
        }
    }

    fn begin(&mut self, key: TargetKey) {
        match key.protocol {
            Protocol::Icmp => self.begin_icmp(key),
            Protocol::Http => self.queue_http(key),
        }
    }

    fn begin_icmp(&mut self, key: TargetKey) {
        if let Some(target) = self.targets.get(&key) {
            let now = self.now();
            let expiry = self.expiry(now);
            let probe = Probe::new(key, now, expiry, target.remote);
            self.confirmation.sent(key, now, expiry);
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
                IcmpEvent::Answered {
                    probe,
                    sequence,
                    rtt,
                } => {
                    let (rtt, source) = self.accounts.answered(&probe, sequence, rtt);
                    if self.answered(probe.key, probe.sent, rtt, source, None) {
                        let now = self.now();
                        self.schedule.settle(&probe.key, now);
                    }
                }
                IcmpEvent::Failed {
                    probe,
                    sequence,
                    failure,
                } => {
                    self.accounts.lost(&probe, sequence, &failure);
                    self.failed(probe.key, probe.sent, &failure);
                }
                IcmpEvent::Deferred { key } => {
                    let at = self.now() + DEFERRED_RETRY;
                    self.confirmation.withdrawn(key, at);
                    self.schedule.pull_in(&key, at);
                }
            }
        }
        self.icmp_events = events;
    }

    /// Queues an HTTP probe, unless one waits already.
    fn queue_http(&mut self, key: TargetKey) {
        if self.http_queued.insert(key) {
            self.http_waiting.push_back(key);
        }
    }

    fn begin_http(&mut self) {
        while self.http.len() < self.http_places
            && let Some(key) = self.http_waiting.pop_front()
        {
            self.http_queued.remove(&key);
            if !self.targets.contains_key(&key) {
                continue;
            }
            let sent = self.now();
            let expiry = self.expiry(sent);
            self.confirmation.sent(key, sent, expiry);
            let peer = SocketAddr::new(key.address, self.options.port);
            let deadline = self.start + expiry;
            self.http.spawn(async move {
                let answer = http::get_hello(peer, deadline).await;
                HttpDone { key, sent, answer }
            });
        }
    }

    fn http_done(&mut self, done: Result<HttpDone, JoinError>) {
        let HttpDone { key, sent, answer } = match done {
            Ok(done) => done,
            Err(error) => {
                tracing::error!(%error, "an HTTP probe ended without a result");
                return;
            }
        };
        let Some(&target) = self.targets.get(&key) else {
            return;
        };
        match answer {
            Ok(hello) => {
                self.accounts.sample(key, hello.total);
                let source = RttSource::Socket;
                let reachable = self.answered(key, sent, hello.total, source, Some(hello.connect));
                let all_told =
                    key.path != Path::Host || self.learn(target, hello.health_endpoint.as_deref());
                if reachable && all_told {
                    let now = self.now();
                    self.schedule.settle(&key, now);
                }
            }
            Err(failure) => {
                self.accounts.lost_untracked(key);
                self.failed(key, sent, &failure);
            }
        }
    }

    /// Takes in an answer. Returns whether the target is reachable.
    fn answered(
        &mut self,
        key: TargetKey,
        sent: Duration,
        rtt: Duration,
        source: RttSource,
        connect: Option<Duration>,
    ) -> bool {
        let now = self.now();
        match self.confirmation.answered(key, sent, rtt, now) {
            Judgement::Reachable => {
                let status = ConnectivityStatus {
                    latency: nanos(rtt),
                    status: String::new(),
                    last_probed: self.wall_clock(sent),
                    rtt_source: Some(source),
                    connect_latency: connect.map(nanos),
                    consecutive_failures: 0,
                    last_change: Some(Timestamp::now()),
                    degraded: None,
                };
                self.record(key, sent, status);
                true
            }
            Judgement::Unreachable | Judgement::Unchanged => {
                self.unchanged(key, sent);
                false
            }
        }
    }

    fn failed(&mut self, key: TargetKey, sent: Duration, failure: &Failure) {
        let now = self.now();
        let was_in_doubt = self.confirmation.in_doubt(&key);
        match self.confirmation.failed(key, sent, failure, now) {
            Judgement::Unreachable => {
                if was_in_doubt {
                    self.schedule.retry(&key, now);
                }
                self.record_failure(key, sent, failure);
            }
            Judgement::Reachable | Judgement::Unchanged => self.unchanged(key, sent),
        }
    }

    fn record_failure(&mut self, key: TargetKey, sent: Duration, failure: &Failure) {
        let status = ConnectivityStatus {
            latency: 0,
            status: failure.to_string(),
            last_probed: self.wall_clock(sent),
            rtt_source: None,
            connect_latency: None,
            consecutive_failures: self.confirmation.unanswered(&key),
            last_change: Some(Timestamp::now()),
            degraded: None,
        };
        self.record(key, sent, status);
    }

    /// A result came that leaves what is shown.
    fn unchanged(&mut self, key: TargetKey, sent: Duration) {
        if !self.confirmation.in_doubt(&key) {
            self.end_wait(key, sent);
        }
    }

    fn record(&mut self, key: TargetKey, sent: Duration, status: ConnectivityStatus) {
        let mut results = self.results.write().unwrap_or_else(PoisonError::into_inner);
        let was_ok = results.is_ok(&key);
        let TargetKey {
            address,
            path,
            protocol,
        } = key;
        match (was_ok, status.is_ok()) {
            (Some(true) | None, false) => {
                tracing::info!(%address, ?path, ?protocol, status = status.status, "unreachable");
            }
            (Some(false), true) => tracing::info!(%address, ?path, ?protocol, "reachable again"),
            _ => {}
        }
        results.record(key, sent, status);
        drop(results);
        self.end_wait(key, sent);
    }

    /// The sweep need not wait for the target any longer if the probe is one of the sweep's.
    fn end_wait(&mut self, key: TargetKey, sent: Duration) {
        if let Some(sweep) = &mut self.sweep
            && sent >= sweep.begun
        {
            sweep.awaited.remove(&key);
        }
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
            self.rebuild_at = Some(self.now() + LEARN_DELAY);
        }
        true
    }

    /// Begins to probe all targets for the sake of `waiter`.
    fn sweep(&mut self, waiter: oneshot::Sender<()>) {
        if let Some(sweep) = &mut self.sweep {
            sweep.waiters.push(waiter);
            return;
        }
        let now = self.now();
        let timeout = self.options.timeout;
        let margin = (timeout / 10).min(SWEEP_MARGIN);
        self.sweep = Some(Sweep {
            begun: now,
            deadline: now + timeout,
            expires: now + timeout - margin,
            awaited: self.targets.keys().copied().collect(),
            waiters: vec![waiter],
        });
        let spread = burst_time(self.targets.len()).min(timeout / 4);
        self.schedule.pull_in_all(now, spread);
    }

    /// Makes the targets anew from the registry, the local endpoint and what was learned.
    fn rebuild(&mut self) {
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

        let mut targets = HashMap::with_capacity(self.targets.len());
        for (index, node) in paths.iter().enumerate() {
            for key in node.targets() {
                let here = node.local || self.options.local_addresses.contains(&key.address);
                targets.entry(key).or_insert(Target {
                    node: index,
                    remote: !here,
                });
            }
        }
        let before = std::mem::replace(&mut self.targets, targets);
        self.drop_targets(
            before
                .keys()
                .filter(|key| !self.targets.contains_key(key))
                .copied()
                .collect(),
        );
        self.add_targets(
            self.targets
                .keys()
                .filter(|key| !before.contains_key(key))
                .copied()
                .collect(),
        );

        // No nodes at all is what a registry says that has not been reached yet.
        if !self.set.nodes.is_empty() {
            let names: HashSet<&str> = paths.iter().map(|node| node.name.as_str()).collect();
            self.learned.retain(|name| names.contains(name));
        }
        self.results
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .set_nodes(self.set.clone(), paths);
    }

    fn drop_targets(&mut self, gone: Vec<TargetKey>) {
        let mut results = self.results.write().unwrap_or_else(PoisonError::into_inner);
        for key in &gone {
            self.schedule.remove(key);
            self.confirmation.remove(key);
            if let Some(sweep) = &mut self.sweep {
                sweep.awaited.remove(key);
            }
            results.remove(key);
            self.accounts.close(*key);
        }
        if !gone.is_empty() {
            self.icmp.retain(|key| self.targets.contains_key(key));
        }
    }

    fn add_targets(&mut self, fresh: Vec<TargetKey>) {
        let now = self.now();
        let spread = burst_time(fresh.len()).max(FIRST_SPREAD);
        self.accounts.open(&fresh);
        for key in fresh {
            self.schedule.insert(key, now, spread);
        }
    }
}

/// How many HTTP probes may run at a time under the limit on open files.
fn http_places() -> usize {
    let (fewest, most) = HTTP_CONCURRENCY;
    getrlimit(Resource::RLIMIT_NOFILE).map_or(fewest, |(soft, _)| {
        usize::try_from(soft / HTTP_DESCRIPTORS_DIVISOR).map_or(most, |n| n.clamp(fewest, most))
    })
}

/// The time that probes of so many targets are spread over at [`BURST_RATE`].
fn burst_time(targets: usize) -> Duration {
    Duration::from_secs(targets as u64) / BURST_RATE
}

fn nanos(duration: Duration) -> i64 {
    duration.as_nanos().try_into().unwrap_or(i64::MAX)
}
