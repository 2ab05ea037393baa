//! Connections of the node's own processes from ports that are also NodePorts.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, UdpSocket};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use health_net::netns::NetNs;
use socket2::{Domain, Socket, Type};
use tests::outside::FAR;
use tests::{PATIENCE, wait_for};

use super::outside::{ALL, node_port, node_targets};
use super::{SOON, Stand, wait_answered_by};

const QUESTION: &[u8] = b"question";
const ANSWER: &[u8] = b"the answer";

/// Answers from outside hosts and from endpoints reach the process that asked, not a backend.
pub(super) fn are_kept(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let service = stand
        .service("own", number)
        .with_node_port(node_port(number));
    stand.write(&service)?;
    let [client, _] = &stand.clients;
    for (target, far) in node_targets(stand, number) {
        wait_answered_by(FAR, target, &ALL)?;
        let endpoint = match target {
            SocketAddr::V4(_) => client.endpoint.ipv4,
            SocketAddr::V6(_) => client.endpoint.ipv6,
        };
        let endpoint = endpoint.context("no address")?;
        for (name, ip) in [(FAR, far), (&*client.name, endpoint)] {
            tcp(stand, target, name, ip).with_context(|| format!("{target}, TCP to {name}"))?;
            udp(stand, target, name, ip).with_context(|| format!("{target}, UDP to {name}"))?;
        }
        wait_answered_by(FAR, target, &ALL)?;
    }
    Ok(())
}

/// A connected socket of the node that is bound to the target's address and port.
fn connected(
    stand: &Stand,
    target: SocketAddr,
    kind: Type,
    to: SocketAddr,
) -> anyhow::Result<Socket> {
    let node = NetNs::open(stand.bed.node(1).name())?;
    let socket = node.run_in(|| Socket::new(Domain::for_address(target), kind, None))??;
    socket.set_reuse_address(true)?;
    // A closed connection must not keep the port in use.
    if kind == Type::STREAM {
        socket.set_linger(Some(Duration::ZERO))?;
    }
    socket.bind(&target.into())?;
    socket.connect_timeout(&to.into(), PATIENCE)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    Ok(socket)
}

fn tcp(stand: &Stand, target: SocketAddr, name: &str, ip: IpAddr) -> anyhow::Result<()> {
    let listener = NetNs::open(name)?.run_in(|| TcpListener::bind((ip, 0)))??;
    let mut asking = connected(stand, target, Type::STREAM, listener.local_addr()?)?;
    let (mut asked, peer) = listener.accept()?;
    ensure!(peer == target, "{peer} asks");
    asked.set_read_timeout(Some(PATIENCE))?;
    for _ in 0..3 {
        asking.write_all(QUESTION)?;
        let mut question = [0; QUESTION.len()];
        asked.read_exact(&mut question)?;
        asked.write_all(ANSWER)?;
        let mut answer = [0; ANSWER.len()];
        asking.read_exact(&mut answer)?;
        ensure!(answer == ANSWER);
    }
    Ok(())
}

fn udp(stand: &Stand, target: SocketAddr, name: &str, ip: IpAddr) -> anyhow::Result<()> {
    let asked = NetNs::open(name)?.run_in(|| UdpSocket::bind((ip, 0)))??;
    let mut asking = connected(stand, target, Type::DGRAM, asked.local_addr()?)?;
    asked.set_read_timeout(Some(SOON))?;
    asking.set_read_timeout(Some(SOON))?;
    // The first packet may wait for neighbour resolution.
    wait_for("an answer", PATIENCE, || {
        asking.write_all(QUESTION)?;
        let mut buffer = [0; 64];
        let (_, peer) = asked.recv_from(&mut buffer)?;
        asked.send_to(ANSWER, peer)?;
        let length = asking.read(&mut buffer)?;
        ensure!(&buffer[..length] == ANSWER);
        Ok(Some(()))
    })
}
