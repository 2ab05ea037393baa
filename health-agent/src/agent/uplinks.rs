//! Tracks the devices that lead to other nodes as they come and go.

use std::collections::HashMap;
use std::net::IpAddr;

use health_datapath::Hook;
use health_model::settings::ServiceXdp;
use health_net::KernelError;
use health_net::link::{self, Link, LinkHeader};
use health_net::netlink::Handle;
use health_registry::nodes::Node;
use health_settings::Settings;
use tracing::warn;

/// Which devices are uplinks: the configured ones, or those that carry the node's addresses.
#[derive(Debug)]
pub(super) struct Uplinks {
    netlink: Handle,
    /// Names of the configured devices.
    asked: Vec<String>,
    addresses: Vec<NodeAddress>,
    /// Link headers of the last known uplinks, by uplink name.
    headers: HashMap<String, LinkHeader>,
    /// Whether XDP programs serve on uplinks with an Ethernet header.
    has_xdp: bool,
}

/// An address of the node.
#[derive(Debug)]
struct NodeAddress {
    address: IpAddr,
    /// Names of the devices that last carried the address. They stay uplinks while no device carries the address, for
    /// example during a lease renewal.
    devices: Vec<String>,
}

impl From<IpAddr> for NodeAddress {
    fn from(address: IpAddr) -> Self {
        Self {
            address,
            devices: Vec::new(),
        }
    }
}

/// The current state of the uplinks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct UplinkSurvey {
    /// Names of the uplinks.
    pub(super) devices: Vec<String>,
    /// Addresses of the node that no device carries, or that are not usable (yet).
    pub(super) unusable: Vec<IpAddr>,
    /// Missing devices and addresses, in words.
    pub(super) missing: Vec<String>,
}

impl Uplinks {
    /// Finds the uplinks at an agent's start, when all configured devices and all of the node's addresses must be
    /// present.
    pub(super) async fn find(
        netlink: &Handle,
        config: &Settings,
        own: &Node,
    ) -> anyhow::Result<(Self, UplinkSurvey)> {
        for device in &config.node.devices {
            if link::by_name(netlink, device).await?.is_none() {
                let known: Vec<_> = link::list(netlink)
                    .await?
                    .into_iter()
                    .map(|link| link.name)
                    .collect();
                anyhow::bail!(
                    "--device {device}: no such interface; existing ones: {}",
                    known.join(", ")
                );
            }
        }
        let carrying = link::carrying(netlink, &own.addresses).await?;
        for addr in &own.addresses {
            anyhow::ensure!(
                carrying.iter().any(|(_, carried)| carried.contains(addr)),
                "no interface has this node's address {addr}; correct it in {}",
                config.node.registry
            );
        }
        let addresses = own.addresses.iter().copied().map(NodeAddress::from);
        let mut uplinks = Self {
            netlink: netlink.clone(),
            asked: config.node.devices.clone(),
            addresses: addresses.collect(),
            headers: HashMap::new(),
            has_xdp: config.services.xdp() != ServiceXdp::Off,
        };
        let found = UplinkSurvey {
            // The endpoint waits until the addresses are usable.
            unusable: Vec::new(),
            ..uplinks.look().await?
        };
        Ok((uplinks, found))
    }

    /// Adds addresses of the node.
    pub(super) fn add_addresses(&mut self, addresses: &[IpAddr]) {
        self.addresses
            .extend(addresses.iter().copied().map(NodeAddress::from));
    }

    /// Surveys the current state. Costs a dump of all addresses and one request per uplink.
    pub(super) async fn look(&mut self) -> Result<UplinkSurvey, KernelError> {
        let all = link::addresses(&self.netlink).await?;
        let mut found = UplinkSurvey::default();
        let mut uplinks: Vec<Link> = Vec::new();
        for name in &self.asked {
            match link::by_name(&self.netlink, name).await? {
                Some(link) => uplinks.push(link),
                None => found.missing.push(format!("uplink {name} does not exist")),
            }
        }
        for NodeAddress { address, devices } in &mut self.addresses {
            let carriers: Vec<_> = all.iter().filter(|a| a.address == *address).collect();
            if carriers.iter().all(|carrier| carrier.tentative) {
                found.unusable.push(*address);
            }
            if carriers.is_empty() {
                let missing = format!("no device has this node's address {address}");
                found.missing.push(missing);
            }
            if !self.asked.is_empty() {
                continue;
            }
            if !carriers.is_empty() {
                devices.clear();
            }
            for carrier in carriers {
                let link = link::by_index(&self.netlink, carrier.index).await?;
                devices.extend(link.filter(|link| !link.loopback).map(|link| link.name));
            }
            for name in devices {
                if !uplinks.iter().any(|uplink| uplink.name == *name)
                    && let Some(link) = link::by_name(&self.netlink, name).await?
                {
                    uplinks.push(link);
                }
            }
        }
        found.devices = uplinks.iter().map(|uplink| uplink.name.clone()).collect();
        self.note(uplinks);
        Ok(found)
    }

    /// Records the uplinks' link headers, and warns once about each uplink whose packets no program can read.
    fn note(&mut self, uplinks: Vec<Link>) {
        for Link { name, header, .. } in &uplinks {
            if *header == LinkHeader::Other && self.headers.get(name) != Some(header) {
                warn!(
                    device = name,
                    "ignoring this uplink: its packets start with neither an Ethernet nor an IP header; round trips through it are measured at the socket, and nothing is masqueraded"
                );
            }
        }
        let headers = uplinks.into_iter().map(|link| (link.name, link.header));
        self.headers = headers.collect();
    }

    /// The program hooks on these uplinks.
    pub(super) fn hooks(&self, devices: &[String]) -> impl Iterator<Item = Hook> {
        let hooks = |device: &String| {
            let header = self.headers.get(device);
            let pair = match header {
                Some(LinkHeader::Ethernet) => Some(Hook::uplink(device)),
                Some(LinkHeader::Ip) => Some(Hook::ip_uplink(device)),
                Some(LinkHeader::Other) | None => None,
            };
            let takes_xdp = self.has_xdp && header == Some(&LinkHeader::Ethernet);
            let xdp = takes_xdp.then(|| Hook::xdp(device));
            pair.into_iter().flatten().chain(xdp)
        };
        devices.iter().flat_map(hooks)
    }
}
