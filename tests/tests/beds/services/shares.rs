//! One namespace asks for all the space in the maps. Its neighbours are served as before, and can still grow.

use std::net::{IpAddr, Ipv4Addr};

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};
use tests::served::{PORT, ServiceManifest, ServicePort};
use tests::{Node, PATIENCE, wait_for};

use super::{Mode, Stand, targets, wait_answered_by};

const GREEDY: &str = "tenant";
const SERVICES: u8 = 6;
const PORTS: u16 = 100;
/// 66,000 backends, which exceed the default capacity.
const ENDPOINTS: u32 = 110;
const FIRST_ENDPOINT: u32 = 0x0ac8_0001;
const FIRST_PORT: u16 = 20_000;
/// Each port needs a table per IP version, so these exceed the default number of tables.
const MAGLEV_PORTS: u16 = 40;

/// A service with this many ports, and its EndpointSlice.
fn wide(number: u8, ports: u16, algorithm: Option<&str>, endpoints: &[IpAddr]) -> Value {
    let name = format!("wide-{number}");
    let ports: Vec<u16> = (0..ports).collect();
    let served = ports.iter().map(|port| {
        json!({ "name": format!("p{port}"), "protocol": "TCP", "port": 1 + port, "targetPort": PORT })
    });
    let behind = ports.iter().map(|port| {
        let at = if algorithm.is_some() {
            PORT
        } else {
            FIRST_PORT + port
        };
        json!({ "name": format!("p{port}"), "protocol": "TCP", "port": at })
    });
    let endpoints = endpoints.iter().map(|ip| json!({ "addresses": [ip] }));
    let annotations = algorithm.map_or(
        json!({}),
        |algorithm| json!({ "service.health-agent.io/algorithm": algorithm }),
    );
    json!({
        "apiVersion": "v1",
        "kind": "List",
        "items": [
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": { "namespace": GREEDY, "name": name, "annotations": annotations },
                "spec": {
                    "clusterIPs": [Ipv4Addr::new(10, 96, 100, number)],
                    "ipFamilies": ["IPv4"],
                    "ports": served.collect::<Vec<_>>(),
                },
            },
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {
                    "namespace": GREEDY,
                    "name": name,
                    "labels": { "kubernetes.io/service-name": name },
                },
                "addressType": "IPv4",
                "ports": behind.collect::<Vec<_>>(),
                "endpoints": endpoints.collect::<Vec<_>>(),
            },
        ],
    })
}

/// The output of `service get` for a service, once one of its lines contains all these words.
fn wait_reported(node: &Node, service: &str, words: &[&str]) -> anyhow::Result<String> {
    wait_for("the agent to report who has no room", PATIENCE, || {
        let said = node.cli(&format!("service get {service}"))?.stdout;
        let mut lines = said.lines();
        let is_reported = lines.any(|line| words.iter().all(|word| line.contains(word)));
        ensure!(is_reported, "{said}");
        Ok(Some(said))
    })
}

/// Number of a namespace's ports that are not in force, from the metrics after the first sync.
fn refused(node: &Node, namespace: &str) -> anyhow::Result<u64> {
    const LAST_SYNC: &str = "kubeproxy_sync_proxy_rules_last_timestamp_seconds ";
    let metrics = wait_for("a sync", PATIENCE, || {
        let metrics = node.exec("curl -sS http://127.0.0.1:10249/metrics")?;
        let mut lines = metrics.lines();
        let last = lines.find_map(|line| line.strip_prefix(LAST_SYNC));
        ensure!(last.is_some_and(|last| last != "0.0"), "{metrics}");
        Ok(Some(metrics))
    })?;
    let name = format!("kubeproxy_sync_proxy_rules_refused_ports{{namespace=\"{namespace}\"}} ");
    let value = metrics.lines().find_map(|line| line.strip_prefix(&name));
    Ok(value.map_or(Ok(0), str::parse)?)
}

