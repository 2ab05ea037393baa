//! A cluster of real agents on this machine: one network namespace per node, joined by a bridge.
//!
//! Node `i` is the namespace `hnode<i>` with 172.30.0.i (and fd00:30::i) on `eth0`; its endpoints have addresses in
//! 10.244.i.0/24 (and fd00:10:244:i::/64). Dropping a [`Bed`] removes all of this. Starting a bed first removes
//! whatever a killed bed left behind.

mod agent;
#[cfg(feature = "all")]
mod certificates;
mod etcd;
mod fabric;
mod lock;
mod mounts;
mod node;
mod reachability;
mod removal;
mod router;

use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use health_model::api::HealthStatus;
use health_net::netns::NetNs;
use nix::sys::signal::Signal;

use self::agent::{AgentSpec, log_tail};
use self::reachability::ExpectedNode;
use crate::http;
use crate::process::print_line;
use crate::relay::{Handling, Relay};
use crate::wait::{pause_since, slowness};

pub use self::agent::binary as agent_binary;
#[cfg(feature = "all")]
pub use self::certificates::{Authority, SignedCertificate};
pub use self::etcd::Etcd;
pub use self::fabric::FABRIC;
pub use self::lock::BedLock;
pub use self::mounts::BPFFS;
pub use self::node::Node;
pub use self::reachability::UnansweredProbe;
pub use self::router::{
    ROUTER, ROUTER4, ROUTER6, add_address, add_host, add_router, command_in, ip, sysctl, wait_local,
};

/// Parent of the agents' runtime folders.
pub const RUNTIME_ROOT: &str = "/run/health-agent";
/// The node registry file that all nodes share.
pub const NODES_FILE: &str = "/run/health-agent/nodes.yaml";
/// Journal of the mounts to undo.
const JOURNAL: &str = "/run/health-agent/bed.mounts";

/// API path of an agent's view of the mesh.
const STATUS: &str = "/v1beta/status";

/// Settings of a bed to start.
#[derive(Clone, Debug)]
#[must_use]
pub struct Builder {
    nodes: u8,
    ipv6: bool,
    mtu: u32,
    agent_args: Vec<String>,
    first_agent_args: String,
    registry: fn(u8) -> String,
    own_clocks: bool,
    start_agents: bool,
}

impl Builder {
    /// Sets the number of nodes; 3 by default.
    pub fn nodes(mut self, nodes: u8) -> Self {
        self.nodes = nodes;
        self
    }

    /// Sets whether nodes and endpoints have IPv6 addresses as well as IPv4.
    pub fn ipv6(mut self, ipv6: bool) -> Self {
        self.ipv6 = ipv6;
        self
    }

    /// Sets the MTU of the nodes' devices in bytes; 1500 by default.
    pub fn mtu(mut self, mtu: u32) -> Self {
        self.mtu = mtu;
        self
    }

    /// Adds flags for `health-agent run`, separated by spaces.
    pub fn agent_args(mut self, words: &str) -> Self {
        self.agent_args
            .extend(words.split_whitespace().map(str::to_owned));
        self
    }

    /// Sets extra flags for the first node's agent only, separated by spaces.
    pub fn first_agent_args(mut self, words: &str) -> Self {
        self.first_agent_args = words.to_owned();
        self
    }

    /// Sets the agents' probe interval and timeout in milliseconds. Both are multiplied by the machine's slowness.
    pub fn probing(self, interval: u32, timeout: u32) -> Self {
        let [interval, timeout] = [interval, timeout].map(|time| time * slowness());
        self.agent_args(&format!(
            "--probe-interval {interval}ms --probe-timeout {timeout}ms"
        ))
    }

    /// Sets the flags, separated by spaces, that select the node registry of node `index`. By default, nodes use the
    /// bed's registry file.
    pub fn registry(mut self, flags: fn(index: u8) -> String) -> Self {
        self.registry = flags;
        self
    }

    /// The flags set with `agent_args`. If none of them concerns probes, slow machines get a longer probe timeout.
    fn all_agent_args(&self) -> Vec<String> {
        let mut args = self.agent_args.clone();
        let of_probes = ["--probe", "--probe-interval", "--probe-timeout"];
        if slowness() > 1 && !args.iter().any(|word| of_probes.contains(&word.as_str())) {
            args.push(format!("--probe-timeout={}s", slowness()));
        }
        args
    }

    /// Gives each agent its own wall clock, which [`Node::shift_clock`] can change.
    pub fn own_clocks(mut self) -> Self {
        self.own_clocks = true;
        self
    }

