//! Policies of a Kubernetes cluster on three nodes: how soon a change is in force on all of them, and the CPU time that
//! a change costs an agent.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use health_model::api::Endpoint;
use serde_json::{Value, json};

use super::requests::quantile;
use super::usage::cpu_time;
use super::{Figure, Options, Report, Target};
use crate::apiserver::ApiServer;
use crate::namespace::Namespace;
use crate::ping::Echoing;
use crate::process::print_line;
use crate::{Bed, Node, PATIENCE, wait_for};

const NODES: u8 = 3;
/// Policies of the cluster besides the one that changes.
const POLICIES: usize = 1000;
/// Changes of a policy that are timed.
const CHANGES: u32 = 100;
/// Changes whose CPU time is measured together, and the time between them.
const COUNTED: u32 = 50;
const PAUSE: Duration = Duration::from_millis(200);
/// How long a reply may take. Each figure includes up to one such time.
const REPLY: Duration = Duration::from_millis(5);
/// How long to wait for a change.
const LIMIT: Duration = Duration::from_secs(20);
/// What is promised of 99 % of the changes.
const PROMISED: Duration = Duration::from_secs(1);
/// What is promised of the CPU time of a change.
const CPU_PROMISED: Duration = Duration::from_millis(50);

pub(super) fn run(options: &Options) -> anyhow::Result<Report> {
    let changes = options.rounds_or(CHANGES);
    let stand = Stand::start()?;
    let mut figures = vec![];
    figures.extend(stand.delays("no other policies", changes)?);
    print_line(format_args!("{POLICIES} policies"));
    for number in 0..POLICIES {
        stand.server.put(other(number, 80));
    }
    for node in stand.bed.nodes() {
        wait_for("all policies", PATIENCE, || {
            let listed = node.listing("policy get")?;
            let policies = listed["policies"].as_array().map_or(0, Vec::len);
            Ok((policies > POLICIES).then_some(()))
        })?;
    }
    figures.extend(stand.delays(&format!("{POLICIES} other policies"), changes)?);
    let web = |number: u32| web(number.is_multiple_of(2));
    figures.push(stand.cpu("that selects the endpoint", web)?);
    let number = |number: u32| other(0, 81 + u16::try_from(number).unwrap_or_default());
    figures.push(stand.cpu("that selects no endpoint", number)?);
    Report::new(figures, changes)
}

/// Nodes with one endpoint each, whose agents follow the policies of an API server.
struct Stand {
    // Fields are dropped in this order.
    endpoints: Vec<(Namespace, std::net::IpAddr)>,
    server: ApiServer,
    bed: Bed,
    _folder: tempfile::TempDir,
}

impl Stand {
    fn start() -> anyhow::Result<Self> {
        let bed = Bed::builder().nodes(NODES).without_agents().start()?;
        let server = ApiServer::start_for(bed.node(1))?;
        server.define_cilium();
        server.put(web(true));
        let folder = tempfile::tempdir()?;
        let kubeconfig = folder.path().join("kubeconfig");
        server.write_kubeconfig(&kubeconfig)?;
        let flags = format!(
            "--policies-from-kubernetes={} --policy-allow-localhost=false",
            kubeconfig.display()
        );
        let mut endpoints = Vec::new();
        for node in bed.nodes() {
            node.start_agent_with(&flags)?;
        }
        for node in bed.nodes() {
            endpoints.push(endpoint(node)?);
        }
        Ok(Self {
            endpoints,
            server,
            bed,
            _folder: folder,
        })
    }

