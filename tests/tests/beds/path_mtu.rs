//! Paths with a smaller MTU than this host's are found on request and at the slow interval, whether a router reports
//! large packets or they vanish; paths without a fault are never reported.

use std::net::{Ipv4Addr, SocketAddr};
use std::process::Command;

use anyhow::{Context as _, ensure};
use health_model::api::{Diagnosis, LargerPackets, PathMtuEntry, PathMtuStatus};
use tests::bed::{FABRIC, Node, ROUTER, ROUTER4, ROUTER6, add_router, ip, sysctl};
use tests::http::{METRICS_PORT, get};
use tests::process::run_with_input;
use tests::{Bed, PATIENCE, wait_for};

/// Routes packets from `from` to `to` through the router, over a separate link with these MTUs at its ends. Replies
/// keep their usual path.
fn lead_over_router(from: &Node, to: &Node, router_mtu: u32, node_mtu: u32) -> anyhow::Result<()> {
    let (name, ipv4) = (to.name(), to.ipv4());
    let ipv6 = to.ipv6().context("the bed has IPv6")?;
    ip(
        ROUTER,
        &format!(
            "link add {name} mtu {router_mtu} type veth peer name eth1 mtu {node_mtu} netns {name}"
        ),
    )?;
    // Packets arrive on a device without a route back to the sender, whatever the machine's default for `rp_filter` is.
    for setting in ["conf.all.rp_filter=0", "conf.eth1.rp_filter=0"] {
        sysctl(name, &format!("net.ipv4.{setting}"))?;
    }
    ip(name, "link set eth1 up")?;
    ip(ROUTER, &format!("link set {name} up"))?;
    ip(name, "address add fe80::2/64 dev eth1 nodad")?;
    ip(ROUTER, &format!("address add fe80::1/64 dev {name} nodad"))?;
    ip(ROUTER, &format!("route add {ipv4}/32 dev {name}"))?;
    ip(
        ROUTER,
        &format!("route add {ipv6}/128 via fe80::2 dev {name}"),
    )?;
    let from = from.name();
    ip(from, &format!("route add {ipv4}/32 via {ROUTER4} dev eth0"))?;
    ip(
        from,
        &format!("route add {ipv6}/128 via {ROUTER6} dev eth0"),
    )
}

/// The results of `path-mtu` with these arguments.
fn probe(node: &Node, words: &str) -> anyhow::Result<Vec<PathMtuEntry>> {
    let found = node.listing(&format!("path-mtu {words}"))?;
    Ok(serde_json::from_value(found)?)
}

/// Results for the paths to all addresses of a node.
fn paths_to<'a>(found: &'a [PathMtuEntry], to: &Node) -> anyhow::Result<Vec<&'a PathMtuStatus>> {
    let paths: Option<Vec<_>> = found
        .iter()
        .filter(|entry| entry.node == to.full_name())
        .map(|entry| entry.path_mtu.as_ref())
        .collect();
    let paths = paths.with_context(|| format!("not all is known: {found:#?}"))?;
    ensure!(paths.len() == to.addresses().len(), "{found:#?}");
    Ok(paths)
}

fn diagnosis(of: &Node, by: &Node) -> anyhow::Result<Option<Diagnosis>> {
    let status = by.status()?;
    let node = status.nodes.into_iter().find(|n| n.name == of.full_name());
    Ok(node.context("the node is not in the report")?.diagnosis)
}

/// Number of lost probes, from the map.
fn lost(node: &Node) -> anyhow::Result<u64> {
    let rows = node.listing("bpf rtt list")?;
    let rows = rows.as_array().context("no rows")?;
    Ok(rows.iter().filter_map(|row| row["lost"].as_u64()).sum())
}

