//! This node's own entry: an agent prefers the registry to what an earlier agent saved, and follows changes.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, ensure};
use nix::sys::signal::Signal;
use tests::apiserver::{ApiServer, node};
use tests::liveness::page;
use tests::served::Manifests;
use tests::{Bed, Node, PATIENCE, wait_for};

const KUBECONFIG: &str = "/run/health-agent/kubeconfig";
const V4: &str = "172.30.0.1";
const OTHER_V4: &str = "172.30.0.77";
const V6: &str = "fd00:30::1";
const PODS4: &str = "10.244.1.0/24";
const PODS6: &str = "fd00:10:244:1::/64";

struct Stand {
    server: ApiServer,
    bed: Bed,
}

impl Stand {
    /// Starts a bed with one node without an agent. The cluster assigns these addresses and pod CIDRs to the node.
    fn start(addresses: &[&str], pod_cidrs: &[&str]) -> anyhow::Result<Self> {
        let bed = Bed::builder()
            .nodes(1)
            .ipv6(true)
            .registry(|_| format!("--registry kubernetes:{KUBECONFIG}"))
            .without_agents()
            .start()?;
        let server = ApiServer::start_on(bed.node(1))?;
        server.write_kubeconfig(Path::new(KUBECONFIG))?;
        let stand = Self { server, bed };
        stand.say(addresses, pod_cidrs);
        Ok(stand)
    }

    fn say(&self, addresses: &[&str], pod_cidrs: &[&str]) {
        self.server
            .put(node(self.node().name(), addresses, pod_cidrs));
    }

    fn node(&self) -> &Node {
        self.bed.node(1)
    }

    /// Starts an agent, waits until it is fully up and has saved its state, and kills it.
    fn keep(&self) -> anyhow::Result<()> {
        self.node().take_over(None)?;
        self.node().wait_kept(self.bed.nodes())?;
        self.node().kill_agent(Signal::SIGKILL)
    }

    /// Gives the host another IPv4 address.
    fn move_host(&self) -> anyhow::Result<()> {
        // The order matters: when the first address of a network is deleted, the kernel also deletes the others.
        self.node().exec(&format!("ip addr del {V4}/24 dev eth0"))?;
        self.node()
            .exec(&format!("ip addr add {OTHER_V4}/24 dev eth0"))
            .map(drop)
    }

    fn answers(&self, address: &str) -> anyhow::Result<bool> {
        Ok(self.node().hello(address.parse()?).is_ok())
    }

    fn wait_logged(&self, words: &[&str]) -> anyhow::Result<()> {
        wait_for(&format!("{words:?} in the log"), PATIENCE, || {
            Ok((!self.node().logged(words)?.is_empty()).then_some(()))
        })
    }
}

