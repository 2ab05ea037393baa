//! Flows of endpoints.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};

use anyhow::{Context as _, ensure};
use serde_json::json;
use tests::PATIENCE;
use tests::served::{Connection, Datagrams, ServiceManifest, curl};

use super::{Row, Stand, address_of, of_names, wait_traced, with_port};
use crate::services::{SOON, targets, wait_answered_by};

pub(in crate::services) const ROWS: &[Row] = &[
    ("a_trace_names_the_backends_that_answer", allowed),
    ("a_trace_reports_flows_without_a_backend", without_backend),
    ("a_trace_reports_who_may_use_a_load_balancer", source_ranges),
    ("a_trace_reports_where_a_client_stays", affinity),
    ("a_trace_finds_flows_that_are_known", known_flow),
    ("a_trace_reports_what_a_maglev_table_has", maglev),
    ("a_trace_says_why_backends_get_nothing", reasons),
    ("a_trace_refuses_ends_that_are_none", bad_ends),
];

fn allowed(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let service = stand.service("traced", number);
    stand.write(&service)?;
    let names = ["web-1", "web-2", "web-3"];
    for client in &stand.clients {
        let node = stand.node_of(client);
        let id = client.endpoint.id.to_string();
        for target in targets(&service) {
            wait_answered_by(&client.name, target, &names)?;
            let own = address_of(client, target)?;
            for source in [&id, &own] {
                let trace = wait_traced(node, [source, &target.to_string(), ""], "reached")?;
                let reported = &trace.reported;
                ensure!(
                    trace
                        .addresses()
                        .iter()
                        .eq(&of_names(stand, &names, target)?),
                    "{reported}"
                );
                ensure!(
                    reported["frontend"]["service"] == "default/traced:http",
                    "{reported}"
                );
                ensure!(reported["frontend"]["type"] == "ClusterIP", "{reported}");
                ensure!(reported["source"]["kind"] == "endpoint", "{reported}");
                ensure!(
                    reported["source"]["endpoint"] == client.endpoint.id,
                    "{reported}"
                );
                ensure!(reported["pool"]["policy"] == "Cluster", "{reported}");
                for backend in trace.backends() {
                    let share = backend["share"].as_f64().unwrap_or_default();
                    ensure!((share - 1.0 / 3.0).abs() < 1e-9, "{reported}");
                    ensure!(backend["egress"]["allowed"] == true, "{reported}");
                }
                // The node only knows the policy of backends that are its own endpoints.
                let here = trace.backends().into_iter();
                let here = here.filter(|backend| !backend["ingress"].is_null()).count();
                ensure!(
                    here == if node.name() == "hnode1" { 1 } else { 2 },
                    "{reported}"
                );
            }
        }
        let ends = [&*id, "default/traced:datagrams", ""];
        let trace = wait_traced(node, ends, "reached")?;
        ensure!(trace.reported["protocol"] == "UDP", "{}", trace.reported);
        let text = node
            .cli(&format!("service trace {id} traced:80"))?
            .success()?;
        ensure!(
            text.contains("\nAnswer:   default/traced:http -> one of 3 backends; "),
            "{text}"
        );
    }
    Ok(())
}

fn reasons(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let [client, _] = &stand.clients;
    let node = stand.node_of(client);
    let id = client.endpoint.id.to_string();
    let mut service = stand.service("reasons", number);
    let zones = ["zone-1", "zone-2", "zone-2"];
    for (endpoint, zone) in service.endpoints.iter_mut().zip(zones) {
        endpoint.zones = vec![zone];
    }
    stand.write(&service)?;
    let target = targets(&service)[0];
    let destination = target.to_string();
    wait_answered_by(&client.name, target, &["web-1"])?;
    let trace = wait_traced(node, [&id, &destination, ""], "reached")?;
    let reasons = trace.reported["pool"]["reasons"].to_string();
    ensure!(
        reasons.contains("hints are for zones, including zone-1"),
        "{reasons}"
    );
    ensure!(reasons.contains("others are preferred"), "{reasons}");
    ensure!(
        trace
            .addresses()
            .iter()
            .eq(&of_names(stand, &["web-1"], target)?),
        "{}",
        trace.reported
    );

    for endpoint in &mut service.endpoints {
        endpoint.zones.clear();
        (endpoint.ready, endpoint.terminating) = (false, true);
    }
    service.endpoints[0].set_ready(false);
    stand.write(&service)?;
    wait_answered_by(&client.name, target, &["web-2", "web-3"])?;
    let trace = wait_traced(node, [&id, &destination, ""], "reached")?;
    let reasons = trace.reported["pool"]["reasons"].to_string();
    ensure!(reasons.contains("no endpoint is ready"), "{reasons}");
    ensure!(reasons.contains("gets no flows: "), "{reasons}");
    Ok(())
}

