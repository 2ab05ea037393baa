//! Uplinks and addresses on devices other than plain Ethernet: peers are reached, and timed in the kernel, and both
//! still hold after a restart.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::process::Command;

use anyhow::{Context as _, ensure};
use health_model::api::RttSource;
use nix::sys::signal::Signal;
use serde_json::Value;
use tests::attached;
use tests::bed::add_address;
use tests::process::{run, run_with_input};
use tests::transfer::Path;
use tests::tun::TunLink;
use tests::{Bed, Node, PATIENCE, wait_for};

/// Addresses of the second node outside the mesh. Endpoint traffic to them is masqueraded.
const OUTSIDE: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(192, 0, 2, 9)),
    IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 9)),
];
const NATIVE: &str = "--native-routing-cidr 10.244.0.0/16 --native-routing-cidr fd00:10:244::/48";
/// Port of the remote ends of transfers.
const TRANSFERS: u16 = 7001;

/// Two nodes without agents, each modified by these commands.
fn bed(flags: &str, commands: impl Fn(&Node, &Node) -> Vec<String>) -> anyhow::Result<Bed> {
    let bed = Bed::builder()
        .nodes(2)
        .without_agents()
        .agent_args(flags)
        .start()?;
    change(&bed, commands)?;
    Ok(bed)
}

/// Like [`bed`], with both IP versions and masquerading.
fn masquerading() -> anyhow::Result<Bed> {
    let builder = Bed::builder().nodes(2).ipv6(true).without_agents();
    builder.agent_args(NATIVE).start()
}

fn change(bed: &Bed, commands: impl Fn(&Node, &Node) -> Vec<String>) -> anyhow::Result<()> {
    for (node, peer) in [(bed.node(1), bed.node(2)), (bed.node(2), bed.node(1))] {
        for command in commands(node, peer) {
            node.exec(&command)?;
        }
    }
    Ok(())
}

/// Returns the commands that bring up a device with the node's own addresses.
fn give_addresses(node: &Node, device: &str) -> Vec<String> {
    let mut commands = vec![format!("ip link set {device} up")];
    for address in node.addresses() {
        let length = if address.is_ipv4() { 24 } else { 64 };
        commands.push(format!(
            "ip address add {address}/{length} dev {device} nodad"
        ));
    }
    commands
}

/// Connects two nodes by a device with this name that has no Ethernet headers. The device has the nodes' addresses and
/// is their only uplink; any earlier device with that name is gone.
fn join_by_tun(bed: &Bed, device: &str, link_type: Option<u16>) -> anyhow::Result<TunLink> {
    change(bed, |_, _| vec!["ip link delete eth0".to_owned()])?;
    let link = TunLink::join([bed.node(1), bed.node(2)], device, link_type)?;
    change(bed, |node, _| give_addresses(node, device))?;
    Ok(link)
}

/// Starts the agents, waits until peers are timed in the kernel, and does the same again after killing the agents.
fn peers_are_timed_over_a_restart(bed: &Bed) -> anyhow::Result<()> {
    for node in bed.nodes() {
        node.start_agent()?;
    }
    let node = bed.node(1);
    bed.wait_all_reachable(PATIENCE)?;
    wait_timed(bed, node)?;
    node.kill_agent(Signal::SIGKILL)?;
    node.start_agent()?;
    bed.wait_all_reachable(PATIENCE)?;
    wait_timed(bed, node)
}

/// Waits until the node's own agent has had its peer timed in the kernel, over both paths and each IP version.
fn wait_timed(bed: &Bed, node: &Node) -> anyhow::Result<()> {
    wait_timed_by(RttSource::Kernel, bed, node)
}

fn wait_timed_by(source: RttSource, bed: &Bed, node: &Node) -> anyhow::Result<()> {
    wait_for(&format!("round trips by {source:?}"), PATIENCE, || {
        let status = node.status()?;
        let name = bed.node(2).full_name();
        let peer = status.nodes.iter().find(|peer| peer.name == name);
        let paths = peer.into_iter().flat_map(|peer| {
            let endpoint = peer.health_endpoint.iter();
            peer.host
                .paths()
                .chain(endpoint.flat_map(|endpoint| endpoint.paths()))
        });
        let sources: Vec<_> = paths
            .map(|path| path.icmp.as_ref().and_then(|icmp| icmp.rtt_source))
            .collect();
        let paths = 2 * node.addresses().len();
        Ok((sources == vec![Some(source); paths]).then_some(()))
    })
}

