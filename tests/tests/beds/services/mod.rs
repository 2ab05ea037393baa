//! Services on real nodes, with real clients and servers: who answers, who is refused, and what becomes of flows when
//! backends come and go.

mod bad_input;
mod choice;
mod drain;
mod errors;
mod flows;
mod load;
mod outside;
mod policy;
mod reach;
mod restart;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use health_common::metrics::Reason;
use tests::served::{Answers, Backend, Datagrams, Manifests, ServiceManifest, curl_soon};
use tests::{Bed, Member, Node, PATIENCE, wait_for};

/// How long an answer to a datagram is waited for before it is asked again.
const SOON: Duration = Duration::from_secs(1);
/// Requests for each backend that may answer: chance leaves none out.
const EACH: usize = 15;

/// Two nodes: `web-1` and a client on the first, `web-2`, `web-3` and another client on the second.
struct Stand {
    backends: Vec<Backend>,
    clients: [Member; 2],
    manifests: Manifests,
    bed: Bed,
}

/// Gives the node of this index a zone of its own.
fn zones(index: u8) -> String {
    format!(
        "--nodes-file {} --service-node-zone zone-{index}",
        tests::bed::NODES_FILE
    )
}

impl Stand {
    fn start() -> anyhow::Result<Self> {
        Self::start_with(["", ""], "")
    }

    /// With flags of the endpoints of backends and clients, and of the agents.
    fn start_with([backend, client]: [&str; 2], agent: &str) -> anyhow::Result<Self> {
        let manifests = Manifests::new()?;
        let bed = Bed::builder()
            .nodes(2)
            .ipv6(true)
            .registry(zones)
            .agent_args(&manifests.agent_args())
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
            bed,
        })
    }

    /// A service of all backends.
    fn service(&self, name: &str, number: u8) -> ServiceManifest {
        ServiceManifest::new(name, number).of(&self.backends)
    }

    fn write(&self, service: &ServiceManifest) -> anyhow::Result<()> {
        self.manifests.write(service)
    }

    /// The node with this client.
    fn node_of(&self, client: &Member) -> &Node {
        self.bed
            .node(1 + usize::from(client.name == self.clients[1].name))
    }

    /// The backend with this name.
    fn backend(&self, name: &str) -> anyhow::Result<&Backend> {
        let mut backends = self.backends.iter();
        let found = backends.find(|backend| backend.name == name);
        found.with_context(|| format!("no backend {name}"))
    }
}

/// Where a service's port 80 is, on each IP version.
fn targets(service: &ServiceManifest) -> Vec<SocketAddr> {
    let addresses = service.cluster_ips.iter();
    addresses.map(|ip| (*ip, 80).into()).collect()
}

/// Waits until requests are answered by these and no others.
fn wait_answered_by(from: &str, target: SocketAddr, names: &[&str]) -> anyhow::Result<Answers> {
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

/// The same of datagrams, each of a flow of its own.
fn wait_datagrams_answered_by(
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

/// Packets that a node counted for this reason.
fn counted(node: &Node, reason: Reason) -> anyhow::Result<u64> {
    let listed = node.listing("bpf metrics list")?;
    let rows = listed.as_array().context("the metrics are no list")?;
    let rows = rows.iter().filter(|row| row["reason"] == reason.text());
    Ok(rows.filter_map(|row| row["packets"].as_u64()).sum())
}

/// A row of the specification: what it shows, and how. Each has a service's number of its own.
type Row = (&'static str, fn(&Stand, u8) -> anyhow::Result<()>);

/// Rows that share a bed, side by side.
const ROWS: &[&[Row]] = &[reach::ROWS, choice::ROWS, flows::ROWS, errors::ROWS];

#[test]
#[ignore = "needs root"]
fn every_row_of_the_specification_comes_true() -> anyhow::Result<()> {
    let stand = Stand::start()?;
    let rows: Vec<Row> = ROWS.concat();
    let names: BTreeSet<&str> = rows.iter().map(|(name, _)| *name).collect();
    assert_eq!(names.len(), rows.len());
    let failed: Vec<String> = thread::scope(|scope| {
        let stand = &stand;
        let shown: Vec<_> = (1..)
            .zip(&rows)
            .map(|(number, (name, show))| (name, scope.spawn(move || show(stand, number))))
            .collect();
        let mut failed = Vec::new();
        for (name, thread) in shown {
            match thread.join() {
                Ok(Ok(())) => println!("ok {name}"),
                Ok(Err(error)) => failed.push(format!("{name}: {error:#}")),
                Err(_) => failed.push(format!("{name} panicked")),
            }
        }
        failed
    });
    ensure!(failed.is_empty(), "{}", failed.join("\n"));
    Ok(())
}
