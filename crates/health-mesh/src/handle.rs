//! Starts a mesh, and speaks to a running one.

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
use health_registry::config::ProbeIntervals;
use health_registry::nodes::NodeSet;
use serde::ser::{Serialize, SerializeSeq as _, Serializer};
use tokio::runtime::Builder;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use super::counters::{IgnoredReplies, IgnoredReplyCounts};
use super::engine::{Command, Engine};
use super::exchange::MalformedHeaders;
use super::mesh_key::MeshKeys;
use super::results::Results;
use super::sending::Sending;
use super::sweep::SweepEvent;

/// Requests to the engine that may wait.
const COMMANDS: usize = 16;
/// Nodes that are written down without a pause for the prober: some 0.2 ms.
const NODES_AT_A_TIME: usize = 64;
/// Longest wait for the MTU of paths: below that of a client. A black hole takes some 15 s.
const PATH_MTU_WAIT: Duration = Duration::from_secs(25);
/// Events of a probe on request that may wait for a slow reader.
const EVENTS: usize = 64;

/// How to probe, and as whom.
#[derive(Clone, Debug)]
pub struct MeshOptions {
    /// Full name (`cluster/node`) of this node.
    pub local: String,
    /// This node's own addresses: probes to them cross no uplink.
    pub local_addresses: Vec<IpAddr>,
    /// Devices that lead to other nodes.
    pub uplinks: Vec<String>,
    /// Time between two probes of one target.
    pub intervals: ProbeIntervals,
    /// Most probes a second; intervals grow where they would come to more.
    pub rate: u32,
    /// How long a probe waits for its answer.
    pub timeout: Duration,
    /// Time between two looks at the MTU of a path; `None`: on request alone.
    pub path_mtu_interval: Option<Duration>,
    /// The part of a target's probes, 0 to 1, whose loss degrades it.
    pub loss_threshold: f64,
    /// Whether round trips of all connections to the targets' addresses are counted.
    pub passive_rtt: bool,
    /// How many times less often a target is probed by ICMP while a connection to its address is
    /// answered; 1 for no less often.
    pub passive_relief: u8,
    /// TCP port of the responders, on all nodes.
    pub port: u16,
    /// ICMP identifier, host byte order. As in `HEALTH_CONFIG`; random for each start.
    pub icmp_id: u16,
    /// Session of the ICMP probes. As in `HEALTH_CONFIG`; random for each start, and not 0.
    pub session: u32,
    /// Keys of the mesh. That of the tags which mark ICMP probes is as in `HEALTH_CONFIG`.
    pub keys: MeshKeys,
    /// Whether peers are asked when ICMP probes arrived.
    pub one_way: bool,
    /// Why no health endpoint is probed, this node's own included, which has none. `None`: they are.
    pub hosts_only: Option<String>,
    /// Folder of what is kept over a restart.
    pub state_dir: PathBuf,
    /// This node's maps that are nearly full; reports list them.
    pub full_maps: watch::Receiver<Vec<FullMap>>,
    /// This node's endpoints that do not follow its policy; reports tell of them.
    pub policy_lag: watch::Receiver<Option<PolicyLag>>,
    /// What is not in order with this agent; reports list it.
    pub problems: watch::Receiver<Vec<AgentProblem>>,
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
    /// No thread of its own, or no runtime on it.
    #[error("cannot start the prober's thread: {0}")]
    Thread(io::Error),
}

/// What the engine writes and its handles read.
#[derive(Debug)]
pub(super) struct Shared {
    /// All times are durations since this.
    pub(super) start: Instant,
    results: RwLock<Results>,
    pub(super) ignored: Arc<IgnoredReplies>,
    /// What peers told that cannot be read.
    pub(super) malformed: MalformedHeaders,
    /// When the engine made its last turn, nanoseconds.
    last_turn: AtomicU64,
    sending: Mutex<Sending>,
}

impl Shared {
    /// The time since the start.
    pub(super) fn now(&self) -> Duration {
        self.start.elapsed()
    }

    pub(super) fn results(&self) -> RwLockReadGuard<'_, Results> {
        self.results.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn results_mut(&self) -> RwLockWriteGuard<'_, Results> {
        self.results.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is counted of the probes that are sent.
    pub(super) fn sending(&self) -> MutexGuard<'_, Sending> {
        self.sending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The engine has come round.
    pub(super) fn turned(&self, now: Duration) {
        let nanos = now.as_nanos().try_into().unwrap_or(u64::MAX);
        self.last_turn.store(nanos, Ordering::Relaxed);
    }
}