    /// Does not start the agents. The test starts them itself.
    pub fn without_agents(mut self) -> Self {
        self.start_agents = false;
        self
    }

    /// Waits until no other bed exists on the machine, then starts this one.
    pub fn start(self) -> anyhow::Result<Bed> {
        self.start_with(BedLock::acquire()?)
    }

    /// Starts the bed for a caller that already holds the lock.
    pub fn start_with(self, lock: BedLock) -> anyhow::Result<Bed> {
        removal::remove().context("cannot clean up after an earlier bed")?;
        fabric::check_neighbour_tables(self.nodes, self.ipv6)?;
        let binary = agent_binary()?;
        let extra = self.all_agent_args();
        let shifted_clock = self.own_clocks.then(agent::shifted_clock).transpose()?;
        let nodes = (1..=self.nodes)
            .map(|index| {
                let mut extra = extra.clone();
                if index == 1 {
                    let words = self.first_agent_args.split_whitespace();
                    extra.extend(words.map(str::to_owned));
                }
                let spec = AgentSpec {
                    binary: binary.clone(),
                    name: fabric::node_name(index),
                    registry: (self.registry)(index)
                        .split_whitespace()
                        .map(str::to_owned)
                        .collect(),
                    extra,
                    shifted_clock: shifted_clock.clone(),
                };
                Node::new(index, self.ipv6, spec)
            })
            .collect();
        // From here on, an early return removes everything created so far.
        let bed = Bed { nodes, _lock: lock };
        make_folder(Path::new(RUNTIME_ROOT))?;
        mounts::ensure(Path::new(JOURNAL))?;
        fabric::build(self.nodes, self.ipv6, self.mtu)?;
        bed.write_nodes_file(&registry(&bed.nodes))?;
        for node in &bed.nodes {
            make_folder(&node.runtime_dir())?;
            if self.own_clocks {
                node.shift_clock(0)?;
            }
        }
        if self.start_agents {
            for node in &bed.nodes {
                node.spawn_agent()?;
            }
            for node in &bed.nodes {
                node.wait_serving()?;
            }
        }
        Ok(bed)
    }
}

/// A running cluster, the only bed on this machine. It is removed on drop.
#[derive(Debug)]
pub struct Bed {
    nodes: Vec<Node>,
    // Dropped last, so that the machine is clean when the next bed gets the lock.
    _lock: BedLock,
}

impl Bed {
    /// Returns a builder with the defaults: three nodes with IPv4 only.
    pub fn builder() -> Builder {
        Builder {
            nodes: 3,
            ipv6: false,
            mtu: 1500,
            agent_args: Vec::new(),
            first_agent_args: String::new(),
            registry: |_| format!("--nodes-file {NODES_FILE}"),
            own_clocks: false,
            start_agents: true,
        }
    }

    /// All nodes.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Node `index`, counted from 1 as in its name.
    ///
    /// # Panics
    /// If the bed has no such node.
    pub fn node(&self, index: usize) -> &Node {
        &self.nodes[index - 1]
    }

    /// Replaces the registry file that all nodes share.
    pub fn write_nodes_file(&self, yaml: &str) -> anyhow::Result<()> {
        fs::write(NODES_FILE, yaml).with_context(|| format!("cannot write {NODES_FILE}"))
    }

    /// Waits until every node reports that all its probes of all nodes were answered. The deadline is multiplied by the
    /// machine's slowness.
    pub fn wait_all_reachable(&self, deadline: Duration) -> anyhow::Result<()> {
        let deadline = deadline * slowness();
        let waited = self.wait_reachable_or(deadline, || false)?;
        match waited {
            WaitOutcome::AllReachable | WaitOutcome::Stopped => Ok(()),
            WaitOutcome::DeadlinePassed(unanswered) => {
                let lines: Vec<String> = unanswered.iter().map(ToString::to_string).collect();
                bail!(
                    "after {deadline:?} these probes have no answer:\n{}\n{}",
                    lines.join("\n"),
                    self.log_tails()
                )
            }
        }
    }

    fn log_tails(&self) -> String {
        let tails = self.nodes.iter().map(|node| {
            let log = node.runtime_dir().join("agent.log");
            format!("{}'s log ends with\n{}", node.name(), log_tail(&log))
        });
        tails.collect::<Vec<_>>().join("\n")
    }

