//! ICMP errors that the first node sends to a client quote packets without the option, whose tag would let the client
//! send to the backend directly.

use std::io::Read as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use anyhow::{Context as _, ensure};
use health_net::netns::NetNs;
use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tests::bed::ip;
use tests::outside::FAR;
use tests::served::ServiceManifest;
use tests::{PATIENCE, wait_for};

use super::super::outside::{node_port, node_targets};
use super::super::{SOON, Stand, wait_answered_by, wait_datagrams_answered_by};

const BACKEND: &str = "web-2";

pub(super) fn are_plain(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let backend = stand.backend(BACKEND)?;
    let service = ServiceManifest::new("quoted", number)
        .of([backend])
        .with_node_port(node_port(number));
    stand.write(&service)?;
    let ends = node_targets(stand, number)
        .into_iter()
        .zip(backend.addresses());
    for ((target, client), backend) in ends {
        wait_answered_by(FAR, target, &[BACKEND])?;
        wait_datagrams_answered_by(FAR, target, &[BACKEND])?;
        too_far(target).with_context(|| format!("too far to {target}"))?;
        unreachable(stand, target, client, backend.ip())
            .with_context(|| format!("unreachable by {target}"))?;
    }
    Ok(())
}

/// The router is the first hop, and the node is the second.
fn too_far(target: SocketAddr) -> anyhow::Result<()> {
    let mut errors = Errors::open(target)?;
    let any: IpAddr = match target {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let sender = NetNs::open(FAR)?.run_in(|| UdpSocket::bind((any, 0)))??;
    let options = SockRef::from(&sender);
    match target {
        SocketAddr::V4(_) => options.set_ttl_v4(2)?,
        SocketAddr::V6(_) => options.set_unicast_hops_v6(2)?,
    }
    sender.connect(target)?;
    wait_for("the node's word", PATIENCE, || {
        // The call may also return an earlier error.
        let _ = sender.send(b"who");
        errors.next([11, 3])
    })?
    .check(17)
}

/// An error about a connection that the node knows, because the backend's node was reachable before.
fn unreachable(
    stand: &Stand,
    target: SocketAddr,
    client: IpAddr,
    backend: IpAddr,
) -> anyhow::Result<()> {
    let (first, second) = (stand.bed.node(1).name(), stand.bed.node(2).name());
    let mut errors = Errors::open(target)?;
    // The client gets no replies and retransmits its SYN.
    ip(second, &format!("route add blackhole {client}"))?;
    let connecting = NetNs::open(FAR)?.run_in(|| -> std::io::Result<Socket> {
        let socket = Socket::new(
            Domain::for_address(target),
            Type::STREAM,
            Some(Protocol::TCP),
        )?;
        socket.set_nonblocking(true)?;
        // The connection attempt continues in the background.
        let _ = socket.connect(&target.into());
        Ok(socket)
    })??;
    let port = connecting
        .local_addr()?
        .as_socket()
        .context("no address")?
        .port();
    let source = SocketAddr::new(client, port).to_string();
    wait_for("the flow to be known", PATIENCE, || {
        let listed = stand.bed.node(1).cli("bpf lb list --flows")?.success()?;
        Ok(listed.contains(&source).then_some(()))
    })?;
    ip(first, &format!("route add unreachable {backend}"))?;
    let quote = wait_for("the node's word", PATIENCE, || errors.next([3, 1]));
    ip(first, &format!("route delete unreachable {backend}"))?;
    ip(second, &format!("route delete blackhole {client}"))?;
    quote?.check(6)
}

/// Receives the ICMP errors that a node sends to the client.
struct Errors {
    node: SocketAddr,
    socket: Socket,
}

/// The packet quoted in an error.
struct Quote(Vec<u8>);

impl Errors {
    fn open(node: SocketAddr) -> anyhow::Result<Self> {
        let protocol = match node {
            SocketAddr::V4(_) => Protocol::ICMPV4,
            SocketAddr::V6(_) => Protocol::ICMPV6,
        };
        let socket = NetNs::open(FAR)?
            .run_in(|| Socket::new(Domain::for_address(node), Type::RAW, Some(protocol)))??;
        socket.set_read_timeout(Some(SOON))?;
        Ok(Self { node, socket })
    }

    /// Receives the next ICMP message, and returns the packet that it quotes if it is from the node and has this ICMP
    /// or ICMPv6 type.
    fn next(&mut self, [of_v4, of_v6]: [u8; 2]) -> anyhow::Result<Option<Quote>> {
        let mut packet = [0; 2048];
        let length = self.socket.read(&mut packet)?;
        let packet = &packet[..length];
        // A raw IPv4 socket also receives the IP header (raw(7)).
        let (is_by_node, icmp, kind) = match self.node.ip() {
            IpAddr::V4(v4) => {
                let length = packet
                    .first()
                    .map_or(0, |first| usize::from(first & 0xf) * 4);
                let source = packet.get(12..16);
                (source == Some(&v4.octets()), packet.get(length..), of_v4)
            }
            IpAddr::V6(_) => (true, Some(packet), of_v6),
        };
        let icmp = icmp.filter(|icmp| is_by_node && icmp.first() == Some(&kind));
        let quote = icmp.and_then(|icmp| icmp.get(8..));
        Ok(quote.map(|quote| Quote(quote.to_vec())))
    }
}

impl Quote {
    /// Checks that a transport header of this protocol directly follows the IP header.
    fn check(&self, protocol: u8) -> anyhow::Result<()> {
        let bytes = &self.0;
        let is_plain = match bytes.first() {
            Some(0x45) => bytes.get(9) == Some(&protocol),
            Some(first) if first >> 4 == 6 => bytes.get(6) == Some(&protocol),
            _ => false,
        };
        ensure!(is_plain, "{bytes:02x?}");
        Ok(())
    }
}