fn without_backend(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let [client, _] = &stand.clients;
    let node = stand.node_of(client);
    let id = client.endpoint.id.to_string();
    let mut service = stand
        .service("void", number)
        .spec(json!({ "internalTrafficPolicy": "Local" }));
    // First without a backend on this node, then without any backend.
    service.endpoints.remove(0);
    for (verdict, refused) in [("dropped", false), ("rejected", true)] {
        stand.write(&service)?;
        for target in targets(&service) {
            let trace = wait_traced(node, [&id, &target.to_string(), ""], verdict)?;
            ensure!(trace.backends().is_empty(), "{}", trace.reported);
            ensure!(
                trace.reported["pool"]["policy"] == "Local",
                "{}",
                trace.reported
            );
            let within = if refused { PATIENCE } else { SOON };
            let connect = || TcpStream::connect_timeout(&target, within);
            let error = client.netns.run_in(connect)?.err();
            let kind = error.context("it is answered")?.kind();
            let is_refused = kind == ErrorKind::ConnectionRefused;
            ensure!(is_refused == refused, "{target}: {kind}");
        }
        service.endpoints.clear();
    }
    Ok(())
}

fn source_ranges(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let [client, other] = &stand.clients;
    let own = client.addresses();
    let balancers: [IpAddr; 2] = [
        Ipv4Addr::new(192, 0, 2, number).into(),
        Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, number.into()).into(),
    ];
    let [one, two] = [0, 1].map(|family| match own[family] {
        IpAddr::V4(ip) => format!("{ip}/32"),
        IpAddr::V6(ip) => format!("{ip}/128"),
    });
    let service = stand.service("ranges", number).spec(json!({
        "type": "LoadBalancer",
        "loadBalancerSourceRanges": [one, two],
    }));
    stand.write(&service.with_load_balancer(balancers))?;
    let node = stand.bed.node(1);
    // Another endpoint of the node is outside the ranges.
    let stranger = &stand.backend("web-1")?.member;
    for balancer in balancers {
        let target = SocketAddr::new(balancer, 80);
        let destination = target.to_string();
        let admitted = address_of(client, target)?;
        let trace = wait_traced(node, [&admitted, &destination, ""], "reached")?;
        ensure!(
            trace.reported["frontend"]["type"] == "LoadBalancer",
            "{}",
            trace.reported
        );
        ensure!(
            trace.reported["source-ranges"]["admitted"] == true,
            "{}",
            trace.reported
        );
        let answers = curl(&client.name, target, 5)?;
        ensure!(answers.all_from().is_some(), "{answers}");

        let refused = address_of(stranger, target)?;
        let trace = wait_traced(node, [&refused, &destination, ""], "dropped")?;
        ensure!(
            trace.reported["source-ranges"]["admitted"] == false,
            "{}",
            trace.reported
        );
        let connect = || TcpStream::connect_timeout(&target, SOON);
        ensure!(stranger.netns.run_in(connect)?.is_err(), "{target} answers");
        ensure!(other.netns.run_in(connect)?.is_err(), "{target} answers");
    }
    Ok(())
}

fn affinity(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let [client, _] = &stand.clients;
    let node = stand.node_of(client);
    let id = client.endpoint.id.to_string();
    let service = stand.service("sticks", number).spec(json!({
        "sessionAffinity": "ClientIP",
        "sessionAffinityConfig": { "clientIP": { "timeoutSeconds": 600 } },
    }));
    stand.write(&service)?;
    for target in targets(&service) {
        let destination = target.to_string();
        let trace = wait_traced(node, [&id, &destination, ""], "reached")?;
        ensure!(trace.reported["affinity"].is_null(), "{}", trace.reported);
        ensure!(trace.backends().len() == 3, "{}", trace.reported);
        let answers = curl(&client.name, target, 1)?;
        let first = answers.backends.keys().next().context("no answer")?;
        let trace = wait_traced(node, [&id, &destination, ""], "reached")?;
        let expected = of_names(stand, &[first], target)?;
        ensure!(
            trace.reported["affinity"]["stays"] == true,
            "{}",
            trace.reported
        );
        ensure!(trace.addresses().iter().eq(&expected), "{}", trace.reported);
    }
    Ok(())
}