/// Checks that probes of both IP versions are in the flow and translation tables, and that endpoint traffic to other
/// destinations over this device has the node's address.
fn flows_are_followed(bed: &Bed, device: &str) -> anyhow::Result<()> {
    let (node, peer) = (bed.node(1), bed.node(2));
    for address in peer.addresses() {
        let of_version = |own: &IpAddr| own.is_ipv4() == address.is_ipv4();
        let own = node.addresses().into_iter().find(of_version);
        let own = own.context("no address of that version")?.to_string();
        let proto = if address.is_ipv4() { "icmp" } else { "icmpv6" };
        let flow = found(
            node,
            &format!("bpf ct list --proto {proto} --dir out --dst {address}"),
        )?;
        for packets in ["tx-packets", "rx-packets"] {
            ensure!(flow[packets].as_u64() > Some(0), "{flow}");
        }
        for way in ["--dir out --dst", "--dir in --src"] {
            let entry = found(
                node,
                &format!("bpf nat list --proto {proto} {way} {address}"),
            )?;
            ensure!(entry["host-local"] == true, "{entry}");
            ensure!(entry["translated-address"] == own.as_str(), "{entry}");
        }
    }
    peer.exec("ip link set lo up")?;
    let endpoint = format!("health-{}", node.name());
    for outside in OUTSIDE {
        let length = if outside.is_ipv4() { 32 } else { 128 };
        add_address(peer.name(), &format!("{outside}/{length}"), "lo")?;
        node.exec(&format!("ip route add {outside}/{length} dev {device}"))?;
        let path = Path::open(&endpoint, peer.name(), outside, TRANSFERS)?;
        let seen = path.stream(1 << 20)?;
        ensure!(node.addresses().contains(&seen), "{outside} sees {seen}");
    }
    Ok(())
}

/// The first row of a listing, once it has one.
fn found(node: &Node, listing: &str) -> anyhow::Result<Value> {
    wait_for(listing, PATIENCE, || {
        let rows = node.listing(listing)?;
        Ok(rows.get(0).cloned())
    })
}

/// Names of the programs on a node's device, as reported by its own agent.
fn programs_on(node: &Node, device: &str) -> anyhow::Result<Vec<String>> {
    let rows = node.listing("bpf prog list")?;
    let rows = rows.as_array().context("the programs are no list")?.iter();
    let hook = |row: &&Value| {
        let hooks = row["attached"].as_array().into_iter().flatten();
        let mut hooks = hooks.filter_map(Value::as_str);
        hooks.any(|hook| hook.split('/').next() == Some(device))
    };
    let names = rows.filter(hook).filter_map(|row| row["name"].as_str());
    Ok(names.map(str::to_owned).collect())
}

#[test]
#[ignore = "needs root and VLAN devices"]
fn peers_are_timed_on_uplinks_that_are_vlan_devices() -> anyhow::Result<()> {
    let bed = bed("", |node, _| {
        let address = node.ipv4();
        vec![
            format!("ip address delete {address}/24 dev eth0"),
            "ip link add link eth0 name vlan5 up type vlan id 5".to_owned(),
            format!("ip address add {address}/24 dev vlan5"),
        ]
    })?;
    peers_are_timed_over_a_restart(&bed)
}

#[test]
#[ignore = "needs root and dummy devices"]
fn peers_are_timed_where_a_nodes_address_is_on_a_dummy_device() -> anyhow::Result<()> {
    let bed = bed("--device eth0", |node, peer| {
        let (own, other) = (node.ipv4(), peer.ipv4());
        let [link, gateway] =
            [own, other].map(|address| format!("172.31.0.{}", address.octets()[3]));
        let mut commands = vec![
            format!("ip address delete {own}/24 dev eth0"),
            format!("ip address add {link}/24 dev eth0"),
            "ip link add service up type dummy".to_owned(),
            format!("ip address add {own}/32 dev service"),
            format!("ip route add {other}/32 via {gateway} src {own}"),
        ];
        // Agents add no routes to nodes outside their own networks.
        for cidr in peer.pod_cidrs() {
            commands.push(format!("ip route add {cidr} via {gateway} src {own}"));
        }
        commands
    })?;
    peers_are_timed_over_a_restart(&bed)
}

