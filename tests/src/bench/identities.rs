//! Identities of a Kubernetes cluster: the memory and the requests that an agent of a large cluster needs for them.

use anyhow::{Context as _, ensure};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::usage::ResidentMemory;
use super::{Figure, Options, Report, Target};
use crate::apiserver::{ApiServer, Kind};
use crate::namespace::Namespace;
use crate::{Bed, Node, PATIENCE, wait_for};

/// Label sets of the cluster.
const IDENTITIES: usize = 10_000;
/// Other nodes, and endpoints on each.
const NODES: usize = 999;
const ENDPOINTS: usize = 100;
/// Objects in a page of a list.
const PAGE: usize = 200;
/// What is promised of an agent's memory, MiB.
const PROMISED: f64 = 128.0;

pub(super) fn run(_: &Options) -> anyhow::Result<Report> {
    let stand = Stand::start()?;
    let mut figures = vec![];
    figures.extend(stand.memory("1 identity")?);

    for number in 1..IDENTITIES {
        stand.server.put(stand.identity(number)?);
    }
    stand.wait_for_identities(IDENTITIES)?;
    figures.extend(stand.memory(&format!("{IDENTITIES} identities"))?);

    for node in 0..NODES {
        stand.server.put(stand.slice(node)?);
    }
    let addresses = NODES * ENDPOINTS;
    stand.wait_for_addresses(addresses)?;
    let large = format!("{IDENTITIES} identities, {addresses} addresses of {NODES} nodes");
    figures.extend(stand.memory(&large)?);

    let before = stand.server.requests().len();
    let node = stand.node();
    node.kill_agent(Signal::SIGTERM)?;
    node.start_agent_with(&stand.flags)?;
    stand.wait_for_identities(IDENTITIES)?;
    stand.wait_for_addresses(addresses)?;
    figures.extend(stand.memory(&format!("{large}, after a restart"))?);
    figures.push(stand.requests(before)?);
    Report::new(figures, 1)
}

/// A node whose agent has one endpoint and keeps identities at an API server.
struct Stand {
    // Fields are dropped in this order.
    _endpoint: Namespace,
    server: ApiServer,
    bed: Bed,
    flags: String,
    _folder: tempfile::TempDir,
    /// The objects of the endpoint, from which those of others are made.
    identity: Value,
    slice: Value,
}

impl Stand {
    fn start() -> anyhow::Result<Self> {
        let bed = Bed::builder().nodes(1).without_agents().start()?;
        let node = bed.node(1);
        let server = ApiServer::start_for(node)?;
        let folder = tempfile::tempdir()?;
        let kubeconfig = folder.path().join("kubeconfig");
        server.write_kubeconfig(&kubeconfig)?;
        let flags = format!("--identity-store=kubernetes:{}", kubeconfig.display());
        node.start_agent_with(&flags)?;
        let endpoint = Namespace::new("bench-identities")?;
        let create = format!(
            "endpoint create --netns {} --label k8s:app=web",
            endpoint.path()
        );
        wait_for("an endpoint", PATIENCE, || {
            Ok((node.cli(&create)?.code == Some(0)).then_some(()))
        })?;
        let first = |kind, what| {
            wait_for(what, PATIENCE, || {
                Ok(server.list_of(kind).into_iter().next())
            })
        };
        let identity = first(Kind::HealthIdentity, "the identity's object")?;
        let slice = wait_for("a slice with the endpoint", PATIENCE, || {
            let slices = server.list_of(Kind::HealthEndpointSlice).into_iter();
            let mut with_address =
                slices.filter(|slice| !slice["spec"]["endpoints"][0]["addresses"].is_null());
            Ok(with_address.next())
        })?;
        Ok(Self {
            _endpoint: endpoint,
            server,
            bed,
            flags,
            _folder: folder,
            identity,
            slice,
        })
    }

    fn node(&self) -> &Node {
        self.bed.node(1)
    }

