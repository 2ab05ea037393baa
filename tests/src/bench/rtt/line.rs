//! Two namespaces joined by a veth pair, or by two veth pairs with a relay between them. The far one owns a whole
//! prefix, so it can represent any number of peers.

use std::net::Ipv4Addr;
use std::process::Command;

use health_net::netns::NetNs;

use super::capture::Capture;
use crate::bed::{FABRIC, command_in};
use crate::process::run;
use crate::relay::{Handling, Relay};
use crate::{Bed, Node};

/// Name of the device at both ends.
pub(super) const DEVICE: &str = "up0";
/// Address of the near end.
pub(super) const NEAR: Ipv4Addr = Ipv4Addr::new(10, 127, 0, 1);
/// Address of the far end.
pub(super) const FAR: Ipv4Addr = Ipv4Addr::new(10, 127, 0, 2);
/// First address of the far end's /16 prefix.
const PEERS: Ipv4Addr = Ipv4Addr::new(10, 128, 0, 0);
/// The relay's devices: the veth peers of the near and the far end.
const RELAYED: [&str; 2] = ["near0", "far0"];

/// The two namespaces. Both are removed on drop.
pub(super) struct Line {
    // Dropped before the bed, which owns the relay's devices.
    relay: Option<Relay>,
    bed: Bed,
}

impl Line {
    /// Joins the namespaces by a veth pair.
    pub(super) fn direct() -> anyhow::Result<Self> {
        let bed = namespaces()?;
        let far = bed.node(2).name();
        bed.node(1).exec(&format!(
            "ip link add {DEVICE} type veth peer name {DEVICE} netns {far}"
        ))?;
        address(&bed)?;
        Ok(Self { relay: None, bed })
    }

    /// Joins the namespaces by a relay.
    pub(super) fn relayed(handling: Handling) -> anyhow::Result<Self> {
        let bed = namespaces()?;
        for (node, device) in bed.nodes().iter().zip(RELAYED) {
            node.exec(&format!(
                "ip link add {DEVICE} type veth peer name {device} netns {FABRIC}"
            ))?;
            let mut up = Command::new("ip");
            run(up.args(["-netns", FABRIC, "link", "set", device, "up"]))?.success()?;
        }
        address(&bed)?;
        let mut line = Self { relay: None, bed };
        line.set_relay(handling)?;
        Ok(line)
    }

    /// Makes the relay handle packets differently from now on. Packets in flight are lost.
    pub(super) fn set_relay(&mut self, handling: Handling) -> anyhow::Result<()> {
        // The old relay must stop before the new one starts.
        self.relay = None;
        self.relay = Some(Relay::start(&NetNs::open(FABRIC)?, RELAYED, handling)?);
        Ok(())
    }

    /// Starts capturing the next `packets` ICMP packets at the near end, in both directions.
    pub(super) fn capture(&self, packets: usize) -> anyhow::Result<Capture> {
        Capture::start(self.near().command("tcpdump"), DEVICE, packets)
    }

    /// Like [`Self::capture`], but at the relay's end of the near veth pair.
    pub(super) fn capture_at_relay(&self, packets: usize) -> anyhow::Result<Capture> {
        Capture::start(command_in(FABRIC, "tcpdump"), RELAYED[0], packets)
    }

    /// Number of packets that the relay has dropped.
    pub(super) fn dropped(&self) -> u64 {
        self.relay.as_ref().map_or(0, Relay::dropped)
    }

    pub(super) fn near(&self) -> &Node {
        self.bed.node(1)
    }

    pub(super) fn far(&self) -> &Node {
        self.bed.node(2)
    }
}

/// The first `count` addresses of the far end's prefix.
pub(super) fn peers(count: u16) -> Vec<Ipv4Addr> {
    (1..=count)
        .map(|index| Ipv4Addr::from_bits(PEERS.to_bits() + u32::from(index)))
        .collect()
}

fn namespaces() -> anyhow::Result<Bed> {
    Bed::builder().nodes(2).without_agents().start()
}

fn address(bed: &Bed) -> anyhow::Result<()> {
    for (node, address) in bed.nodes().iter().zip([NEAR, FAR]) {
        node.exec(&format!("ip address add {address}/30 dev {DEVICE}"))?;
        node.exec(&format!("ip link set {DEVICE} up"))?;
    }
    let (near, far) = (bed.node(1), bed.node(2));
    near.exec(&format!("ip route add {PEERS}/16 via {FAR}"))?;
    far.exec(&format!("ip route add local {PEERS}/16 dev lo"))?;
    Ok(())
}
