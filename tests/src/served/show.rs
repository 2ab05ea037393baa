//! The demonstration of `cargo xtask run --services`: which backends respond while one of them is not ready.

use std::fmt;
use std::fs;
use std::net::SocketAddr;

use anyhow::{Context as _, ensure};
use serde::Serialize;
use tempfile::TempDir;

use super::{Answers, Backend, Manifests, ServiceManifest, cluster_ips, curl, curl_soon};
use crate::{Bed, Member, Node, PATIENCE, wait_for};

/// The service's name, which is also the prefix of its backends' names.
const NAME: &str = "web";
/// The last part of the service's ClusterIPs.
const NUMBER: u8 = 80;
/// The service's port at the ClusterIPs.
const PORT: u16 = 80;
/// The service's NodePort.
const NODE_PORT: u16 = 30_080;
/// Number of backends.
const BACKENDS: usize = 3;
/// Requests per address. Enough that no backend is left out by chance.
const REQUESTS: usize = 100;

/// Folders for the manifest of the service and the manifest of its first backend's pod.
#[derive(Debug)]
pub struct Folders {
    manifests: Manifests,
    pods: TempDir,
}

impl Folders {
    /// Creates the folders.
    pub fn new() -> anyhow::Result<Self> {
        let pods = tempfile::Builder::new().prefix("hpods-").tempdir();
        Ok(Self {
            manifests: Manifests::new()?,
            pods: pods.context("cannot create a folder for manifests")?,
        })
    }

    /// The flags that all agents need.
    pub fn agent_args(&self) -> String {
        self.manifests.agent_args()
    }

    /// Additional flags for the first agent.
    pub fn first_agent_args(&self) -> String {
        format!("--pod-manifests {}", self.pods.path().display())
    }
}

/// The service, its backends on all nodes, and its client.
#[derive(Debug)]
pub struct Show {
    backends: Vec<Backend>,
    routes: Vec<Route>,
    folders: Folders,
    /// Client endpoint on the first node.
    _client: Member,
}

/// The namespace from which a client sends requests, and the address of the service to which it sends them.
#[derive(Debug)]
struct Route {
    from: String,
    to: SocketAddr,
}

impl Show {
    /// Starts the backends and the client, and writes the manifests.
    pub fn start(folders: Folders, bed: &Bed) -> anyhow::Result<Self> {
        let nodes = bed.nodes();
        let mut backends = Vec::new();
        for (i, node) in (1..=BACKENDS).zip(nodes.iter().cycle()) {
            backends.push(Backend::start(node, &format!("{NAME}-{i}"), "")?);
        }
        let client = Member::on(bed.node(1), "client", "")?;
        let first = &backends[0];
        let pod = folders.pods.path().join(format!("{}.json", first.name));
        fs::write(&pod, first.pod().to_string())
            .with_context(|| format!("cannot write {}", pod.display()))?;
        let mut service = ServiceManifest::new(NAME, NUMBER).of(&backends);
        service.ports.truncate(1);
        service.ports[0].node_port = Some(NODE_PORT);
        folders.manifests.write(&service)?;
        let routes = routes(bed, &client);
        Ok(Self {
            backends,
            routes,
            folders,
            _client: client,
        })
    }

    /// Makes the first backend's readiness probe fail and succeed again, and counts responses in each state. Fails if
    /// the backends' state does not change in time, or if `is_stopped` returns true.
    pub fn run(&self, mut is_stopped: impl FnMut() -> bool) -> anyhow::Result<Report> {
        let first = &self.backends[0];
        let mut round = |state: &str, is_ready: bool| -> anyhow::Result<Round> {
            self.wait_until(is_ready, &mut is_stopped)
                .with_context(|| state.to_owned())?;
            self.round(state, is_ready)
        };
        let mut rounds = vec![round("All backends are ready.", true)?];
        first.set_ready(false)?;
        let state = format!("The readiness probe of {} fails.", first.name);
        rounds.push(round(&state, false)?);
        first.set_ready(true)?;
        let state = format!("The readiness probe of {} succeeds again.", first.name);
        rounds.push(round(&state, true)?);
        Ok(Report {
            service: format!("default/{NAME}"),
            backends: self.backends.iter().map(Place::of).collect(),
            rounds,
        })
    }

    /// Waits until the first backend gets requests to all addresses (`is_ready`) or to none of them.
    fn wait_until(
        &self,
        is_ready: bool,
        is_stopped: &mut impl FnMut() -> bool,
    ) -> anyhow::Result<()> {
        let first = &self.backends[0].name;
        let is_so = wait_for("requests to reach the right backends", PATIENCE, || {
            if is_stopped() {
                return Ok(Some(false));
            }
            for Route { from, to } in &self.routes {
                let answers = curl_soon(from, *to, 10 * BACKENDS)?;
                let is_so = (answers.of(first) > 0) == is_ready && answers.failed.is_empty();
                ensure!(is_so, "{from} to {to}: {answers}");
            }
            Ok(Some(true))
        })?;
        ensure!(is_so, "interrupted");
        Ok(())
    }

