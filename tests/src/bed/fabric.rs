//! The nodes' namespaces and the bridge between them.

use std::fmt::Write as _;
use std::fs;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};

use crate::process::{run, run_with_input};

/// The folder of named namespaces.
pub(super) const NETNS_DIR: &str = "/run/netns";
/// The namespace of the bridge. A node's port there is named after the node.
pub const FABRIC: &str = "hfabric";

/// Name of node `index` (from 1), shared by its namespace, its instance and its registry entry.
pub(super) fn node_name(index: u8) -> String {
    format!("hnode{index}")
}

/// Whether [`node_name`] can produce `name`.
pub(super) fn is_node_name(name: &str) -> bool {
    name.strip_prefix("hnode")
        .is_some_and(|index| !index.is_empty() && index.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Path of a named namespace.
pub(super) fn netns_path(name: &str) -> PathBuf {
    Path::new(NETNS_DIR).join(name)
}

pub(super) fn node_ipv4(index: u8) -> Ipv4Addr {
    Ipv4Addr::new(172, 30, 0, index)
}

/// `fd00:30::i`, where the hexadecimal group `i` reads as the decimal index.
pub(super) fn node_ipv6(index: u8) -> Ipv6Addr {
    Ipv6Addr::new(0xfd00, 0x30, 0, 0, 0, 0, 0, decimal_group(index))
}

fn link_local(index: u8) -> Ipv6Addr {
    Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, decimal_group(index))
}

pub(super) fn pod_cidr4(index: u8) -> String {
    format!("10.244.{index}.0/24")
}

pub(super) fn pod_cidr6(index: u8) -> String {
    format!("fd00:10:244:{index}::/64")
}

fn decimal_group(index: u8) -> u16 {
    let index = u16::from(index);
    ((index / 100) << 8) | ((index / 10 % 10) << 4) | (index % 10)
}

/// Fails if the machine's neighbour tables, which all namespaces share, are too small: every node must know every other
/// node, its own endpoint and its endpoint's gateway. The limit is visible only in the initial namespace; elsewhere,
/// this check passes.
pub(super) fn check_neighbour_tables(nodes: u8, ipv6: bool) -> anyhow::Result<()> {
    let needed = u64::from(nodes) * (u64::from(nodes) + 2);
    for family in ["ipv4", "ipv6"].into_iter().take(1 + usize::from(ipv6)) {
        let path = format!("/proc/sys/net/{family}/neigh/default/gc_thresh3");
        let text = match fs::read_to_string(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            text => text.with_context(|| format!("cannot read {path}"))?,
        };
        let limit: u64 = text
            .trim()
            .parse()
            .with_context(|| format!("{path} does not hold a number: {text:?}"))?;
        ensure!(
            needed <= limit,
            "{nodes} nodes need {needed} entries in the {family} neighbour table, and the limit is \
             {limit}; run: sysctl -w net.{family}.neigh.default.gc_thresh3={needed}"
        );
    }
    Ok(())
}

/// Creates `nodes` namespaces, each with an addressed `eth0` that is up, all on one bridge.
pub(super) fn build(nodes: u8, ipv6: bool, mtu: u32) -> anyhow::Result<()> {
    add_namespace(FABRIC)?;
    let mut links = format!("link add br0 mtu {mtu} up type bridge mcast_snooping 0\n");
    for index in 1..=nodes {
        let node = node_name(index);
        add_namespace(&node)?;
        writeln!(
            links,
            "link add {node} mtu {mtu} master br0 up type veth \
             peer name eth0 mtu {mtu} netns {node}"
        )?;
    }
    batch(FABRIC, &links)?;
    for index in 1..=nodes {
        let mut addresses = format!(
            "link set lo up\n\
             link set eth0 addrgenmode none\n\
             link set eth0 up\n\
             address add {}/24 dev eth0\n",
            node_ipv4(index)
        );
        if ipv6 {
            // Also set link-local addresses, which the kernel would otherwise add later. Skip duplicate address
            // detection, so that they work immediately.
            for address in [link_local(index), node_ipv6(index)] {
                writeln!(addresses, "address add {address}/64 dev eth0 nodad")?;
            }
        }
        batch(&node_name(index), &addresses)?;
    }
    Ok(())
}

/// Detaches a node's link from the bridge.
pub(super) fn detach(node: &str) -> anyhow::Result<()> {
    batch(FABRIC, &format!("link set {node} nomaster\n"))
}

/// Attaches a node's link to the bridge.
pub(super) fn attach(node: &str) -> anyhow::Result<()> {
    batch(FABRIC, &format!("link set {node} master br0\n"))
}

/// Replaces a node's link to the bridge with two devices in the bridge's namespace that a relay can join. Returns their
/// names, the node's first.
pub(super) fn open_wire(node: &str) -> anyhow::Result<[String; 2]> {
    let [inner, port] = ["wire", "port"].map(|end| format!("{node}-{end}"));
    batch(
        FABRIC,
        &format!(
            "link add {inner} up type veth peer name {port}\n\
             link set {port} master br0 up\n\
             link set {node} nomaster\n"
        ),
    )?;
    Ok([node.to_owned(), inner])
}

/// Adds an address to the bridge, for servers that the nodes use.
pub(super) fn add_server_address(address: Ipv4Addr) -> anyhow::Result<()> {
    // Packets that a namespace sends to its own addresses go through its loopback device.
    batch(
        FABRIC,
        &format!("link set lo up\naddress replace {address}/24 dev br0\n"),
    )
}

/// Creates a named namespace.
pub(super) fn add_namespace(name: &str) -> anyhow::Result<()> {
    run(Command::new("ip").args(["netns", "add", name]))?.success()?;
    Ok(())
}

/// Deletes a named namespace if it exists.
pub(super) fn delete_namespace(name: &str) -> anyhow::Result<()> {
    if !netns_path(name).exists() {
        return Ok(());
    }
    run(Command::new("ip").args(["netns", "del", name]))?.success()?;
    Ok(())
}

/// Names of all named namespaces.
pub(super) fn namespaces() -> anyhow::Result<Vec<String>> {
    if !Path::new(NETNS_DIR).exists() {
        return Ok(Vec::new());
    }
    fs::read_dir(NETNS_DIR)
        .and_then(|entries| {
            entries
                .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
                .collect()
        })
        .with_context(|| format!("cannot list {NETNS_DIR}"))
}

/// Runs `ip` commands, one per line, in a namespace.
fn batch(namespace: &str, commands: &str) -> anyhow::Result<()> {
    run_with_input(
        Command::new("ip").args(["-netns", namespace, "-batch", "-"]),
        commands,
    )?
    .success()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_read_as_the_index() {
        assert_eq!(node_ipv4(12).to_string(), "172.30.0.12");
        assert_eq!(node_ipv6(12).to_string(), "fd00:30::12");
        assert_eq!(node_ipv6(205).to_string(), "fd00:30::205");
        assert_eq!(pod_cidr6(12), "fd00:10:244:12::/64");
    }

    #[test]
    fn only_nodes_names_are_nodes_names() {
        assert!(is_node_name("hnode1") && is_node_name("hnode12"));
        assert!(!is_node_name("hnode") && !is_node_name("hnodex") && !is_node_name("myhnode1"));
    }
}