fn known_flow(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let [client, _] = &stand.clients;
    let node = stand.node_of(client);
    let mut service = stand.service("known", number);
    stand.write(&service)?;
    let mut flows = Vec::new();
    for target in targets(&service) {
        wait_answered_by(&client.name, target, &["web-1", "web-2", "web-3"])?;
        let mut connection = Connection::open(&client.name, target)?;
        let backend = connection.ask()?.backend;
        let source = with_port(client, connection.stream().local_addr()?)?;
        let mut datagrams = Datagrams::open(&client.name, target)?;
        let answer = datagrams.ask(PATIENCE)?.context("no answer")?;
        let asking = with_port(client, datagrams.local_address()?)?;
        for (source, backend, protocol) in [
            (&source, &backend, "--protocol tcp"),
            (&asking, &answer.backend, "--protocol udp"),
        ] {
            let ends = [&**source, &target.to_string(), protocol];
            let trace = wait_traced(node, ends, "reached")?;
            let expected = of_names(stand, &[backend], target)?;
            ensure!(
                trace.reported["flow"]["stays"] == true,
                "{}",
                trace.reported
            );
            ensure!(trace.addresses().iter().eq(&expected), "{}", trace.reported);
        }
        flows.push((target, connection, source));
    }
    // The connection keeps its backend, but a new one between the same ports would not.
    for endpoint in &mut service.endpoints {
        endpoint.set_ready(false);
    }
    stand.write(&service)?;
    for (target, mut connection, source) in flows {
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

/// Predicts the backend of a flow that does not exist yet.
fn maglev(stand: &Stand, number: u8) -> anyhow::Result<()> {
    const FLOWS: usize = 10;
    let [client, _] = &stand.clients;
    let node = stand.node_of(client);
    let service = ServiceManifest {
        annotations: json!({ "service.health-agent.io/algorithm": "maglev" }),
        ..stand.service("reported", number)
    };
    stand.write(&service)?;
    for target in targets(&service) {
        wait_answered_by(&client.name, target, &["web-1", "web-2", "web-3"])?;
        let mut traced = 0;
        while traced < FLOWS {
            let mut flow = Datagrams::open(&client.name, target)?;
            // If the client just used this port for another service, the backend's replies may still belong to that
            // earlier flow.
            let port = flow.local_address()?.port();
            let known = node.cli("bpf lb list --flows")?.success()?;
            if known.contains(&format!(":{port} ")) {
                continue;
            }
            traced += 1;
            let source = with_port(client, flow.local_address()?)?;
            let ends = [&*source, &target.to_string(), "--protocol udp"];
            let trace = wait_traced(node, ends, "reached")?;
            let answer = flow.ask(PATIENCE)?.context("no answer")?;
            let expected = of_names(stand, &[&answer.backend], target)?;
            ensure!(trace.addresses().iter().eq(&expected), "{}", trace.reported);
        }
    }
    Ok(())
}

fn bad_ends(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let [client, _] = &stand.clients;
    let node = stand.node_of(client);
    let id = client.endpoint.id.to_string();
    let service = stand.service("ends-there", number);
    stand.write(&service)?;
    let target = targets(&service)[0];
    wait_answered_by(&client.name, target, &["web-1", "web-2", "web-3"])?;
    let ip = target.ip();
    for (source, destination, reported) in [
        (
            &*id,
            "nothing:80",
            "no service \"nothing\"; `health-agent service list`",
        ),
        (
            &id,
            "ends-there:81",
            "has no such port; it has http 80/TCP, datagrams 80/UDP",
        ),
        (&id, "ends-there", "ends-there has several ports"),
        (
            &id,
            &format!("{ip}:81"),
            "belongs to default/ends-there, which has http 80/TCP",
        ),
        (&id, "192.0.2.77:80", "no service at 192.0.2.77:80/TCP"),
        (&id, &ip.to_string(), "has no port"),
        ("4096", "ends-there:80", "no endpoint \"4096\" on this node"),
        (
            "nobody",
            "ends-there:80",
            "no endpoint \"nobody\" on this node",
        ),
        (
            "10.244.1.255",
            "ends-there:80",
            "no endpoint on this node has address 10.244.1.255",
        ),
        ("host:x", "ends-there:80", "invalid port \"x\""),
        ("2001:db8::1", &target.to_string(), "has no IPv4 address"),
    ] {
        let ran = node.cli(&format!("service trace {source} {destination}"))?;
        ensure!(ran.code == Some(1), "{source} {destination}: {ran:?}");
        ensure!(
            ran.stderr.contains(reported),
            "{source} {destination}: {ran:?}"
        );
    }
    let ran = node.cli(&format!("service trace {id} ends-there:80 --protocol icmp"))?;
    ensure!(ran.code == Some(2), "{ran:?}");
    Ok(())
}
