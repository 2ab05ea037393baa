//! A workload of a test: a network namespace with an endpoint.

use std::net::IpAddr;

use anyhow::Context as _;
use health_model::api::Endpoint;
use health_net::netns::{self, NetNs};

use crate::Node;

/// An endpoint with its namespace, which goes with this value.
#[derive(Debug)]
pub struct Member {
    /// The namespace's name.
    pub name: String,
    /// The namespace.
    pub netns: NetNs,
    /// As the agent told it when it made it.
    pub endpoint: Endpoint,
}

impl Member {
    /// Makes an endpoint on a node, with flags of `endpoint create`, in a namespace `h-NAME` of its own.
    pub fn on(node: &Node, name: &str, flags: &str) -> anyhow::Result<Self> {
        let name = format!("h-{name}");
        // One that a killed test left.
        netns::remove(&name)?;
        let netns = NetNs::create(&name)?;
        let made = node.cli(&format!(
            "endpoint create --netns {} {flags} -o json",
            netns.path().display()
        ))?;
        Ok(Self {
            endpoint: serde_json::from_str(&made.success()?)?,
            netns,
            name,
        })
    }

    /// All of the endpoint's addresses, the one of IPv4 first.
    pub fn addresses(&self) -> Vec<IpAddr> {
        let Endpoint { ipv4, ipv6, .. } = &self.endpoint;
        ipv4.iter().chain(ipv6).copied().collect()
    }

    /// The endpoint's address of IPv4.
    pub fn ipv4(&self) -> anyhow::Result<IpAddr> {
        self.endpoint
            .ipv4
            .context("the endpoint has no IPv4 address")
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let _ = netns::remove(&self.name);
    }
}
