//! Which clients reach which backends.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use health_common::metrics::Reason;
use serde_json::json;
use tests::served::{Connection, Datagrams, ServiceManifest, ServicePort, cluster_ips, curl};
use tests::{PATIENCE, wait_for};

use super::{
    Mode, Row, SOON, Stand, counted, targets, wait_answered_by, wait_datagrams_answered_by,
};

pub(super) const ROWS: &[Row] = &[
    (
        "backends_here_and_elsewhere_are_reached",
        here_and_elsewhere,
    ),
    ("a_backend_reaches_itself", hairpin),
    ("each_port_of_a_service_has_its_own_backends", ports),
    ("without_endpoints_new_flows_are_rejected", rejected),
    (
        "local_policy_without_local_endpoints_drops",
        local_without_local,
    ),
    ("a_service_moves_to_another_address", moved),
    ("a_deleted_service_is_gone", deleted),
    ("headless_and_external_services_are_not_served", skipped),
];

/// All backends answer clients on either node, over TCP and UDP, and see the client's own address.
fn here_and_elsewhere(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let service = stand.service("everywhere", number);
    stand.write(&service)?;
    let names = ["web-1", "web-2", "web-3"];
    for client in &stand.clients {
        for (target, own) in targets(&service).into_iter().zip(client.addresses()) {
            let answers = wait_answered_by(&client.name, target, &names)?;
            ensure!(answers.clients.iter().eq([&own]), "{:?}", answers.clients);
            let answers = wait_datagrams_answered_by(&client.name, target, &names)?;
            ensure!(answers.clients.iter().eq([&own]), "{:?}", answers.clients);
            // The upload has segments that are split later, and a window that grows.
            let mut connection = Connection::open(&client.name, target)?;
            for _ in 0..3 {
                connection.upload(3 << 20)?;
            }
        }
    }
    Ok(())
}

/// A client whose flow leads back to itself gets an answer like any other client.
fn hairpin(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let own = &stand.backends[0];
    let mut service = ServiceManifest::new("hairpin", number).of([own]);
    stand.write(&service)?;
    let from = &own.member.name;
    for target in targets(&service) {
        wait_answered_by(from, target, &["web-1"])?;
        wait_datagrams_answered_by(from, target, &["web-1"])?;
        let mut connection = Connection::open(from, target)?;
        connection.upload(1 << 20)?;
    }
    service = service.of(&stand.backends);
    stand.write(&service)?;
    for target in targets(&service) {
        wait_answered_by(from, target, &["web-1", "web-2", "web-3"])?;
    }
    Ok(())
}

/// Each service port leads to the matching port of the endpoints, and other ports lead nowhere.
fn ports(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let mut service = stand.service("ports", number);
    service.ports = vec![
        ServicePort::http(80),
        ServicePort {
            name: "again",
            ..ServicePort::http(8081)
        },
        ServicePort::datagrams(53),
    ];
    stand.write(&service)?;
    let [client, _] = &stand.clients;
    let names = ["web-1", "web-2", "web-3"];
    for ip in cluster_ips(number) {
        for port in [80, 8081] {
            wait_answered_by(&client.name, (ip, port).into(), &names)?;
        }
        wait_datagrams_answered_by(&client.name, (ip, 53).into(), &names)?;
        for port in [53, 8080] {
            ensure!(
                connect(stand, (ip, port).into(), SOON).is_err(),
                "{ip} answers at port {port}"
            );
        }
    }
    Ok(())
}

fn connect(stand: &Stand, target: SocketAddr, within: Duration) -> std::io::Result<TcpStream> {
    let connect = || TcpStream::connect_timeout(&target, within);
    let netns = &stand.clients[0].netns;
    netns.run_in(connect).map_err(std::io::Error::other)?
}

/// New flows are rejected with an ICMP error, and known ones continue.
fn rejected(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let mut service = stand.service("empty", number);
    stand.write(&service)?;
    let [client, _] = &stand.clients;
    let mut connections = Vec::new();
    for target in targets(&service) {
        wait_answered_by(&client.name, target, &["web-1", "web-2", "web-3"])?;
        connections.push(Connection::open(&client.name, target)?);
    }
    service.endpoints.clear();
    stand.write(&service)?;
    for target in targets(&service) {
        wait_for("connections to be refused", PATIENCE, || {
            let refused = connect(stand, target, PATIENCE).err();
            Ok(refused.filter(|error| error.kind() == ErrorKind::ConnectionRefused))
        })
        .with_context(|| target.to_string())?;
        let answers = curl(&client.name, target, 1)?;
        ensure!(answers.failed.keys().eq([&7]), "{answers}");
        wait_for(
            "datagrams to be refused",
            PATIENCE,
            || match Datagrams::open(&client.name, target)?.ask(SOON) {
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => Ok(Some(())),
                other => anyhow::bail!("{target}: {other:?}"),
            },
        )?;
    }
    for connection in &mut connections {
        connection.ask()?;
    }
    Ok(())
}