#[test]
#[ignore = "needs root"]
fn a_namespace_that_fills_the_maps_is_refused_and_no_neighbour_is() -> anyhow::Result<()> {
    let stand = Stand::start_with(Mode::Ebpf, ["", ""], "")?;
    let node = stand.bed.node(1);
    let [client, _] = &stand.clients;
    let one = |name: &str, number, backend: usize| {
        ServiceManifest::new(name, number).of(&stand.backends[backend..=backend])
    };
    let answered = |service: &ServiceManifest, by: &str| -> anyhow::Result<()> {
        for target in targets(service) {
            wait_answered_by(&client.name, target, &[by])?;
        }
        Ok(())
    };
    let neighbour = one("neighbour", 1, 0);
    stand.write(&neighbour)?;
    answered(&neighbour, "web-1")?;

    let ips = (FIRST_ENDPOINT..).take(ENDPOINTS as usize);
    let ips: Vec<IpAddr> = ips.map(|bits| Ipv4Addr::from_bits(bits).into()).collect();
    for number in 0..SERVICES {
        let text = wide(number, PORTS, None, &ips).to_string();
        stand
            .manifests
            .write_file(&format!("wide-{number}"), &text)?;
    }
    let last = format!("{GREEDY}/wide-{}", SERVICES - 1);
    let words = [
        "Not in force:",
        "HEALTH_BACKENDS",
        "of tenant",
        "reserved for others",
    ];
    wait_reported(node, &last, &words)?;
    ensure!(refused(node, GREEDY)? > 0, "the metrics report nothing");
    let health = node.exec("curl -sS http://127.0.0.1:10256/healthz")?;
    ensure!(health.contains("\"healthy\":true"), "{health}");
    let logged = node.logged(&["cannot update the port in the maps", GREEDY])?;
    ensure!(!logged.is_empty(), "the log reports nothing");

    // Replaces the neighbour's only backend twice, and adds another service.
    for (backend, name) in [(1, "web-2"), (2, "web-3")] {
        let neighbour = one("neighbour", 1, backend);
        stand.write(&neighbour)?;
        answered(&neighbour, name)?;
    }
    let later = stand.service("later", 2);
    stand.write(&later)?;
    for target in targets(&later) {
        wait_answered_by(&client.name, target, &["web-1", "web-2", "web-3"])?;
    }
    ensure!(refused(node, "default")? == 0);

    // At the next start, the agent enlarges the maps that were nearly full.
    node.kill_agent(nix::sys::signal::Signal::SIGKILL)?;
    node.take_over(None)?;
    let left = refused(node, GREEDY)?;
    ensure!(left == 0, "{left} ports are not in force");
    let neighbour = one("neighbour", 1, 0);
    stand.write(&neighbour)?;
    answered(&neighbour, "web-1")?;
    ensure!(refused(node, "default")? == 0);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn without_a_maglev_table_backends_are_chosen_at_random() -> anyhow::Result<()> {
    let stand = Stand::start_with(Mode::Ebpf, ["", ""], "")?;
    let node = stand.bed.node(1);
    let [client, _] = &stand.clients;
    let ips = stand.backends.iter().map(|backend| {
        let mut addresses = backend.member.addresses().into_iter();
        addresses.find(IpAddr::is_ipv4).context("no IPv4 address")
    });
    let ips = ips.collect::<anyhow::Result<Vec<_>>>()?;
    let greedy = wide(0, MAGLEV_PORTS, Some("maglev"), &ips);
    stand.manifests.write_file("wide-0", &greedy.to_string())?;
    let words = ["Not in force:", "maglev", "at random", "HEALTH_MAGLEV"];
    let said = wait_reported(node, &format!("{GREEDY}/wide-0"), &words)?;
    let without = said.matches("maglev is not in force").count() as u64;
    ensure!((1..u64::from(MAGLEV_PORTS)).contains(&without), "{said}");
    ensure!(refused(node, GREEDY)? == without);
    // Ports without a table are served too.
    for port in [1, MAGLEV_PORTS] {
        let target = (Ipv4Addr::new(10, 96, 100, 0), port).into();
        wait_answered_by(&client.name, target, &["web-1", "web-2", "web-3"])?;
    }

    // A neighbour gets a table for each IP version, and keeps it when its backends change.
    let mut neighbour = stand.service("neighbour", 1);
    neighbour.ports = vec![ServicePort::http(PORT)];
    neighbour.annotations = json!({ "service.health-agent.io/algorithm": "maglev" });
    for names in [&["web-1", "web-2", "web-3"][..], &["web-1", "web-2"]] {
        neighbour.endpoints.truncate(names.len());
        stand.write(&neighbour)?;
        for ip in &neighbour.cluster_ips {
            wait_answered_by(&client.name, (*ip, PORT).into(), names)?;
        }
        let said = node.cli("service get default/neighbour")?.stdout;
        ensure!(!said.contains("Not in force"), "{said}");
    }
    Ok(())
}