#[test]
#[ignore = "needs root"]
fn peers_are_timed_and_flows_translated_on_uplinks_that_are_tun_devices() -> anyhow::Result<()> {
    let bed = masquerading()?;
    let _link = join_by_tun(&bed, "tun0", None)?;
    peers_are_timed_over_a_restart(&bed)?;
    assert_eq!(
        programs_on(bed.node(1), "tun0")?,
        ["from_ip_netdev", "to_ip_netdev"]
    );
    flows_are_followed(&bed, "tun0")?;

    let node = bed.node(1);
    let pins = ["HEALTH_IP_CALLS", "programs/to_ip_netdev"].map(|pin| node.pins().join(pin));
    for pin in &pins {
        fs::remove_file(pin)?;
        wait_for("the pin to be there again", PATIENCE, || {
            Ok(pin.exists().then_some(()))
        })?;
    }
    // This agent has no such device as an uplink.
    node.kill_agent(Signal::SIGKILL)?;
    node.exec("ip link add other0 type veth peer name other1")?;
    node.start_agent_with("--device other0")?;
    wait_for("the pins to be gone", PATIENCE, || {
        Ok((!pins.iter().any(|pin| pin.exists())).then_some(()))
    })
}

/// The new device has the old one's name, so agents notice the change only by its type.
#[test]
#[ignore = "needs root"]
fn programs_follow_where_a_tun_device_takes_the_place_of_an_uplink() -> anyhow::Result<()> {
    let bed = masquerading()?;
    for node in bed.nodes() {
        node.start_agent()?;
    }
    bed.wait_all_reachable(PATIENCE)?;
    let node = bed.node(1);
    assert_eq!(programs_on(node, "eth0")?, ["from_netdev", "to_netdev"]);
    let _link = join_by_tun(&bed, "eth0", None)?;
    wait_for("other programs", PATIENCE, || {
        let is_there = programs_on(node, "eth0")? == ["from_ip_netdev", "to_ip_netdev"];
        Ok(is_there.then_some(()))
    })?;
    // All entries found from now on were created by these programs.
    for flush in ["bpf ct flush global", "bpf nat flush --all"] {
        node.cli(flush)?.success()?;
    }
    bed.wait_all_reachable(PATIENCE)?;
    flows_are_followed(&bed, "eth0")
}

#[test]
#[ignore = "needs root"]
fn an_uplink_that_programs_cannot_read_is_named_and_left_alone() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(2).without_agents().start()?;
    let _link = join_by_tun(&bed, "ib0", Some(libc::ARPHRD_INFINIBAND))?;
    for node in bed.nodes() {
        node.start_agent()?;
    }
    bed.wait_all_reachable(PATIENCE)?;
    let node = bed.node(1);
    wait_timed_by(RttSource::Socket, &bed, node)?;
    let reported = node.logged(&["WARN", "ib0", "ignoring this uplink"])?;
    ensure!(reported.len() == 1, "{reported:?}");
    assert_eq!(attached::programs(node, "ib0")?, [vec![], vec![]]);
    Ok(())
}

#[test]
#[ignore = "needs root and WireGuard devices"]
fn peers_are_timed_and_flows_translated_on_uplinks_that_are_wireguard_devices() -> anyhow::Result<()>
{
    let bed = masquerading()?;
    let mut keys = Vec::new();
    for node in bed.nodes() {
        let private = run(node.command("wg").arg("genkey"))?.success()?;
        let public = run_with_input(Command::new("wg").arg("pubkey"), &private)?.success()?;
        keys.push((private, public.trim().to_owned()));
    }
    let outer = |node: &Node| format!("172.31.0.{}", node.ipv4().octets()[3]);
    for (at, node) in bed.nodes().iter().enumerate() {
        let (private, _) = &keys[at];
        let (peer, (_, public)) = (&bed.nodes()[1 - at], &keys[1 - at]);
        for command in [
            "ip address flush dev eth0".to_owned(),
            format!("ip address add {}/24 dev eth0", outer(node)),
            "ip link add wg0 type wireguard".to_owned(),
        ] {
            node.exec(&command)?;
        }
        let everything = "0.0.0.0/0,::/0";
        let setting = format!(
            "set wg0 listen-port 51820 private-key /proc/self/fd/0 \
             peer {public} allowed-ips {everything} endpoint {}:51820",
            outer(peer)
        );
        let mut wg = node.command("wg");
        run_with_input(wg.args(setting.split_whitespace()), private)?.success()?;
    }
    change(&bed, |node, _| give_addresses(node, "wg0"))?;
    peers_are_timed_over_a_restart(&bed)?;
    assert_eq!(
        programs_on(bed.node(1), "wg0")?,
        ["from_ip_netdev", "to_ip_netdev"]
    );
    flows_are_followed(&bed, "wg0")
}
