//! Flows of clients outside the cluster.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{Context as _, ensure};
use health_common::metrics::Reason;
use health_net::mac::MacAddr;
use health_net::netns::NetNs;
use serde_json::{Value, json};
use tests::bed::ROUTER;
use tests::frames::Outlet;
use tests::outside::FAR;
use tests::packet::Tcp;
use tests::served::{Connection, Datagrams, curl};
use tests::{PATIENCE, wait_for};

use super::{Row, Stand, Trace, of_names, wait_traced};
use crate::services::outside::{
    ALL, RANGES_WITH, RANGES_WITHOUT, external_targets, node_port, node_targets, wait_dropped,
    write_balanced,
};
use crate::services::wait_answered_by;

pub(in crate::services) const ROWS: &[Row] = &[
    ("a_trace_names_who_answers_clients_outside", reached),
    ("a_trace_finds_flows_of_clients_outside", known_flows),
    ("a_trace_reports_where_a_client_outside_stays", affinity),
    (
        "a_trace_reports_which_clients_outside_may_use_a_load_balancer",
        source_ranges,
    ),
    (
        "a_trace_knows_that_no_packet_is_served_at_the_loopback",
        loopback,
    ),
    ("a_trace_reports_who_may_not_come_from_outside", strangers),
];

fn reached(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let node = stand.bed.node(1);
    let service = stand
        .service("traced", number)
        .with_node_port(node_port(number));
    let local = json!({ "externalTrafficPolicy": "Local" });
    stand.write(&service)?;
    for (target, client) in node_targets(stand, number) {
        wait_answered_by(FAR, target, &ALL)?;
        let ends = [&*client.to_string(), &target.to_string(), ""];
        let trace = wait_traced(node, ends, "reached")?;
        let reported = &trace.reported;
        ensure!(
            trace.addresses().iter().eq(&of_names(stand, &ALL, target)?),
            "{reported}"
        );
        ensure!(reported["source"]["kind"] == "outside", "{reported}");
        ensure!(reported["pool"]["inside"] == false, "{reported}");
    }
    stand.write(&service.clone().spec(local.clone()))?;
    for (target, client) in node_targets(stand, number) {
        wait_answered_by(FAR, target, &ALL[..1])?;
        let ends = [&*client.to_string(), &target.to_string(), ""];
        let trace = wait_traced(node, ends, "reached")?;
        let expected = of_names(stand, &ALL[..1], target)?;
        ensure!(trace.addresses().iter().eq(&expected), "{}", trace.reported);
        ensure!(
            trace.reported["pool"]["policy"] == "Local",
            "{}",
            trace.reported
        );
    }
    stand.write(&service.of(&stand.backends[1..]).spec(local))?;
    for (target, client) in node_targets(stand, number) {
        wait_dropped(node, target, Reason::ServiceNoLocal)?;
        let destination = target.to_string();
        wait_traced(node, [&client.to_string(), &destination, ""], "dropped")?;
        // The node's own sockets may use all backends.
        wait_traced(node, ["host", &destination, ""], "reached")?;
    }
    Ok(())
}

/// Flows to a backend on this node, and to backends on other nodes, which see this node's address.
fn known_flows(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let node = stand.bed.node(1);
    let mut service = stand
        .service("known", number)
        .with_node_port(node_port(number));
    stand.write(&service)?;
    let mut flows = Vec::new();
    for (target, client) in node_targets(stand, number) {
        wait_answered_by(FAR, target, &ALL)?;
        for name in ALL {
            let connection = wait_for("a connection to each", PATIENCE, || {
                let mut connection = Connection::open(FAR, target)?;
                let is_to = connection.ask()?.backend == name;
                Ok(is_to.then_some(connection))
            })?;
            let source = from(client, connection.stream().local_addr()?);
            let trace = wait_traced(node, [&source, &target.to_string(), ""], "reached")?;
            let expected = of_names(stand, &[name], target)?;
            ensure!(trace.stays(), "{}", trace.reported);
            ensure!(trace.addresses().iter().eq(&expected), "{}", trace.reported);
            flows.push((target, source, connection));
        }
        let mut datagrams = Datagrams::open(FAR, target)?;
        let answer = datagrams.ask(PATIENCE)?.context("no answer")?;
        let source = from(client, datagrams.local_address()?);
        let ends = [&*source, &target.to_string(), "--protocol udp"];
        let trace = wait_traced(node, ends, "reached")?;
        let expected = of_names(stand, &[&answer.backend], target)?;
        ensure!(trace.stays(), "{}", trace.reported);
        ensure!(trace.addresses().iter().eq(&expected), "{}", trace.reported);
    }
    // A closed connection no longer keeps its backend.
    if let Some((target, source, connection)) = flows.pop() {
        drop(connection);
        wait_for("the connection to be over", PATIENCE, || {
            let trace = Trace::run(node, &source, &target.to_string(), "")?;
            Ok((!trace.stays() && trace.backends().len() == ALL.len()).then_some(()))
        })?;
    }
    for endpoint in &mut service.endpoints {
        endpoint.set_ready(false);
    }
    stand.write(&service)?;
    for (target, source, mut connection) in flows {
        let trace = wait_traced(node, [&source, &target.to_string(), ""], "rejected")?;
        ensure!(
            trace.reported["flow"]["stays"] == false,
            "{}",
            trace.reported
        );
        connection.ask()?;
    }
    Ok(())
}

