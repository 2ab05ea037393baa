//! An endpoint on the bed, and hosts for it to talk to.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::process::Command;

use anyhow::Context as _;

use super::packets::Hosts;
use super::wire::{Place, Wire};
use crate::bed::registry;
use crate::process::run;
use crate::{Bed, Node, PATIENCE, wait_for};

/// A node with an endpoint, and distant hosts behind another node.
#[derive(Debug)]
pub struct Lab {
    /// The endpoint's node and a second node, which has no agent.
    pub bed: Bed,
    /// The endpoint's IPv4 and IPv6 addresses.
    endpoint: Hosts,
}

impl Lab {
    /// Starts the endpoint's node with these agent flags, separated by spaces, and sets up the routes.
    pub fn start(agent_args: &str) -> anyhow::Result<Self> {
        let bed = Bed::builder()
            .nodes(2)
            .ipv6(true)
            .agent_args(agent_args)
            .without_agents()
            .start()?;
        let node = bed.node(1);
        // Otherwise the agent would keep probing the other node.
        bed.write_nodes_file(&registry(&bed.nodes()[..1]))?;
        node.start_agent()?;
        let endpoint = wait_for("the health endpoint", PATIENCE, || {
            let addresses = node.health_addresses()?;
            let v4 = addresses.iter().copied().find(IpAddr::is_ipv4);
            let v6 = addresses.iter().copied().find(IpAddr::is_ipv6);
            Ok(v4
                .zip(v6)
                .filter(|&(v4, v6)| [v4, v6].iter().all(|&ip| node.pings(ip).unwrap_or(false))))
        })?;
        let lab = Self { bed, endpoint };
        lab.route_to_nobody()?;
        lab.route_to_somebody()?;
        Ok(lab)
    }

    /// Routes hosts via the second node for which nobody answers. The endpoint does not answer them either.
    fn route_to_nobody(&self) -> anyhow::Result<()> {
        let [node, router] = [1, 2].map(|index| self.bed.node(index));
        let next_hop6 = router.ipv6().context("a bed with IPv6")?;
        for (prefix, via) in [
            ("198.18.0.0/16", IpAddr::from(router.ipv4())),
            ("2001:db8:18::/48", next_hop6.into()),
        ] {
            node.exec(&format!("ip route add {prefix} via {via}"))?;
            router.exec(&format!("ip route add blackhole {prefix}"))?;
            let mut nsenter = Command::new("nsenter");
            nsenter.arg(format!("--net={}", node.endpoint_netns().display()));
            nsenter.args(["--", "ip", "route", "add", "blackhole", prefix]);
            run(&mut nsenter)?.success()?;
        }
        Ok(())
    }

    /// Routes hosts via the second node for which that node itself answers.
    fn route_to_somebody(&self) -> anyhow::Result<()> {
        let [node, router] = [1, 2].map(|index| self.bed.node(index));
        let own6 = node.ipv6().context("a bed with IPv6")?;
        let next_hop6 = router.ipv6().context("a bed with IPv6")?;
        router.exec("sysctl -qw net.ipv6.ip_nonlocal_bind=1")?;
        for (prefix, via) in [
            ("198.19.0.0/16", IpAddr::from(router.ipv4())),
            ("2001:db8:19::/48", next_hop6.into()),
        ] {
            node.exec(&format!("ip route add {prefix} via {via}"))?;
            router.exec(&format!("ip route add local {prefix} dev lo"))?;
        }
        for prefix in node.pod_cidrs() {
            let via = if prefix.contains(':') {
                IpAddr::from(own6)
            } else {
                node.ipv4().into()
            };
            router.exec(&format!("ip route add {prefix} via {via}"))?;
        }
        Ok(())
    }

    /// The endpoint's node.
    pub fn node(&self) -> &Node {
        self.bed.node(1)
    }

    /// Opens a packet socket in the endpoint and one behind the node.
    pub fn wire(&self) -> anyhow::Result<Wire> {
        let endpoint_netns = format!("health-{}", self.node().name());
        let endpoint = Place {
            netns: &endpoint_netns,
            device: "health0",
            node: self.node().name(),
            facing: "lxc_health",
        };
        let far = Place {
            netns: self.bed.node(2).name(),
            device: "eth0",
            node: self.node().name(),
            facing: "eth0",
        };
        let marks = [true, false].map(|is_v4| (self.endpoint(is_v4), silent(u16::MAX, is_v4)));
        Wire::open(endpoint, far, marks)
    }

    /// The endpoint's IPv4 or IPv6 address.
    pub fn endpoint(&self, is_v4: bool) -> IpAddr {
        if is_v4 {
            self.endpoint.0
        } else {
            self.endpoint.1
        }
    }
}

/// Distant host `number`, which never answers. The highest number is reserved for the [`Wire`].
pub fn silent(number: u16, is_v4: bool) -> IpAddr {
    let [high, low] = number.to_be_bytes();
    if is_v4 {
        Ipv4Addr::new(198, 18, high, low).into()
    } else {
        Ipv6Addr::new(0x2001, 0xdb8, 0x18, 0, 0, 0, 0, number).into()
    }
}

/// Whether [`silent`] can return this host.
pub fn is_silent(host: IpAddr) -> bool {
    match host {
        IpAddr::V4(host) => host.octets().starts_with(&[198, 18]),
        IpAddr::V6(host) => host.segments().starts_with(&[0x2001, 0xdb8, 0x18]),
    }
}

/// Distant host `number`, for which the second node answers.
pub fn answering(number: u16, is_v4: bool) -> IpAddr {
    let [high, low] = number.to_be_bytes();
    if is_v4 {
        Ipv4Addr::new(198, 19, high, low).into()
    } else {
        Ipv6Addr::new(0x2001, 0xdb8, 0x19, 0, 0, 0, 0, number).into()
    }
}
