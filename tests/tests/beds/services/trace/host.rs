//! Flows of the host's own sockets.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};

use anyhow::{Context as _, ensure};
use nix::errno::Errno;
use serde_json::json;
use tests::served::{Connection, Datagrams, ServiceManifest, ServicePort, curl};
use tests::{Node, PATIENCE};

use super::{Row, Stand, of_names, wait_traced};
use crate::services::{targets, wait_answered_by};

pub(in crate::services) const ROWS: &[Row] = &[
    ("a_trace_of_the_host_names_who_answers_it", reached),
    ("a_trace_of_the_host_reports_where_it_stays", affinity),
    (
        "a_trace_of_the_host_names_all_that_maglev_may_choose",
        maglev,
    ),
    ("a_trace_of_the_host_knows_its_sockets", known_sockets),
    ("a_trace_of_the_host_reports_who_refuses_it", refused),
    ("a_trace_knows_what_sctp_can", sctp),
];

const ALL: [&str; 3] = ["web-1", "web-2", "web-3"];

/// The error that a process gets when it connects to the target.
fn error(node: &Node, target: SocketAddr) -> anyhow::Result<Option<Errno>> {
    let connected = node.run_in(|| TcpStream::connect(target))?;
    let number = connected
        .err()
        .and_then(|error: io::Error| error.raw_os_error());
    Ok(number.map(Errno::from_raw))
}

/// On the loopback, only the host's own sockets reach services.
fn reached(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let port = 31_000 + u16::from(number);
    let service = stand.service("traced-by-host", number).with_node_port(port);
    stand.write(&service)?;
    let node = stand.bed.node(1);
    let localhost: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    let places = node.addresses().into_iter().chain(localhost);
    let mut all = targets(&service);
    all.extend(places.map(|ip| SocketAddr::from((ip, port))));
    for target in all {
        wait_answered_by(node.name(), target, &ALL)?;
        let destination = target.to_string();
        let trace = wait_traced(node, ["host", &destination, ""], "reached")?;
        let reported = &trace.reported;
        ensure!(
            trace.addresses().iter().eq(&of_names(stand, &ALL, target)?),
            "{reported}"
        );
        ensure!(reported["source"]["kind"] == "host", "{reported}");
        ensure!(reported["pool"]["inside"] == true, "{reported}");
        if !target.ip().is_loopback() {
            continue;
        }
        for client in &stand.clients {
            let id = client.endpoint.id.to_string();
            wait_traced(stand.node_of(client), [&id, &destination, ""], "not-served")?;
        }
    }
    Ok(())
}

fn affinity(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let node = stand.bed.node(1);
    let service = ServiceManifest {
        annotations: json!({ "service.health-agent.io/algorithm": "maglev" }),
        ..stand.service("host-sticks", number)
    };
    let service = service.spec(json!({ "sessionAffinity": "ClientIP" }));
    stand.write(&service)?;
    for target in targets(&service) {
        let ends = ["host", &*target.to_string(), ""];
        // Maglev hashes only the address, so all flows of the host get one backend.
        let before = wait_traced(node, ends, "reached")?;
        ensure!(before.reported["affinity"].is_null(), "{}", before.reported);
        let answers = curl(node.name(), target, 5)?;
        let names = answers.all_from().context("a request failed")?;
        let expected = of_names(stand, &names, target)?;
        ensure!(names.len() == 1, "{answers}");
        ensure!(
            before.addresses().iter().eq(&expected),
            "{}",
            before.reported
        );
        let after = wait_traced(node, ends, "reached")?;
        ensure!(
            after.reported["affinity"]["stays"] == true,
            "{}",
            after.reported
        );
        ensure!(after.addresses().iter().eq(&expected), "{}", after.reported);
    }
    Ok(())
}

fn maglev(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let node = stand.bed.node(1);
    let service = ServiceManifest {
        annotations: json!({ "service.health-agent.io/algorithm": "maglev" }),
        ..stand.service("host-reported", number)
    };
    stand.write(&service)?;
    for target in targets(&service) {
        wait_answered_by(node.name(), target, &ALL)?;
        let trace = wait_traced(node, ["host:40000", &target.to_string(), ""], "reached")?;
        let reasons = trace.reported["pool"]["reasons"].to_string();
        ensure!(reasons.contains("the socket's cookie"), "{reasons}");
        ensure!(
            trace.addresses().iter().eq(&of_names(stand, &ALL, target)?),
            "{}",
            trace.reported
        );
    }
    Ok(())
}

