//! Agents that serve through IPVS: the rows shared with the eBPF mode, and rows for outside traffic.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpStream};

use anyhow::{Context as _, ensure};
use health_net::netns::NetNs;
use serde_json::json;
use tests::process::run;
use tests::served::{Datagrams, ServiceManifest, cluster_ips, curl};
use tests::{Node, PATIENCE, bed::command_in, outside, wait_for};

use crate::services::bad_input::show_that_the_older_is_served;
use crate::services::{
    Mode, ROWS, Row, SOON, Stand, show, targets, wait_answered_by, wait_datagrams_answered_by,
};

const ALL: [&str; 3] = ["web-1", "web-2", "web-3"];

const IPVS_ROWS: &[Row] = &[
    ("tools_list_what_was_asked_for", tools),
    ("timeouts_are_those_of_the_flags", timeouts),
    ("the_mode_is_reported", mode_is_reported),
    ("a_node_reaches_services", from_node),
    ("cluster_ips_are_reached_from_outside", from_outside),
    ("node_ports_are_reached_from_everywhere", node_ports),
    ("external_policy_local_keeps_the_source", external_local),
    (
        "external_policy_local_without_local_endpoints_drops",
        external_local_without_local,
    ),
    ("external_addresses_are_served", external_ips),
    ("only_source_ranges_reach_a_load_balancer", source_ranges),
    ("load_balancers_learn_of_local_endpoints", health_check),
    ("node_ports_without_endpoints_reject", rejected_node_port),
    ("a_client_may_go_elsewhere_after_the_timeout", affinity_ends),
];

/// Flags for the timeouts of idle connections, and how `ipvsadm` shows these timeouts.
const TIMEOUTS: &str = "--ipvs-tcp-timeout 20m --ipvs-tcpfin-timeout 90s --ipvs-udp-timeout 4m";
const TIMEOUTS_LISTED: &str = "Timeout (tcp tcpfin udp): 1200 90 240";

#[test]
#[ignore = "needs root"]
fn every_row_of_the_specification_comes_true_by_ipvs() -> anyhow::Result<()> {
    let stand = Stand::start_with(Mode::Ipvs, ["", ""], TIMEOUTS)?;
    outside::add(stand.bed.node(1))?;
    show(&stand, &[ROWS.concat(), IPVS_ROWS.to_vec()].concat())
}

#[test]
#[ignore = "needs root"]
fn the_older_of_a_node_port_and_an_external_address_is_served_by_ipvs() -> anyhow::Result<()> {
    show_that_the_older_is_served(Mode::Ipvs)
}

/// The output of a command on a node, once it contains all these lines. Whitespace differences are ignored.
fn wait_listed(node: &Node, command: &str, lines: &[String]) -> anyhow::Result<String> {
    wait_for("a tool to list what was asked for", PATIENCE, || {
        let listed = node.exec(command)?;
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        let all: Vec<_> = listed.lines().map(words).collect();
        let missing: Vec<_> = lines.iter().filter(|line| !all.contains(line)).collect();
        ensure!(missing.is_empty(), "{missing:?} not in\n{listed}");
        Ok(Some(listed))
    })
    .with_context(|| command.to_owned())
}