    /// The object of another label set.
    fn identity(&self, number: usize) -> anyhow::Result<Value> {
        let own: usize = self.identity["metadata"]["name"]
            .as_str()
            .and_then(|name| name.parse().ok())
            .context("an identity whose name is no number")?;
        let free = (256..).filter(|free| *free != own).nth(number);
        let mut object = self.identity.clone();
        object["metadata"] = json!({ "name": free.context("no number is free")?.to_string() });
        object["spec"]["labels"] = json!([
            format!("k8s:app=app-{number}"),
            "k8s:io.cilium.k8s.policy.cluster=default",
            "k8s:io.cilium.k8s.policy.serviceaccount=default",
            format!("k8s:io.kubernetes.pod.namespace=namespace-{}", number / 20),
        ]);
        Ok(object)
    }

    /// The slice of another node, whose endpoints have the identity of this node's.
    fn slice(&self, node: usize) -> anyhow::Result<Value> {
        let mut object = self.slice.clone();
        object["metadata"] = json!({ "name": format!("node-{node}-0") });
        let entry = object["spec"]["endpoints"][0].clone();
        let entries = (1..=ENDPOINTS).map(|endpoint| {
            let mut entry = entry.clone();
            let (high, low) = (node / 250, node % 250);
            entry["id"] = endpoint.into();
            entry["addresses"] = json!([{
                "ip": format!("10.{}.{low}.{}", 200 + high, endpoint),
                "node": format!("172.30.{high}.{low}"),
            }]);
            entry
        });
        object["spec"]["endpoints"] = entries.collect();
        object["spec"]["count"] = ENDPOINTS.into();
        object["spec"]["node"] = format!("node-{node}").into();
        Ok(object)
    }

    fn wait_for_identities(&self, count: usize) -> anyhow::Result<()> {
        self.wait_for_rows("identity list", count)
    }

    fn wait_for_addresses(&self, count: usize) -> anyhow::Result<()> {
        self.wait_for_rows("bpf ipcache list", count)
    }

    /// Waits until a listing has at least this many rows.
    fn wait_for_rows(&self, listing: &str, count: usize) -> anyhow::Result<()> {
        wait_for(listing, PATIENCE, || {
            let listed = self.node().listing(listing)?;
            let rows = listed.as_array().context("the listing is no list")?;
            Ok((rows.len() >= count).then_some(()))
        })
        .map(drop)
    }

    /// The agent's memory, compared with the promise.
    fn memory(&self, case: &str) -> anyhow::Result<[Figure; 2]> {
        let resident = ResidentMemory::of(self.node().agent_pid()?)?;
        let figure = |which: &str, ours: f64| {
            let figure = Figure {
                name: format!("{case}: resident memory{which} (other: the promise)"),
                unit: "MiB",
                ours,
                other: Some(PROMISED),
                target: Some(Target::RatioAtMost(1.0)),
            };
            figure.print();
            figure
        };
        Ok([
            figure("", resident.now),
            figure(" at its peak", resident.peak),
        ])
    }

    /// The agent's requests for identities after the first ones: pages of two lists, two watches, and none that writes.
    fn requests(&self, first: usize) -> anyhow::Result<Figure> {
        let requests = self.server.requests().split_off(first);
        let ours = requests.iter().filter(|one| one.contains("/health"));
        let (reads, writes): (Vec<_>, Vec<_>) = ours.partition(|one| one.starts_with("GET "));
        ensure!(writes.is_empty(), "a restart writes: {writes:?}");
        let slices = self.server.list_of(Kind::HealthEndpointSlice).len();
        let expected = IDENTITIES.div_ceil(PAGE) + slices.div_ceil(PAGE) + 2;
        let figure = Figure {
            name: "requests of a restarted agent (other: pages of both lists, and two watches)"
                .to_owned(),
            unit: "requests",
            ours: reads.len() as f64,
            other: Some(expected as f64),
            target: Some(Target::RatioAtMost(1.1)),
        };
        figure.print();
        Ok(figure)
    }
}
