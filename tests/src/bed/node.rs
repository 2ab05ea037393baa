//! A node of a bed.

use std::fs::{self, OpenOptions};
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use health_model::api::{HealthStatus, RegistryState};
use health_net::netns::NetNs;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::agent::{AgentProcess, AgentSpec};
use super::fabric::{netns_path, node_ipv4, node_ipv6, pod_cidr4, pod_cidr6};
use crate::process::{RunOutput, run};
use crate::{PATIENCE, wait_for};

/// Exit code of `status` when something is unreachable.
const UNREACHABLE: i32 = 3;
/// Port of `/hello`.
const HEALTH_PORT: u16 = 4240;
const HELLO_TIMEOUT: Duration = Duration::from_secs(1);

/// A namespace with its own agent.
#[derive(Debug)]
pub struct Node {
    index: u8,
    has_ipv6: bool,
    spec: AgentSpec,
    agent: Mutex<Option<AgentProcess>>,
}

impl Node {
    pub(super) fn new(index: u8, has_ipv6: bool, spec: AgentSpec) -> Self {
        Self {
            index,
            has_ipv6,
            spec,
            agent: Mutex::new(None),
        }
    }

    /// The node's name, shared by its namespace, its agent's instance and its registry entry.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// The node's name in reports: `cluster/node`.
    pub fn full_name(&self) -> String {
        format!("default/{}", self.name())
    }

    /// The node's own IPv4 address.
    pub fn ipv4(&self) -> Ipv4Addr {
        node_ipv4(self.index)
    }

    /// The node's own IPv6 address, if the bed has IPv6.
    pub fn ipv6(&self) -> Option<Ipv6Addr> {
        self.has_ipv6.then(|| node_ipv6(self.index))
    }

    /// All of the node's own addresses.
    pub fn addresses(&self) -> Vec<IpAddr> {
        std::iter::once(self.ipv4().into())
            .chain(self.ipv6().map(IpAddr::from))
            .collect()
    }

    /// The node's pod CIDRs, which contain the addresses of its endpoints.
    pub fn pod_cidrs(&self) -> Vec<String> {
        std::iter::once(pod_cidr4(self.index))
            .chain(self.has_ipv6.then(|| pod_cidr6(self.index)))
            .collect()
    }

    /// Path of the node's network namespace.
    pub fn netns(&self) -> PathBuf {
        netns_path(self.name())
    }

    /// Path of the network namespace of the node's health endpoint.
    pub fn endpoint_netns(&self) -> PathBuf {
        netns_path(&format!("health-{}", self.name()))
    }

    /// The agent's runtime folder.
    pub fn runtime_dir(&self) -> PathBuf {
        self.spec.runtime_dir()
    }

    /// Socket of the agent's API.
    pub fn socket(&self) -> PathBuf {
        self.spec.socket()
    }

    /// The folder where the agent pins maps and programs.
    pub fn pins(&self) -> PathBuf {
        [super::BPFFS, "health", self.name()].iter().collect()
    }

