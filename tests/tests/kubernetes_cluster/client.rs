//! Pods of the tests, and requests from their network namespaces.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use health_model::api::Endpoint;
use health_net::netns::NetNs;
use serde_json::{Value, json};
use tests::kubernetes::{Cluster, WORKLOAD, is_ready};
use tests::{PATIENCE, RaisedAtEnd, wait_for};

/// The ports of web servers.
pub(crate) const PORTS: [u16; 2] = [8080, 9090];
/// How long a request may take: longer than a retransmitted SYN.
const REQUEST: Duration = Duration::from_secs(5);
/// How long to check that a dropped connection is not established.
const SILENCE: Duration = Duration::from_millis(300);

/// A pod that runs.
#[derive(Debug)]
pub(crate) struct Pod {
    pub(crate) name: String,
    pub(crate) node: String,
    /// All addresses, IPv4 first.
    pub(crate) addresses: Vec<IpAddr>,
    pub(crate) netns: NetNs,
}

impl Pod {
    /// Waits until a pod is ready.
    pub(crate) fn ready(cluster: &Cluster, namespace: &str, name: &str) -> anyhow::Result<Self> {
        wait_for(&format!("pod {name} to be ready"), PATIENCE, || {
            let object = cluster.plane.get(&format!("pod -n {namespace} {name}"))?;
            match is_ready(&object) {
                true => Self::of(cluster, &object).map(Some),
                false => Ok(None),
            }
        })
    }

    /// The ready pods with a label, by name.
    pub(crate) fn all(
        cluster: &Cluster,
        namespace: &str,
        label: &str,
    ) -> anyhow::Result<Vec<Self>> {
        let listed = cluster
            .plane
            .get(&format!("pods -n {namespace} -l {label}"))?;
        let pods = listed["items"].as_array().context("no list of pods")?;
        let ready = pods.iter().filter(|pod| is_ready(pod));
        ready.map(|pod| Self::of(cluster, pod)).collect()
    }

    fn of(cluster: &Cluster, object: &Value) -> anyhow::Result<Self> {
        let text = |value: &Value| value.as_str().map(str::to_owned).context("no such field");
        let (name, node) = (
            text(&object["metadata"]["name"])?,
            text(&object["spec"]["nodeName"])?,
        );
        let uid = text(&object["metadata"]["uid"])?;
        let host = cluster.node(&node)?;
        let endpoints: Vec<Endpoint> = serde_json::from_str(&host.agent("endpoint list -o json")?)?;
        let is_of = |endpoint: &&Endpoint| {
            let pod = endpoint.pod.as_ref();
            pod.is_some_and(|pod| pod.uid.as_ref() == Some(&uid))
        };
        let endpoint = endpoints.iter().find(is_of);
        let endpoint = endpoint.with_context(|| format!("no endpoint of pod {name}"))?;
        Ok(Self {
            addresses: endpoint
                .ipv4
                .iter()
                .chain(&endpoint.ipv6)
                .copied()
                .collect(),
            netns: NetNs::at(&host.file(&endpoint.netns)?)?,
            name,
            node,
        })
    }

    /// The pod's IPv4 address.
    pub(crate) fn ipv4(&self) -> anyhow::Result<IpAddr> {
        self.addresses
            .first()
            .copied()
            .context("the pod has no address")
    }

    /// Asks a web server for the name of its pod.
    pub(crate) fn ask(&self, to: SocketAddr) -> anyhow::Result<String> {
        self.netns.run_in(|| ask(to))?
    }

    /// Whether a server accepts a connection, rather than that nothing answers.
    pub(crate) fn reaches(&self, to: SocketAddr) -> anyhow::Result<bool> {
        let connect = || TcpStream::connect_timeout(&to, SILENCE);
        match self.netns.run_in(connect)? {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == ErrorKind::TimedOut => Ok(false),
            Err(error) => Err(error).with_context(|| format!("{} to {to}", self.name)),
        }
    }
}

/// Asks a web server for the name of its pod, from this thread's namespace, on a new connection.
pub(crate) fn ask(to: SocketAddr) -> anyhow::Result<String> {
    let mut stream = TcpStream::connect_timeout(&to, REQUEST)?;
    stream.set_read_timeout(Some(REQUEST))?;
    stream.write_all(b"GET /name HTTP/1.0\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer
        .split_once("\r\n\r\n")
        .context("an unfinished answer")?;
    ensure!(head.contains(" 200 "), "{head}");
    Ok(body.trim().to_owned())
}

/// The result of requests one after the other.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    pub(crate) answered: usize,
    pub(crate) errors: Vec<String>,
}