/// Checks the virtual and real servers and the sets with their own tools.
fn tools(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let service = stand.service("tools", number);
    stand.write(&service)?;
    let node = stand.bed.node(1);
    for target in targets(&service) {
        for protocol in ["TCP", "UDP"] {
            let option = protocol.to_lowercase();
            let mut lines = vec![format!("{protocol} {target} rr")];
            for backend in &stand.backends {
                let addresses = backend.addresses().into_iter();
                let mut real = addresses.filter(|one| one.is_ipv4() == target.is_ipv4());
                let real = real.next().context("no address")?;
                lines.push(format!("-> {real} Masq 1 0 0"));
            }
            let option = &option[..1];
            wait_listed(node, &format!("ipvsadm -Ln -{option} {target}"), &lines)?;
        }
        let prefix = if target.is_ipv6() {
            "HEALTH-6-"
        } else {
            "HEALTH-"
        };
        let ip = target.ip();
        let entries = ["tcp", "udp"].map(|protocol| format!("{ip},{protocol}:80"));
        for set in ["CLUSTER-IP", "IPVS-SERVERS"] {
            wait_listed(node, &format!("ipset list {prefix}{set}"), &entries)?;
        }
        wait_listed(
            node,
            &format!("ipset list {prefix}IPVS-IPS"),
            &[ip.to_string()],
        )?;
    }
    // Only backends on this node have entries for connections to themselves.
    for (own, backend) in stand.backends.iter().enumerate() {
        for address in backend.addresses() {
            let prefix = if address.is_ipv6() {
                "HEALTH-6-"
            } else {
                "HEALTH-"
            };
            let ip = address.ip();
            let entry = format!("{ip},tcp:{},{ip}", address.port());
            let listed = node.exec(&format!("ipset list {prefix}LOOP-BACK"))?;
            ensure!(listed.contains(&entry) == (own == 0), "{entry}: {listed}");
        }
    }
    stand.manifests.remove(&service.name)?;
    wait_for("nothing to be listed", PATIENCE, || {
        let listed = node.exec("ipvsadm -Ln")?;
        let mut left = targets(&service).into_iter();
        let left = left.find(|target| listed.contains(&target.to_string()));
        Ok(left.is_none().then_some(()))
    })
}

/// Runs on the node where no other row changes the timeouts.
fn timeouts(stand: &Stand, _: u8) -> anyhow::Result<()> {
    let listed = stand.bed.node(1).exec("ipvsadm -L --timeout")?;
    assert_eq!(listed.trim(), TIMEOUTS_LISTED);
    Ok(())
}

fn mode_is_reported(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let service = stand.service("reported", number);
    stand.write(&service)?;
    let [client, _] = &stand.clients;
    wait_answered_by(&client.name, targets(&service)[0], &ALL)?;
    let node = stand.bed.node(1);
    let page = |path: &str| node.exec(&format!("curl -s http://127.0.0.1:10249/{path}"));
    assert_eq!(page("proxyMode")?, "ipvs");
    let metrics = page("metrics")?;
    let failures = "kubeproxy_sync_proxy_rules_ipvs_sync_failures_total ";
    ensure!(metrics.contains(failures), "{metrics}");
    let listed = node.cli("service get reported")?.success()?;
    ensure!(
        listed.contains(&targets(&service)[0].to_string()),
        "{listed}"
    );
    Ok(())
}

/// Connections from a node to ClusterIPs.
fn from_node(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let service = stand.service("from-node", number);
    stand.write(&service)?;
    for node in stand.bed.nodes() {
        for target in targets(&service) {
            wait_answered_by(node.name(), target, &ALL)?;
            wait_datagrams_answered_by(node.name(), target, &ALL)?;
        }
    }
    Ok(())
}

/// The outside client's address of this IP version.
fn outsider(like: &IpAddr) -> anyhow::Result<IpAddr> {
    let own = if like.is_ipv6() {
        "fd00:77::5"
    } else {
        "192.168.77.5"
    };
    Ok(own.parse()?)
}

/// Outside clients are masqueraded, because endpoints have no route back to them.
fn from_outside(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let service = stand.service("from-outside", number);
    stand.write(&service)?;
    for target in targets(&service) {
        let answers = wait_answered_by(outside::CLIENT, target, &ALL)?;
        let own = outsider(&target.ip())?;
        ensure!(!answers.clients.contains(&own), "{:?}", answers.clients);
        wait_datagrams_answered_by(outside::CLIENT, target, &ALL)?;
    }
    Ok(())
}

/// A NodePort that only this row uses.
fn node_port(number: u8) -> u16 {
    30_000 + u16::from(number)
}

/// The first node's addresses with this port, as outside clients use them.
fn node_targets(stand: &Stand, port: u16) -> Vec<SocketAddr> {
    let addresses = stand.bed.node(1).addresses().into_iter();
    addresses.map(|ip| (ip, port).into()).collect()
}

