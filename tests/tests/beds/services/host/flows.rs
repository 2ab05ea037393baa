//! Which backend answers the host, and what happens to the host's sockets when a backend goes away.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{Context as _, ensure};
use nix::errno::Errno;
use serde_json::json;
use tests::served::{Connection, Datagrams, ServiceManifest, curl};
use tests::{PATIENCE, wait_for};

use super::super::EACH;
use super::{
    ALL, all_targets, ask_connected, ask_from, ensure_errno, mapped, targets, unconnected,
};
use super::{Row, SOON, Stand, wait_answered_by, wait_datagrams_answered_by};

pub(in crate::services) const ROWS: &[Row] = &[
    ("the_host_is_one_client_to_affinity", affinity),
    (
        "unconnected_sockets_of_the_host_go_elsewhere_when_their_backend_stops_serving",
        unconnected_move,
    ),
    (
        "connected_sockets_of_the_host_are_ended_when_their_backend_stops_serving",
        connected_end,
    ),
    (
        "a_socket_of_the_host_stays_connected_where_it_was_when_another_service_refuses_it",
        stays_connected,
    ),
    (
        "an_unconnected_socket_of_the_host_hears_from_where_it_asked",
        asked_by_several_addresses,
    ),
    (
        "a_socket_that_connects_to_a_backend_it_asked_as_a_service_hears_from_the_backend",
        connects_after_asking,
    ),
    (
        "flows_of_the_host_are_counted_until_their_sockets_are_closed",
        counts,
    ),
];

/// Affinity holds although each request comes from a different port.
fn affinity(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let service = stand.service("host-affinity", number).spec(json!({
        "sessionAffinity": "ClientIP",
        "sessionAffinityConfig": { "clientIP": { "timeoutSeconds": 600 } },
    }));
    stand.write(&service)?;
    for node in stand.bed.nodes() {
        for target in targets(&service) {
            let first = wait_for("an answer", PATIENCE, || {
                let answers = curl(node.name(), target, 1)?;
                Ok(answers.backends.into_keys().next())
            })?;
            let answers = curl(node.name(), target, EACH)?;
            ensure!(answers.of(&first) == EACH, "{answers}, first by {first}");
        }
    }
    Ok(())
}

/// Makes the named endpoint stop or start serving.
fn set_serving(
    stand: &Stand,
    service: &mut ServiceManifest,
    name: &str,
    is_serving: bool,
) -> anyhow::Result<()> {
    let own = stand.backend(name)?.slice_endpoint();
    let mut endpoints = service.endpoints.iter_mut();
    let endpoint = endpoints
        .find(|endpoint| endpoint.addresses == own.addresses)
        .context("no such endpoint")?;
    endpoint.set_ready(is_serving);
    stand.write(service)
}

/// Unconnected sockets stay with a backend only while it serves.
fn unconnected_move(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let mut service = stand.service("host-asks", number);
    stand.write(&service)?;
    let node = stand.bed.node(1);
    for target in all_targets(&targets(&service)) {
        wait_datagrams_answered_by(node.name(), target, &ALL)?;
        let socket = unconnected(node, target)?;
        let first = ask_from(&socket, target)?;
        for _ in 0..EACH {
            let name = ask_from(&socket, target)?;
            ensure!(name == first, "{name} answers, before it was {first}");
        }
        set_serving(stand, &mut service, &first, false)?;
        wait_for("another one to answer", PATIENCE, || {
            Ok((ask_from(&socket, target)? != first).then_some(()))
        })?;
        set_serving(stand, &mut service, &first, true)?;
    }
    Ok(())
}

/// Errors on a socket that the agent has aborted: while it waits for an answer, and when it sends.
const ENDED: [i32; 2] = [Errno::ECONNABORTED as i32, Errno::EDESTADDRREQ as i32];

