//! Manifests of services and endpoint slices, which the agents of a bed read from a folder.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::backend::{Backend, PORT};

/// The ClusterIPs of service `number`, IPv4 first.
pub fn cluster_ips(number: u8) -> [IpAddr; 2] {
    [
        Ipv4Addr::new(10, 96, 0, number).into(),
        Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, number.into()).into(),
    ]
}

/// A port of a service.
#[derive(Clone, Debug)]
pub struct ServicePort {
    /// The port's name.
    pub name: &'static str,
    /// `TCP`, `UDP` or `SCTP`.
    pub protocol: &'static str,
    /// The port number at the ClusterIPs.
    pub port: u16,
    /// The port number at the endpoints.
    pub target: u16,
    /// The NodePort, if there is one.
    pub node_port: Option<u16>,
}

impl ServicePort {
    /// A port for the backends' web server, with the number `port` at the ClusterIPs.
    pub const fn http(port: u16) -> Self {
        Self {
            name: "http",
            protocol: "TCP",
            port,
            target: PORT,
            node_port: None,
        }
    }

    /// A port for the backends' UDP server, with the number `port` at the ClusterIPs.
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
    /// The endpoint's addresses.
    pub addresses: Vec<IpAddr>,
    /// Name of the endpoint's node.
    pub node: String,
    /// Whether new flows may go to the endpoint.
    pub ready: bool,
    /// Whether the endpoint can serve.
    pub serving: bool,
    /// Whether the endpoint is terminating.
    pub terminating: bool,
    /// The zones in the endpoint's hints.
    pub zones: Vec<&'static str>,
    /// The nodes in the endpoint's hints.
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

    /// Sets whether the endpoint is ready and can serve.
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

/// A service and one slice of its endpoints per IP version.
#[derive(Clone, Debug)]
pub struct ServiceManifest {
    /// The service's name in the namespace `default`.
    pub name: String,
    /// The service's ClusterIPs.
    pub cluster_ips: Vec<IpAddr>,
    /// The service's ports.
    pub ports: Vec<ServicePort>,
    /// Other fields of the service's `spec`.
    pub spec: Value,
    /// The service's annotations.
    pub annotations: Value,
    /// The load balancer addresses in the service's status, which normally a controller of the cluster writes.
    pub load_balancer: Vec<IpAddr>,
    /// The service's endpoints.
    pub endpoints: Vec<SliceEndpoint>,
}

impl ServiceManifest {
    /// A service with the ClusterIPs of `number`, and port 80 over TCP and UDP for the backends' servers.
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

    /// Sets the endpoints to these backends, all of which are ready.
    #[must_use]
    pub fn of<'a>(mut self, backends: impl IntoIterator<Item = &'a Backend>) -> Self {
        let backends = backends.into_iter();
        self.endpoints = backends.map(Backend::slice_endpoint).collect();
        self
    }

    /// Sets the NodePort of all ports to this number.
    #[must_use]
    pub fn with_node_port(mut self, number: u16) -> Self {
        for port in &mut self.ports {
            port.node_port = Some(number);
        }
        self
    }

    /// Sets the load balancer addresses.
    #[must_use]
    pub fn with_load_balancer(mut self, ips: impl IntoIterator<Item = IpAddr>) -> Self {
        self.load_balancer = ips.into_iter().collect();
        self
    }

    /// Sets the other fields of the service's `spec`.
    #[must_use]
    pub fn spec(mut self, spec: Value) -> Self {
        self.spec = spec;
        self
    }

    /// The contents of the service's file.
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

/// A folder of manifests that agents watch. It is removed on drop.
#[derive(Debug)]
pub struct Manifests(TempDir);

impl Manifests {
    /// Creates the folder.
    pub fn new() -> anyhow::Result<Self> {
        let dir = tempfile::Builder::new().prefix("hservices-").tempdir();
        dir.map(Self)
            .context("cannot create a folder for manifests")
    }

    /// Path of the folder.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Calls `work` while the folder is renamed.
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

    /// The flag that makes an agent serve the services in this folder.
    pub fn agent_args(&self) -> String {
        format!("--service-manifests {}", self.path().display())
    }

    /// Adds or changes a service's file.
    pub fn write(&self, service: &ServiceManifest) -> anyhow::Result<()> {
        self.write_file(&service.name, &service.json().to_string())
    }

    /// Like [`write`](Self::write), but with an arbitrary string as the file's content.
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

    /// Removes a service's file.
    pub fn remove(&self, name: &str) -> anyhow::Result<()> {
        let path = self.file(name);
        fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))
    }

    fn file(&self, name: &str) -> PathBuf {
        self.path().join(format!("{name}.json"))
    }
}

impl Backend {
    /// Converts the backend to a ready endpoint of a service.
    pub fn slice_endpoint(&self) -> SliceEndpoint {
        SliceEndpoint::new(self.member.addresses(), &self.node)
    }
}
