//! Services on real nodes, with real clients and servers: which backends reply, which requests are refused, and what
//! happens to flows when backends come and go.

pub(crate) mod bad_input;
mod choice;
mod direct;
mod drain;
mod errors;
mod flows;
mod host;
mod host_routing;
mod listing;
pub(crate) mod load;
mod outside;
mod own_ports;
pub(crate) mod policy;
mod reach;
mod restart;
mod same_ports;
mod shares;
mod trace;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use health_common::metrics::Reason;
use tests::served::{Answers, Backend, Datagrams, Manifests, ServiceManifest, curl_soon};
use tests::{Bed, Member, Node, PATIENCE, slowness, wait_for};

/// How long to wait for an answer to a datagram before sending another.
pub(crate) const SOON: Duration = Duration::from_secs(1);
/// Requests per backend, enough that random choice leaves no backend out.
pub(crate) const EACH: usize = 15;

/// How agents implement services.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Ebpf,
    Ipvs,
}

impl Mode {
    /// Agent flags for this mode.
    pub(crate) const fn flags(self) -> &'static str {
        match self {
            Self::Ebpf => "--service-proxy-mode ebpf",
            Self::Ipvs => "--service-proxy-mode ipvs --ipvs-drain-interval 500ms",
        }
    }
}

/// Two nodes: `web-1` and a client on the first, `web-2`, `web-3` and another client on the second.
pub(crate) struct Stand {
    pub(crate) backends: Vec<Backend>,
    pub(crate) clients: [Member; 2],
    pub(crate) manifests: Manifests,
    pub(crate) mode: Mode,
    pub(crate) bed: Bed,
}

/// Assigns a separate zone to the node with this index.
fn zones(index: u8) -> String {
    format!(
        "--nodes-file {} --service-node-zone zone-{index}",
        tests::bed::NODES_FILE
    )
}

impl Stand {
    fn start() -> anyhow::Result<Self> {
        Self::start_with(Mode::Ebpf, ["", ""], "")
    }

    /// Starts the nodes with flags for the endpoints of backends and clients, and for the agents.
    pub(crate) fn start_with(
        mode: Mode,
        [backend, client]: [&str; 2],
        agent: &str,
    ) -> anyhow::Result<Self> {
        let manifests = Manifests::new()?;
        let bed = Bed::builder()
            .nodes(2)
            .ipv6(true)
            .registry(zones)
            .agent_args(&manifests.agent_args())
            .agent_args(mode.flags())
            .agent_args(agent)
            .start()?;
        bed.wait_all_reachable(PATIENCE)?;
        let [here, there] = [1, 2].map(|index| bed.node(index));
        let backends = [("web-1", here), ("web-2", there), ("web-3", there)];
        let backends = backends.map(|(name, node)| Backend::start(node, name, backend));
        Ok(Self {
            backends: backends.into_iter().collect::<anyhow::Result<_>>()?,
            clients: [
                Member::on(here, "client-1", client)?,
                Member::on(there, "client-2", client)?,
            ],
            manifests,
            mode,
            bed,
        })
    }

    /// A service with all backends.
    pub(crate) fn service(&self, name: &str, number: u8) -> ServiceManifest {
        ServiceManifest::new(name, number).of(&self.backends)
    }

    pub(crate) fn write(&self, service: &ServiceManifest) -> anyhow::Result<()> {
        self.manifests.write(service)
    }

    /// The node of this client.
    pub(crate) fn node_of(&self, client: &Member) -> &Node {
        self.bed
            .node(1 + usize::from(client.name == self.clients[1].name))
    }

    /// The backend with this name.
    pub(crate) fn backend(&self, name: &str) -> anyhow::Result<&Backend> {
        let mut backends = self.backends.iter();
        let found = backends.find(|backend| backend.name == name);
        found.with_context(|| format!("no backend {name}"))
    }
}

/// Addresses of a service's port 80, one per IP version.
pub(crate) fn targets(service: &ServiceManifest) -> Vec<SocketAddr> {
    let addresses = service.cluster_ips.iter();
    addresses.map(|ip| (*ip, 80).into()).collect()
}