/// The process gets an error, and its next socket is answered. TCP connections continue.
fn connected_end(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let mut service = stand.service("host-hears", number);
    let node = stand.bed.node(1);
    for target in all_targets(&targets(&service)) {
        stand.write(&service)?;
        wait_answered_by(node.name(), target, &ALL)?;
        wait_datagrams_answered_by(node.name(), target, &ALL)?;
        let mut connection = Connection::open(node.name(), target)?;
        let by = connection.ask()?.backend;
        let mut flow = Datagrams::open(node.name(), target)?;
        let asked = |flow: &mut Datagrams| wait_for("an answer", PATIENCE, || Ok(flow.ask(SOON)?));
        let first = asked(&mut flow)?.backend;
        let ended = |flow: &mut Datagrams| {
            wait_for("the socket to be ended", PATIENCE, || {
                let error = flow.ask(SOON).err();
                let number = error.and_then(|error| error.raw_os_error());
                Ok(number.filter(|number| ENDED.contains(number)))
            })
        };
        set_serving(stand, &mut service, &first, false)?;
        ended(&mut flow).context("unready backend")?;
        let mut flow = Datagrams::open(node.name(), target)?;
        let second = asked(&mut flow)?.backend;
        ensure!(second != first, "{second} answers still");

        stand.manifests.remove(&service.name)?;
        ended(&mut flow).context("removed service")?;
        let answer = connection.ask()?;
        ensure!(answer.backend == by, "{answer:?}, before by {by}");
        set_serving(stand, &mut service, &first, true)?;
    }
    Ok(())
}

fn stays_connected(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let service = stand.service("host-connected", number);
    let nobody = ServiceManifest::new("host-nobody", number + 100);
    stand.write(&service)?;
    stand.write(&nobody)?;
    let node = stand.bed.node(1);
    for (target, refusing) in targets(&service).into_iter().zip(targets(&nobody)) {
        wait_datagrams_answered_by(node.name(), target, &ALL)?;
        let socket = unconnected(node, target)?;
        socket.connect(target)?;
        let first = ask_connected(&socket, target)?;
        wait_for("another service to refuse", PATIENCE, || {
            // Until the service exists, the host may have no route to its address.
            let refused = unconnected(node, refusing)?.connect(refusing).err();
            Ok(ensure_errno(refused, Errno::ECONNREFUSED).ok())
        })?;
        ensure_errno(socket.connect(refusing).err(), Errno::ECONNREFUSED)?;
        let peer = socket.peer_addr()?;
        ensure!(peer == target, "it is reported as connected to {peer}");
        let name = ask_connected(&socket, target)?;
        ensure!(name == first, "{name} answers, before it was {first}");
    }
    Ok(())
}

/// Number of address sequences, each used by one socket.
const SEQUENCES: usize = 16;

/// One socket contacts the addresses of two services and of their only backend, on this node and on the other, in any
/// order, with or without waiting for each answer. Each answer seems to come from the address that was contacted.
fn asked_by_several_addresses(stand: &Stand, _number: u8) -> anyhow::Result<()> {
    let node = stand.bed.node(1);
    let mut random = fastrand::Rng::with_seed(tests::seed());
    for (backend, numbers) in [("web-1", [1, 2]), ("web-2", [3, 4])] {
        let backend = stand.backend(backend)?;
        let mut asked = vec![backend.addresses()];
        for number in numbers {
            let mut service = ServiceManifest::new(&format!("asked-{number}"), 0).of([backend]);
            service.cluster_ips = vec![
                Ipv4Addr::new(10, 96, 9, number).into(),
                Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 9, number.into()).into(),
            ];
            stand.write(&service)?;
            for target in targets(&service) {
                wait_datagrams_answered_by(node.name(), target, &[&backend.name])?;
            }
            asked.push(targets(&service));
        }
        let of_version = |version: fn(&SocketAddr) -> bool| -> Vec<SocketAddr> {
            asked.iter().flatten().copied().filter(version).collect()
        };
        let [v4, v6] = [
            of_version(SocketAddr::is_ipv4),
            of_version(SocketAddr::is_ipv6),
        ];
        let mapped: Vec<_> = v4.iter().copied().map(mapped).collect();
        for addresses in [v4, v6, mapped] {
            ensure!(addresses.len() == 3, "{addresses:?}");
            for _ in 0..SEQUENCES {
                let socket = unconnected(node, addresses[0])?;
                for _ in 0..8 {
                    ask_from(&socket, addresses[random.usize(..addresses.len())])?;
                }
                let mut questions = Vec::new();
                for question in 0..4_u8 {
                    let to = addresses[random.usize(..addresses.len())];
                    socket.send_to(&[b'0' + question], to)?;
                    questions.push(to);
                }
                for (question, to) in questions.iter().enumerate() {
                    let mut buffer = [0; 64];
                    let (length, from) = socket.recv_from(&mut buffer)?;
                    let answer = String::from_utf8_lossy(&buffer[..length]).into_owned();
                    ensure!(
                        answer.ends_with(&question.to_string()),
                        "{answer} to {question}"
                    );
                    ensure!(from == *to, "{question} to {questions:?}: {from} answers");
                }
            }
        }
    }
    Ok(())
}