    fn round(&self, state: &str, is_ready: bool) -> anyhow::Result<Round> {
        let mut ways = Vec::new();
        for Route { from, to } in &self.routes {
            let answers = curl(from, *to, REQUESTS)?;
            let used = self.backends.iter().map(|one| answers.of(&one.name) > 0);
            let is_as_expected =
                answers.failed.is_empty() && used.eq([is_ready].into_iter().chain([true; 2]));
            ways.push(Way {
                from: from.clone(),
                to: *to,
                requests: REQUESTS,
                answers,
                is_as_expected,
            });
        }
        Ok(Round {
            state: state.to_owned(),
            ways,
        })
    }

    /// Commands to try by hand, using this node's agent.
    pub fn guide(&self, node: &Node) -> String {
        let first = &self.backends[0];
        let requests = self.routes.iter().map(|Route { from, to }| {
            format!("\n  a request             nsenter --net=/run/netns/{from} curl http://{to}/")
        });
        format!(
            "\nThe service runs as well. Try{requests}\n  \
             which are ready       {cli} service get {NAME}\n  \
             fail a probe          rm {ready}\n  \
             let it succeed        touch {ready}\n  \
             change the service    editor {manifests}/{NAME}.json",
            requests = requests.collect::<String>(),
            cli = crate::process::shown(&node.cli_command()),
            ready = first.ready_file().display(),
            manifests = self.folders.manifests.path().display(),
        )
    }
}

/// Routes from an endpoint and the first node to the ClusterIPs, and from outside to the NodePort of the first node.
/// Only the first node probes the backend, so only the first node takes it out of service.
fn routes(bed: &Bed, client: &Member) -> Vec<Route> {
    let (first, last) = (bed.node(1), bed.nodes().last());
    let outside = last.map_or(first.name(), Node::name);
    let families = client.addresses().len();
    let cluster = cluster_ips(NUMBER).map(|ip| SocketAddr::from((ip, PORT)));
    let nodes = first
        .addresses()
        .into_iter()
        .map(|ip| (ip, NODE_PORT).into());
    let at_cluster = [client.name.as_str(), first.name()]
        .into_iter()
        .flat_map(|from| cluster.iter().take(families).map(move |to| (from, *to)));
    let at_node = nodes.take(families).map(|to| (outside, to));
    at_cluster
        .chain(at_node)
        .map(|(from, to)| Route {
            from: from.to_owned(),
            to,
        })
        .collect()
}

/// The responses in each state of the backends.
#[derive(Debug, Serialize)]
pub struct Report {
    /// `NAMESPACE/NAME` of the service.
    pub service: String,
    /// The service's backends.
    pub backends: Vec<Place>,
    /// The results in chronological order.
    pub rounds: Vec<Round>,
}

/// Where a backend is.
#[derive(Debug, Serialize)]
pub struct Place {
    /// The backend's name.
    pub name: String,
    /// Name of the backend's node.
    pub node: String,
    /// The backend's addresses, with its port.
    pub addresses: Vec<SocketAddr>,
}

impl Place {
    fn of(backend: &Backend) -> Self {
        Self {
            name: backend.name.clone(),
            node: backend.node.clone(),
            addresses: backend.addresses(),
        }
    }
}

/// The results of requests in one state of the backends.
#[derive(Debug, Serialize)]
pub struct Round {
    /// The state, as a sentence.
    pub state: String,
    /// The results by source and destination.
    pub ways: Vec<Way>,
}

/// The results of requests from one client to one address.
#[derive(Debug, Serialize)]
pub struct Way {
    /// The client's network namespace.
    pub from: String,
    /// The service's address.
    pub to: SocketAddr,
    /// Number of requests.
    pub requests: usize,
    /// The responses by backend.
    pub answers: Answers,
    /// Whether all ready backends responded, no other backend did, and no request failed.
    pub is_as_expected: bool,
}

impl Report {
    /// Whether all requests reached the right backends.
    pub fn is_good(&self) -> bool {
        let mut ways = self.rounds.iter().flat_map(|round| &round.ways);
        ways.all(|way| way.is_as_expected)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\nService {}, requests by backend:", self.service)?;
        let names = self.backends.iter().map(|backend| backend.name.as_str());
        let columns: Vec<&str> = names.chain(["failed"]).collect();
        for round in &self.rounds {
            writeln!(f, "\n{}", round.state)?;
            write!(f, "  {:<10}{:<24}", "from", "to")?;
            for column in &columns {
                write!(f, "{column:>8}")?;
            }
            writeln!(f)?;
            for way in &round.ways {
                write!(f, "  {:<10}{:<24}", way.from, way.to.to_string())?;
                for place in &self.backends {
                    write!(f, "{:>8}", way.answers.of(&place.name))?;
                }
                write!(f, "{:>8}", way.answers.failed.values().sum::<usize>())?;
                writeln!(f, "{}", if way.is_as_expected { "" } else { "   WRONG" })?;
            }
        }
        Ok(())
    }
}
