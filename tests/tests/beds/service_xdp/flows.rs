//! An outside client with flows through a NodePort to a backend on another node, which XDP forwards with and without an
//! agent.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use health_common::metrics::Reason;
use health_net::xdp::{self, Mode};
use nix::net::if_::if_nametoindex;
use nix::sys::signal::Signal;
use tests::bed::FABRIC;
use tests::offload::{self, Offload};
use tests::outside::{self, FAR};
use tests::served::{Answer, Backend, Connection, Datagrams, Manifests, ServiceManifest};
use tests::{Bed, Node, PATIENCE, wait_for};

use super::{UPLINK, flags, wait_program};

const NODE_PORT: u16 = 30_080;
/// How long to wait for an answer to a datagram before sending another.
const SOON: Duration = Duration::from_secs(1);

/// Only newer kernels report XDP features of drivers. On older kernels, the XDP program of a veth cannot redirect
/// packets.
fn mode() -> anyhow::Result<(&'static str, Mode)> {
    Ok(match xdp::sends(if_nametoindex("lo")?)? {
        Some(_) => ("native", Mode::Native),
        None => ("generic", Mode::Generic),
    })
}

/// Number of packets that XDP has forwarded.
fn forwarded(node: &Node) -> anyhow::Result<u64> {
    let listed = node.listing("bpf metrics list")?;
    let rows = listed.as_array().context("the metrics are no list")?;
    let rows = rows
        .iter()
        .filter(|row| row["reason"] == Reason::ForwardedByXdp.text());
    Ok(rows.filter_map(|row| row["packets"].as_u64()).sum())
}

/// A client's connection and UDP flow to one NodePort.
struct Flows {
    connection: Connection,
    datagrams: Datagrams,
    target: SocketAddr,
}

impl Flows {
    fn open(target: SocketAddr) -> anyhow::Result<Self> {
        let answered = || {
            Connection::open(FAR, target)
                .and_then(|mut connection| connection.ask())
                .map(Some)
                .with_context(|| format!("{target}"))
        };
        wait_for("the service to answer", PATIENCE, answered)?;
        Ok(Self {
            connection: Connection::open(FAR, target)?,
            datagrams: Datagrams::open(FAR, target)?,
            target,
        })
    }

    /// Continues both flows until XDP has forwarded packets of each in both directions.
    fn go_on(&mut self, node: &Node) -> anyhow::Result<()> {
        let expected = self.target.ip();
        let judge = |answer: &Answer| {
            let is_right = answer.backend == "web" && answer.client == expected;
            ensure!(is_right, "{answer:?}");
            Ok(())
        };
        let (connection, datagrams) = (&mut self.connection, &mut self.datagrams);
        let segments = || judge(&connection.upload(100_000)?);
        wait_carried(node, segments).with_context(|| format!("segments to {}", self.target))?;
        // A question and its answer are two packets.
        let datagrams = || {
            for _ in 0..2 {
                let answer = wait_for("an answer", PATIENCE, || Ok(datagrams.ask(SOON)?));
                judge(&answer?)?;
            }
            Ok(())
        };
        wait_carried(node, datagrams).with_context(|| format!("datagrams to {}", self.target))
    }
}

/// Repeats `go_on` until XDP forwards at least four packets during one call.
fn wait_carried(node: &Node, mut go_on: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<()> {
    wait_for("XDP to carry packets", PATIENCE, || {
        let before = forwarded(node)?;
        go_on()?;
        Ok((forwarded(node)? >= before + 4).then_some(()))
    })
}

#[test]
#[ignore = "needs root"]
fn flows_to_another_node_go_on_by_xdp_with_an_agent_and_without() -> anyhow::Result<()> {
    let manifests = Manifests::new()?;
    let (word, mode) = mode()?;
    let bed = Bed::builder()
        .nodes(2)
        .ipv6(true)
        .agent_args(&flags(&manifests, word))
        .start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let (node, other) = (bed.node(1), bed.node(2));
    outside::add(node)?;
    let backend = Backend::start(other, "web", "")?;
    // The senders compute checksums in software, because XDP cannot see that a checksum was left to the device.
    offload::set(FAR, "eth0", Offload::TxChecksums, false)?;
    offload::set(&backend.member.name, "eth0", Offload::TxChecksums, false)?;
    // The peer of a veth accepts the packets that XDP sends back only if GRO is enabled on the peer.
    offload::set(FABRIC, node.name(), Offload::Gro, true)?;
    let mut service = ServiceManifest::new("web", 1).of([&backend]);
    for port in &mut service.ports {
        port.node_port = Some(NODE_PORT);
    }
    manifests.write(&service)?;
    let program = wait_program(node, mode, None)?;

    let targets = node.addresses().into_iter();
    let targets = targets.map(|address| SocketAddr::new(address, NODE_PORT));
    let mut flows = targets.map(Flows::open).collect::<Result<Vec<_>, _>>()?;
    for flows in &mut flows {
        flows.go_on(node).context("with an agent")?;
    }
    node.kill_agent(Signal::SIGKILL)?;
    for flows in &mut flows {
        flows.go_on(node).context("without an agent")?;
    }
    node.start_agent()?;
    wait_program(node, mode, Some(program))?;
    for flows in &mut flows {
        flows.go_on(node).context("with the next agent")?;
    }
    ensure!(super::programs(node, UPLINK)?.len() == 1);
    Ok(())
}
