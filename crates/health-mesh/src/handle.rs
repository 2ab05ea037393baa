//! Starts a mesh, and controls a running one.

use std::convert::Infallible;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;
use std::{io, thread};

use health_datapath::rtt_store::RttStore;
use health_model::activity::LastTurn;
use health_model::api::{
    AgentProblem, FullMap, HealthStatus, NodeList, NodeStatus, PathMtuEntry, PolicyLag, ProbeEvent,
    RegistryState, TargetHistory,
};
use health_registry::nodes::NodeSet;
use health_settings::ProbeIntervals;
use serde::ser::{Serialize, SerializeSeq as _, Serializer};
use tokio::runtime::Builder;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use super::counters::{IgnoredReplies, IgnoredReplyCounts};
use super::engine::{Command, Engine};
use super::exchange::MalformedHeaders;
use super::mesh_key::MeshKeys;
use super::path_mtu::PathMtuOptions;
use super::results::Results;
use super::sending::Sending;
use super::sweep::SweepEvent;

/// Maximum number of queued requests to the engine.
const COMMANDS: usize = 16;
/// Nodes serialized before the prober gets a turn: about 0.2 ms.
const NODES_AT_A_TIME: usize = 64;
/// Maximum wait for path MTUs: shorter than a client's time-out. A black hole takes about 15 s.
const PATH_MTU_WAIT: Duration = Duration::from_secs(25);
/// Maximum number of probe events queued for a slow reader.
const EVENTS: usize = 64;

/// Options that can change while the mesh runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tuning {
    /// Time between two probes of one target.
    pub intervals: ProbeIntervals,
    /// Maximum number of probes a second; intervals grow if they would need more.
    pub rate: u32,
    /// How long a probe waits for an answer.
    pub timeout: Duration,
    /// Fraction of a target's probes, 0 to 1, whose loss makes it degraded.
    pub loss_threshold: f64,
    /// Factor by which ICMP probes of a target become rarer while it answers on a connection to its address; 1 for no
    /// change.
    pub passive_relief: u8,
    /// Time between two checks of a path's MTU; `None`: only on request.
    pub path_mtu_interval: Option<Duration>,
}

impl Tuning {
    pub(super) fn path_mtu(&self) -> PathMtuOptions {
        PathMtuOptions {
            interval: self.path_mtu_interval,
            rate: self.rate,
            timeout: self.timeout,
        }
    }
}

/// How to probe, and as which node.
#[derive(Clone, Debug)]
pub struct MeshOptions {
    /// Full name (`cluster/node`) of this node.
    pub local: String,
    /// This node's own addresses: probes to them do not cross an uplink.
    pub local_addresses: Vec<IpAddr>,
    /// Devices that lead to other nodes.
    pub uplinks: Vec<String>,
    /// When to probe and how to rate results.
    pub tuning: Tuning,
    /// Whether round trips of all connections to the targets' addresses are counted.
    pub passive_rtt: bool,
    /// TCP port of the responders, on all nodes.
    pub port: u16,
    /// ICMP identifier, host byte order. Same as in `HEALTH_CONFIG`; random on each start.
    pub icmp_id: u16,
    /// Session of the ICMP probes. Same as in `HEALTH_CONFIG`; random on each start, never 0.
    pub session: u32,
    /// Keys of the mesh. The key of the tags that mark ICMP probes is the same as in `HEALTH_CONFIG`.
    pub keys: MeshKeys,
    /// Whether peers are asked for the arrival times of ICMP probes.
    pub one_way: bool,
    /// Why no health endpoint is probed; this node then has none either. `None`: they are probed.
    pub hosts_only: Option<String>,
    /// Folder for data that survives a restart.
    pub state_dir: PathBuf,
    /// This node's nearly full maps; listed in reports.
    pub full_maps: watch::Receiver<Vec<FullMap>>,
    /// This node's endpoints that do not enforce its current policy; included in reports.
    pub policy_lag: watch::Receiver<Option<PolicyLag>>,
    /// Problems of this agent; listed in reports.
    pub problems: watch::Receiver<Vec<AgentProblem>>,
}

/// Why the mesh cannot start.
#[derive(Debug, thiserror::Error)]
pub enum MeshError {
    /// Raw sockets are not available.
    #[error("cannot open a raw ICMP socket: {0}; run as root or with CAP_NET_RAW")]
    RawSocket(io::Error),
    /// The rows of round-trip times cannot be read.
    #[error("cannot list the rows of HEALTH_RTT: {0}")]
    RttStore(io::Error),
    /// The thread, or its runtime, cannot be created.
    #[error("cannot start the prober thread: {0}")]
    Thread(io::Error),
}

