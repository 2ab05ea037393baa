//! Frames that a workload sends through a packet socket, bypassing its own stack, do not bypass policy.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use anyhow::{Context as _, ensure};
use health_common::metrics::Reason;
use socket2::{Domain, Socket, Type};
use tests::packet::{IPV4, IPV6, Ipv4, Ipv6, ethernet, tagged, transport_checksum};
use tests::{Bed, Member, Node, PATIENCE, wait_for};

use crate::vlan::open;

const UDP: u8 = 17;
const PORT: u16 = 4000;
const DENY_ALL: &str =
    r#"[{"labels": ["name=deny"], "endpointSelector": {}, "ingress": [{}], "egress": [{}]}]"#;
const TAGS: [(u16, u16); 4] = [(0x8100, 0), (0x8100, 7), (0x88a8, 0), (0x88a8, 7)];

/// An IP packet with a UDP datagram, and its EtherType.
fn datagram(source: IpAddr, destination: IpAddr) -> anyhow::Result<(u16, Vec<u8>)> {
    let mut udp = [PORT, PORT, 14, 0].map(u16::to_be_bytes).concat();
    udp.extend(b"around");
    Ok(match (source, destination) {
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
            let check = transport_checksum(source.into(), destination.into(), UDP, &udp);
            udp[6..8].copy_from_slice(&check.to_be_bytes());
            (IPV6, ip.packet(&udp))
        }
        _ => anyhow::bail!("{source} and {destination} are of two IP versions"),
    })
}

fn hardware(text: &str) -> anyhow::Result<[u8; 6]> {
    let bytes: Result<Vec<u8>, _> = text
        .split(':')
        .map(|byte| u8::from_str_radix(byte, 16))
        .collect();
    <[u8; 6]>::try_from(bytes?)
        .ok()
        .context("no hardware address")
}

fn counted(node: &Node, reason: Reason) -> anyhow::Result<u64> {
    let listed = node.listing("bpf metrics list")?;
    let rows = listed.as_array().context("the metrics are no list")?;
    let rows = rows.iter().filter(|row| row["reason"] == reason.text());
    Ok(rows.filter_map(|row| row["packets"].as_u64()).sum())
}

/// A workload that may not send anything, and the host, which must not receive anything.
struct Wire {
    bed: Bed,
    member: Member,
    socket: Socket,
    macs: ([u8; 6], [u8; 6]),
    /// Sockets on which datagrams to the host would arrive, one per IP version.
    listeners: Vec<UdpSocket>,
}

impl Wire {
    fn new() -> anyhow::Result<Self> {
        let bed = Bed::builder().nodes(1).ipv6(true).start()?;
        bed.wait_all_reachable(PATIENCE)?;
        let node = bed.node(1);
        let member = Member::on(node, "frames", "--label app=web")?;
        let bind = |address: &IpAddr| -> anyhow::Result<UdpSocket> {
            let socket = node.run_in(|| UdpSocket::bind((*address, PORT)))??;
            socket.set_nonblocking(true)?;
            Ok(socket)
        };
        let listeners = node
            .addresses()
            .iter()
            .map(bind)
            .collect::<Result<_, _>>()?;
        let device = &member.endpoint.inner_interface;
        let socket = member.netns.run_in(|| open(device))??;
        let macs = (
            hardware(&member.endpoint.host_mac)?,
            hardware(&member.endpoint.mac)?,
        );
        Ok(Self {
            bed,
            member,
            socket,
            macs,
            listeners,
        })
    }

    /// Sends a packet to the host in a tagged or untagged frame.
    fn send(&self, ethertype: u16, packet: &[u8], tags: &[(u16, u16)]) -> anyhow::Result<()> {
        let frame = ethernet(self.macs.0, self.macs.1, ethertype, packet);
        self.socket.send(&tagged(&frame, tags))?;
        Ok(())
    }