    /// Builds a command that runs in the node's network namespace, but shares the host's file system and PID namespace.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--net={}", self.netns().display()))
            .args(["--", program]);
        command
    }

    /// Runs a command in the node's network namespace and returns its standard output. Arguments are separated by
    /// spaces. Fails if the command fails.
    pub fn exec(&self, command: &str) -> anyhow::Result<String> {
        let mut words = command.split_whitespace();
        let program = words.next().context("no command to run")?;
        run(self.command(program).args(words))?.success()
    }

    /// Runs `work` on a thread in the node's network namespace.
    pub fn run_in<T: Send>(&self, work: impl FnOnce() -> T + Send) -> anyhow::Result<T> {
        Ok(NetNs::open(self.name())?.run_in(work)?)
    }

    /// Requests `/hello` of a responder from this node. Returns the HTTP status code.
    pub fn hello(&self, responder: IpAddr) -> anyhow::Result<u16> {
        self.run_in(|| hello(SocketAddr::new(responder, HEALTH_PORT)))?
    }

    /// Whether an echo request from this node is answered within a second.
    pub fn pings(&self, address: IpAddr) -> anyhow::Result<bool> {
        let ping = format!("-n -q -c 1 -W 1 {address}");
        let ran = run(self.command("ping").args(ping.split(' ')))?;
        Ok(ran.code == Some(0))
    }

    /// The command that starts the node's agent, which works in any namespace.
    pub fn agent_command(&self) -> Command {
        self.spec.daemon()
    }

    /// The command line to call the node's agent, without a subcommand.
    pub fn cli_command(&self) -> Command {
        self.spec.cli()
    }

    /// Runs a health-agent subcommand against the node's agent. Arguments are separated by spaces.
    pub fn cli(&self, words: &str) -> anyhow::Result<RunOutput> {
        run(self.cli_command().args(words.split_whitespace()))
    }

    /// The node's view of the mesh, as `status` reports it.
    pub fn status(&self) -> anyhow::Result<HealthStatus> {
        let mut ran = self.cli("status -o json")?;
        if ran.code == Some(UNREACHABLE) {
            ran.code = Some(0);
        }
        serde_json::from_str(&ran.success()?)
            .with_context(|| format!("the status of {} does not match the API", self.name()))
    }

    /// The JSON output of a list command of the node's agent. Arguments are separated by spaces.
    pub fn listing(&self, words: &str) -> anyhow::Result<serde_json::Value> {
        let json = self.cli(&format!("{words} -o json"))?.success()?;
        serde_json::from_str(&json)
            .with_context(|| format!("{words} of {} is not JSON", self.name()))
    }

    /// Full names of the nodes that the agent lists.
    pub fn listed_nodes(&self) -> anyhow::Result<Vec<String>> {
        let list = self.listing("node list")?;
        let rows = list.as_array().context("the nodes are not a list")?;
        Ok(rows
            .iter()
            .filter_map(|row| Some(row["name"].as_str()?.to_owned()))
            .collect())
    }

    /// The reason why the agent cannot read a registry, if there is one.
    pub fn stale_registry(&self) -> anyhow::Result<Option<String>> {
        let registries = self.cli("node registries -o json")?.stdout;
        let registries: Vec<RegistryState> = serde_json::from_str(&registries)
            .with_context(|| format!("not a list of registries: {registries}"))?;
        Ok(registries.into_iter().find_map(|registry| registry.stale))
    }

    /// Waits until the agent has saved all these nodes for its next start.
    pub fn wait_kept(&self, nodes: &[Node]) -> anyhow::Result<()> {
        let kept = self.runtime_dir().join("state/nodes.json");
        wait_for("the nodes to be kept", PATIENCE, || {
            let kept = fs::read_to_string(&kept)?;
            let all = nodes.iter().all(|node| kept.contains(node.name()));
            Ok(all.then_some(()))
        })
    }

    /// Addresses of the node's health endpoint, as the node's own agent reports them.
    pub fn health_addresses(&self) -> anyhow::Result<Vec<IpAddr>> {
        let status = self.status()?;
        let own = status
            .nodes
            .iter()
            .find(|node| node.name == self.full_name())
            .and_then(|node| node.health_endpoint.as_ref())
            .with_context(|| format!("{} does not know its health endpoint yet", self.name()))?;
        Ok(own.paths().map(|path| path.ip).collect())
    }

    /// IPv4 address of the node's health endpoint, as the node's own agent reports it.
    pub fn health_ipv4(&self) -> anyhow::Result<IpAddr> {
        self.health_addresses()?
            .into_iter()
            .find(IpAddr::is_ipv4)
            .with_context(|| format!("the health endpoint of {} has no IPv4", self.name()))
    }

    /// The agent's log.
    pub fn log(&self) -> anyhow::Result<String> {
        let path = self.spec.log();
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    }

    /// Process ID of the agent, no matter which process started it.
    pub fn agent_pid(&self) -> anyhow::Result<Pid> {
        let path = self.runtime_dir().join("health-agent.pid");
        let text =
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let pid = text
            .trim()
            .parse()
            .with_context(|| format!("{} does not hold a process ID: {text:?}", path.display()))?;
        Ok(Pid::from_raw(pid))
    }

    /// Number of files, sockets and maps that the agent has open.
    pub fn open_files(&self) -> anyhow::Result<usize> {
        let folder = format!("/proc/{}/fd", self.agent_pid()?);
        let entries = fs::read_dir(&folder).with_context(|| format!("cannot read {folder}"));
        Ok(entries?.count())
    }

    /// Sets the offset of the agent's wall clock from the host's to `seconds`. The bed must have been built with
    /// [`own_clocks`](super::Builder::own_clocks).
    pub fn shift_clock(&self, seconds: i64) -> anyhow::Result<()> {
        let path = self.spec.clock();
        // Write in place, because agents have the file mapped.
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path);
        file.and_then(|mut file| file.write_all(&seconds.to_ne_bytes()))
            .with_context(|| format!("cannot write {}", path.display()))
    }

    /// Starts the agent and waits until it serves its API.
    pub fn start_agent(&self) -> anyhow::Result<()> {
        self.spawn_agent()?;
        self.wait_serving()
    }

    /// Like [`Node::start_agent`], but with these flags, separated by spaces, instead of the bed's.
    pub fn start_agent_with(&self, words: &str) -> anyhow::Result<()> {
        let spec = AgentSpec {
            extra: words.split_whitespace().map(str::to_owned).collect(),
            ..self.spec.clone()
        };
        self.spawn(&spec)?;
        self.wait_serving()
    }

    /// Like [`Node::start_agent`], but waits until the agent has taken over the state of its predecessor. With another
    /// binary, this is an in-place upgrade or downgrade.
    pub fn take_over(&self, binary: Option<&Path>) -> anyhow::Result<()> {
        let own = &self.spec.binary;
        self.take_over_as(&AgentSpec {
            binary: binary.map_or_else(|| own.clone(), Path::to_owned),
            ..self.spec.clone()
        })
    }

    /// Like [`Node::take_over`], but with additional flags, separated by spaces, which override the bed's.
    pub fn take_over_with(&self, words: &str) -> anyhow::Result<()> {
        let words: Vec<_> = words.split_whitespace().map(str::to_owned).collect();
        let flags: Vec<_> = words.iter().filter(|word| word.starts_with("--")).collect();
        let mut extra = Vec::new();
        let mut is_replaced = false;
        for word in &self.spec.extra {
            if word.starts_with("--") {
                is_replaced = flags.contains(&word);
            }
            if !is_replaced {
                extra.push(word.clone());
            }
        }
        extra.extend(words);
        self.take_over_as(&AgentSpec {
            extra,
            ..self.spec.clone()
        })
    }

    fn take_over_as(&self, spec: &AgentSpec) -> anyhow::Result<()> {
        const UP: [&str; 1] = ["agent is up"];
        // The node's first agent has no log yet.
        let before = self.logged(&UP).map_or(0, |lines| lines.len());
        self.spawn(spec)?;
        wait_for("the agent to have taken over", PATIENCE, || {
            if let Some(agent) = self.agent().as_mut() {
                agent.check_alive(spec)?;
            }
            Ok((self.logged(&UP)?.len() > before).then_some(()))
        })
    }

    pub(super) fn spawn_agent(&self) -> anyhow::Result<()> {
        self.spawn(&self.spec)
    }

    fn spawn(&self, spec: &AgentSpec) -> anyhow::Result<()> {
        let mut agent = self.agent();
        if let Some(running) = agent.as_mut() {
            ensure!(
                running.check_alive(&self.spec).is_err(),
                "the agent of {} is already running",
                self.name()
            );
        }
        *agent = Some(AgentProcess::spawn(spec)?);
        Ok(())
    }

    pub(super) fn wait_serving(&self) -> anyhow::Result<()> {
        self.agent()
            .as_mut()
            .with_context(|| format!("the agent of {} was not started", self.name()))?
            .wait_serving(&self.spec)
    }

    /// Sends the agent a signal that stops it, and waits until it exits.
    pub fn kill_agent(&self, signal: Signal) -> anyhow::Result<()> {
        self.signal_agent(signal)?;
        self.reap_agent()
    }

    /// Sends the agent a signal.
    pub fn signal_agent(&self, signal: Signal) -> anyhow::Result<()> {
        match self.agent().as_ref() {
            Some(agent) => agent.signal(signal),
            None => Ok(()),
        }
    }

    pub(super) fn reap_agent(&self) -> anyhow::Result<()> {
        let agent = self.agent().take();
        agent.map_or(Ok(()), AgentProcess::reap)
    }

    /// Fails if the agent was started and has exited by itself.
    pub fn check_agent(&self) -> anyhow::Result<()> {
        match self.agent().as_mut() {
            // Someone may have replaced a dead agent by hand.
            Some(agent) => agent.check_alive(&self.spec).or_else(|died| {
                let successor = self.agent_pid().ok().filter(|&pid| kill(pid, None).is_ok());
                successor.map(drop).ok_or(died)
            }),
            None => Ok(()),
        }
    }

    /// Lines of the agent's log that contain all of these words.
    pub fn logged(&self, words: &[&str]) -> anyhow::Result<Vec<String>> {
        let log = self.log()?;
        let lines = log
            .lines()
            .filter(|line| words.iter().all(|word| line.contains(word)));
        Ok(lines.map(str::to_owned).collect())
    }

    fn agent(&self) -> MutexGuard<'_, Option<AgentProcess>> {
        // A test that panicked must still be able to stop the agent.
        self.agent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sends `GET /hello` and returns the status code.
fn hello(responder: SocketAddr) -> anyhow::Result<u16> {
    let mut stream = TcpStream::connect_timeout(&responder, HELLO_TIMEOUT)
        .with_context(|| format!("cannot connect to {responder}"))?;
    stream.set_read_timeout(Some(HELLO_TIMEOUT))?;
    stream.set_write_timeout(Some(HELLO_TIMEOUT))?;
    stream.write_all(b"GET /hello HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n")?;
    let mut response = String::new();
    stream.read_to_string(&mut response)?;
    response
        .split(' ')
        .nth(1)
        .and_then(|code| code.parse().ok())
        .with_context(|| format!("{responder} did not answer with HTTP: {response:?}"))
}