/// State that the engine writes and its handles read.
#[derive(Debug)]
pub(super) struct Shared {
    /// All times are durations since this instant.
    pub(super) start: Instant,
    results: RwLock<Results>,
    pub(super) ignored: Arc<IgnoredReplies>,
    /// Malformed reports of peers.
    pub(super) malformed: MalformedHeaders,
    /// When the engine completed its last turn, in nanoseconds.
    last_turn: AtomicU64,
    sending: Mutex<Sending>,
}

impl Shared {
    /// Time since the start.
    pub(super) fn now(&self) -> Duration {
        self.start.elapsed()
    }

    pub(super) fn results(&self) -> RwLockReadGuard<'_, Results> {
        self.results.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn results_mut(&self) -> RwLockWriteGuard<'_, Results> {
        self.results.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counters of sent probes.
    pub(super) fn sending(&self) -> MutexGuard<'_, Sending> {
        self.sending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the engine completed a turn.
    pub(super) fn turned(&self, now: Duration) {
        let nanos = now.as_nanos().try_into().unwrap_or(u64::MAX);
        self.last_turn.store(nanos, Ordering::Relaxed);
    }
}

/// The nodes of a report, in the order of the current set.
struct NodeStream<'a>(&'a Shared);

impl NodeStream<'_> {
    fn try_for_each<E>(&self, mut each: impl FnMut(&NodeStatus) -> Result<(), E>) -> Result<(), E> {
        let mut after = None;
        loop {
            let (some, last) =
                self.0
                    .results()
                    .some_nodes(after.as_ref(), NODES_AT_A_TIME, self.0.now());
            some.iter().try_for_each(&mut each)?;
            match last {
                Some(last) => after = Some(last),
                None => return Ok(()),
            }
        }
    }
}

impl Serialize for NodeStream<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut nodes = serializer.serialize_seq(None)?;
        self.try_for_each(|node| nodes.serialize_element(node))?;
        nodes.end()
    }
}

/// The prober.
#[derive(Debug)]
pub struct Mesh;

impl Mesh {
    /// Starts to probe the nodes of each set that `nodes` delivers. `local_health` holds the addresses of this node's
    /// own health endpoint; while it is empty, the registry's addresses apply. Rows of `store` that belong to no known
    /// peer are removed. Must be called in the network namespace to probe from.
    ///
    /// The prober has its own thread: no slow API request delays a probe, and a probe is never handed from thread to
    /// thread.
    pub fn start(
        options: MeshOptions,
        nodes: watch::Receiver<Arc<NodeSet>>,
        store: Arc<dyn RttStore>,
        local_health: watch::Receiver<Vec<IpAddr>>,
    ) -> Result<MeshHandle, MeshError> {
        let shared = Arc::new(Shared {
            start: Instant::now(),
            results: RwLock::new(Results::new(&options)),
            ignored: Arc::default(),
            malformed: MalformedHeaders::default(),
            last_turn: AtomicU64::new(0),
            sending: Mutex::default(),
        });
        let (commands, received) = mpsc::channel(COMMANDS);
        let (started, start) = std::sync::mpsc::channel();
        let of_thread = shared.clone();
        let run = move || {
            let runtime = match Builder::new_current_thread().enable_all().build() {
                Ok(runtime) => runtime,
                Err(error) => {
                    let _ = started.send(Err(MeshError::Thread(error)));
                    return;
                }
            };
            runtime.block_on(async {
                match Engine::new(options, of_thread, nodes, store, local_health) {
                    Ok(engine) => {
                        // The thread that starts the mesh waits for this.
                        let _ = started.send(Ok(()));
                        engine.run(received).await;
                    }
                    Err(error) => {
                        let _ = started.send(Err(error));
                    }
                }
            });
        };
        thread::Builder::new()
            .name("mesh".to_owned())
            .spawn(run)
            .map_err(MeshError::Thread)?;
        let ended = |_| MeshError::Thread(io::ErrorKind::UnexpectedEof.into());
        start.recv().map_err(ended)??;
        Ok(MeshHandle { shared, commands })
    }
}

/// Controls a running mesh. The mesh stops when the last handle is dropped.
#[derive(Clone, Debug)]
pub struct MeshHandle {
    pub(super) shared: Arc<Shared>,
    commands: mpsc::Sender<Command>,
}

impl MeshHandle {
    /// The current report.
    pub fn report(&self) -> HealthStatus {
        self.shared.results().report(self.shared.now())
    }

    /// Writes the report as JSON, a few nodes at a time. Neither holds the whole report in memory nor delays the
    /// prober, however slow the reader is.
    pub fn write_report(&self, out: &mut dyn io::Write) -> io::Result<()> {
        let nodes = NodeStream(&self.shared);
        let report = self.shared.results().report_of(nodes, self.shared.now());
        // JSON is written in many small pieces.
        let mut out = io::BufWriter::new(out);
        serde_json::to_writer(&mut out, &report)?;
        // Writes the rest of the buffer without flushing `out`, which would make the reader wait for this last small
        // piece.
        out.into_inner().map_err(io::IntoInnerError::into_error)?;
        Ok(())
    }