fn node_ports(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let service = stand
        .service("node-ports", number)
        .with_node_port(node_port(number));
    stand.write(&service)?;
    let [here, there] = &stand.clients;
    let node = stand.bed.node(1).name();
    for target in node_targets(stand, node_port(number)) {
        for from in [&here.name, &there.name, node, outside::CLIENT] {
            wait_answered_by(from, target, &ALL)?;
            wait_datagrams_answered_by(from, target, &ALL)?;
        }
        let answers = curl(outside::CLIENT, target, 10)?;
        let own = outsider(&target.ip())?;
        ensure!(!answers.clients.contains(&own), "{:?}", answers.clients);
    }
    Ok(())
}

fn external_local(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let service = stand
        .service("keeps-source", number)
        .with_node_port(node_port(number))
        .spec(json!({ "externalTrafficPolicy": "Local" }));
    stand.write(&service)?;
    for target in node_targets(stand, node_port(number)) {
        let own = outsider(&target.ip())?;
        let answers = wait_answered_by(outside::CLIENT, target, &ALL[..1])?;
        ensure!(answers.clients.iter().eq([&own]), "{:?}", answers.clients);
        let answers = wait_datagrams_answered_by(outside::CLIENT, target, &ALL[..1])?;
        ensure!(answers.clients.iter().eq([&own]), "{:?}", answers.clients);
    }
    Ok(())
}

/// The local policy does not apply to traffic from this node and its endpoints.
fn external_local_without_local(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let service = ServiceManifest::new("elsewhere", number).of(&stand.backends[1..]);
    let service = service
        .with_node_port(node_port(number))
        .spec(json!({ "externalTrafficPolicy": "Local" }));
    stand.write(&service)?;
    let [client, _] = &stand.clients;
    for target in node_targets(stand, node_port(number)) {
        wait_answered_by(&client.name, target, &ALL[1..])?;
        ensure!(refusal(outside::CLIENT, target)? == ErrorKind::TimedOut);
    }
    Ok(())
}

/// The error with which a client's connection is refused.
fn refusal(from: &str, target: SocketAddr) -> anyhow::Result<ErrorKind> {
    let connect = || TcpStream::connect_timeout(&target, SOON);
    let connected = NetNs::open(from)?.run_in(connect)?;
    let refused = connected
        .err()
        .with_context(|| format!("{target} lets {from} in"))?;
    Ok(refused.kind())
}

/// Addresses that are routed to the first node and used only by this row's service.
fn external_addresses(number: u8) -> [IpAddr; 2] {
    let host = u16::from(number);
    [
        [203, 0, 113, number].into(),
        [0x2001, 0xdb8, 0x113, 0, 0, 0, 0, host].into(),
    ]
}

fn external_ips(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let addresses = external_addresses(number);
    let service = stand
        .service("external", number)
        .spec(json!({ "externalIPs": addresses }));
    stand.write(&service)?;
    let [client, _] = &stand.clients;
    for ip in addresses {
        let node = stand.bed.node(1).name();
        for from in [&client.name, node, outside::CLIENT] {
            wait_answered_by(from, (ip, 80).into(), &ALL)?;
            wait_datagrams_answered_by(from, (ip, 80).into(), &ALL)?;
        }
    }
    Ok(())
}

/// Clients in a source range are admitted, and so is the node if one of its addresses is in a range.
fn source_ranges(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let balancer = external_addresses(number);
    let [client, _] = &stand.clients;
    let node = stand.bed.node(1);
    let single = |ip: IpAddr| format!("{ip}/{}", if ip.is_ipv6() { 128 } else { 32 });
    // Single addresses, because the node has an address in the same network.
    let outsiders: Vec<_> = balancer
        .iter()
        .map(|ip| outsider(ip).map(single))
        .collect::<anyhow::Result<_>>()?;
    let insiders = client.addresses().into_iter().chain(node.addresses());
    let insiders: Vec<_> = insiders.map(single).collect();
    for (ranges, is_outsider) in [(outsiders, true), (insiders, false)] {
        let service = stand.service("restricted", number).spec(json!({
            "type": "LoadBalancer",
            "loadBalancerSourceRanges": ranges,
        }));
        stand.write(&service.with_load_balancer(balancer))?;
        for ip in balancer {
            let target = (ip, 80).into();
            let inside = [client.name.as_str(), node.name()];
            let (let_in, kept_out) = match is_outsider {
                true => (&[outside::CLIENT][..], &inside[..]),
                false => (&inside[..], &[outside::CLIENT][..]),
            };
            for from in let_in {
                wait_answered_by(from, target, &ALL)?;
            }
            for from in kept_out {
                ensure!(refusal(from, target)? == ErrorKind::TimedOut, "{from}");
            }
        }
    }
    // At the ClusterIP, the same endpoints are open to everyone.
    for ip in cluster_ips(number) {
        wait_answered_by(outside::CLIENT, (ip, 80).into(), &ALL)?;
    }
    Ok(())
}