/// An unconnected socket contacts a service, and in some cases its only backend directly, before it connects to the
/// backend.
fn connects_after_asking(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let node = stand.bed.node(1);
    let backend = stand.backend("web-1")?;
    let service = ServiceManifest::new("connects-after-asking", number).of([backend]);
    stand.write(&service)?;
    for asked in targets(&service) {
        wait_datagrams_answered_by(node.name(), asked, &[&backend.name])?;
        let mut own = backend.addresses().into_iter();
        let own = own.find(|own| own.is_ipv4() == asked.is_ipv4());
        let own = own.context("no address of this IP version")?;
        let mut ways = vec![(asked, own)];
        if asked.is_ipv4() {
            ways.push((mapped(asked), mapped(own)));
        }
        for (asked, own) in ways {
            for others in [&[asked][..], &[asked, own]] {
                let socket = unconnected(node, asked)?;
                for other in others {
                    ask_from(&socket, *other)?;
                }
                socket.connect(own)?;
                ensure!(socket.peer_addr()? == own, "{:?}", socket.peer_addr());
                ensure!(ask_connected(&socket, own)? == backend.name);
            }
        }
    }
    Ok(())
}

/// Refused connections are counted too.
fn counts(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let backend = &stand.backends[0];
    let service = ServiceManifest::new("host-counts", number).of([backend]);
    stand.write(&service)?;
    let node = stand.bed.node(1);
    let target = targets(&service)[0];
    wait_answered_by(node.name(), target, &["web-1"])?;
    let flows = || -> anyhow::Result<u64> {
        let listed = node.listing("bpf map dump HEALTH_BACKENDS")?;
        let frontends = node.listing("bpf map dump HEALTH_SVC4")?;
        let frontends = frontends.as_array().context("frontends are no list")?;
        let of_service = frontends.iter().find(|frontend| {
            frontend["key"]["address"] == target.to_string() && frontend["key"]["protocol"] == "TCP"
        });
        let number = &of_service.context("no frontend")?["value"]["service"];
        let backends = listed.as_array().context("backends are no list")?;
        let own = backends
            .iter()
            .find(|backend| backend["value"]["service"] == *number);
        own.context("no backend")?["value"]["flows"]
            .as_u64()
            .context("no count")
    };
    let wait_count = |wanted: u64| {
        wait_for("flows to be counted", PATIENCE, || {
            let count = flows()?;
            ensure!(count == wanted, "{count}, not {wanted}");
            Ok(Some(()))
        })
    };
    wait_count(0)?;
    let open = || Connection::open(node.name(), target);
    let connections = [open()?, open()?, open()?];
    wait_count(3)?;
    drop(connections);
    wait_count(0)
}
