//! Packets from outside with a source address of this node, of one of its endpoints, or of no host, sent from the next
//! hop and from two hops away. The host's own multicast gets through, and so do packets from an address that the host
//! no longer has.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, UdpSocket};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use health_common::metrics::Reason;
use health_net::netns::NetNs;
use nix::sys::signal::Signal;
use serde_json::Value;
use tests::bed::{ROUTER, add_address, ip, sysctl};
use tests::frames::Outlet;
use tests::outside::{self, FAR, FAR4, FAR6, ROUTER_DEVICE};
use tests::packet::{IPV4, IPV6, Ipv4, Ipv6, ethernet, transport_checksum};
use tests::process::run;
use tests::{Bed, Member, Node, PATIENCE, wait_for};

use crate::services::counted;

const UDP: u8 = 17;
const PORT: u16 = 5001;
/// The attacked endpoint only accepts packets from the endpoint next to it.
const POLICY: &str = r#"[{"labels": ["name=spoofing"], "endpointSelector": {"matchLabels": {"app": "victim"}},
    "ingress": [{"fromEndpoints": [{"matchLabels": {"app": "friend"}}]}, {"fromEntities": ["host"]}]}]"#;

fn mac(namespace: &str, device: &str) -> anyhow::Result<[u8; 6]> {
    let mut ip = Command::new("ip");
    let said = run(ip.args(["-n", namespace, "-j", "link", "show", device]))?.success()?;
    let listed: Value = serde_json::from_str(&said)?;
    let text = listed[0]["address"].as_str().context("no address")?;
    let bytes: Result<Vec<u8>, _> = text
        .split(':')
        .map(|byte| u8::from_str_radix(byte, 16))
        .collect();
    <[u8; 6]>::try_from(bytes?).map_err(|bytes| anyhow::anyhow!("{bytes:?} is not a MAC address"))
}

/// A UDP datagram to `PORT` with this data.
fn datagram(source: IpAddr, destination: IpAddr, data: &[u8]) -> (u16, Vec<u8>) {
    let len = (8 + data.len()) as u16;
    let header = [4000, PORT, len, 0].map(u16::to_be_bytes);
    let mut udp = [header.as_flattened(), data].concat();
    let check = transport_checksum(source, destination, UDP, &udp);
    udp[6..8].copy_from_slice(&check.to_be_bytes());
    match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let ip = Ipv4 {
                protocol: UDP,
                ..Ipv4::icmp(source, destination)
            };
            (IPV4, ip.packet(&udp))
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let ip = Ipv6 {
                next_header: UDP,
                ..Ipv6::icmp(source, destination)
            };
            (IPV6, ip.packet(&udp))
        }
        _ => unreachable!("both are of one IP version"),
    }
}

/// A place from which packets are sent to the node: a namespace, its device, and the MAC address of the next hop.
struct Place {
    outlet: Outlet,
    macs: [[u8; 6]; 2],
}

impl Place {
    fn new(namespace: &str, next: (&str, &str)) -> anyhow::Result<Self> {
        Ok(Self {
            outlet: NetNs::open(namespace)?.run_in(|| Outlet::on("eth0"))??,
            macs: [mac(next.0, next.1)?, mac(namespace, "eth0")?],
        })
    }

    fn send(&self, source: IpAddr, destination: IpAddr, data: &[u8]) -> anyhow::Result<()> {
        let (ethertype, packet) = datagram(source, destination, data);
        let [to, from] = self.macs;
        self.outlet
            .send_plain(&ethernet(to, from, ethertype, &packet))
    }
}

/// A UDP server in a namespace, on all addresses.
struct Server(UdpSocket);

impl Server {
    fn open(netns: &NetNs) -> anyhow::Result<Self> {
        let open = || -> std::io::Result<UdpSocket> {
            let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, PORT))?;
            socket.set_nonblocking(true)?;
            Ok(socket)
        };
        Ok(Self(netns.run_in(open)??))
    }

    /// Waits for the datagram with this data. Returns the sources of the datagrams that arrived before it.
    fn until(&self, data: &[u8]) -> anyhow::Result<Vec<SocketAddr>> {
        let mut others = Vec::new();
        let mut room = [0; 64];
        wait_for("the last datagram", PATIENCE, || {
            loop {
                match self.0.recv_from(&mut room) {
                    Ok((len, _)) if &room[..len] == data => return Ok(Some(())),
                    Ok((_, from)) => others.push(from),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                    Err(error) => return Err(error.into()),
                }
            }
        })?;
        Ok(others)
    }
}