#[test]
#[ignore = "needs root"]
fn a_node_that_comes_back_with_another_address_starts_by_the_word_of_its_cluster()
-> anyhow::Result<()> {
    let stand = Stand::start(&[V4], &[PODS4])?;
    stand.keep()?;
    stand.move_host()?;
    stand.say(&[OTHER_V4], &[PODS4]);
    stand.node().take_over(None)?;
    assert!(stand.answers(OTHER_V4)?);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_node_that_gained_ipv6_and_pod_cidrs_has_both_at_its_next_start() -> anyhow::Result<()> {
    let stand = Stand::start(&[V4], &[])?;
    stand.keep()?;
    stand.say(&[V4, V6], &[PODS4, PODS6]);
    // Without the new address, the agent rejects the flags; without the pod CIDR, there is no endpoint.
    let flags = "--native-routing-cidr 10.0.0.0/8 --native-routing-cidr fd00::/8";
    stand.node().take_over_with(flags)?;
    assert!(stand.answers(V6)?);
    wait_for("a health endpoint of both versions", PATIENCE, || {
        let addresses = stand.node().health_addresses()?;
        Ok((addresses.len() == 2).then_some(()))
    })
}

#[test]
#[ignore = "needs root"]
fn without_its_cluster_an_agent_starts_by_what_was_kept_if_that_fits_the_host() -> anyhow::Result<()>
{
    let mut stand = Stand::start(&[V4], &[PODS4])?;
    stand.keep()?;
    stand.server.stop();
    stand.node().take_over(None)?;
    assert!(stand.answers(V4)?);
    ensure!(stand.node().stale_registry()?.is_some(), "it is not shown");
    stand.node().kill_agent(Signal::SIGKILL)?;

    stand.move_host()?;
    stand.node().start_agent()?;
    let misfit = format!(
        "the saved entry does not match this host: no interface has this node's address {V4}"
    );
    stand.wait_logged(&["waiting for node", &misfit])?;
    stand.node().check_agent()?;
    stand.server.resume()?;
    // The cluster only learns the node's new address later.
    stand.wait_logged(&["; the entry does not match this host"])?;
    stand.say(&[OTHER_V4], &[PODS4]);
    wait_for("the agent to be up", PATIENCE, || {
        stand.node().check_agent()?;
        Ok(stand.answers(OTHER_V4)?.then_some(()))
    })
}

#[test]
#[ignore = "needs root"]
fn an_agent_that_waits_for_its_entry_stops_in_order() -> anyhow::Result<()> {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let stand = Stand::start(&[], &[])?;
        let node = stand.node();
        node.start_agent()?;
        stand.wait_logged(&["waiting for node"])?;
        assert_eq!(page(node, "/livez")?.0, 200, "nobody should restart it");
        let (code, reason) = page(node, "/readyz")?;
        ensure!(
            code == 503 && reason.contains("waiting for node"),
            "{reason}"
        );
        node.kill_agent(signal)?;
        stand.wait_logged(&["agent stopped before it finished starting"])?;
        let pid_file = node.runtime_dir().join("health-agent.pid");
        ensure!(!pid_file.exists(), "{} is left", pid_file.display());
        ensure!(!Path::new("/sys/fs/bpf/health").exists(), "pins are left");
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn settings_that_change_while_an_agent_waits_for_its_entry_are_in_force_once_it_is_up()
-> anyhow::Result<()> {
    let stand = Stand::start(&[], &[])?;
    let node = stand.node();
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("config.yaml");
    let write = |probe_rate: u32| {
        let text = format!(
            "conntrack: {{conntrack-timeout-udp: 45s}}\nmesh: {{probe-rate: {probe_rate}}}\n"
        );
        fs::write(&file, text)
    };
    fs::write(&file, "mesh: {probe-rate: 50}\n")?;
    node.start_agent_with(&format!("--config {}", file.display()))?;
    stand.wait_logged(&["waiting for node"])?;
    write(60)?;
    node.signal_agent(Signal::SIGHUP)?;
    stand.wait_logged(&["setting changed", "probe-rate", "60"])?;
    // Without a signal, too.
    write(70)?;
    stand.wait_logged(&["setting changed", "probe-rate", "70"])?;
    stand.say(&[V4], &[PODS4]);
    wait_for("the agent to be up", PATIENCE, || {
        node.check_agent()?;
        Ok(stand.answers(V4)?.then_some(()))
    })?;
    wait_for("the programs to have the new timeout", PATIENCE, || {
        let config = node.listing("bpf map dump HEALTH_CONFIG")?;
        Ok((config[0]["value"]["timeouts"]["udp-s"] == 45).then_some(()))
    })
}

#[test]
#[ignore = "needs root"]
fn an_agent_that_waits_for_its_registry_has_its_sockets_spared_from_services() -> anyhow::Result<()>
{
    let mut stand = Stand::start(&[V4], &[PODS4])?;
    let manifests = Manifests::new()?;
    let flags = format!("--service-manifests {}", manifests.path().display());
    let node = stand.bed.node(1);
    node.take_over_with(&flags)?;
    node.wait_kept(stand.bed.nodes())?;
    // The PID in the initial PID namespace, which may differ from the PID in this one.
    let spared = || -> anyhow::Result<u64> {
        let listed = node.listing("bpf map dump HEALTH_CONFIG")?;
        let number = listed[0]["value"]["agent-tgid"].as_u64();
        number.with_context(|| format!("no number of a process: {listed}"))
    };
    let former = spared()?;
    node.kill_agent(Signal::SIGKILL)?;
    stand.server.stop();
    stand.move_host()?;
    stand.node().start_agent_with(&flags)?;
    stand.wait_logged(&[
        "waiting for node",
        "the saved entry does not match this host",
    ])?;
    let now = spared()?;
    ensure!(now != former, "the programs still spare {former}");
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_running_agent_listens_on_a_new_own_address_and_ends_once_when_it_moves() -> anyhow::Result<()>
{
    let stand = Stand::start(&[V4], &[PODS4])?;
    stand.node().take_over(None)?;
    let pid = stand.node().agent_pid()?;
    assert!(!stand.answers(V6)?);
    stand.say(&[V4, V6], &[PODS4]);
    wait_for("an answer on the new address", PATIENCE, || {
        Ok(stand.answers(V6)?.then_some(()))
    })?;
    // An address that the host lacks does not stop the agent.
    stand.say(&[OTHER_V4, V6], &[PODS4]);
    stand.say(&[OTHER_V4], &[PODS4]);
    let seen = stand.node();
    wait_for("the agent to hear of it", PATIENCE, || {
        let listed = seen.listing("node list")?;
        Ok(listed.to_string().contains(OTHER_V4).then_some(()))
    })?;
    assert_eq!(stand.node().agent_pid()?, pid);
    assert!(stand.answers(V4)?);
    stand.move_host()?;
    let ended = format!("addresses {OTHER_V4} instead of {V4}, {V6}; restart the agent");
    stand.wait_logged(&[&ended])?;
    wait_for("the agent to end", PATIENCE, || {
        Ok(stand.node().check_agent().is_err().then_some(()))
    })?;
    stand.node().take_over(None)?;
    assert!(stand.answers(OTHER_V4)?);
    let ends = stand.node().logged(&["restart the agent"])?;
    assert_eq!(ends.len(), 1, "{ends:?}");
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn addresses_of_a_file_are_followed_too() -> anyhow::Result<()> {
    let bed = Bed::builder()
        .nodes(1)
        .ipv6(true)
        .without_agents()
        .start()?;
    let node = bed.node(1);
    let write = |addresses: &str| {
        let name = node.name();
        bed.write_nodes_file(&format!(
            "nodes: [{{name: {name}, addresses: [{addresses}], podCIDRs: [{PODS4}]}}]"
        ))
    };
    write(V4)?;
    node.take_over(None)?;
    write(&format!("{V4}, \"{V6}\""))?;
    wait_for("an answer on the new address", PATIENCE, || {
        Ok(node.hello(V6.parse()?).is_ok().then_some(()))
    })?;
    node.check_agent().context("it followed without a restart")
}
