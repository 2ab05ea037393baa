//! The kernel's own NAT, with rules like kube-proxy's.

use std::fmt::Write as _;
use std::net::IpAddr;

use tests::Node;
use tests::bed::{add_host, ip};
use tests::outside::{FAR4, FAR6};
use tests::served::PORT;

use super::side::{Frontend, Service, Side};

/// kube-proxy's mark for packets to masquerade.
const MARK: &str = "0x4000";

/// A pod behind a node without an agent.
pub(super) struct Pod {
    pub(super) namespace: String,
    addresses: [IpAddr; 2],
}

impl Pod {
    /// Creates the pod with this number, and the routes to it from the other node of its side.
    pub(super) fn add(node: &Node, number: u8) -> anyhow::Result<Self> {
        let index = node.ipv4().octets()[3];
        // Named like a node, so that the bed removes the pod together with the nodes.
        let namespace = format!("hnode{}", 200 + index * 4 + number);
        let first = 4 * number;
        let v4 = |last: u8| format!("10.244.{index}.{}", first + last);
        let v6 = |last: u8| format!("fd00:10:244:{index}:{number}::{last}");
        add_host(
            &namespace,
            (node.name(), &format!("pod{number}")),
            [&format!("{}/30", v4(1)), &format!("{}/80", v6(1))],
            [&format!("{}/30", v4(2)), &format!("{}/80", v6(2))],
        )?;
        Ok(Self {
            namespace,
            addresses: [v4(2).parse()?, v6(2).parse()?],
        })
    }

    pub(super) fn addresses(&self) -> Vec<IpAddr> {
        self.addresses.to_vec()
    }
}

/// Gives each of two nodes its routes to the other node's pods.
pub(super) fn add_routes(nodes: [&Node; 2]) -> anyhow::Result<()> {
    let [one, other] = nodes;
    for (node, peer) in [(one, other), (other, one)] {
        for (cidr, via) in peer.pod_cidrs().iter().zip(peer.addresses()) {
            ip(node.name(), &format!("route add {cidr} via {via}"))?;
        }
    }
    Ok(())
}

/// A node's rules, in `nft` syntax.
pub(super) fn rules(side: &Side, node: &Node) -> String {
    let mut text = String::new();
    for (family, pods, far) in [
        ("ip", "10.244.0.0/16", IpAddr::from(FAR4)),
        ("ip6", "fd00:10:244::/48", FAR6.into()),
    ] {
        let mut services = String::new();
        let mut hairpins = String::new();
        for service in Service::all() {
            let mut backends = side.backend(service.target).iter();
            let Some(backend) = backends.find(|ip| ip.is_ipv4() == far.is_ipv4()) else {
                continue;
            };
            for (at, kind) in side.frontends(service, node) {
                if at.is_ipv4() != far.is_ipv4() {
                    continue;
                }
                let from = match kind {
                    Frontend::Cluster => format!("{family} saddr != {pods}"),
                    Frontend::Outward => String::new(),
                };
                for protocol in ["tcp", "udp"] {
                    let to = format!("{family} daddr {} {protocol} dport {}", at.ip(), at.port());
                    // Writing to a string cannot fail.
                    let _ = writeln!(services, "    {to} {from} meta mark set {MARK}");
                    let destination = std::net::SocketAddr::new(*backend, PORT);
                    let _ = writeln!(services, "    {to} dnat to {destination}");
                }
            }
            let _ = writeln!(
                hairpins,
                "    {family} saddr {backend} {family} daddr {backend} masquerade fully-random"
            );
        }
        let _ = write!(
            text,
            "
table {family} pairs {{
  chain services {{
{services}  }}
  chain in {{
    type nat hook prerouting priority -100
    jump services
  }}
  chain own {{
    type nat hook output priority -100
    jump services
  }}
  chain out {{
    type nat hook postrouting priority 100
    meta mark {MARK} masquerade fully-random
{hairpins}    {family} saddr {pods} {family} daddr {far} masquerade
  }}
}}
"
        );
    }
    text
}
