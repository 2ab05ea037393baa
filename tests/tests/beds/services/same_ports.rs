//! One client port and one backend, over several paths at once: each flow is answered, whichever comes first, and all
//! reach the same backend.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use anyhow::{Context as _, ensure};
use health_net::netns::NetNs;
use socket2::{Domain, Protocol, Socket, Type};
use tests::conntrack::packets;
use tests::outside::{FAR, FAR4};
use tests::packet::Tcp;
use tests::served::{Connection, Datagrams};
use tests::{PATIENCE, wait_for};

use super::outside::node_port;
use super::{Row, SOON, Stand, wait_answered_by};

pub(super) const ROWS: &[Row] = &[(
    "an_endpoints_flows_from_one_port_to_one_backend_are_all_answered",
    of_endpoints,
)];

/// The first node's clients reach the backend through a ClusterIP, through the NodePort of the backend's own node, and
/// directly, in every order. The backend is on the client's node or on the other one.
fn of_endpoints(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let mut port = 20_000 + 100 * u16::from(number);
    let [client, _] = &stand.clients;
    for backend in [&stand.backends[0], &stand.backends[1]] {
        let service = stand
            .service("same-ports", number)
            .with_node_port(node_port(number))
            .of([backend]);
        stand.write(&service)?;
        let node = stand.bed.node(if backend.name == "web-1" { 1 } else { 2 });
        let of_backend = backend.addresses();
        for (version, ip) in service.cluster_ips.iter().enumerate() {
            let node = node.addresses()[version];
            let ways = [
                SocketAddr::new(*ip, 80),
                SocketAddr::new(node, node_port(number)),
                of_backend[version],
            ];
            wait_answered_by(&client.name, ways[0], &[&backend.name])?;
            wait_answered_by(&client.name, ways[1], &[&backend.name])?;
            for at in 0..ways.len() {
                let mut order = ways;
                order.rotate_left(at);
                for order in [order, [order[0], order[2], order[1]]] {
                    port += 1;
                    let from = order.map(|target| (&*client.name, target));
                    all_answer(&from, port, &backend.name)?;
                }
            }
        }
    }
    Ok(())
}

/// An outside client and processes of the node that serves it use the same source port to one backend on another node.
pub(super) fn of_the_node(stand: &Stand, number: u8) -> anyhow::Result<()> {
    // Above the kernel's ephemeral ports, and within the range from which agents assign ports to flows.
    let mut port = 61_000 + 20 * u16::from(number);
    let backend = &stand.backends[1];
    let service = stand
        .service("meets", number)
        .with_node_port(node_port(number))
        .of([backend]);
    stand.write(&service)?;
    let node = stand.bed.node(1);
    let of_backend = backend.addresses();
    for (version, ip) in service.cluster_ips.iter().enumerate() {
        let outside = SocketAddr::new(node.addresses()[version], node_port(number));
        wait_answered_by(FAR, outside, &[&backend.name])?;
        for own in [SocketAddr::new(*ip, 80), of_backend[version]] {
            for order in [
                [(FAR, outside), (node.name(), own)],
                [(node.name(), own), (FAR, outside)],
            ] {
                port += 1;
                all_answer(&order, port, &backend.name)?;
            }
        }
        // The flows go through the NodePort of the backend's own node, and through the ClusterIP.
        let theirs = stand.bed.node(2).addresses()[version];
        let theirs = SocketAddr::new(theirs, node_port(number));
        for order in [
            [
                (node.name(), theirs),
                (node.name(), SocketAddr::new(*ip, 80)),
            ],
            [
                (node.name(), SocketAddr::new(*ip, 80)),
                (node.name(), theirs),
            ],
        ] {
            port += 1;
            all_answer(&order, port, &backend.name)?;
        }
    }
    Ok(())
}

/// Opens one flow after another from the same port, one to each target, and then uses all of them in turn.
fn all_answer(ways: &[(&str, SocketAddr)], port: u16, backend: &str) -> anyhow::Result<()> {
    let reported = || format!("{ways:?} from port {port}");
    let mut connections = Vec::new();
    for (from, target) in ways {
        let connection = Connection::open_from(from, port, *target);
        connections.push(connection.with_context(|| format!("TCP, {}", reported()))?);
        for connection in &mut connections {
            let answer = connection
                .ask()
                .with_context(|| format!("TCP, {}", reported()))?;
            ensure!(answer.backend == backend, "TCP, {}: {answer:?}", reported());
        }
    }
    let mut sockets = Vec::new();
    for (from, target) in ways {
        let socket = Datagrams::open_from(from, port, *target);
        sockets.push(socket.with_context(|| format!("UDP, {}", reported()))?);
        for socket in &mut sockets {
            let answer = wait_for("an answer", PATIENCE, || Ok(socket.ask(SOON)?));
            let answer = answer.with_context(|| format!("UDP, {}", reported()))?;
            ensure!(answer.backend == backend, "UDP, {}: {answer:?}", reported());
        }
    }
    Ok(())
}

/// Sends SYNs with spoofed sources to a NodePort whose only backend is on another node, more than this node has ports
/// for. The backend's replies are never acknowledged.
pub(super) fn are_left_by_a_flood(stand: &Stand, number: u8) -> anyhow::Result<()> {
    const SYNS: u32 = 80_000;
    const FROM_EACH: u32 = 40_000;
    const SYN: u8 = 2;
    let backend = &stand.backends[1];
    let service = stand
        .service("flooded", number)
        .with_node_port(node_port(number))
        .of([backend]);
    stand.write(&service)?;
    let node = IpAddr::from(stand.bed.node(1).ipv4());
    let target = SocketAddr::new(node, node_port(number));
    wait_answered_by(FAR, target, &[&backend.name])?;
    let raw = || {
        Socket::new(
            Domain::IPV4,
            Type::RAW,
            Some(Protocol::from(libc::IPPROTO_RAW)),
        )
    };
    let sender = NetNs::open(FAR)?.run_in(raw)??;
    for syn in 0..SYNS {
        // An unused address in the client's network.
        let source = IpAddr::from(Ipv4Addr::from(FAR4.to_bits() + 1 + syn / FROM_EACH));
        let port = 10_000 + (syn % FROM_EACH) as u16;
        let segment = Tcp::between((port, target.port()), SYN).segment(source, node);
        let packet = packets::packet((source, node), 6, &segment);
        sender.send_to(&packet, &SocketAddr::new(node, 0).into())?;
    }
    for _ in 0..10 {
        let answer = Connection::open(FAR, target)?.ask()?;
        ensure!(answer.backend == backend.name, "{answer:?}");
    }
    Ok(())
}
