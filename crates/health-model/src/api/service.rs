//! Services of this node.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

/// A service that is served on this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ServiceEntry {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// `ClusterIP`, `NodePort` or `LoadBalancer`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Where it was read.
    pub source: String,
    /// Its ports, as in its manifest.
    pub ports: Vec<ServicePortEntry>,
}

/// A port of a service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ServicePortEntry {
    /// Its name; empty for the only port of a service.
    pub name: String,
    /// `TCP`, `UDP` or `SCTP`.
    pub protocol: String,
    /// Its number at the addresses of the service.
    pub port: u16,
    /// Its number at the addresses of nodes.
    pub node_port: Option<u16>,
    /// Where its traffic arrives, IPv4 first.
    pub frontends: Vec<ServiceFrontend>,
    /// Its endpoints, IPv4 first.
    pub backends: Vec<ServiceBackend>,
}

/// Where traffic of a port arrives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ServiceFrontend {
    /// `ClusterIP`, `LoadBalancer`, `ExternalIP` or `NodePort`.
    #[serde(rename = "type")]
    pub kind: String,
    /// `ADDRESS:PORT`, or `node port NUMBER`.
    pub listen: String,
    /// The family: `IPv4` or `IPv6`.
    pub family: String,
    /// What becomes of new flows of this node and its pods: they go to a backend of the `cluster` or on this node
    /// (`local`), `drop` or `reject`.
    pub inside: String,
    /// The same of all other new flows.
    pub outside: String,
}

/// An endpoint of a port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ServiceBackend {
    /// Where it listens.
    pub address: SocketAddr,
    /// Whether it is meant to get new flows.
    pub ready: bool,
    /// Whether it can serve, ending or not.
    pub serving: bool,
    /// Whether it is ending.
    pub terminating: bool,
    /// Whether it is on this node.
    pub local: bool,
    /// Whether new flows of this node go to it.
    pub used: bool,
    /// Its share of new flows relative to others of the port.
    pub weight: u16,
    /// The node that it is on.
    pub node: Option<String>,
    /// The zone that it is in.
    pub zone: Option<String>,
}

/// A port is not served at an address, since another port has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ServiceConflict {
    /// The service without, `NAMESPACE/NAME`.
    pub service: String,
    /// Which address, and who has it.
    pub problem: String,
}

/// What keeps services from being served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ServiceProblem {
    /// What it is about: a file.
    pub subject: String,
    /// What is wrong, with the object and the field.
    pub problem: String,
}