/// The client stays with a backend on another node as long as the policy allows that.
fn affinity(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let node = stand.bed.node(1);
    let service = stand
        .service("sticks", number)
        .with_node_port(node_port(number));
    let sticks = json!({ "sessionAffinity": "ClientIP" });
    stand.write(
        &service
            .clone()
            .of(&stand.backends[1..2])
            .spec(sticks.clone()),
    )?;
    for (target, client) in node_targets(stand, number) {
        wait_answered_by(FAR, target, &["web-2"])?;
        let ends = [&*client.to_string(), &target.to_string(), ""];
        let trace = wait_traced(node, ends, "reached")?;
        ensure!(
            trace.reported["affinity"]["stays"] == true,
            "{}",
            trace.reported
        );
    }
    stand.write(&service.clone().spec(sticks))?;
    for (target, client) in node_targets(stand, number) {
        let ends = [&*client.to_string(), &target.to_string(), ""];
        let expected = of_names(stand, &["web-2"], target)?;
        let trace = wait_traced(node, ends, "reached")?;
        ensure!(trace.addresses().iter().eq(&expected), "{}", trace.reported);
        let answers = curl(FAR, target, 5)?;
        ensure!(
            answers.all_from().is_some_and(|all| all == ["web-2"]),
            "{answers}"
        );
    }
    stand.write(&service.spec(json!({
        "sessionAffinity": "ClientIP",
        "externalTrafficPolicy": "Local",
    })))?;
    for (target, client) in node_targets(stand, number) {
        let ends = [&*client.to_string(), &target.to_string(), ""];
        wait_for("the policy to be in force", PATIENCE, || {
            let trace = wait_traced(node, ends, "reached")?;
            Ok((trace.reported["affinity"]["stays"] == false).then_some(()))
        })?;
        let trace = wait_traced(node, ends, "reached")?;
        let expected = of_names(stand, &["web-1"], target)?;
        ensure!(trace.addresses().iter().eq(&expected), "{}", trace.reported);
        let answers = curl(FAR, target, 5)?;
        ensure!(
            answers.all_from().is_some_and(|all| all == ["web-1"]),
            "{answers}"
        );
    }
    Ok(())
}

/// Source ranges do not apply to the NodePort of the same service.
fn source_ranges(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let node = stand.bed.node(1);
    let nodes = node_targets(stand, number);
    let balancers = external_targets(number);
    let clients = nodes.iter().map(|(_, client)| client.to_string());
    let clients: Vec<_> = clients.collect();
    let all = || balancers.iter().zip(&clients);
    let trace = |client: &str, target: SocketAddr, verdict: &str, admitted: bool| {
        wait_for("source ranges to judge so", PATIENCE, || {
            let trace = Trace::run(node, client, &target.to_string(), "")?;
            let judged = &trace.reported["source-ranges"]["admitted"];
            ensure!(trace.verdict() == verdict, "{}", trace.reported);
            ensure!(*judged == json!(admitted), "{}", trace.reported);
            Ok(Some(()))
        })
    };
    write_balanced(stand, ("ranged", number), RANGES_WITH)?;
    for (target, client) in all() {
        wait_answered_by(FAR, *target, &ALL)?;
        trace(client, *target, "reached", true)?;
    }
    write_balanced(stand, ("ranged", number), RANGES_WITHOUT)?;
    for (target, client) in all() {
        wait_dropped(node, *target, Reason::ServiceSourceRange)?;
        trace(client, *target, "dropped", false)?;
    }
    for (target, client) in nodes {
        wait_answered_by(FAR, target, &ALL)?;
        let ends = [&*client.to_string(), &target.to_string(), ""];
        let reported = wait_traced(node, ends, "reached")?.reported;
        ensure!(reported["source-ranges"].is_null(), "{reported}");
    }
    Ok(())
}