/// The nodes of a report, in the order of the set in force.
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
    /// Starts to probe the nodes of each set that `nodes` brings. `local_health` tells the addresses
    /// of this node's own health endpoint; while it is empty, the registry's stand. Rows of `store`
    /// that belong to no known peer are removed. Must be called in the network namespace to probe from.
    ///
    /// The prober has a thread of its own: no slow request of the API delays a probe, and all that a
    /// probe takes is done without handing it from thread to thread.
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
                        // Whoever started the mesh waits for this.
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

/// Speaks to a running mesh. The mesh ends when the last handle is dropped.
#[derive(Clone, Debug)]
pub struct MeshHandle {
    pub(super) shared: Arc<Shared>,
    commands: mpsc::Sender<Command>,
}

impl MeshHandle {
    /// What is known now.
    pub fn report(&self) -> HealthStatus {
        self.shared.results().report(self.shared.now())
    }

    /// Writes the same as JSON, a few nodes at a time: neither does it take the memory of a whole report,
    /// nor does it hold up the prober, however slow the reader is.
    pub fn write_report(&self, out: &mut dyn io::Write) -> io::Result<()> {
        let nodes = NodeStream(&self.shared);
        let report = self.shared.results().report_of(nodes, self.shared.now());
        // JSON is written in many small parts.
        let mut out = io::BufWriter::new(out);
        serde_json::to_writer(&mut out, &report)?;
        // Not a flush, which would have the reader wait for a part that is no larger than this.
        out.into_inner().map_err(io::IntoInnerError::into_error)?;
        Ok(())
    }

    /// The last report without the nodes.
    pub fn report_head(&self) -> HealthStatus<()> {
        self.shared.results().report_of((), self.shared.now())
    }

    /// Gives the nodes of the last report to `each`, in the order of the report, with pauses for the
    /// prober.
    pub fn each_node(&self, each: &mut dyn FnMut(&NodeStatus)) {
        let Ok(()) = NodeStream(&self.shared).try_for_each(|node| {
            each(node);
            Ok::<(), Infallible>(())
        });
    }

    /// How the node registries do.
    pub fn registries(&self) -> Vec<RegistryState> {
        self.shared.results().registries()
    }

    /// The registry as it is probed.
    pub fn nodes(&self) -> NodeList {
        self.shared.results().node_list()
    }

    /// What became of the probes of the last hour: of one node, by its full name, or of all.
    pub fn history(&self, node: Option<&str>) -> Vec<TargetHistory> {
        self.shared.results().history(node, self.shared.now())
    }

    /// ICMP messages that were not taken for answers.
    pub fn ignored_replies(&self) -> IgnoredReplyCounts {
        self.shared.ignored.counts()
    }

    /// Answers to `GET /hello` in which a peer's counts could not be read.
    pub fn malformed_headers(&self) -> u64 {
        self.shared.malformed.count()
    }

    /// How the prober does: when it came round for the last time, about a second ago at most unless it hangs, and
    /// whether its probes are sent, and in time.
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

    /// Probes all targets and reports when all results are there, at the latest when the last probe
    /// has timed out, with what is known then. Requests that come while one is served share its
    /// probes.
    pub async fn probe_now(&self) -> HealthStatus {
        let mut events = self.sweep().await;
        while events.recv().await.is_some() {}
        self.report()
    }

    /// Does the same, and tells what comes as it comes. The last event is [`ProbeEvent::Done`].
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
            // The reader may have gone.
            let _ = sender.send(ProbeEvent::Done(Box::new(mesh.report()))).await;
        });
        receiver
    }

    /// What is known of the MTU of the paths to one node, by its full name, or to all.
    pub fn path_mtus(&self, node: Option<&str>) -> Vec<PathMtuEntry> {
        self.shared.results().path_mtus(node)
    }

    /// Finds them anew. Ends when that has been done, and after 25 s with what is known then.
    pub async fn probe_path_mtus(&self, node: Option<&str>) -> Vec<PathMtuEntry> {
        let (done, wait) = oneshot::channel();
        let command = Command::ProbePathMtu {
            node: node.map(str::to_owned),
            done,
        };
        // An error means that the mesh has ended; what was known stays true.
        if self.commands.send(command).await.is_ok() {
            let _ = tokio::time::timeout(PATH_MTU_WAIT, wait).await;
        }
        self.path_mtus(node)
    }

    /// Begins to probe all targets. The channel closes when that has ended, or the mesh has.
    async fn sweep(&self) -> mpsc::UnboundedReceiver<SweepEvent> {
        let (sender, receiver) = mpsc::unbounded_channel();
        // An error means that the mesh has ended; what was known stays true.
        let _ = self.commands.send(Command::Probe(sender)).await;
        receiver
    }

    /// Ends the mesh; returns when what it learned is written. Reports stay available.
    pub async fn shutdown(&self) {
        let (done, wait) = oneshot::channel();
        if self.commands.send(Command::Shutdown(done)).await.is_ok() {
            let _ = wait.await;
        }
    }
}
