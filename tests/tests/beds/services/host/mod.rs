//! Services for the host's own sockets: processes in the node's network namespace.

mod flows;
mod programs;
mod reach;

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};

use anyhow::{Context as _, ensure};
use nix::errno::Errno;
use tests::{Node, PATIENCE, wait_for};

use super::{Row, SOON, Stand, counted, targets, wait_answered_by, wait_datagrams_answered_by};

pub(super) use flows::ROWS as FLOW_ROWS;
pub(super) use reach::ROWS as REACH_ROWS;

const ALL: [&str; 3] = ["web-1", "web-2", "web-3"];

/// The same address for an IPv6 socket, which is IPv4-mapped if necessary (RFC 4291 section 2.5.5.2).
fn mapped(target: SocketAddr) -> SocketAddr {
    match target.ip() {
        IpAddr::V4(v4) => (v4.to_ipv6_mapped(), target.port()).into(),
        IpAddr::V6(_) => target,
    }
}

/// The addresses of a service for IPv4 sockets, for IPv6 sockets, and for IPv6 sockets with IPv4-mapped addresses.
fn all_targets(targets: &[SocketAddr]) -> Vec<SocketAddr> {
    let mapped = targets.iter().copied().map(mapped);
    let mapped = mapped.filter(|target| !targets.contains(target));
    let mut all = targets.to_vec();
    all.extend(mapped);
    all
}

/// An unconnected UDP socket in the node's namespace.
fn unconnected(node: &Node, target: SocketAddr) -> anyhow::Result<UdpSocket> {
    let any: IpAddr = match target {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = node.run_in(|| UdpSocket::bind((any, 0)))??;
    socket.set_read_timeout(Some(SOON))?;
    Ok(socket)
}

/// The name of the backend that answers a datagram. The answer must seem to come from the datagram's destination.
fn ask_from(socket: &UdpSocket, target: SocketAddr) -> anyhow::Result<String> {
    ask(socket, target, || socket.send_to(b"who", target))
}

/// Like [`ask_from`], for a socket connected to the target.
fn ask_connected(socket: &UdpSocket, target: SocketAddr) -> anyhow::Result<String> {
    ask(socket, target, || socket.send(b"who"))
}

fn ask(
    socket: &UdpSocket,
    target: SocketAddr,
    send: impl Fn() -> io::Result<usize>,
) -> anyhow::Result<String> {
    wait_for("a datagram to be answered", PATIENCE, || {
        send()?;
        let mut buffer = [0; 256];
        let (length, from) = match socket.recv_from(&mut buffer) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
            received => received?,
        };
        ensure!(from == target, "{target} was asked, {from} answers");
        let answer = String::from_utf8_lossy(&buffer[..length]).into_owned();
        Ok(answer.split(' ').next().map(str::to_owned))
    })
}

/// Checks that all these backends answer, over TCP and over connected and unconnected UDP sockets, and that their
/// answers seem to come from the service.
fn answered_by(node: &Node, target: SocketAddr, names: &[&str]) -> anyhow::Result<()> {
    let from = node.name();
    wait_answered_by(from, target, names)?;
    wait_datagrams_answered_by(from, target, names)?;
    let show = || -> anyhow::Result<()> {
        let peer = node.run_in(|| TcpStream::connect(target)?.peer_addr())??;
        ensure!(peer == target, "a connection is reported as one to {peer}");
        let socket = unconnected(node, target)?;
        for _ in 0..5 {
            let name = ask_from(&socket, target)?;
            ensure!(names.contains(&&*name), "{name} answers");
        }
        socket.connect(target)?;
        let peer = socket.peer_addr()?;
        ensure!(
            peer == target,
            "a socket is reported as connected to {peer}"
        );
        let name = ask_connected(&socket, target)?;
        ensure!(names.contains(&&*name), "{name} answers");
        Ok(())
    };
    show().with_context(|| format!("{from} to {target}"))
}

fn ensure_errno(error: Option<io::Error>, wanted: Errno) -> anyhow::Result<()> {
    let number = error.as_ref().and_then(io::Error::raw_os_error);
    ensure!(number == Some(wanted as i32), "{error:?}, not {wanted}");
    Ok(())
}