/// Sends packets directly on the link, because no router forwards them. The same packet is served if its destination is
/// the node's address.
fn loopback(stand: &Stand, number: u8) -> anyhow::Result<()> {
    const SYN: u8 = 2;
    let node = stand.bed.node(1);
    let service = stand
        .service("looped", number)
        .with_node_port(node_port(number));
    stand.write(&service)?;
    let outlet = NetNs::open(ROUTER)?.run_in(|| Outlet::on("eth0"))??;
    let devices: Value = serde_json::from_str(&node.exec("ip -json link show dev eth0")?)?;
    let mac: MacAddr = devices[0]["address"]
        .as_str()
        .context("no hardware address")?
        .parse()?;
    for (target, client) in node_targets(stand, number) {
        wait_answered_by(FAR, target, &ALL)?;
        let localhost: IpAddr = match target {
            SocketAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            SocketAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        };
        // Two source ports that no client in this namespace has used.
        let [at_loopback, at_node] = [2_001, 2_002];
        let send = |port: u16, to: IpAddr| {
            let mut frame = Tcp::between((port, target.port()), SYN).frame(client, to);
            frame[..6].copy_from_slice(&mac.0);
            outlet.send_plain(&frame)
        };
        let source = |port| SocketAddr::new(client, port).to_string();
        let looped = SocketAddr::new(localhost, target.port()).to_string();
        let flows = wait_for("a flow of a packet from the wire", PATIENCE, || {
            // Sends the packets in order: once the second one is served, the program has seen the first one.
            send(at_loopback, localhost)?;
            send(at_node, target.ip())?;
            let flows = node.cli("bpf lb list --flows")?.success()?;
            Ok(flows.contains(&source(at_node)).then_some(flows))
        })?;
        ensure!(!flows.contains(&source(at_loopback)), "{flows}");
        wait_traced(node, [&source(at_node), &target.to_string(), ""], "reached")?;
        wait_traced(node, [&source(at_loopback), &looped, ""], "not-served")?;
    }
    Ok(())
}

fn strangers(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let node = stand.bed.node(1);
    let service = stand
        .service("strange", number)
        .with_node_port(node_port(number));
    stand.write(&service)?;
    for (target, client) in node_targets(stand, number) {
        wait_answered_by(FAR, target, &ALL)?;
        let destination = target.to_string();
        // An address of this node stands for one of its sockets, since nothing else sends from it.
        let own = wait_traced(
            node,
            [&target.ip().to_string(), &destination, ""],
            "reached",
        )?;
        ensure!(own.reported["source"]["kind"] == "host", "{}", own.reported);
        let (nobody, localhost): (&str, IpAddr) = match target {
            SocketAddr::V4(_) => ("224.0.0.5", [127, 0, 0, 1].into()),
            SocketAddr::V6(_) => ("ff02::5", std::net::Ipv6Addr::LOCALHOST.into()),
        };
        let ran = node.cli(&format!("service trace {nobody} {destination}"))?;
        ensure!(ran.stderr.contains("no packet can come from"), "{ran:?}");
        let loopback = SocketAddr::new(localhost, target.port()).to_string();
        wait_traced(node, [&client.to_string(), &loopback, ""], "not-served")?;
        if target.is_ipv6() {
            wait_traced(node, ["fe80::9", &destination, ""], "not-served")?;
        }
    }
    Ok(())
}

/// A client's address with a socket's port.
fn from(client: IpAddr, socket: SocketAddr) -> String {
    SocketAddr::new(client, socket.port()).to_string()
}
