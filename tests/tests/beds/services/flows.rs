//! Flows while backends come and go, fragments, and SCTP.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::os::fd::AsRawFd as _;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use nix::sys::socket::{MsgFlags, recv};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use tests::conntrack::packets;
use tests::served::{Answer, Connection, Datagrams, ServiceManifest, ServicePort};
use tests::{Member, PATIENCE, wait_for};

use super::{Row, SOON, Stand, targets, wait_answered_by, wait_datagrams_answered_by};

pub(super) const ROWS: &[Row] = &[
    (
        "a_connection_lasts_though_its_backend_leaves",
        connections_last,
    ),
    (
        "datagrams_go_elsewhere_when_their_backend_stops_serving",
        datagrams_move,
    ),
    ("fragments_go_where_their_first_one_goes", fragments),
    ("fragments_whose_first_one_comes_last_arrive", backwards),
    ("sctp_is_translated", sctp),
];

/// Sends datagrams until an answer arrives.
fn ask(flow: &mut Datagrams) -> anyhow::Result<Answer> {
    wait_for("an answer", PATIENCE, || Ok(flow.ask(SOON)?))
}

/// The names of all backends except this one.
fn others<'a>(stand: &'a Stand, name: &str) -> Vec<&'a str> {
    let names = stand.backends.iter().map(|backend| backend.name.as_str());
    names.filter(|other| *other != name).collect()
}

/// Existing connections survive the removal of their backend from the slice. New ones use other backends.
fn connections_last(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let whole = stand.service("lasting", number);
    stand.write(&whole)?;
    let [client, _] = &stand.clients;
    for target in targets(&whole) {
        wait_answered_by(&client.name, target, &["web-1", "web-2", "web-3"])?;
        let mut connection = Connection::open(&client.name, target)?;
        let backend = connection.ask()?.backend;
        let mut service = whole.clone();
        let own = stand.backend(&backend)?.slice_endpoint();
        let position = service
            .endpoints
            .iter()
            .position(|endpoint| endpoint.addresses == own.addresses)
            .context("no such endpoint")?;
        let leaves: [&dyn Fn(&mut ServiceManifest); 2] = [
            &|service| service.endpoints[position].set_ready(false),
            &|service| drop(service.endpoints.remove(position)),
        ];
        for leave in leaves {
            leave(&mut service);
            stand.write(&service)?;
            wait_answered_by(&client.name, target, &others(stand, &backend))?;
            for _ in 0..10 {
                let answer = connection.ask()?;
                ensure!(answer.backend == backend, "{answer:?}, before by {backend}");
            }
        }
        stand.write(&whole)?;
    }
    Ok(())
}

/// Datagrams stay with a backend as long as it serves, whether it is ready or not.
fn datagrams_move(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let whole = stand.service("datagrams", number);
    stand.write(&whole)?;
    let [client, _] = &stand.clients;
    for target in targets(&whole) {
        let names = ["web-1", "web-2", "web-3"];
        wait_datagrams_answered_by(&client.name, target, &names)?;
        let mut flow = Datagrams::open(&client.name, target)?;
        let backend = ask(&mut flow)?.backend;
        let own = stand.backend(&backend)?.slice_endpoint();
        let mut service = whole.clone();
        let mut endpoints = service.endpoints.iter_mut();
        let endpoint = endpoints
            .find(|endpoint| endpoint.addresses == own.addresses)
            .context("no such endpoint")?;
        endpoint.ready = false;
        endpoint.terminating = true;
        let mut ended = endpoint.clone();
        ended.serving = false;
        stand.write(&service)?;
        wait_datagrams_answered_by(&client.name, target, &others(stand, &backend))?;
        for _ in 0..10 {
            let answer = ask(&mut flow)?;
            ensure!(answer.backend == backend, "{answer:?}, before by {backend}");
        }
        for endpoint in &mut service.endpoints {
            if endpoint.addresses == own.addresses {
                *endpoint = ended.clone();
            }
        }
        stand.write(&service)?;
        wait_for("the flow to go elsewhere", PATIENCE, || {
            let answer = ask(&mut flow)?;
            Ok((answer.backend != backend).then_some(()))
        })?;
        stand.write(&whole)?;
    }
    Ok(())
}

/// Fragments get through in both directions.
fn fragments(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let backends = [&stand.backends[0], &stand.backends[1]];
    let service = ServiceManifest::new("fragments", number).of(backends);
    stand.write(&service)?;
    let [client, _] = &stand.clients;
    for target in targets(&service) {
        wait_datagrams_answered_by(&client.name, target, &["web-1", "web-2"])?;
        let mut seen = std::collections::BTreeSet::new();
        // Each datagram socket is a separate flow, so that both backends are chosen eventually.
        while seen.len() < backends.len() {
            let mut flow = Datagrams::open(&client.name, target)?;
            for length in [1600, 4000, 20_000] {
                let question: Vec<u8> = (0..length).map(|at| b'a' + (at % 23) as u8).collect();
                let answer = wait_for("an answer in fragments", PATIENCE, || {
                    Ok(flow.ask_with(&question, SOON)?)
                })
                .with_context(|| format!("{length} bytes to {target}"))?;
                seen.insert(answer.backend);
            }
        }
    }
    Ok(())
}

/// Sends fragments in reverse order, through a service and directly to an endpoint.
fn backwards(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let service = ServiceManifest::new("backwards", number).of([&stand.backends[1]]);
    stand.write(&service)?;
    let [client, _] = &stand.clients;
    for target in targets(&service) {
        wait_datagrams_answered_by(&client.name, target, &["web-2"])?;
        arrive_backwards(&client.name, target)?;
    }
    Ok(())
}

