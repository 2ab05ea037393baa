//! A router on the fabric, and namespaces that a test adds to a bed in addition to the nodes.

use std::path::PathBuf;
use std::process::Command;

use super::fabric::{FABRIC, add_namespace, netns_path};
use crate::process::run;
use crate::wait::{PATIENCE, wait_for};

/// The router's namespace. It is named like a node's namespace, so that the bed removes it too.
pub const ROUTER: &str = "hnode254";
/// The router's IPv4 address on the nodes' network.
pub const ROUTER4: &str = "172.30.0.254";
/// The router's IPv6 address on the nodes' network.
pub const ROUTER6: &str = "fd00:30::254";

/// Runs `ip` in a namespace. Arguments are separated by spaces.
pub fn ip(namespace: &str, words: &str) -> anyhow::Result<()> {
    let words = words.split_whitespace();
    run(Command::new("ip").args(["-n", namespace]).args(words))?.success()?;
    Ok(())
}

/// Adds an address `ADDRESS/LENGTH` to a device that is up, and waits until it works.
pub fn add_address(namespace: &str, address: &str, device: &str) -> anyhow::Result<()> {
    ip(
        namespace,
        &format!("address add {address} dev {device} nodad"),
    )?;
    wait_local(address, &["-n", namespace])
}

/// Waits until an address `ADDRESS[/LENGTH]` that was just added works: for IPv6, the kernel adds the local route in a
/// work queue (net/ipv6/addrconf.c, `addrconf_dad_work`). `options` come before the object of the `ip` command.
pub fn wait_local(address: &str, options: &[&str]) -> anyhow::Result<()> {
    let own = address.split('/').next().unwrap_or(address);
    wait_for("an address to serve", PATIENCE, || {
        let mut ip = Command::new("ip");
        let route = run(ip.args(options).args(["route", "get", own]))?.stdout;
        Ok(route.starts_with("local ").then_some(()))
    })
}

/// Sets a sysctl, given as `name=value`, in a namespace.
pub fn sysctl(namespace: &str, setting: &str) -> anyhow::Result<()> {
    run(command_in(namespace, "sysctl").args(["-q", "-w", setting]))?.success()?;
    Ok(())
}

/// Builds a command that runs in a named network namespace, but shares the host's file system and PID namespace.
pub fn command_in(namespace: &str, program: &str) -> Command {
    let file: PathBuf = netns_path(namespace);
    let mut command = Command::new("nsenter");
    command
        .arg(format!("--net={}", file.display()))
        .args(["--", program]);
    command
}

/// Creates a router with a port on the bridge that connects all nodes.
pub fn add_router() -> anyhow::Result<()> {
    add_namespace(ROUTER)?;
    ip(
        FABRIC,
        &format!("link add {ROUTER} master br0 up type veth peer name eth0 netns {ROUTER}"),
    )?;
    ip(ROUTER, "link set lo up")?;
    ip(ROUTER, "link set eth0 up")?;
    add_address(ROUTER, &format!("{ROUTER4}/24"), "eth0")?;
    add_address(ROUTER, &format!("{ROUTER6}/64"), "eth0")?;
    sysctl(ROUTER, "net.ipv4.ip_forward=1")?;
    sysctl(ROUTER, "net.ipv6.conf.all.forwarding=1")
}

/// Creates the namespace `name` and connects it to the namespace `behind` by a veth pair: `eth0` in the new namespace,
/// `device` in `behind`. `device` gets the addresses `here` and `eth0` the addresses `there`. The new namespace uses
/// the addresses `here` as its default gateways.
pub fn add_host(
    name: &str,
    (behind, device): (&str, &str),
    here: [&str; 2],
    there: [&str; 2],
) -> anyhow::Result<()> {
    add_namespace(name)?;
    ip(
        behind,
        &format!("link add {device} type veth peer name eth0 netns {name}"),
    )?;
    for (namespace, device, addresses) in [(behind, device, here), (name, "eth0", there)] {
        ip(namespace, &format!("link set {device} up"))?;
        for address in addresses {
            add_address(namespace, address, device)?;
        }
    }
    ip(name, "link set lo up")?;
    for gateway in here {
        let gateway = gateway.split('/').next().unwrap_or(gateway);
        ip(name, &format!("route add default via {gateway}"))?;
    }
    Ok(())
}