/// Waits until exactly these backends answer requests.
pub(crate) fn wait_answered_by(
    from: &str,
    target: SocketAddr,
    names: &[&str],
) -> anyhow::Result<Answers> {
    wait_for("requests to be answered by others", PATIENCE, || {
        let answers = curl_soon(from, target, EACH * names.len())?;
        ensure!(
            answers.all_from().is_some_and(|all| all == names),
            "{answers}"
        );
        Ok(Some(answers))
    })
    .with_context(|| format!("{from} to {target}, wanted {names:?}"))
}

/// Like [`wait_answered_by`] for datagrams, each in its own flow.
pub(crate) fn wait_datagrams_answered_by(
    from: &str,
    target: SocketAddr,
    names: &[&str],
) -> anyhow::Result<Answers> {
    wait_for("datagrams to be answered by others", PATIENCE, || {
        let mut answers = Answers::default();
        for _ in 0..EACH * names.len() {
            let answer = Datagrams::open(from, target)?.ask(SOON)?;
            answers.add(answer.context("no answer")?);
        }
        ensure!(
            answers.all_from().is_some_and(|all| all == names),
            "{answers}"
        );
        Ok(Some(answers))
    })
    .with_context(|| format!("datagrams of {from} to {target}, wanted {names:?}"))
}

/// Number of packets that a node has counted for this reason.
pub(crate) fn counted(node: &Node, reason: Reason) -> anyhow::Result<u64> {
    let listed = node.listing("bpf metrics list")?;
    let rows = listed.as_array().context("the metrics are no list")?;
    let rows = rows.iter().filter(|row| row["reason"] == reason.text());
    Ok(rows.filter_map(|row| row["packets"].as_u64()).sum())
}

/// A row of the specification: its name and its test. Each row has its own service number.
pub(crate) type Row = (&'static str, fn(&Stand, u8) -> anyhow::Result<()>);

/// Rows that share a bed and run at the same time.
pub(crate) const ROWS: &[&[Row]] = &[reach::ROWS, choice::ROWS, flows::ROWS, errors::ROWS];
/// Rows for one mode only.
const EBPF_ROWS: &[&[Row]] = &[
    choice::EBPF_ROWS,
    errors::EBPF_ROWS,
    host::REACH_ROWS,
    host::FLOW_ROWS,
    host_routing::ROWS,
    listing::ROWS,
    same_ports::ROWS,
    trace::ENDPOINT_ROWS,
    trace::HOST_ROWS,
];
/// How many rows run at once on a slow machine. Each row waits for its own answers.
const AT_ONCE_WHEN_SLOW: usize = 6;

/// Runs rows on a stand, and fails with the names of those that failed.
pub(crate) fn show(stand: &Stand, rows: &[Row]) -> anyhow::Result<()> {
    let names: BTreeSet<&str> = rows.iter().map(|(name, _)| *name).collect();
    assert_eq!(names.len(), rows.len());
    let at_once = match slowness() {
        1 => rows.len(),
        _ => AT_ONCE_WHEN_SLOW,
    };
    let rows = Mutex::new((1_u8..).zip(rows));
    let next = || rows.lock().unwrap_or_else(PoisonError::into_inner).next();
    // Each thread takes one row at a time, so that a long row holds up no other.
    let show_some = || {
        let mut failed = Vec::new();
        while let Some((number, (name, show))) = next() {
            let start = Instant::now();
            match panic::catch_unwind(AssertUnwindSafe(|| show(stand, number))) {
                Ok(Ok(())) => println!("ok {name} ({:.1} s)", start.elapsed().as_secs_f64()),
                Ok(Err(error)) => failed.push(format!("{name}: {error:#}")),
                // The panic message has already been printed.
                Err(_) => failed.push(format!("{name} panicked")),
            }
        }
        failed
    };
    let failed = thread::scope(|scope| {
        let threads: Vec<_> = (0..at_once).map(|_| scope.spawn(show_some)).collect();
        let ended = threads.into_iter().map(|thread| {
            let panicked = |_| vec!["a thread panicked".to_owned()];
            thread.join().unwrap_or_else(panicked)
        });
        ended.flatten().collect::<Vec<_>>()
    });
    ensure!(failed.is_empty(), "{}", failed.join("\n"));
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn every_row_of_the_specification_comes_true() -> anyhow::Result<()> {
    let stand = Stand::start()?;
    show(&stand, &[ROWS.concat(), EBPF_ROWS.concat()].concat())
}