    /// Times changes of the endpoints' policy, from the change of the object until the change is in force on all nodes.
    fn delays(&self, case: &str, changes: u32) -> anyhow::Result<[Figure; 2]> {
        let mut delays = Vec::new();
        for number in 0..changes {
            let is_allowed = number.is_multiple_of(2);
            let begun = Instant::now();
            self.server.put(web(is_allowed));
            let ended: Vec<anyhow::Result<Instant>> = thread::scope(|scope| {
                let nodes = self.bed.nodes().iter().zip(&self.endpoints);
                let waits: Vec<_> = nodes
                    .map(|(node, (_, address))| {
                        scope.spawn(move || until(node, *address, is_allowed))
                    })
                    .collect();
                let panicked = |_| Err(anyhow::anyhow!("the thread panicked"));
                let waits = waits.into_iter();
                waits
                    .map(|wait| wait.join().unwrap_or_else(panicked))
                    .collect()
            });
            let ended = ended.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
            let last = ended.into_iter().max().context("no nodes")?;
            delays.push(last.saturating_duration_since(begun));
        }
        delays.sort_unstable();
        let figure = |name: &str, delay: Duration, target| {
            let figure = Figure {
                name: format!(
                    "{case}: change in force on {NODES} nodes, {name} (other: the promise)"
                ),
                unit: "ms",
                ours: delay.as_secs_f64() * 1e3,
                other: Some(PROMISED.as_secs_f64() * 1e3),
                target,
            };
            figure.print();
            figure
        };
        Ok([
            figure("median", quantile(&delays, 0.5)?, None),
            figure(
                "p99",
                quantile(&delays, 0.99)?,
                Some(Target::RatioAtMost(1.0)),
            ),
        ])
    }

    /// Measures the CPU time that changes of a policy cost an agent, beyond that of an agent without changes.
    fn cpu(&self, which: &str, object: impl Fn(u32) -> Value) -> anyhow::Result<Figure> {
        let pid = self.bed.node(2).agent_pid()?;
        let used = |change: &dyn Fn(u32)| -> anyhow::Result<Duration> {
            let before = cpu_time(pid)?;
            for number in 0..COUNTED {
                change(number);
                thread::sleep(PAUSE);
            }
            Ok(cpu_time(pid)? - before)
        };
        let idle = used(&|_| ())?;
        let busy = used(&|number| self.server.put(object(number)))?;
        let of_one = busy.saturating_sub(idle) / COUNTED;
        let figure = Figure {
            name: format!(
                "{POLICIES} other policies: CPU time of a change of one {which} (other: the promise)"
            ),
            unit: "ms",
            ours: of_one.as_secs_f64() * 1e3,
            other: Some(CPU_PROMISED.as_secs_f64() * 1e3),
            target: Some(Target::RatioAtMost(1.0)),
        };
        figure.print();
        Ok(figure)
    }
}

/// Waits until echoes from a node to its endpoint are answered, or are no longer.
fn until(node: &Node, address: std::net::IpAddr, is_answered: bool) -> anyhow::Result<Instant> {
    let end = Instant::now() + LIMIT;
    let mut echoing = Echoing::start(node.name(), address)?;
    loop {
        let sent = Instant::now();
        if echoing.is_answered(REPLY)? == is_answered {
            return Ok(if is_answered { Instant::now() } else { sent });
        }
        ensure!(
            Instant::now() < end,
            "a policy is not in force after {LIMIT:?}"
        );
    }
}

/// Creates a node's endpoint, which `web` selects.
fn endpoint(node: &Node) -> anyhow::Result<(Namespace, std::net::IpAddr)> {
    let namespace = Namespace::new(&format!("bench-{}", node.name()))?;
    let create = format!(
        "endpoint create --netns {} --label k8s:app=web -o json",
        namespace.path()
    );
    let created = wait_for("an endpoint", PATIENCE, || {
        let created = node.cli(&create)?;
        Ok((created.code == Some(0)).then_some(created.stdout))
    })?;
    let created: Endpoint = serde_json::from_str(&created)?;
    let address = created
        .ipv4
        .context("an endpoint without an IPv4 address")?;
    Ok((namespace, address))
}

/// The policy of the endpoints, which lets the host reach them or does not.
fn web(is_allowed: bool) -> Value {
    let ingress = match is_allowed {
        true => json!({ "fromEntities": ["host"] }),
        false => json!({}),
    };
    json!({
        "apiVersion": "cilium.io/v2", "kind": "CiliumClusterwideNetworkPolicy",
        "metadata": { "name": "web", "uid": "p-web" },
        "spec": { "endpointSelector": { "matchLabels": { "k8s:app": "web" } }, "ingress": [ingress] },
    })
}

/// One of many policies, which selects no endpoint.
fn other(number: usize, port: u16) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": { "namespace": "shop", "name": format!("other-{number}"), "uid": format!("p-{number}") },
        "spec": {
            "podSelector": { "matchLabels": { "app": format!("other-{number}") } },
            "ingress": [{
                "from": [{ "podSelector": { "matchLabels": { "app": "client" } } }],
                "ports": [{ "port": port }],
            }],
        },
    })
}
