//! A test workload: a network namespace with an endpoint.

use std::net::IpAddr;

use anyhow::Context as _;
use health_model::api::Endpoint;
use health_net::netns::{self, NetNs};

use crate::Node;

/// An endpoint in its own namespace, which is removed when this value is dropped.
#[derive(Debug)]
pub struct Member {
    /// The namespace's name.
    pub name: String,
    /// The namespace.
    pub netns: NetNs,
    /// The endpoint as the agent reported it on creation.
    pub endpoint: Endpoint,
}

impl Member {
    /// Creates an endpoint on a node, with flags of `endpoint create`, in its own namespace `h-NAME`.
    pub fn on(node: &Node, name: &str, flags: &str) -> anyhow::Result<Self> {
        let name = format!("h-{name}");
        // A killed test may have left a namespace of this name.
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

    /// All of the endpoint's addresses, IPv4 first.
    pub fn addresses(&self) -> Vec<IpAddr> {
        let Endpoint { ipv4, ipv6, .. } = &self.endpoint;
        ipv4.iter().chain(ipv6).copied().collect()
    }

    /// The endpoint's IPv4 address.
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