#[test]
#[ignore = "needs root"]
fn a_device_that_drops_large_packets_itself_is_a_black_hole_that_is_soon_found()
-> anyhow::Result<()> {
    let bed = Bed::builder()
        .nodes(2)
        .ipv6(true)
        .agent_args("--path-mtu-interval off")
        .start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let (prober, other) = (bed.node(1), bed.node(2));
    // A veth drops packets that exceed its peer's MTU. A raw socket hides such drops.
    let name = prober.name();
    ip(FABRIC, &format!("link set {name} mtu 1400"))?;
    let dropped = || -> anyhow::Result<u64> {
        let shown = prober.exec("ip -s -j link show eth0")?;
        let links: serde_json::Value = serde_json::from_str(&shown)?;
        let dropped = links[0]["stats64"]["tx"]["dropped"].as_u64();
        dropped.with_context(|| format!("no counter: {shown}"))
    };
    let before = dropped()?;
    let found = probe(prober, other.name())?;
    for path in paths_to(&found, other)? {
        // A veth also accepts packets that are longer by a VLAN tag, while the bridge on the return path may not.
        assert!((1400..=1404).contains(&path.mtu), "{path:?}");
        assert_eq!(path.local_mtu, 1500, "{path:?}");
        assert_eq!(path.larger, LargerPackets::Vanish, "{path:?}");
    }
    let said = diagnosis(other, prober)?.context("no diagnosis")?;
    assert_eq!(said.cause, "path-mtu");
    // Both searches together try each failing size a fixed number of times.
    let dropped = dropped()? - before;
    ensure!(
        (1..2_000).contains(&dropped),
        "{dropped} packets were dropped"
    );
    ip(FABRIC, &format!("link set {name} mtu 1500"))?;
    for path in paths_to(&probe(prober, "")?, other)? {
        assert_eq!(path.mtu, 1500, "{path:?}");
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_lower_mtu_on_the_way_is_found_on_request_and_so_is_its_end() -> anyhow::Result<()> {
    let bed = Bed::builder()
        .nodes(4)
        .ipv6(true)
        .agent_args("--path-mtu-interval off")
        .start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let [prober, reported, black_hole, straight] = [1, 2, 3, 4].map(|index| bed.node(index));
    add_router()?;
    lead_over_router(prober, reported, 1400, 1400)?;
    // The far end silently drops packets that are longer than its own MTU plus a VLAN tag.
    lead_over_router(prober, black_hole, 1500, 1400)?;
    bed.wait_all_reachable(PATIENCE)?;
    let lost_before = lost(prober)?;

    let found = probe(prober, "")?;
    for path in paths_to(&found, straight)? {
        assert_eq!((path.mtu, path.local_mtu), (1500, 1500), "{path:?}");
        assert_eq!(path.larger, LargerPackets::None);
    }
    for path in paths_to(&found, reported)? {
        assert_eq!((path.mtu, path.local_mtu), (1400, 1500), "{path:?}");
        assert_eq!(path.larger, LargerPackets::Rejected, "{path:?}");
        assert_eq!(path.device, "eth0");
        let router = path.rejected_by.context("who rejects them?")?.to_string();
        assert!([ROUTER4, ROUTER6].contains(&router.as_str()), "{router}");
    }
    for path in paths_to(&found, black_hole)? {
        assert_eq!((path.mtu, path.local_mtu), (1404, 1500), "{path:?}");
        assert_eq!(path.larger, LargerPackets::Vanish, "{path:?}");
        assert_eq!(path.rejected_by, None);
    }
    ensure!(!found.iter().any(|path| path.node == prober.full_name()));

    // The paths are reported, without any other effects.
    assert_eq!(diagnosis(straight, prober)?, None);
    for (node, word) in [(reported, ROUTER4), (black_hole, "vanish")] {
        let said = diagnosis(node, prober)?.context("no diagnosis")?;
        assert_eq!(said.cause, "path-mtu");
        assert!(said.message.contains(word), "{}", said.message);
        assert_eq!(said.evidence.len(), 2, "{:?}", said.evidence);
    }
    bed.wait_all_reachable(PATIENCE)?;
    assert_eq!(lost(prober)?, lost_before);

    // With a firewall that drops the router's errors, the path becomes a black hole.
    let swallow = "table inet swallow {\nchain out {\ntype filter hook output priority 0;\n\
                   icmp type destination-unreachable drop;\nicmpv6 type packet-too-big drop;\n}\n}\n";
    let mut nft = Command::new("ip");
    nft.args(["netns", "exec", ROUTER, "nft", "-f", "-"]);
    run_with_input(&mut nft, swallow)?.success()?;
    for path in paths_to(&probe(prober, reported.name())?, reported)? {
        assert_eq!(path.mtu, 1400, "{path:?}");
        assert_eq!(path.larger, LargerPackets::Vanish, "{path:?}");
    }

    // The kernel's cached path MTU does not hide that the path has a larger MTU now.
    ip(ROUTER, &format!("link set {} mtu 1500", reported.name()))?;
    ip(reported.name(), "link set eth1 mtu 1500")?;
    for path in paths_to(&probe(prober, reported.name())?, reported)? {
        assert_eq!(path.mtu, 1500, "{path:?}");
    }
    assert_eq!(diagnosis(reported, prober)?, None);

    // No path is too narrow for a host that sends no larger packets.
    ip(prober.name(), "link set eth0 mtu 1404")?;
    for path in paths_to(&probe(prober, black_hole.name())?, black_hole)? {
        assert_eq!((path.mtu, path.local_mtu), (1404, 1404), "{path:?}");
    }
    assert_eq!(diagnosis(black_hole, prober)?, None);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_lower_mtu_on_the_way_is_found_at_the_slow_beat() -> anyhow::Result<()> {
    let bed = Bed::builder()
        .nodes(2)
        .ipv6(true)
        .agent_args("--path-mtu-interval 1s")
        .start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let (prober, peer) = (bed.node(1), bed.node(2));
    wait_for("both paths to be looked at", PATIENCE, || {
        let shown = prober.cli("status --verbose --node hnode2")?.success()?;
        let full = shown.matches("Path MTU:   1500; eth0: 1500").count();
        Ok((full == 2).then_some(()))
    })?;
    assert_eq!(diagnosis(peer, prober)?, None);

    add_router()?;
    lead_over_router(prober, peer, 1400, 1400)?;
    wait_for("the lower MTU to be found", PATIENCE, || {
        let status = prober.status()?;
        let node = status.nodes.iter().find(|n| n.name == peer.full_name());
        let paths = node.context("no such node")?.host.paths();
        let reduced = paths.filter_map(|path| path.path_mtu.as_ref());
        Ok((reduced.filter(|seen| seen.mtu == 1400).count() == 2).then_some(()))
    })?;
    assert_eq!(
        diagnosis(peer, prober)?.map(|said| said.cause).as_deref(),
        Some("path-mtu")
    );
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, METRICS_PORT));
    let (_, metrics) = get(prober, address, "/metrics")?;
    let series = format!(
        "health_agent_node_path_mtu_bytes{{target_cluster=\"default\",target_node_name=\"hnode2\",\
         address=\"{}\"}} 1400",
        peer.ipv4()
    );
    assert!(metrics.contains(&series), "{metrics}");

    ip(prober.name(), &format!("route del {}/32", peer.ipv4()))?;
    let ipv6 = peer.ipv6().context("the bed has IPv6")?;
    ip(prober.name(), &format!("route del {ipv6}/128"))?;
    wait_for("the end of it to be reported", PATIENCE, || {
        Ok(diagnosis(peer, prober)?.is_none().then_some(()))
    })
}

#[test]
#[ignore = "needs root"]
fn another_mtu_of_the_device_is_noticed_at_once() -> anyhow::Result<()> {
    let bed = Bed::builder()
        .nodes(2)
        .agent_args("--path-mtu-interval 1h")
        .start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let (prober, peer) = (bed.node(1), bed.node(2));
    let shows = |line: &str| -> anyhow::Result<Option<()>> {
        let shown = prober.cli("status --verbose --node hnode2")?.success()?;
        Ok(shown.contains(line).then_some(()))
    };
    probe(prober, "")?;
    ensure!(shows("Path MTU:   1500; eth0: 1500")?.is_some());
    ip(prober.name(), "link set eth0 mtu 1400")?;
    wait_for("the lower MTU", PATIENCE, || {
        shows("Path MTU:   1400; eth0: 1400")
    })?;
    // The link at the peer and the bridge keep their MTU.
    ip(prober.name(), "link set eth0 mtu 9000")?;
    wait_for("a black hole", PATIENCE, || {
        Ok(diagnosis(peer, prober)?.filter(|said| said.cause == "path-mtu"))
    })?;
    Ok(())
}