/// Sends a datagram from a namespace through an ordinary socket.
fn send_from(netns: &NetNs, to: IpAddr, data: &[u8]) -> anyhow::Result<()> {
    let any: IpAddr = match to {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    netns.run_in(|| UdpSocket::bind((any, 0))?.send_to(data, (to, PORT)))??;
    Ok(())
}

fn bed() -> anyhow::Result<Bed> {
    let bed = Bed::builder().nodes(1).ipv6(true).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let node = bed.node(1);
    outside::add(node)?;
    for (cidr, via) in node.pod_cidrs().iter().zip(node.addresses()) {
        ip(ROUTER, &format!("route add {cidr} via {via}"))?;
    }
    for device in ["all", "eth0", ROUTER_DEVICE] {
        sysctl(ROUTER, &format!("net.ipv4.conf.{device}.rp_filter=0"))?;
    }
    Ok(bed)
}

fn import(node: &Node) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("policy");
    std::fs::write(&file, POLICY)?;
    node.cli(&format!("policy import {}", file.display()))?
        .success()?;
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn nobody_outside_gets_past_policy_in_the_name_of_this_node() -> anyhow::Result<()> {
    let bed = bed()?;
    let node = bed.node(1);
    import(node)?;
    let victim = Member::on(node, "victim", "--label app=victim")?;
    let friend = Member::on(node, "friend", "--label app=friend")?;
    let server = Server::open(&victim.netns)?;
    let to_own = Server::open(&NetNs::open(node.name())?)?;
    let near = Place::new(ROUTER, (node.name(), "eth0"))?;
    let far = Place::new(FAR, (ROUTER, ROUTER_DEVICE))?;
    let own = node.addresses();
    let of = |text: &str| -> IpAddr { text.parse().expect(text) };
    // Includes the directed broadcast address and the subnet-router anycast address.
    let routed = [own[0], own[1], of("172.30.0.255"), of("fd00:30::")];
    let routed: Vec<IpAddr> = routed.into_iter().chain(friend.addresses()).collect();
    let mapped: Vec<IpAddr> = [Ipv4Addr::LOCALHOST, node.ipv4(), Ipv4Addr::new(0, 0, 0, 1)]
        .iter()
        .chain(&[Ipv4Addr::new(224, 0, 0, 1)])
        .map(|v4| v4.to_ipv6_mapped().into())
        .collect();
    let nobody = [
        "127.0.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "ff02::1",
    ];
    let on_link: Vec<IpAddr> = routed
        .iter()
        .copied()
        .chain(mapped)
        .chain(nobody.map(of))
        .collect();
    let mut number = 0_u32;
    for rp_filter in [0, 2, 1] {
        for device in ["all", "default", "eth0"] {
            sysctl(
                node.name(),
                &format!("net.ipv4.conf.{device}.rp_filter={rp_filter}"),
            )?;
        }
        for (place, sources) in [(&near, &on_link), (&far, &routed)] {
            for (server, targets) in [(&server, victim.addresses()), (&to_own, node.addresses())] {
                let before = counted(node, Reason::InvalidSource)?;
                let mut sent = 0;
                for target in &targets {
                    for source in sources.iter().filter(|ip| ip.is_ipv4() == target.is_ipv4()) {
                        place.send(*source, *target, b"false")?;
                        sent += 1;
                    }
                }
                // The node dropped all of them because of their source, so routers have dropped none.
                wait_for("false sources to be dropped", PATIENCE, || {
                    let dropped = counted(node, Reason::InvalidSource)? - before;
                    ensure!(dropped <= sent, "{dropped} of {sent}");
                    Ok((dropped == sent).then_some(()))
                })
                .with_context(|| format!("{targets:?}, rp_filter {rp_filter}"))?;
                for target in targets {
                    number += 1;
                    let last = number.to_be_bytes();
                    send_from(&friend.netns, target, &last)?;
                    let others = server.until(&last)?;
                    ensure!(others.is_empty(), "{target}: {others:?}");
                }
            }
        }
    }
    // An outside client that contacts the node's address is still seen under its own address.
    let [v4, v6] = [FAR4.into(), FAR6.into()].map(|ip: IpAddr| ip);
    for (source, target) in [(v4, own[0]), (v6, own[1])] {
        far.send(source, target, b"true")?;
        let others = to_own.until(b"true")?;
        ensure!(others.is_empty(), "{target}: {others:?}");
    }
    Ok(())
}

/// When a node's virtual address moves to another host, packets from that host are accepted, with and without an agent.
#[test]
#[ignore = "needs root"]
fn who_has_an_address_now_is_heard() -> anyhow::Result<()> {
    const MOVED: [&str; 2] = ["172.30.0.77/32", "fd00:30::77/128"];
    let bed = bed()?;
    let node = bed.node(1);
    let member = Member::on(node, "server", "--label app=server")?;
    let server = Server::open(&member.netns)?;
    let near = Place::new(ROUTER, (node.name(), "eth0"))?;
    let moved = MOVED.map(|text| -> IpAddr {
        let address = text.split('/').next().unwrap_or(text);
        address.parse().expect(text)
    });
    let is_known = |text: &str| -> anyhow::Result<bool> {
        let listed = node.listing("bpf map dump HEALTH_OWN")?;
        let rows = listed.as_array().context("no list")?;
        Ok(rows.iter().any(|row| row["key"] == text))
    };
    let all_known = |expected: bool| {
        wait_for("the programs to know the addresses", PATIENCE, || {
            let known = [is_known(MOVED[0])?, is_known(MOVED[1])?];
            Ok((known == [expected; 2]).then_some(()))
        })
    };
    let are_dropped = || -> anyhow::Result<()> {
        let before = counted(node, Reason::InvalidSource)?;
        for (source, target) in moved.into_iter().zip(member.addresses()) {
            near.send(source, target, b"false")?;
        }
        wait_for("false sources to be dropped", PATIENCE, || {
            Ok((counted(node, Reason::InvalidSource)? == before + 2).then_some(()))
        })
    };
    let are_heard = |data: &[u8]| -> anyhow::Result<()> {
        for (source, target) in moved.into_iter().zip(member.addresses()) {
            near.send(source, target, data)?;
            let others = server.until(data)?;
            ensure!(others.is_empty(), "{others:?}");
        }
        Ok(())
    };
    are_heard(b"before")?;
    for address in MOVED {
        add_address(node.name(), address, "eth0")?;
    }
    all_known(true)?;
    are_dropped()?;
    node.kill_agent(Signal::SIGKILL)?;
    are_dropped()?;
    for address in MOVED {
        ip(node.name(), &format!("address del {address} dev eth0"))?;
    }
    are_heard(b"without an agent")?;
    node.take_over(None)?;
    all_known(false)?;
    are_heard(b"with the next one")
}

/// A host receives its own copy of the multicast packets that it sends through the uplink.
#[test]
#[ignore = "needs root"]
fn the_hosts_own_datagrams_to_groups_come_back_to_it() -> anyhow::Result<()> {
    const SOON: Duration = Duration::from_secs(20);
    let bed = bed()?;
    let node = bed.node(1);
    let v4 = node.ipv4();
    let before = counted(node, Reason::InvalidSource)?;
    let exchange = || -> anyhow::Result<()> {
        let index = nix::net::if_::if_nametoindex("eth0")?;
        let group4 = Ipv4Addr::new(239, 1, 1, 7);
        let group6: Ipv6Addr = "ff15::7".parse()?;
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, PORT))?;
        socket.join_multicast_v4(&group4, &v4)?;
        socket.set_read_timeout(Some(SOON))?;
        let mut room = [0; 16];
        socket.send_to(b"four", (group4, PORT))?;
        let (len, from) = socket.recv_from(&mut room)?;
        ensure!(&room[..len] == b"four" && from.ip() == v4, "{from}");

        let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, PORT + 1))?;
        socket.join_multicast_v6(&group6, index)?;
        socket.set_read_timeout(Some(SOON))?;
        socket.send_to(b"six", SocketAddrV6::new(group6, PORT + 1, 0, index))?;
        let (len, from) = socket.recv_from(&mut room)?;
        ensure!(&room[..len] == b"six", "{from}");
        Ok(())
    };
    node.run_in(exchange)??;
    assert_eq!(counted(node, Reason::InvalidSource)?, before);
    Ok(())
}
