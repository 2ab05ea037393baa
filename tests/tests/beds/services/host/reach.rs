//! Which services the host reaches, and which errors it gets.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};

use anyhow::ensure;
use health_common::metrics::Reason;
use nix::errno::Errno;
use serde_json::json;
use tests::served::Connection;
use tests::{PATIENCE, wait_for};

use super::{ALL, all_targets, answered_by, counted, ensure_errno, targets, unconnected};
use super::{Row, SOON, Stand};

pub(in crate::services) const ROWS: &[Row] = &[
    ("the_host_reaches_cluster_ips", cluster_ips),
    (
        "the_host_reaches_node_ports_at_all_addresses_and_at_localhost",
        node_ports,
    ),
    (
        "the_host_reaches_external_addresses_from_within_source_ranges",
        external_addresses,
    ),
    ("the_host_stays_on_its_node_by_policy", internal_local),
    ("without_endpoints_the_host_is_refused_at_once", refused),
];

fn cluster_ips(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let service = stand.service("to-host", number);
    stand.write(&service)?;
    for node in stand.bed.nodes() {
        for target in all_targets(&targets(&service)) {
            answered_by(node, target, &ALL)?;
        }
    }
    Ok(())
}

/// An endpoint has its own localhost, where nothing listens.
fn node_ports(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let port = 31_000 + u16::from(number);
    let service = stand.service("ports-of-host", number).with_node_port(port);
    stand.write(&service)?;
    let localhost: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    for node in stand.bed.nodes() {
        let addresses = node.addresses().into_iter().chain(localhost);
        let places: Vec<SocketAddr> = addresses.map(|ip| (ip, port).into()).collect();
        for target in all_targets(&places) {
            answered_by(node, target, &ALL)?;
        }
    }
    for client in &stand.clients {
        for ip in localhost {
            let connect = || TcpStream::connect_timeout(&(ip, port).into(), SOON);
            let connected = client.netns.run_in(connect)?;
            ensure!(connected.is_err(), "{} reaches {ip}", client.name);
        }
    }
    Ok(())
}

/// Load balancer addresses are only open to clients within the ranges, here the first node. External addresses are open
/// to all.
fn external_addresses(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let [external, balancer] = [198, 203].map(|first| -> [IpAddr; 2] {
        let v6 = Ipv6Addr::new(0xfd00, first, 0, 0, 0, 0, 0, number.into());
        [
            Ipv4Addr::new(first as u8, 51, 100, number).into(),
            v6.into(),
        ]
    });
    let [here, there] = [1, 2].map(|index| stand.bed.node(index));
    let ranges = here.addresses().into_iter();
    let ranges: Vec<String> = ranges
        .map(|ip| format!("{ip}/{}", if ip.is_ipv4() { 32 } else { 128 }))
        .collect();
    let service = stand.service("outward", number).spec(json!({
        "type": "LoadBalancer",
        "externalIPs": external,
        "loadBalancerSourceRanges": ranges,
    }));
    stand.write(&service.with_load_balancer(balancer))?;
    let at = |ips: [IpAddr; 2]| ips.map(|ip| SocketAddr::from((ip, 80)));
    for target in at(external) {
        for node in [here, there] {
            answered_by(node, target, &ALL)?;
        }
    }
    for target in at(balancer) {
        answered_by(here, target, &ALL)?;
        let before = counted(there, Reason::ServiceSourceRange)?;
        let error = there.run_in(|| TcpStream::connect(target))?.err();
        ensure_errno(error, Errno::EPERM)?;
        let socket = unconnected(there, target)?;
        ensure_errno(socket.send_to(b"who", target).err(), Errno::EPERM)?;
        let after = counted(there, Reason::ServiceSourceRange)?;
        ensure!(after >= before + 2, "{before}, then {after}");
    }
    Ok(())
}

/// Without a backend on the node, a process gets an error at once.
fn internal_local(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let mut service = stand
        .service("host-stays", number)
        .spec(json!({ "internalTrafficPolicy": "Local" }));
    stand.write(&service)?;
    let [here, there] = [1, 2].map(|index| stand.bed.node(index));
    for target in targets(&service) {
        answered_by(here, target, &ALL[..1])?;
        answered_by(there, target, &ALL[1..])?;
    }
    service.endpoints.remove(0);
    stand.write(&service)?;
    for target in targets(&service) {
        wait_for("nobody to be there", PATIENCE, || {
            let error = here.run_in(|| TcpStream::connect(target))?.err();
            Ok(error.filter(|error| error.raw_os_error() == Some(Errno::EHOSTUNREACH as i32)))
        })?;
        let socket = unconnected(here, target)?;
        let sent = socket.send_to(b"who", target).err();
        ensure_errno(sent, Errno::EHOSTUNREACH)?;
    }
    Ok(())
}

fn refused(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let mut service = stand.service("host-empty", number);
    stand.write(&service)?;
    let node = stand.bed.node(1);
    let mut connections = Vec::new();
    for target in targets(&service) {
        answered_by(node, target, &ALL)?;
        connections.push(Connection::open(node.name(), target)?);
    }
    service.endpoints.clear();
    stand.write(&service)?;
    for target in all_targets(&targets(&service)) {
        let before = counted(node, Reason::ServiceRejected)?;
        wait_for("connections to be refused", PATIENCE, || {
            let error = node.run_in(|| TcpStream::connect(target))?.err();
            Ok(error.filter(|error| error.kind() == ErrorKind::ConnectionRefused))
        })?;
        let socket = unconnected(node, target)?;
        let error = socket.send_to(b"who", target).err();
        ensure_errno(error, Errno::ECONNREFUSED)?;
        ensure_errno(socket.connect(target).err(), Errno::ECONNREFUSED)?;
        let after = counted(node, Reason::ServiceRejected)?;
        ensure!(after >= before + 3, "{before}, then {after}");
    }
    // Existing connections continue.
    for connection in &mut connections {
        connection.ask()?;
    }
    Ok(())
}