/// Sends a datagram in two fragments, and one of nearly the maximum length, with the last fragment first.
pub(super) fn arrive_backwards(namespace: &str, target: SocketAddr) -> anyhow::Result<()> {
    for length in [2000, 60_000] {
        let question = vec![b'b'; length];
        let mut flow = Datagrams::open(namespace, target)?;
        wait_for("an answer to fragments", PATIENCE, || {
            flow.ask_backwards(&question, SOON)
        })
        .with_context(|| format!("{length} bytes from {namespace} to {target}"))?;
    }
    Ok(())
}

/// The port of both service and backend: SCTP's checksum covers the ports, and the datapath does not recompute it.
const SCTP_PORT: u16 = 3868;
const SCTP: i32 = 132;

/// Uses crafted packets, since not every kernel supports SCTP.
fn sctp(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let server = &stand.backends[1];
    let mut service = ServiceManifest::new("sctp", number).of([server]);
    service.ports = vec![
        ServicePort::http(80),
        ServicePort {
            name: "sctp",
            protocol: "SCTP",
            target: SCTP_PORT,
            ..ServicePort::http(SCTP_PORT)
        },
    ];
    stand.write(&service)?;
    let [client, _] = &stand.clients;
    for (ip, own) in service.cluster_ips.iter().zip(client.addresses()) {
        wait_answered_by(&client.name, (*ip, 80).into(), &["web-2"])?;
        let listener = raw(&server.member, (*ip, 0).into())?;
        let sender = raw(client, (*ip, 0).into())?;
        let ports = [40_000 + u16::from(number), SCTP_PORT];
        let packet = sctp_packet(ports, INIT, 0);
        wait_for("a packet of SCTP to arrive", PATIENCE, || {
            sender.send_to(&packet, &SockAddr::from(SocketAddr::new(*ip, 0)))?;
            Ok(receive(&listener, &packet)?.then_some(()))
        })
        .with_context(|| ip.to_string())?;
        let packet = sctp_packet([ports[1], ports[0]], INIT_ACK, INITIATE_TAG);
        sender.connect(&SockAddr::from(SocketAddr::new(*ip, 0)))?;
        // The sender accepts only packets from the service's address.
        wait_for("an answer by SCTP", PATIENCE, || {
            listener.send_to(&packet, &SockAddr::from(SocketAddr::new(own, 0)))?;
            Ok(receive(&sender, &packet)?.then_some(()))
        })
        .with_context(|| ip.to_string())?;
    }
    Ok(())
}

fn raw(member: &Member, like: SocketAddr) -> anyhow::Result<Socket> {
    let domain = Domain::for_address(like);
    let socket = member
        .netns
        .run_in(|| Socket::new(domain, Type::RAW, Some(Protocol::from(SCTP))))??;
    socket.set_read_timeout(Some(Duration::from_millis(50)))?;
    Ok(socket)
}

/// Receives packets until one ends with these bytes. Returns false if none arrives in time.
fn receive(socket: &Socket, wanted: &[u8]) -> anyhow::Result<bool> {
    let mut bytes = [0; 256];
    loop {
        match recv(socket.as_raw_fd(), &mut bytes, MsgFlags::empty()) {
            Ok(length) if bytes[..length].ends_with(wanted) => return Ok(true),
            Ok(_) => {}
            Err(error) => {
                let error = std::io::Error::from(error);
                // A kernel without SCTP rejects the packet.
                let is_end = [ErrorKind::WouldBlock, ErrorKind::ConnectionRefused];
                ensure!(is_end.contains(&error.kind()), "{error}");
                return Ok(false);
            }
        }
    }
}

/// Chunk types (RFC 9260 section 3.2).
const INIT: u8 = 1;
const INIT_ACK: u8 = 2;
/// Identifies the peer.
const INITIATE_TAG: u32 = 0x0102_0304;

/// A packet that starts an association or accepts one (RFC 9260 sections 3.3.2 and 3.3.3). Connection trackers accept
/// only these as first packets.
fn sctp_packet([from, to]: [u16; 2], chunk: u8, verification_tag: u32) -> Vec<u8> {
    let value = [
        &INITIATE_TAG.to_be_bytes()[..],
        // Receiver window, number of outbound and inbound streams, initial TSN.
        &65_536_u32.to_be_bytes(),
        &[0, 1, 0, 1],
        &u32::from(chunk).to_be_bytes(),
    ];
    packets::sctp((from, to), verification_tag, chunk, &value.concat())
}

/// Services need the conntrack entries of their flows, so these flows have some, at both ends, whatever the endpoints'
/// settings.
#[test]
#[ignore = "needs root"]
fn flows_of_endpoints_without_conntrack_have_entries() -> anyhow::Result<()> {
    let stand = Stand::start()?;
    let [client, _] = &stand.clients;
    let backend = stand.backend("web-1")?;
    let node = stand.node_of(client);
    ensure!(backend.node == node.name());
    let ends = [&client.endpoint, &backend.member.endpoint];
    for end in ends {
        node.cli(&format!("endpoint config {} conntrack=off", end.id))?
            .success()?;
    }
    let service = ServiceManifest::new("untracked", 1).of([backend]);
    stand.write(&service)?;
    for target in targets(&service) {
        wait_answered_by(&client.name, target, &["web-1"])?;
        node.cli("bpf ct flush global")?.success()?;
        let mut connection = Connection::open(&client.name, target)?;
        connection.ask()?;
        let listed = node.listing("bpf ct list --proto tcp")?;
        let entries = listed.as_array().context("the entries are no list")?;
        for end in ends {
            let is_its = |entry: &serde_json::Value| entry["ifindex"] == end.ifindex;
            ensure!(entries.iter().any(is_its), "{listed}, none of {}", end.id);
        }
        connection.ask()?;
    }
    Ok(())
}
