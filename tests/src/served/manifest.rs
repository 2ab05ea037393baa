//! Services and endpoint slices, as the agents of a bed read them from a folder.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::backend::{Backend, PORT};

/// The ClusterIPs of the service with this number, IPv4 first.
pub fn cluster_ips(number: u8) -> [IpAddr; 2] {
    [
        Ipv4Addr::new(10, 96, 0, number).into(),
        Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, number.into()).into(),
    ]
}

/// A port of a service.
#[derive(Clone, Debug)]
pub struct ServicePort {
    /// Its name.
    pub name: &'static str,
    /// `TCP`, `UDP` or `SCTP`.
    pub protocol: &'static str,
    /// Its number at the ClusterIPs.
    pub port: u16,
    /// Its number at the endpoints.
    pub target: u16,
    /// Its number at the nodes, if it has one.
    pub node_port: Option<u16>,
}

impl ServicePort {
    /// A port for the backends' web server, with this number at the ClusterIPs.
    pub const fn http(port: u16) -> Self {
        Self {
            name: "http",
            protocol: "TCP",
            port,
            target: PORT,
            node_port: None,
        }
    }

    /// A port for the backends' UDP server, with this number at the ClusterIPs.
    pub const fn datagrams(port: u16) -> Self {
        Self {
            name: "datagrams",
            protocol: "UDP",
            ..Self::http(port)
        }
    }
}

/// An endpoint of a service.
#[derive(Clone, Debug)]
pub struct SliceEndpoint {
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// The node that it is on.
    pub node: String,
    /// Whether it should get new flows.
    pub ready: bool,
    /// Whether it can serve.
    pub serving: bool,
    /// Whether it is terminating.
    pub terminating: bool,
    /// The zones in its hints.
    pub zones: Vec<&'static str>,
    /// The nodes in its hints.
    pub nodes: Vec<&'static str>,
}

impl SliceEndpoint {
    /// A ready endpoint with these addresses on this node.
    pub fn new(addresses: Vec<IpAddr>, node: &str) -> Self {
        Self {
            addresses,
            node: node.to_owned(),
            ready: true,
            serving: true,
            terminating: false,
            zones: Vec::new(),
            nodes: Vec::new(),
        }
    }

    /// Sets whether it is ready and can serve.
    pub fn set_ready(&mut self, is_ready: bool) {
        (self.ready, self.serving) = (is_ready, is_ready);
    }

    fn json(&self, address: IpAddr) -> Value {
        let named = |names: &[&str]| -> Vec<Value> {
            names.iter().map(|name| json!({ "name": name })).collect()
        };
        json!({
            "addresses": [address],
            "nodeName": self.node,
            "conditions": {
                "ready": self.ready,
                "serving": self.serving,
                "terminating": self.terminating,
            },
            "hints": { "forZones": named(&self.zones), "forNodes": named(&self.nodes) },
        })
    }
}

/// A service, and one slice of its endpoints for each IP version.
#[derive(Clone, Debug)]
pub struct ServiceManifest {
    /// Its name, in the namespace `default`.
    pub name: String,
    /// Its ClusterIPs.
    pub cluster_ips: Vec<IpAddr>,
    /// Its ports.
    pub ports: Vec<ServicePort>,
    /// Other fields of its `spec`.
    pub spec: Value,
    /// Its annotations.
    pub annotations: Value,
    /// The addresses of its load balancer, as a cluster's controller writes them.
    pub load_balancer: Vec<IpAddr>,
    /// Its endpoints.
    pub endpoints: Vec<SliceEndpoint>,
}

impl ServiceManifest {
    /// A service with the ClusterIPs of this number, and port 80 of TCP and UDP for the backends' servers.
    pub fn new(name: &str, number: u8) -> Self {
        Self {
            name: name.to_owned(),
            cluster_ips: cluster_ips(number).to_vec(),
            ports: vec![ServicePort::http(80), ServicePort::datagrams(80)],
            spec: json!({}),
            annotations: json!({}),
            load_balancer: Vec::new(),
            endpoints: Vec::new(),
        }
    }

