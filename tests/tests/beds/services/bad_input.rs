//! Services that cannot be served as written are reported, and all others are served.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{Context as _, ensure};
use ipnet::IpNet;
use nix::sys::signal::Signal;
use serde_json::json;
use tests::served::{Backend, PORT, ServiceManifest, ServicePort};
use tests::{Node, PATIENCE, wait_for};

use super::{Mode, Stand, targets, wait_answered_by};

/// Waits until a line of `service list`, or of `service get` if a service is given, contains all these words.
fn wait_reported(node: &Node, service: Option<&str>, words: &[&str]) -> anyhow::Result<()> {
    let ask = match service {
        Some(name) => format!("service get {name}"),
        None => "service list".to_owned(),
    };
    wait_for("the agent to report what is wrong", PATIENCE, || {
        let ran = node.cli(&ask)?;
        let said = format!("{}{}", ran.stdout, ran.stderr);
        let is_reported = said
            .lines()
            .any(|line| words.iter().all(|word| line.contains(word)));
        ensure!(is_reported, "{said}");
        Ok(Some(()))
    })
    .with_context(|| format!("{ask}, wanted {words:?}"))
}

#[test]
#[ignore = "needs root"]
fn bad_services_are_named_and_their_neighbours_are_served() -> anyhow::Result<()> {
    let stand = Stand::start()?;
    let node = stand.bed.node(1);
    let [client, _] = &stand.clients;
    let names = ["web-1", "web-2", "web-3"];
    let mut neighbour = stand.service("neighbour", 1);
    neighbour.ports[0].node_port = Some(30_080);
    stand.write(&neighbour)?;
    let is_served = |what: &str| -> anyhow::Result<()> {
        for target in targets(&neighbour) {
            wait_answered_by(&client.name, target, &names).context(what.to_owned())?;
        }
        Ok(())
    };
    is_served("alone")?;

    // The neighbour owns the address, because its name sorts first.
    let taken = ServiceManifest {
        cluster_ips: neighbour.cluster_ips.clone(),
        ..ServiceManifest::new("taken", 2).of(&stand.backends[..1])
    };
    stand.write(&taken)?;
    wait_reported(
        node,
        Some("taken"),
        &["default/taken", "default/neighbour", "10.96.0.1:80"],
    )?;
    is_served("another one with its ClusterIP")?;
    let mut taken = ServiceManifest::new("taken", 2).of(&stand.backends[..1]);
    taken.ports[0].node_port = Some(30_080);
    stand.write(&taken)?;
    wait_reported(
        node,
        Some("taken"),
        &["default/taken", "default/neighbour", "30080"],
    )?;
    is_served("another one with its node port")?;
    for target in targets(&taken) {
        // The other addresses of the service are served.
        wait_answered_by(&client.name, target, &names[..1])?;
    }

    let mut unnamed = stand.service("unnamed", 3);
    unnamed.ports.push(ServicePort {
        name: "",
        ..ServicePort::http(81)
    });
    stand.write(&unnamed)?;
    wait_reported(
        node,
        Some("unnamed"),
        &["default/unnamed", "spec.ports[2].name"],
    )?;
    // Addresses of a family that the service lacks affect neither its other addresses nor the service itself.
    let mut wrong = stand
        .service("wrong", 4)
        .spec(json!({ "externalIPs": ["203.0.113.4", "fd00::77", "203.000.113.05"] }))
        .with_load_balancer([IpAddr::from([203, 0, 113, 6]), "2001:db8:1::12".parse()?]);
    wrong.cluster_ips.truncate(1);
    stand.write(&wrong)?;
    for address in ["fd00::77", "2001:db8:1::12"] {
        wait_reported(node, Some("wrong"), &["default/wrong", address])?;
    }
    for ip in wrong
        .cluster_ips
        .iter()
        .copied()
        .chain([4, 5, 6].map(|last| [203, 0, 113, last].into()))
    {
        wait_answered_by(&client.name, (ip, 80).into(), &names)?;
    }
    // The same holds for an invalid endpoint, and for a slice port without a number.
    let mut torn = stand.service("torn", 6).json();
    let slices = torn["items"].as_array_mut().context("no list")?;
    for slice in slices.iter_mut().skip(1) {
        let endpoints = slice["endpoints"].as_array_mut().context("no endpoints")?;
        endpoints.insert(1, json!({ "addresses": ["10.244.1.1000"] }));
        endpoints.insert(2, json!({ "addresses": "10.244.1.7" }));
        let ports = slice["ports"].as_array_mut().context("no ports")?;
        ports.insert(0, json!({ "name": "none" }));
    }
    stand.manifests.write_file("torn", &torn.to_string())?;
    for path in [
        "endpoints[1].addresses[0]",
        "endpoints[2].addresses",
        "ports[0].port",
    ] {
        wait_reported(node, None, &["default/torn", path])?;
    }
    for target in targets(&stand.service("torn", 6)) {
        wait_answered_by(&client.name, target, &names)?;
    }
    stand.manifests.write_file("broken", "{")?;
    wait_reported(node, None, &["broken.json"])?;
    is_served("beside bad ones")?;
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn no_service_takes_an_address_that_its_node_uses() -> anyhow::Result<()> {
    let stand = Stand::start()?;
    let node = stand.bed.node(1);
    let [client, _] = &stand.clients;
    let web = stand.backend("web-1")?;
    let gateways = node.pod_cidrs().into_iter().map(|cidr| gateway(&cidr));
    let gateways = gateways.collect::<anyhow::Result<Vec<_>>>()?;
    let health: BTreeSet<_> = node.health_addresses()?.into_iter().collect();
    let health: Vec<_> = health.into_iter().collect();
    let endpoint = web.member.addresses();
    // Without backends, the service would reject all packets to its addresses.
    let mut usurper = ServiceManifest::new("usurper", 5);
    usurper.ports = vec![ServicePort::http(PORT)];
    let own = usurper.cluster_ips.clone();
    let neighbour = stand.service("neighbour", 1);
    stand.write(&neighbour)?;
    let all = [gateways, health.clone(), endpoint.clone()].concat();
    let external = json!({ "externalIPs": all });
    stand.write(&usurper.clone().spec(external))?;
    for ip in &all {
        let listen = SocketAddr::new(*ip, PORT).to_string();
        let reported = ["spec.externalIPs", "of this node", &listen];
        wait_reported(node, Some("usurper"), &reported)?;
    }
    let undisturbed = || -> anyhow::Result<()> {
        for ip in &endpoint {
            wait_answered_by(&client.name, (*ip, PORT).into(), &["web-1"])?;
        }
        for target in targets(&neighbour) {
            wait_answered_by(&client.name, target, &["web-1", "web-2", "web-3"])?;
        }
        Ok(())
    };
    undisturbed().context("external addresses")?;
    // The service's own addresses are still served.
    usurper = usurper.of(&stand.backends[..1]);
    stand.write(&usurper.clone().spec(json!({ "externalIPs": all })))?;
    for ip in own {
        wait_answered_by(&client.name, (ip, PORT).into(), &["web-1"])?;
    }
    // The same addresses are refused as ClusterIPs too.
    usurper.cluster_ips = health;
    stand.write(&usurper)?;
    let words = ["spec.clusterIPs", "of this node"];
    wait_reported(node, Some("usurper"), &words)?;
    undisturbed().context("a ClusterIP")
}

/// The gateway of a node's pods, which is the address after the network address.
fn gateway(cidr: &str) -> anyhow::Result<IpAddr> {
    Ok(match cidr.parse()? {
        IpNet::V4(v4) => Ipv4Addr::from_bits(v4.network().to_bits() + 1).into(),
        IpNet::V6(v6) => Ipv6Addr::from_bits(v6.network().to_bits() + 1).into(),
    })
}

/// One more than fits, because the first entry of the backend map is never used.
const TOO_MANY: u32 = 1_024;

/// Number of syncs that have failed.
fn failures(node: &Node) -> anyhow::Result<u64> {
    const NAME: &str = "kubeproxy_sync_proxy_rules_ebpf_sync_failures_total ";
    let metrics = node.exec("curl -sS http://127.0.0.1:10249/metrics")?;
    let value = metrics.lines().find_map(|line| line.strip_prefix(NAME));
    Ok(value.context("no such metric")?.trim().parse()?)
}

#[test]
#[ignore = "needs root"]
fn a_service_with_too_many_backends_is_named_and_its_neighbours_are_served() -> anyhow::Result<()> {
    let room = format!("--service-backend-max-entries {TOO_MANY}");
    let stand = Stand::start_with(Mode::Ebpf, ["", ""], &room)?;
    let node = stand.bed.node(1);
    let [client, _] = &stand.clients;
    let neighbour = stand.service("neighbour", 1);
    stand.write(&neighbour)?;
    let names = ["web-1", "web-2", "web-3"];
    let crowded = stand.service("crowded", 2);
    stand.write(&crowded)?;
    for target in targets(&crowded) {
        wait_answered_by(&client.name, target, &names)?;
    }
    let addresses = (0..TOO_MANY).map(|number| Ipv4Addr::from_bits(0x0ac8_0000 + number));
    let endpoints: Vec<_> = addresses.map(|ip| json!({ "addresses": [ip] })).collect();
    let slice = json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": { "name": "crowd", "labels": { "kubernetes.io/service-name": "crowded" } },
        "addressType": "IPv4",
        "ports": [{ "name": "http", "protocol": "TCP", "port": PORT }],
        "endpoints": endpoints,
    });
    stand.manifests.write_file("crowd", &slice.to_string())?;
    wait_reported(
        node,
        None,
        &["cannot serve default/crowded:http/TCP IPv4", "has no room"],
    )?;
    wait_reported(node, None, &["default/crowded", "not in force"])?;
    wait_reported(
        node,
        Some("crowded"),
        &["Not in force:", "IPv4: HEALTH_BACKENDS has no room"],
    )?;
    // The sync is retried continuously, but reported only once.
    let before = failures(node)?;
    wait_for("more syncs to fail", PATIENCE, || {
        Ok((failures(node)? > before + 2).then_some(()))
    })?;
    let reported = node.logged(&["a sync failed", "has no room"])?;
    ensure!(reported.len() == 1, "{reported:?}");
    for target in targets(&neighbour) {
        wait_answered_by(&client.name, target, &names)?;
    }
    // Later services are served, and the oversized service is served once it has shrunk.
    let later = stand.service("later", 3);
    stand.write(&later)?;
    for target in targets(&later) {
        wait_answered_by(&client.name, target, &names)?;
    }
    stand.manifests.remove("crowd")?;
    for target in targets(&crowded) {
        wait_answered_by(&client.name, target, &names)?;
    }
    Ok(())
}