    /// The current report without the nodes.
    pub fn report_head(&self) -> HealthStatus<()> {
        self.shared.results().report_of((), self.shared.now())
    }

    /// Passes the nodes of the current report to `each`, in report order, with pauses for the prober.
    pub fn each_node(&self, each: &mut dyn FnMut(&NodeStatus)) {
        let Ok(()) = NodeStream(&self.shared).try_for_each(|node| {
            each(node);
            Ok::<(), Infallible>(())
        });
    }

    /// State of the node registries.
    pub fn registries(&self) -> Vec<RegistryState> {
        self.shared.results().registries()
    }

    /// The registry as it is probed.
    pub fn nodes(&self) -> NodeList {
        self.shared.results().node_list()
    }

    /// Probe results of the last hour, for one node by its full name, or for all.
    pub fn history(&self, node: Option<&str>) -> Vec<TargetHistory> {
        self.shared.results().history(node, self.shared.now())
    }

    /// ICMP messages that were not accepted as answers.
    pub fn ignored_replies(&self) -> IgnoredReplyCounts {
        self.shared.ignored.counts()
    }

    /// Answers to `GET /hello` with malformed counts of a peer.
    pub fn malformed_headers(&self) -> u64 {
        self.shared.malformed.count()
    }

    /// State of the prober: when it completed its last turn, at most about a second ago unless it hangs, and whether
    /// its probes are sent, and on time.
    pub fn prober(&self) -> LastTurn {
        let last = Duration::from_nanos(self.shared.last_turn.load(Ordering::Relaxed));
        let age = self.shared.now().saturating_sub(last);
        let problem = self.shared.sending().problem();
        LastTurn {
            age,
            overdue: age,
            succeeded: problem.is_none().then_some(age),
            problem,
        }
    }

    /// Probes all targets. Returns the report once all results are in, or what is known when the last probe has timed
    /// out. Requests that arrive meanwhile share the same probes.
    pub async fn probe_now(&self) -> HealthStatus {
        let mut events = self.sweep().await;
        while events.recv().await.is_some() {}
        self.report()
    }

    /// Like [`Self::probe_now`], but sends results as they arrive. The last event is [`ProbeEvent::Done`].
    pub fn probe_events(&self) -> mpsc::Receiver<ProbeEvent> {
        let (sender, receiver) = mpsc::channel(EVENTS);
        let mesh = self.clone();
        tokio::spawn(async move {
            let mut events = mesh.sweep().await;
            while let Some(event) = events.recv().await {
                let event = match event {
                    SweepEvent::Node(index) => {
                        let node = mesh.shared.results().node(index, mesh.shared.now());
                        node.map(|node| ProbeEvent::Node(Box::new(node)))
                    }
                    SweepEvent::Progress { done, total } => {
                        Some(ProbeEvent::Progress { done, total })
                    }
                };
                if let Some(event) = event
                    && sender.send(event).await.is_err()
                {
                    return;
                }
            }
            // The reader may be gone.
            let _ = sender.send(ProbeEvent::Done(Box::new(mesh.report()))).await;
        });
        receiver
    }

    /// Changes when targets are probed and how results are rated. Existing results are kept.
    pub async fn tune(&self, tuning: Tuning) {
        // An engine that has stopped probes nothing.
        let _ = self.commands.send(Command::Tune(Box::new(tuning))).await;
    }

    /// The known path MTUs to one node, by its full name, or to all.
    pub fn path_mtus(&self, node: Option<&str>) -> Vec<PathMtuEntry> {
        self.shared.results().path_mtus(node)
    }

    /// Measures path MTUs again. Returns when all are measured, or after 25 s with the results known by then.
    pub async fn probe_path_mtus(&self, node: Option<&str>) -> Vec<PathMtuEntry> {
        let (done, wait) = oneshot::channel();
        let command = Command::ProbePathMtu {
            node: node.map(str::to_owned),
            done,
        };
        // An error means that the mesh has stopped; the last results stay valid.
        if self.commands.send(command).await.is_ok() {
            let _ = tokio::time::timeout(PATH_MTU_WAIT, wait).await;
        }
        self.path_mtus(node)
    }

    /// Starts to probe all targets. The channel closes when the sweep or the mesh has ended.
    async fn sweep(&self) -> mpsc::UnboundedReceiver<SweepEvent> {
        let (sender, receiver) = mpsc::unbounded_channel();
        // An error means that the mesh has stopped; the last results stay valid.
        let _ = self.commands.send(Command::Probe(sender)).await;
        receiver
    }

    /// Stops the mesh; returns once everything it learned is written. Reports stay available.
    pub async fn shutdown(&self) {
        let (done, wait) = oneshot::channel();
        if self.commands.send(Command::Shutdown(done)).await.is_ok() {
            let _ = wait.await;
        }
    }
}