    /// Sets the endpoints to these backends, all of them ready.
    #[must_use]
    pub fn of<'a>(mut self, backends: impl IntoIterator<Item = &'a Backend>) -> Self {
        let backends = backends.into_iter();
        self.endpoints = backends.map(Backend::slice_endpoint).collect();
        self
    }

    /// Gives all its ports this number at the nodes.
    #[must_use]
    pub fn with_node_port(mut self, number: u16) -> Self {
        for port in &mut self.ports {
            port.node_port = Some(number);
        }
        self
    }

    /// Gives it a load balancer of these addresses.
    #[must_use]
    pub fn with_load_balancer(mut self, ips: impl IntoIterator<Item = IpAddr>) -> Self {
        self.load_balancer = ips.into_iter().collect();
        self
    }

    /// Adds these fields to its `spec`.
    #[must_use]
    pub fn spec(mut self, spec: Value) -> Self {
        self.spec = spec;
        self
    }

    /// The contents of its file.
    pub fn json(&self) -> Value {
        let ports = self.ports.iter().map(|port| {
            let mut shown = json!({
                "name": port.name,
                "protocol": port.protocol,
                "port": port.port,
                "targetPort": port.target,
            });
            if let Some(number) = port.node_port {
                shown["nodePort"] = number.into();
            }
            shown
        });
        let has_node_port = self.ports.iter().any(|port| port.node_port.is_some());
        let mut spec = json!({
            "type": if has_node_port { "NodePort" } else { "ClusterIP" },
            "clusterIP": self.cluster_ips.first(),
            "clusterIPs": self.cluster_ips,
            "ports": ports.collect::<Vec<_>>(),
        });
        for (field, value) in self.spec.as_object().into_iter().flatten() {
            spec[field] = value.clone();
        }
        let ingress = self.load_balancer.iter().map(|ip| json!({ "ip": ip }));
        let service = json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": { "name": self.name, "annotations": self.annotations },
            "spec": spec,
            "status": { "loadBalancer": { "ingress": ingress.collect::<Vec<_>>() } },
        });
        let slices = [("IPv4", true), ("IPv6", false)].map(|(family, is_v4)| {
            let endpoints = self.endpoints.iter().filter_map(|endpoint| {
                let mut addresses = endpoint.addresses.iter();
                let address = addresses.find(|address| address.is_ipv4() == is_v4)?;
                Some(endpoint.json(*address))
            });
            let ports = self.ports.iter().map(
                |port| json!({ "name": port.name, "protocol": port.protocol, "port": port.target }),
            );
            json!({
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {
                    "name": format!("{}-{}", self.name, family.to_lowercase()),
                    "labels": { "kubernetes.io/service-name": self.name },
                },
                "addressType": family,
                "ports": ports.collect::<Vec<_>>(),
                "endpoints": endpoints.collect::<Vec<_>>(),
            })
        });
        let [v4, v6] = slices;
        json!({ "apiVersion": "v1", "kind": "List", "items": [service, v4, v6] })
    }
}

/// A folder of manifests that agents watch. Dropping it removes the folder.
#[derive(Debug)]
pub struct Manifests(TempDir);

impl Manifests {
    /// Creates the folder.
    pub fn new() -> anyhow::Result<Self> {
        let dir = tempfile::Builder::new().prefix("hservices-").tempdir();
        dir.map(Self)
            .context("cannot create a folder for manifests")
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Does `work` while the folder is moved away.
    pub fn while_away<T>(&self, work: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
        let aside = self.path().with_extension("aside");
        let rename = |from: &Path, to: &Path| {
            fs::rename(from, to).with_context(|| format!("cannot rename {}", from.display()))
        };
        rename(self.path(), &aside)?;
        let result = work();
        rename(&aside, self.path())?;
        result
    }

    /// The flag of an agent that serves this folder.
    pub fn agent_args(&self) -> String {
        format!("--service-manifests {}", self.path().display())
    }

    /// Adds or changes a service.
    pub fn write(&self, service: &ServiceManifest) -> anyhow::Result<()> {
        self.write_file(&service.name, &service.json().to_string())
    }

    /// Like [`write`](Self::write), with any text.
    pub fn write_file(&self, name: &str, text: &str) -> anyhow::Result<()> {
        let path = self.file(name);
        let new = path.with_extension("new");
        let write = || {
            fs::write(&new, text)?;
            // An agent must not read a partial file.
            fs::rename(&new, &path)
        };
        write().with_context(|| format!("cannot write {}", path.display()))
    }

    /// Removes a service.
    pub fn remove(&self, name: &str) -> anyhow::Result<()> {
        let path = self.file(name);
        fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))
    }

    fn file(&self, name: &str) -> PathBuf {
        self.path().join(format!("{name}.json"))
    }
}

impl Backend {
    /// The backend as a ready endpoint of a service.
    pub fn slice_endpoint(&self) -> SliceEndpoint {
        SliceEndpoint::new(self.member.addresses(), &self.node)
    }
}