    /// Like [`wait_all_reachable`](Self::wait_all_reachable), but gives up when `stop` returns true. Fails if an agent
    /// exits.
    pub fn wait_reachable_or(
        &self,
        deadline: Duration,
        mut stop: impl FnMut() -> bool,
    ) -> anyhow::Result<WaitOutcome> {
        let start = Instant::now();
        let expected = self.expected();
        let mut waiting_for: Vec<&Node> = self.nodes.iter().collect();
        loop {
            let begin = Instant::now();
            waiting_for.retain(|node| {
                !http::of_agent(node, STATUS).is_ok_and(|report| complete(&report, &expected))
            });
            if waiting_for.is_empty() {
                return Ok(WaitOutcome::AllReachable);
            }
            self.nodes.iter().try_for_each(Node::check_agent)?;
            if stop() {
                return Ok(WaitOutcome::Stopped);
            }
            if start.elapsed() > deadline {
                let reports: Vec<HealthStatus> = waiting_for
                    .iter()
                    .map(|node| node.status())
                    .collect::<anyhow::Result<_>>()?;
                return Ok(WaitOutcome::DeadlinePassed(
                    reports
                        .iter()
                        .flat_map(|report| reachability::unanswered(report, &expected))
                        .collect(),
                ));
            }
            thread::sleep(pause_since(begin));
        }
    }

    /// The unanswered probes in one node's report.
    pub fn unanswered(&self, report: &HealthStatus) -> Vec<UnansweredProbe> {
        reachability::unanswered(report, &self.expected())
    }

    /// Detaches a node from the bridge, which stops all traffic from and to the node.
    pub fn cut_off(&self, node: &Node) -> anyhow::Result<()> {
        fabric::detach(node.name())
    }

    /// Reattaches a node to the bridge.
    pub fn reconnect(&self, node: &Node) -> anyhow::Result<()> {
        fabric::attach(node.name())
    }

    /// Puts a relay between a node and the bridge. From now on, the relay carries all traffic between this node and the
    /// others.
    pub fn relay(&self, node: &Node, handling: Handling) -> anyhow::Result<Relay> {
        let devices = fabric::open_wire(node.name())?;
        let devices = devices.each_ref().map(String::as_str);
        Relay::start(&NetNs::open(FABRIC)?, devices, handling)
    }

    fn expected(&self) -> Vec<ExpectedNode> {
        self.nodes
            .iter()
            .map(|node| ExpectedNode {
                name: node.full_name(),
                addresses: node.addresses(),
            })
            .collect()
    }

    fn stop_agents(&self) -> anyhow::Result<()> {
        for node in &self.nodes {
            node.signal_agent(Signal::SIGTERM)?;
        }
        for node in &self.nodes {
            node.reap_agent()?;
        }
        // An agent that was started by hand is not a child of this process.
        removal::kill_agents()
    }
}

/// How a wait for reachability ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WaitOutcome {
    /// Every node answered every other node's probes.
    AllReachable,
    /// The caller stopped the wait.
    Stopped,
    /// The deadline passed; these probes are still unanswered.
    DeadlinePassed(Vec<UnansweredProbe>),
}

impl Drop for Bed {
    fn drop(&mut self) {
        let report = |error: anyhow::Error| print_line(format_args!("bed: {error:#}"));
        self.stop_agents().unwrap_or_else(report);
        for node in self.nodes.iter().filter(|node| node.pins().exists()) {
            node.cli("cleanup")
                .and_then(|ran| ran.success().map(drop))
                .unwrap_or_else(report);
        }
        removal::remove().unwrap_or_else(report);
    }
}

fn complete(report: &HealthStatus, expected: &[ExpectedNode]) -> bool {
    reachability::unanswered(report, expected).is_empty()
}

/// Generates a registry file with these nodes. It has no health endpoint addresses, which agents exchange themselves.
pub fn registry(nodes: &[Node]) -> String {
    let mut yaml = "nodes:\n".to_owned();
    for node in nodes {
        yaml += &registry_entry(node);
    }
    yaml
}

fn registry_entry(node: &Node) -> String {
    let addresses: Vec<String> = node
        .addresses()
        .iter()
        .map(|ip| format!("\"{ip}\""))
        .collect();
    let cidrs: Vec<String> = node
        .pod_cidrs()
        .iter()
        .map(|cidr| format!("\"{cidr}\""))
        .collect();
    format!(
        "- name: {}\n  cluster: default\n  addresses: [{}]\n  podCIDRs: [{}]\n",
        node.name(),
        addresses.join(", "),
        cidrs.join(", ")
    )
}

fn make_folder(path: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(path).with_context(|| format!("cannot create {}", path.display()))
}