/// Asks a server again and again from a pod while `work` runs, each time on a new connection.
pub(crate) fn while_asking<T>(
    pod: &Pod,
    to: SocketAddr,
    work: impl FnOnce() -> anyhow::Result<T>,
) -> anyhow::Result<(T, Requests)> {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let asking = scope.spawn(|| {
            pod.netns.run_in(|| {
                let mut requests = Requests::default();
                while !is_over.load(Ordering::Relaxed) {
                    match ask(to) {
                        Ok(_) => requests.answered += 1,
                        Err(error) => requests.errors.push(format!("{error:#}")),
                    }
                }
                requests
            })
        });
        let done = {
            let _over = RaisedAtEnd(&is_over);
            work()
        };
        let requests = asking
            .join()
            .map_err(|_| anyhow::anyhow!("a thread panicked"))??;
        Ok((done?, requests))
    })
}

/// A namespace with these labels.
pub(crate) fn namespace(name: &str, labels: &Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Namespace",
        "metadata": { "name": name, "labels": labels },
    })
}

/// A web server on [`PORTS`] that answers with the name of its pod, and goes on for a moment when it must end: until then
/// clients may still come.
pub(crate) fn web_container() -> Value {
    json!({
        "name": "web", "image": WORKLOAD,
        "command": ["sh", "-c", "hostname >/www/name; httpd -p 9090 -h /www; exec httpd -f -p 8080 -h /www"],
        "ports": [{ "name": "http", "containerPort": 8080 }],
        "readinessProbe": { "httpGet": { "path": "/name", "port": "http" }, "periodSeconds": 1 },
        "lifecycle": { "preStop": { "exec": { "command": ["sleep", "3"] } } },
    })
}

/// A pod on a node with this container and these labels.
pub(crate) fn pod(namespace: &str, name: &str, node: &str, labels: &Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": name, "namespace": namespace, "labels": labels },
        "spec": {
            "nodeName": node, "terminationGracePeriodSeconds": 4,
            "containers": [web_container()],
        },
    })
}

/// A Deployment of web servers, spread over the nodes, and its services: `NAME`, and `NAME-outside` at a node port.
pub(crate) fn deployment(
    namespace: &str,
    name: &str,
    replicas: usize,
    node_port: u16,
) -> [Value; 3] {
    let labels = json!({ "app": name });
    let service = |name: &str, spec: Value| {
        json!({
            "apiVersion": "v1", "kind": "Service",
            "metadata": { "name": name, "namespace": namespace }, "spec": spec,
        })
    };
    [
        json!({
            "apiVersion": "apps/v1", "kind": "Deployment",
            "metadata": { "name": name, "namespace": namespace },
            "spec": {
                "replicas": replicas, "selector": { "matchLabels": labels },
                "strategy": { "rollingUpdate": { "maxUnavailable": 0, "maxSurge": 4 } },
                "template": {
                    "metadata": { "labels": labels },
                    "spec": {
                        "terminationGracePeriodSeconds": 5, "containers": [web_container()],
                        "topologySpreadConstraints": [{
                            "maxSkew": 1, "topologyKey": "kubernetes.io/hostname",
                            "whenUnsatisfiable": "DoNotSchedule",
                            "labelSelector": { "matchLabels": labels },
                        }],
                    },
                },
            },
        }),
        service(
            name,
            json!({ "selector": labels, "ports": [{ "port": 80, "targetPort": "http" }] }),
        ),
        service(
            &format!("{name}-outside"),
            json!({
                "type": "NodePort", "selector": labels,
                "ports": [{ "port": 80, "targetPort": "http", "nodePort": node_port }],
            }),
        ),
    ]
}

/// The address of a service.
pub(crate) fn service(
    cluster: &Cluster,
    namespace: &str,
    name: &str,
) -> anyhow::Result<SocketAddr> {
    let object = cluster
        .plane
        .get(&format!("service -n {namespace} {name}"))?;
    let address = object["spec"]["clusterIP"].as_str();
    let address: IpAddr = address.context("the service has no address")?.parse()?;
    Ok((address, 80).into())
}