    /// Whether a datagram has reached the host.
    fn has_arrived(&self) -> anyhow::Result<bool> {
        for listener in &self.listeners {
            match listener.recv_from(&mut [0; 64]) {
                Ok(_) => return Ok(true),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(false)
    }

    /// Pairs of an endpoint address and the host's address of the same IP version.
    fn ways(&self) -> Vec<(IpAddr, IpAddr)> {
        self.member
            .addresses()
            .into_iter()
            .zip(self.bed.node(1).addresses())
            .collect()
    }

    fn deny_all(&self) -> anyhow::Result<()> {
        self.import(DENY_ALL)
    }

    fn import(&self, rules: &str) -> anyhow::Result<()> {
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("policy");
        std::fs::write(&file, rules)?;
        let import = format!("policy import {}", file.display());
        self.bed.node(1).cli(&import)?.success()?;
        Ok(())
    }
}

/// Permission to reach the world does not include this host, whichever of its addresses is used.
#[test]
#[ignore = "needs root"]
fn the_world_is_nowhere_on_the_host() -> anyhow::Result<()> {
    const WORLD: &str = r#"[{"labels": ["name=world"], "endpointSelector": {},
        "egress": [{"toEntities": ["world"]}]}]"#;
    let mut wire = Wire::new()?;
    let anywhere = |domain: Domain, address: IpAddr| -> anyhow::Result<UdpSocket> {
        let node = wire.bed.node(1);
        let socket = node.run_in(|| Socket::new(domain, Type::DGRAM, None))??;
        if domain == Domain::IPV6 {
            socket.set_only_v6(true)?;
        }
        socket.set_nonblocking(true)?;
        socket.bind(&SocketAddr::new(address, PORT).into())?;
        Ok(socket.into())
    };
    wire.listeners.clear();
    wire.listeners = vec![
        anywhere(Domain::IPV4, Ipv4Addr::UNSPECIFIED.into())?,
        anywhere(Domain::IPV6, Ipv6Addr::UNSPECIFIED.into())?,
    ];
    let node = wire.bed.node(1);
    let uplink: serde_json::Value =
        serde_json::from_str(&node.exec("ip -j -4 address show dev eth0")?)?;
    let broadcast = uplink[0]["addr_info"][0]["local"]
        .as_str()
        .context("no address")?
        .parse::<Ipv4Addr>()?;
    let prefix_len = uplink[0]["addr_info"][0]["prefixlen"]
        .as_u64()
        .context("no prefix")?;
    let broadcast = ipnet::Ipv4Net::new(broadcast, u8::try_from(prefix_len)?)?.broadcast();
    node.exec("ip link add other type veth peer name another")?;
    node.exec("ip link set another up")?;
    node.exec("ip address add 198.18.0.1/24 dev other")?;
    node.exec("ip address add 2001:db8:18::1/64 dev other nodad")?;
    node.exec("ip link set other up")?;
    node.exec("ip route add local 198.19.0.0/24 dev lo")?;
    let device = &wire.member.endpoint.interface;
    node.exec(&format!(
        "sysctl -q -w net.ipv4.conf.{device}.route_localnet=1"
    ))?;
    let targets: Vec<IpAddr> = [
        "255.255.255.255",
        &broadcast.to_string(),
        "127.0.0.1",
        "224.0.0.1",
        "198.18.0.1",
        "198.18.0.255",
        "ff02::1",
        "2001:db8:18::1",
        // A subnet-router anycast address (RFC 4291 section 2.6.1), and an address in a network that is local to this
        // host.
        "2001:db8:18::",
        "198.19.0.7",
    ]
    .into_iter()
    .map(str::parse)
    .collect::<Result<_, _>>()?;
    let packet_to = |target: IpAddr| {
        let addresses = wire.member.addresses();
        let mut of_family = addresses
            .iter()
            .filter(|one| one.is_ipv4() == target.is_ipv4());
        datagram(*of_family.next().context("no address")?, target)
    };
    for &target in &targets {
        let (ethertype, packet) = packet_to(target)?;
        wait_for("a datagram without policy", PATIENCE, || {
            wire.send(ethertype, &packet, &[])?;
            Ok(wire.has_arrived()?.then_some(()))
        })
        .with_context(|| target.to_string())?;
    }
    wire.import(WORLD)?;
    while wire.has_arrived()? {}
    for &target in &targets {
        let before = counted(node, Reason::PolicyDenied)?;
        let (ethertype, packet) = packet_to(target)?;
        wire.send(ethertype, &packet, &[])?;
        wait_for("a datagram to be dropped", PATIENCE, || {
            Ok((counted(node, Reason::PolicyDenied)? > before).then_some(()))
        })
        .with_context(|| target.to_string())?;
        ensure!(!wire.has_arrived()?, "{target}");
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn frames_with_tags_or_of_other_protocols_do_not_get_to_the_host() -> anyhow::Result<()> {
    let wire = Wire::new()?;
    let node = wire.bed.node(1);
    for (source, destination) in wire.ways() {
        let (ethertype, packet) = datagram(source, destination)?;
        wait_for("a datagram without policy", PATIENCE, || {
            wire.send(ethertype, &packet, &[])?;
            Ok(wire.has_arrived()?.then_some(()))
        })?;
    }
    wire.deny_all()?;
    while wire.has_arrived()? {}

    let mut stacks: Vec<Vec<(u16, u16)>> = vec![Vec::new()];
    let mut sent = 0;
    let before = counted(node, Reason::UnsupportedL2)?;
    for _ in 0..3 {
        let longer = |tag: (u16, u16)| {
            stacks
                .iter()
                .map(move |stack| [&[tag], &stack[..]].concat())
        };
        stacks = TAGS.into_iter().flat_map(longer).collect();
        for (source, destination) in wire.ways() {
            let forged = match source {
                IpAddr::V4(_) => "198.51.100.9".parse()?,
                IpAddr::V6(_) => "2001:db8::9".parse()?,
            };
            for source in [source, forged] {
                let (ethertype, packet) = datagram(source, destination)?;
                for stack in &stacks {
                    wire.send(ethertype, &packet, stack)?;
                    sent += 1;
                    ensure!(
                        !wire.has_arrived()?,
                        "{source} behind {stack:x?} has arrived"
                    );
                }
            }
        }
    }
    for (source, destination) in wire.ways() {
        let (_, packet) = datagram(source, destination)?;
        for ethertype in [
            46, 0x0600, 0x22f0, 0x8035, 0x8847, 0x8863, 0x8864, 0x888e, 0x88cc, 0x88e5, 0x88fb,
            0x9100,
        ] {
            wire.send(ethertype, &packet, &[])?;
            sent += 1;
        }
    }
    let truncated = counted(node, Reason::InvalidPacket)?;
    wire.send(IPV4, &[0x45; 19], &[])?;
    wire.send(IPV6, &[0x60; 39], &[])?;
    wait_for("the frames to be dropped", PATIENCE, || {
        let are_dropped = counted(node, Reason::UnsupportedL2)? >= before + sent
            && counted(node, Reason::InvalidPacket)? >= truncated + 2;
        Ok(are_dropped.then_some(()))
    })?;
    ensure!(!wire.has_arrived()?, "a datagram has arrived");
    Ok(())
}