fn health_check(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let port = 31_000 + u16::from(number);
    let mut service = stand.service("checked", number).spec(json!({
        "type": "LoadBalancer",
        "externalTrafficPolicy": "Local",
        "healthCheckNodePort": port,
    }));
    service.load_balancer = external_addresses(number).to_vec();
    // The health check of a service with one IP version answers over both.
    let both = service.cluster_ips.clone();
    for (cluster_ips, is_ready, code) in [
        (&both[..], true, "200"),
        (&both[..1], true, "200"),
        (&both[..1], false, "503"),
        (&both[..], false, "503"),
    ] {
        service.cluster_ips = cluster_ips.to_vec();
        service.endpoints[0].set_ready(is_ready);
        stand.write(&service)?;
        for target in node_targets(stand, port) {
            let body = format!("\"localEndpoints\":{}", u8::from(is_ready));
            wait_for("the load balancer to be reported", PATIENCE, || {
                let mut curl = command_in(outside::CLIENT, "curl");
                curl.args(["-s", "-m", "10", "-w", "%{http_code}"]);
                let reported = run(curl.arg(format!("http://{target}/")))?.success()?;
                ensure!(
                    reported.ends_with(code) && reported.contains(&body),
                    "{reported}"
                );
                Ok(Some(()))
            })?;
        }
    }
    Ok(())
}

fn rejected_node_port(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let service = ServiceManifest::new("nobody", number).with_node_port(node_port(number));
    stand.write(&service)?;
    for target in node_targets(stand, node_port(number)) {
        wait_for("connections to be refused", PATIENCE, || {
            let kind = refusal(outside::CLIENT, target)?;
            Ok((kind == ErrorKind::ConnectionRefused).then_some(()))
        })?;
    }
    Ok(())
}

/// The kernel remembers a client as long as any of its connections exists, so this test makes connections expire soon,
/// on a node where no other row checks UDP flows. If the client's timeout expires while a connection exists, the kernel
/// keeps the client for another minute, and each connection restarts that minute (`ip_vs_conn_expire`). The test
/// therefore sends nothing until the client is forgotten.
fn affinity_ends(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let service = stand.service("forgets", number).spec(json!({
        "sessionAffinity": "ClientIP",
        "sessionAffinityConfig": { "clientIP": { "timeoutSeconds": 1 } },
    }));
    stand.write(&service)?;
    let [_, client] = &stand.clients;
    let node = stand.node_of(client);
    node.exec("ipvsadm --set 0 0 1")?;
    for target in targets(&service) {
        let ask = || anyhow::Ok(Datagrams::open(&client.name, target)?.ask(SOON)?);
        let first = wait_for("an answer", PATIENCE, ask)?;
        for _ in 0..5 {
            let answer = ask()?.context("no answer")?;
            ensure!(
                answer.backend == first.backend,
                "{answer:?}, first {first:?}"
            );
        }
        wait_for("another one to answer", PATIENCE, || {
            let place = target.to_string();
            wait_for("the client to be forgotten", PATIENCE, || {
                let known = node.exec("ipvsadm -Lnc")?;
                Ok((!known.contains(&place)).then_some(()))
            })?;
            let answer = ask()?;
            Ok(answer.filter(|answer| answer.backend != first.backend))
        })?;
    }
    Ok(())
}