fn known_sockets(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let node = stand.bed.node(1);
    let mut service = stand.service("host-known", number);
    stand.write(&service)?;
    let mut flows = Vec::new();
    for target in targets(&service) {
        wait_answered_by(node.name(), target, &ALL)?;
        let mut connection = Connection::open(node.name(), target)?;
        let answer = connection.ask()?;
        let mut datagrams = Datagrams::open(node.name(), target)?;
        let other = datagrams.ask(PATIENCE)?.context("no answer")?;
        let opened = connection.stream().local_addr()?.port();
        let asking = datagrams.local_address()?.port();
        for (port, backend, protocol) in [
            (opened, &answer.backend, "--protocol tcp"),
            (asking, &other.backend, "--protocol udp"),
        ] {
            let source = format!("host:{port}");
            let ends = [&*source, &target.to_string(), protocol];
            let trace = wait_traced(node, ends, "reached")?;
            let expected = of_names(stand, &[backend], target)?;
            ensure!(trace.stays(), "{}", trace.reported);
            ensure!(trace.addresses().iter().eq(&expected), "{}", trace.reported);
        }
        flows.push((target, connection, opened, asking, datagrams));
    }
    for endpoint in &mut service.endpoints {
        endpoint.set_ready(false);
    }
    stand.write(&service)?;
    for (target, mut connection, opened, asking, _datagrams) in flows {
        let destination = target.to_string();
        let asking = format!("host:{asking}");
        wait_traced(node, [&asking, &destination, "--protocol udp"], "rejected")?;
        // The connection keeps its backend, which no other socket reaches.
        let opened = format!("host:{opened}");
        let trace = wait_traced(node, [&opened, &destination, ""], "reached")?;
        ensure!(trace.stays(), "{}", trace.reported);
        connection.ask()?;
        wait_traced(node, ["host", &destination, ""], "rejected")?;
        let error = error(node, target)?;
        ensure!(error == Some(Errno::ECONNREFUSED), "{target}: {error:?}");
    }
    Ok(())
}

/// The first node is within the load balancer's ranges, and has no backend of its own where the policy requires one.
fn refused(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let [here, there] = [1, 2].map(|index| stand.bed.node(index));
    let balancers: [IpAddr; 2] = [
        Ipv4Addr::new(203, 52, 100, number).into(),
        Ipv6Addr::new(0xfd00, 203, 52, 0, 0, 0, 0, number.into()).into(),
    ];
    let ranges = here.addresses().into_iter();
    let ranges: Vec<_> = ranges
        .map(|ip| format!("{ip}/{}", if ip.is_ipv4() { 32 } else { 128 }))
        .collect();
    let mut service = stand.service("host-refused", number).spec(json!({
        "type": "LoadBalancer",
        "internalTrafficPolicy": "Local",
        "loadBalancerSourceRanges": ranges,
    }));
    service.endpoints.remove(0);
    service.load_balancer = balancers.to_vec();
    stand.write(&service)?;
    for target in balancers.map(|ip| SocketAddr::from((ip, 80))) {
        let destination = target.to_string();
        let trace = wait_traced(here, ["host", &destination, ""], "reached")?;
        ensure!(
            trace.reported["source-ranges"]["admitted"] == true,
            "{}",
            trace.reported
        );
        wait_answered_by(here.name(), target, &ALL[1..])?;
        let trace = wait_traced(there, ["host", &destination, ""], "rejected")?;
        ensure!(
            trace.reported["source-ranges"]["admitted"] == false,
            "{}",
            trace.reported
        );
        ensure!(trace.answer().contains("EPERM"), "{}", trace.answer());
        let error = error(there, target)?;
        ensure!(error == Some(Errno::EPERM), "{target}: {error:?}");
    }
    for target in targets(&service) {
        let trace = wait_traced(here, ["host", &target.to_string(), ""], "rejected")?;
        ensure!(
            trace.answer().contains("EHOSTUNREACH"),
            "{}",
            trace.answer()
        );
        let error = error(here, target)?;
        ensure!(error == Some(Errno::EHOSTUNREACH), "{target}: {error:?}");
    }
    Ok(())
}

/// Packets need a backend at the service's port, and the host's own SCTP sockets are not served at all.
fn sctp(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let mut service = stand.service("associated", number);
    service.ports = vec![ServicePort {
        name: "associations",
        protocol: "SCTP",
        ..ServicePort::http(80)
    }];
    stand.write(&service)?;
    let [client, _] = &stand.clients;
    let id = client.endpoint.id.to_string();
    let node = stand.node_of(client);
    let ends = |source| [source, "associated:80", ""];
    let trace = wait_traced(node, ends(&id), "dropped")?;
    ensure!(
        trace
            .answer()
            .contains("SCTP can reach only backends at the service's port"),
        "{}",
        trace.answer()
    );
    let trace = wait_traced(node, ends("host"), "not-served")?;
    ensure!(trace.backends().is_empty(), "{}", trace.reported);
    for command in ["list", "get associated"] {
        let reported = node.cli(&format!("service {command}"))?.success()?;
        let [target, _] = service.cluster_ips[..] else {
            anyhow::bail!("{:?}", service.cluster_ips);
        };
        let problem = format!("SCTP to another port: drops at {target}:80, ");
        ensure!(reported.contains(&problem), "{reported}");
    }
    Ok(())
}