/// Writes a service with this creation time: an older service wins a contested address.
fn write_created(stand: &Stand, service: &ServiceManifest, created: &str) -> anyhow::Result<()> {
    let mut manifest = service.json();
    manifest["items"][0]["metadata"]["creationTimestamp"] = created.into();
    stand
        .manifests
        .write_file(&service.name, &manifest.to_string())
}

/// A service with `web-1` as its only backend, at this port of its ClusterIPs and external addresses.
fn at_port(stand: &Stand, (name, number): (&str, u8), port: u16) -> ServiceManifest {
    let mut service = ServiceManifest::new(name, number).of(&stand.backends[..1]);
    service.ports = vec![ServicePort::http(port)];
    service
}

#[test]
#[ignore = "needs root"]
fn no_service_captures_what_its_nodes_need() -> anyhow::Result<()> {
    let stand = Stand::start()?;
    let [here, there] = [1, 2].map(|index| stand.bed.node(index));
    let own = here.addresses();
    let peers = there.addresses();
    let pods = there.pod_cidrs().into_iter().map(|cidr| gateway(&cidr));
    let pods = pods.collect::<anyhow::Result<Vec<_>>>()?;
    let mut number = 10;
    for (port, ips, words) in [
        (4240, &own, "a port of this node's agent (--health-port)"),
        (
            10_256,
            &own,
            "a port of this node's agent (--service-healthz-address)",
        ),
        (22, &own, "which --service-external-ips refuses"),
        (4240, &peers, "a port of the agent of the node"),
        (80, &peers, "which --service-external-ips refuses"),
        (80, &pods, "in the pod CIDR"),
    ] {
        number += 1;
        let name = format!("captor-{number}");
        let service = at_port(&stand, (&name, number), port);
        stand.write(&service.spec(json!({ "externalIPs": ips })))?;
        for ip in ips {
            let listen = SocketAddr::new(*ip, port).to_string();
            wait_reported(here, Some(&name), &["spec.externalIPs", words, &listen])?;
        }
    }
    let node_port = at_port(&stand, ("captor-mesh", 30), 80).with_node_port(4240);
    stand.write(&node_port)?;
    wait_reported(
        here,
        Some("captor-mesh"),
        &["spec.ports.nodePort", "--health-port", "node port 4240"],
    )?;
    // Neither the mesh nor clients of the node's health servers are affected.
    stand.bed.wait_all_reachable(PATIENCE)?;
    for node in [here, there] {
        for ip in own.iter().chain(&peers) {
            let pages = [(4240, "hello"), (10_256, "healthz")];
            // By default, node health is served over IPv4 only.
            for (port, path) in &pages[..if ip.is_ipv4() { 2 } else { 1 }] {
                let url = format!("http://{}/{path}", SocketAddr::new(*ip, *port));
                let asked = format!("curl -sS -m 10 -o /dev/null -w %{{http_code}} {url}");
                let said = node.exec(&asked)?;
                ensure!(
                    matches!(said.trim(), "200" | "401"),
                    "{}: {url}: {said}",
                    node.name()
                );
            }
        }
    }
    // Addresses that these services may have are still served.
    let [client, _] = &stand.clients;
    for ip in at_port(&stand, ("captor-mesh", 30), 80).cluster_ips {
        wait_answered_by(&client.name, (ip, 80).into(), &["web-1"])?;
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn the_older_of_a_node_port_and_an_external_address_of_the_node_is_served() -> anyhow::Result<()> {
    show_that_the_older_is_served(Mode::Ebpf)
}

/// One service has a NodePort, and another has one of the node's addresses as external address with the same port.
pub(crate) fn show_that_the_older_is_served(mode: Mode) -> anyhow::Result<()> {
    let stand = Stand::start_with(mode, ["", ""], "--service-external-ips all")?;
    let node = stand.bed.node(1);
    let own = node.addresses();
    let [client, _] = &stand.clients;
    // The backend is on the node itself: with IPVS, the other node treats this node's external address as its own, and
    // replies would end there.
    let beside = [Backend::start(node, "web-4", "")?];
    let mut port = 30_080;
    for (external, node_port, winner, loser, field) in [
        (
            "2026-01-02T00:00:00Z",
            "2026-01-01T00:00:00Z",
            "port",
            "address",
            "spec.externalIPs",
        ),
        (
            "2026-01-01T00:00:00Z",
            "2026-01-02T00:00:00Z",
            "address",
            "port",
            "spec.ports.nodePort",
        ),
    ] {
        port += 1;
        let mut by_address = ServiceManifest::new("address", 1).of(&beside);
        by_address.ports = vec![ServicePort::http(port)];
        let by_address = by_address.spec(json!({ "externalIPs": own }));
        let mut by_port = ServiceManifest::new("port", 2).of(&stand.backends[..1]);
        by_port.ports = vec![ServicePort::http(80)];
        let by_port = by_port.with_node_port(port);
        write_created(&stand, &by_address, external)?;
        write_created(&stand, &by_port, node_port)?;
        let (of_winner, of_loser) = match winner {
            "port" => ("web-1", "web-4"),
            _ => ("web-4", "web-1"),
        };
        for ip in &own {
            let target = SocketAddr::new(*ip, port);
            wait_reported(
                node,
                Some(loser),
                &[field, &format!("default/{winner}"), &target.to_string()],
            )?;
            wait_answered_by(&client.name, target, &[of_winner])?;
        }
        // An address that a removed service held is free, even if no agent was running when the service went away.
        node.kill_agent(Signal::SIGKILL)?;
        stand.manifests.remove(winner)?;
        node.take_over(None)?;
        for ip in &own {
            wait_answered_by(&client.name, SocketAddr::new(*ip, port), &[of_loser])?;
        }
        stand.manifests.remove(loser)?;
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn line_breaks_in_names_make_no_rows() -> anyhow::Result<()> {
    let stand = Stand::start()?;
    let node = stand.bed.node(1);
    let mut manifest = stand.service("broken-lines", 1).json();
    let slices = manifest["items"].as_array_mut().context("no list")?;
    for slice in slices.iter_mut().skip(1) {
        for endpoint in slice["endpoints"].as_array_mut().context("no endpoints")? {
            endpoint["zone"] = "z1\nProblems:   none".into();
            endpoint["nodeName"] = "there\r\n      10.9.9.9:80   ready".into();
        }
    }
    stand
        .manifests
        .write_file("broken-lines", &manifest.to_string())?;
    wait_reported(
        node,
        Some("broken-lines"),
        &[r"z1\nProblems", r"there\r\n      10.9.9.9:80"],
    )?;
    for command in [
        "service get broken-lines",
        "service trace host broken-lines:http",
    ] {
        let said = node.cli(command)?.stdout;
        let is_false = |line: &str| {
            line.starts_with("Problems:   none") && line.len() > "Problems:   none".len()
        };
        ensure!(!said.lines().any(is_false), "{said}");
        let is_false = |line: &&str| line.trim_start().starts_with("10.9.9.9");
        ensure!(said.lines().find(is_false).is_none(), "{said}");
    }
    // An object with an invalid name causes one line in the log.
    let other = json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": { "name": "a\n2026-01-01T00:00:00Z ERROR false" }, "spec": { "clusterIP": "10.96.0.9" },
    });
    stand.manifests.write_file("other", &other.to_string())?;
    wait_reported(node, None, &["other.json", r"a\n2026-01-01"])?;
    let reported = node.logged(&["ERROR false"])?;
    ensure!(
        !reported.iter().any(|line| line.starts_with("2026-01-01")),
        "{reported:?}"
    );
    Ok(())
}
