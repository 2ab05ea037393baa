//! Veth pairs that the agent makes ahead of endpoints: handed over, replaced, and never left behind.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, ensure};
use health_agent::api::types::Endpoint;
use health_agent::net::netns::{self, NetNs};
use nix::sys::signal::Signal;
use tests::process::run;
use tests::{Bed, Node, PATIENCE, Snapshot, wait_for};

const SPARES: u8 = 2;

/// A network namespace that goes with its value.
struct Namespace(NetNs, &'static str);

impl Namespace {
    fn new(name: &'static str) -> anyhow::Result<Self> {
        // One that a killed test left.
        netns::remove(name)?;
        Ok(Self(NetNs::create(name)?, name))
    }

    fn endpoint_on(&self, node: &Node) -> anyhow::Result<Endpoint> {
        let path = self.0.path().display();
        let words = format!("endpoint create --netns {path} --label app=web -o json");
        serde_json::from_str(&node.cli(&words)?.success()?).context("create says no endpoint")
    }

    fn pings(&self, address: IpAddr) -> anyhow::Result<()> {
        let mut ping = Command::new("ip");
        ping.args(["netns", "exec", self.1, "ping", "-n", "-q", "-c", "2"]);
        run(ping.args(["-i", "0.01", "-W", "2", &address.to_string()]))?.success()?;
        Ok(())
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = netns::remove(self.1);
    }
}

fn pin(node: &Node, program: &str, device: &str) -> std::path::PathBuf {
    node.pins().join(format!("links/{program}_{device}"))
}

/// Waits until all pairs are there, programs and all; their devices' numbers by name.
fn spares(node: &Node) -> anyhow::Result<BTreeMap<String, u32>> {
    wait_for("the pairs to be there", PATIENCE, || {
        let found = devices(node, "lxcspare")?;
        let outer = devices(node, "lxc")?;
        let spares: BTreeMap<_, _> = found
            .keys()
            .map(|inner| inner.replace("spare", ""))
            .filter_map(|name| Some((name.clone(), *outer.get(&name)?)))
            .filter(|(name, _)| pin(node, "to_endpoint", name).exists())
            .collect();
        Ok((spares.len() == usize::from(SPARES)).then_some(spares))
    })
}

/// Devices whose name begins like this, and their numbers.
fn devices(node: &Node, prefix: &str) -> anyhow::Result<BTreeMap<String, u32>> {
    let listed = node.exec("ip -o link show")?;
    let named = listed.lines().filter_map(|line| {
        let (number, rest) = line.split_once(": ")?;
        let name = rest.split(['@', ':']).next()?;
        Some((name.to_owned(), number.parse().ok()?))
    });
    Ok(named.filter(|(name, _)| name.starts_with(prefix)).collect())
}

fn is_gone(node: &Node, device: &str) -> anyhow::Result<bool> {
    let is_there = devices(node, device)?.contains_key(device);
    Ok(!is_there && !pin(node, "from_endpoint", device).exists())
}

#[test]
#[ignore = "needs root"]
fn endpoints_get_pairs_that_wait_and_none_is_left_by_a_killed_agent() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(1).ipv6(true).spare_pairs(SPARES);
    let bed = bed.without_agents().start()?;
    let node = bed.node(1);
    node.start_agent()?;
    let ready = spares(node)?;
    let listed = node.cli("endpoint list -o json")?.success()?;
    let listed: Vec<Endpoint> = serde_json::from_str(&listed)?;
    assert!(listed.iter().all(|one| one.identity == 4), "{listed:?}");

    let first = Namespace::new("spare1")?;
    let made = first.endpoint_on(node)?;
    assert_eq!(ready.get(&made.interface), Some(&made.ifindex), "{ready:?}");
    for address in node.addresses() {
        first.pings(address)?;
    }
    let before = spares(node)?;
    assert!(!before.contains_key(&made.interface), "{before:?}");

    node.kill_agent(Signal::SIGKILL)?;
    node.start_agent()?;
    let after = spares(node)?;
    for (device, number) in &before {
        ensure!(
            after.get(device) != Some(number),
            "{device} is an agent's that is gone"
        );
        ensure!(
            after.contains_key(device) || is_gone(node, device)?,
            "{device} is left"
        );
    }
    for address in node.addresses() {
        first.pings(address)?;
    }
    let second = Namespace::new("spare2")?;
    let other = second.endpoint_on(node)?;
    second.pings(made.ipv4.context("it has no address")?)?;
    second.pings(made.ipv6.context("it has no address")?)?;

    spares(node)?;
    node.kill_agent(Signal::SIGTERM)?;
    node.cli("cleanup")?.success()?;
    let left = Snapshot::node(node)?;
    assert!(!left.mentions("lxc"), "{left:?}");
    assert!(!left.mentions(&format!("lxc{}", other.id)), "{left:?}");
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_pair_that_was_tampered_with_serves_no_endpoint_as_it_is() -> anyhow::Result<()> {
    let bed = Bed::builder()
        .nodes(1)
        .ipv6(true)
        .spare_pairs(SPARES)
        .start()?;
    let node = bed.node(1);
    let ready: Vec<String> = spares(node)?.into_keys().collect();
    node.exec(&format!("ip link delete {}", ready[0]))?;
    for program in ["from_endpoint", "to_endpoint"] {
        std::fs::remove_file(pin(node, program, &ready[1]))?;
    }
    for name in ["spare1", "spare2"] {
        let namespace = Namespace::new(name)?;
        let made = namespace.endpoint_on(node)?;
        assert!(ready.contains(&made.interface), "{made:?}");
        for address in node.addresses() {
            namespace.pings(address)?;
        }
        let is_pinned = |program| Path::exists(&pin(node, program, &made.interface));
        assert!(is_pinned("from_endpoint") && is_pinned("to_endpoint"));
        let id = made.id;
        node.cli(&format!("endpoint delete {id}"))?.success()?;
        assert!(is_gone(node, &made.interface)?);
    }
    Ok(())
}