/// Traffic that must stay on its node cannot use endpoints on other nodes, and is dropped silently.
fn local_without_local(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let service = ServiceManifest::new("local", number)
        .of(&stand.backends[1..])
        .spec(json!({ "internalTrafficPolicy": "Local" }));
    stand.write(&service)?;
    let [here, there] = &stand.clients;
    let node = stand.node_of(here);
    for target in targets(&service) {
        wait_answered_by(&there.name, target, &["web-2", "web-3"])?;
        let before = counted(node, Reason::ServiceNoLocal)?;
        wait_for("packets to be dropped", PATIENCE, || {
            let kind = connect(stand, target, SOON).err().map(|error| error.kind());
            ensure!(kind == Some(ErrorKind::TimedOut), "{kind:?}");
            // IPVS has no such counter.
            let is_counted = counted(node, Reason::ServiceNoLocal)? > before;
            Ok((is_counted || stand.mode == Mode::Ipvs).then_some(()))
        })
        .with_context(|| target.to_string())?;
        let answer = Datagrams::open(&here.name, target)?.ask(SOON)?;
        ensure!(answer.is_none(), "{answer:?}");
    }
    Ok(())
}

/// When a service's ClusterIP changes, the service is reachable only at the new one.
fn moved(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let mut service = stand.service("moves", number);
    let [client, _] = &stand.clients;
    let names = ["web-1", "web-2", "web-3"];
    stand.write(&service)?;
    let before = targets(&service);
    for target in &before {
        wait_answered_by(&client.name, *target, &names)?;
    }
    service.cluster_ips = cluster_ips(number + 100).to_vec();
    stand.write(&service)?;
    for (target, old) in targets(&service).into_iter().zip(before) {
        wait_answered_by(&client.name, target, &names)?;
        let connected = connect(stand, old, SOON);
        ensure!(connected.is_err(), "{old} answers still");
    }
    Ok(())
}

/// No backend replies at the address of a deleted service, not even in known UDP flows.
fn deleted(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let service = stand.service("goes", number);
    stand.write(&service)?;
    let [client, _] = &stand.clients;
    let mut flows = Vec::new();
    for target in targets(&service) {
        wait_answered_by(&client.name, target, &["web-1", "web-2", "web-3"])?;
        let mut flow = Datagrams::open(&client.name, target)?;
        let asked = || flow.ask(SOON).map_err(anyhow::Error::from);
        wait_for("an answer", PATIENCE, asked)?;
        flows.push((target, flow));
    }
    stand.manifests.remove(&service.name)?;
    for (target, mut flow) in flows {
        wait_for("nobody to answer", PATIENCE, || {
            Ok(connect(stand, target, SOON).is_err().then_some(()))
        })?;
        wait_for("no datagram to be answered", PATIENCE, || {
            // One lost datagram proves nothing.
            let is_answered = (0..3).any(|_| matches!(flow.ask(SOON), Ok(Some(_))));
            Ok((!is_answered).then_some(()))
        })?;
    }
    Ok(())
}

/// An ExternalName service and a headless one have no frontend, whatever endpoints they have.
fn skipped(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let addresses: [IpAddr; 2] = cluster_ips(number);
    let headless = stand
        .service("headless", number)
        .spec(json!({ "clusterIP": "None", "clusterIPs": ["None"] }));
    let external = stand
        .service("external", number)
        .spec(json!({ "type": "ExternalName", "externalName": "elsewhere.test" }));
    for service in [&headless, &external] {
        stand.write(service)?;
    }
    // Services written after these are served.
    let mut witness = stand.service("witness", number);
    witness.cluster_ips = cluster_ips(number + 100).to_vec();
    stand.write(&witness)?;
    let [client, _] = &stand.clients;
    for target in targets(&witness) {
        wait_answered_by(&client.name, target, &["web-1", "web-2", "web-3"])?;
    }
    for ip in addresses {
        let connected = connect(stand, (ip, 80).into(), SOON);
        ensure!(connected.is_err(), "{ip} answers");
    }
    Ok(())
}
