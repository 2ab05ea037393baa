//! The world outside a bed's cluster: a host behind the router, which has no route to endpoints, and a client behind a
//! node. The two can only talk if the node performs NAT.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::process::Command;

use crate::bed::{Node, ROUTER, ROUTER4, ROUTER6, add_host, add_router, command_in, ip, sysctl};
use crate::process::Running;
use crate::{PATIENCE, wait_for};

/// Namespace of the outside host. It is named like a node's namespace, so that the bed removes it too.
pub const FAR: &str = "hnode253";
/// IPv4 address of the outside host.
pub const FAR4: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 9);
/// IPv6 address of the outside host.
pub const FAR6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 9);
/// The router's device towards the outside host.
pub const ROUTER_DEVICE: &str = "out";

/// Namespace of the client.
pub const CLIENT: &str = "hnode252";
/// Prefixes of the client's addresses.
pub const CLIENT_CIDRS: [&str; 2] = ["192.168.77.0/24", "fd00:77::/64"];

/// Creates the router, the outside host and the client. The client is behind this node, which gets a default route via
/// the router.
pub fn add(node: &Node) -> anyhow::Result<()> {
    add_router()?;
    add_host(
        FAR,
        (ROUTER, ROUTER_DEVICE),
        ["192.0.2.1/24", "2001:db8::1/64"],
        [&format!("{FAR4}/24"), &format!("{FAR6}/64")],
    )?;
    add_host(
        CLIENT,
        (node.name(), "client0"),
        ["192.168.77.1/24", "fd00:77::1/64"],
        ["192.168.77.5/24", "fd00:77::5/64"],
    )?;
    for router in [ROUTER4, ROUTER6] {
        ip(node.name(), &format!("route add default via {router}"))?;
    }
    sysctl(node.name(), "net.ipv4.ip_forward=1")?;
    sysctl(node.name(), "net.ipv6.conf.all.forwarding=1")
}

/// Namespaces whose packets are masqueraded: a node's health endpoint and its client.
pub fn sources(node: &Node) -> [String; 2] {
    [format!("health-{}", node.name()), CLIENT.to_owned()]
}

/// Addresses of the outside host.
pub fn far() -> [IpAddr; 2] {
    [FAR4.into(), FAR6.into()]
}

/// Starts a server in the outside host's namespace and waits until something listens on its port there.
pub fn serve(server: &mut Command, socket: &str, port: u16) -> anyhow::Result<Running> {
    let running = Running::start(server)?;
    wait_for("the server to listen", PATIENCE, || {
        let mut ss = command_in(FAR, "ss");
        ss.args(["-Hln", socket, "sport", "=", &format!(":{port}")]);
        let listening = crate::process::run(&mut ss)?.success()?;
        Ok((!listening.is_empty()).then_some(()))
    })?;
    Ok(running)
}
