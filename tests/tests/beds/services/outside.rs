//! Clients outside the cluster, behind a router: which services they reach at a node's addresses, and which client
//! address the backends see.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use health_common::metrics::Reason;
use health_net::netns::NetNs;
use nix::sys::signal::Signal;
use serde_json::json;
use tests::bed::{ROUTER, command_in, ip};
use tests::outside::{self, FAR, FAR4, FAR6, ROUTER_DEVICE, far};
use tests::process::{Running, run, run_with_input};
use tests::served::{Connection, Datagrams, ServiceManifest, ServicePort};
use tests::{Node, PATIENCE, wait_for};

use super::flows::arrive_backwards;
use super::own_ports;
use super::same_ports;
use super::trace::OUTSIDE_ROWS;
use super::{Mode, SOON, Stand, counted, targets, wait_answered_by, wait_datagrams_answered_by};

pub(super) const ALL: [&str; 3] = ["web-1", "web-2", "web-3"];

/// A test with outside clients. The rows on a bed run one after another.
pub(super) type Row = (&'static str, fn(&Stand, u8) -> anyhow::Result<()>);

/// The row that holds only without direct server return.
pub(super) const ELSEWHERE: &str = "a_backend_elsewhere_sees_the_node";

pub(super) const ROWS: &[Row] = &[
    ("a_backend_here_sees_the_client", here),
    (
        "netfilter_sees_neither_way_of_a_connection_to_a_backend_here",
        unseen,
    ),
    (ELSEWHERE, elsewhere),
    ("local_policy_keeps_the_source_or_drops", local_policy),
    ("external_addresses_are_reached", external),
    ("source_ranges_count_at_load_balancers", source_ranges),
    ("a_cluster_ip_is_reached_where_it_is_routed", cluster_ip),
    ("a_process_of_the_node_is_a_backend", of_the_node),
    ("without_endpoints_clients_are_refused", refused),
    ("other_ports_of_the_node_are_its_own", others),
    (
        "the_nodes_own_connections_keep_a_node_port",
        own_ports::are_kept,
    ),
    (
        "a_health_check_answers_by_the_family_that_its_service_lacks",
        check_by_both,
    ),
    (
        "the_nodes_own_flows_and_a_clients_from_one_port_are_all_answered",
        same_ports::of_the_node,
    ),
    (
        "connections_that_nobody_acknowledges_keep_no_ports",
        same_ports::are_left_by_a_flood,
    ),
    ("a_udp_flow_moves", udp_moves),
    ("connections_outlive_backends_and_agents", connections),
    ("long_datagrams_and_smaller_paths", smaller_path),
    ("fragments_whose_first_one_comes_last_arrive", backwards),
    ("flows_end_with_conntrack", flows_end),
];

/// Routes the router's traffic to service addresses to the first node.
pub(super) fn add_routes(stand: &Stand) -> anyhow::Result<()> {
    let node = stand.bed.node(1);
    outside::add(node)?;
    for (cidrs, via) in [
        (["10.96.0.0/16", "203.0.113.0/24"], node.addresses().first()),
        (
            ["fd00:10:96::/64", "2001:db8:113::/64"],
            node.addresses().get(1),
        ),
    ] {
        let via = via.context("no address")?;
        for cidr in cidrs {
            ip(ROUTER, &format!("route add {cidr} via {via}"))?;
        }
    }
    Ok(())
}

fn show_rows(agent: &str) -> anyhow::Result<()> {
    let collected = "--conntrack-gc-interval 10s --conntrack-timeout-udp 15s";
    let stand = Stand::start_with(Mode::Ebpf, ["", ""], &format!("{collected} {agent}"))?;
    add_routes(&stand)?;
    for (number, (name, show)) in (1..).zip(ROWS.iter().chain(OUTSIDE_ROWS)) {
        show(&stand, number).with_context(|| (*name).to_owned())?;
        println!("ok {name}");
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn clients_outside_are_served() -> anyhow::Result<()> {
    show_rows("")
}

#[test]
#[ignore = "needs root"]
fn clients_outside_are_served_by_nodes_that_masquerade() -> anyhow::Result<()> {
    show_rows("--native-routing-cidr 10.244.0.0/16 --native-routing-cidr fd00:10:244::/48")
}

/// The NodePort of a row, used for both protocols.
pub(super) fn node_port(number: u8) -> u16 {
    30_000 + u16::from(number)
}

/// The first node's NodePort addresses, one per IP version, each with the source address of the outside client.
pub(super) fn node_targets(stand: &Stand, number: u8) -> Vec<(SocketAddr, IpAddr)> {
    let addresses = stand.bed.node(1).addresses().into_iter();
    let targets = addresses.map(|ip| SocketAddr::new(ip, node_port(number)));
    targets.map(|target| (target, own(target))).collect()
}

/// The outside client's address of the target's IP version.
fn own(target: SocketAddr) -> IpAddr {
    match target {
        SocketAddr::V4(_) => FAR4.into(),
        SocketAddr::V6(_) => FAR6.into(),
    }
}

/// Checks that these backends answer over TCP and UDP and see this client address, and that segments that are split
/// later get through.
pub(super) fn is_answered_by(
    target: SocketAddr,
    names: &[&str],
    client: IpAddr,
) -> anyhow::Result<()> {
    let answers = wait_answered_by(FAR, target, names)?;
    ensure!(
        answers.clients.iter().eq([&client]),
        "{:?}",
        answers.clients
    );
    let answers = wait_datagrams_answered_by(FAR, target, names)?;
    ensure!(
        answers.clients.iter().eq([&client]),
        "{:?}",
        answers.clients
    );
    let mut connection = Connection::open(FAR, target)?;
    for _ in 0..3 {
        connection.upload(3 << 20)?;
    }
    Ok(())
}

fn here(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let service = ServiceManifest::new("here", number).of(&stand.backends[..1]);
    stand.write(&service.with_node_port(node_port(number)))?;
    for (target, client) in node_targets(stand, number) {
        is_answered_by(target, &["web-1"], client)?;
    }
    Ok(())
}

/// nf_conntrack would treat half a connection's packets as invalid, and firewalls drop invalid packets.
fn unseen(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let node = stand.bed.node(1);
    let backend = &stand.backend("web-1")?.member;
    let service = ServiceManifest::new("unseen", number).of(&stand.backends[..1]);
    stand.write(&service.with_node_port(node_port(number)))?;
    let mut rules = String::from(
        "add table inet outside\nadd chain inet outside forward { type filter hook forward priority 0; }\n\
         add counter inet outside seen\n",
    );
    for (client, backend) in far().iter().zip(backend.addresses()) {
        let ip = if client.is_ipv4() { "ip" } else { "ip6" };
        for (from, to) in [(*client, backend), (backend, *client)] {
            let ends = format!("{ip} saddr {from} {ip} daddr {to} meta l4proto {{ tcp, udp }}");
            rules += &format!("add rule inet outside forward {ends} counter name seen\n");
            rules += &format!("add rule inet outside forward {ends} ct state invalid drop\n");
        }
    }
    run_with_input(node.command("nft").args(["-f", "-"]), &rules)?.success()?;
    for (target, client) in node_targets(stand, number) {
        is_answered_by(target, &["web-1"], client)?;
    }
    let seen = node.exec("nft list counter inet outside seen")?;
    ensure!(seen.contains("packets 0 "), "{seen}");
    node.exec("nft delete table inet outside").map(drop)
}

fn elsewhere(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let service = ServiceManifest::new("elsewhere", number).of(&stand.backends[1..]);
    stand.write(&service.with_node_port(node_port(number)))?;
    for (target, _) in node_targets(stand, number) {
        is_answered_by(target, &["web-2", "web-3"], target.ip())?;
    }
    Ok(())
}

/// The policy does not apply to clients in the cluster, which may use all endpoints.
fn local_policy(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let service = stand
        .service("kept", number)
        .spec(json!({ "externalTrafficPolicy": "Local" }));
    let mut service = service.with_node_port(node_port(number));
    stand.write(&service)?;
    let [inside, _] = &stand.clients;
    for (target, client) in node_targets(stand, number) {
        is_answered_by(target, &["web-1"], client)?;
        wait_answered_by(&inside.name, target, &ALL)?;
    }
    service = service.of(&stand.backends[1..]);
    stand.write(&service)?;
    let node = stand.bed.node(1);
    for (target, _) in node_targets(stand, number) {
        wait_dropped(node, target, Reason::ServiceNoLocal)?;
        wait_answered_by(&inside.name, target, &["web-2", "web-3"])?;
    }
    Ok(())
}

fn connect(target: SocketAddr) -> anyhow::Result<std::io::Result<TcpStream>> {
    connect_within(target, SOON)
}

fn connect_within(
    target: SocketAddr,
    time: Duration,
) -> anyhow::Result<std::io::Result<TcpStream>> {
    let connect = || TcpStream::connect_timeout(&target, time);
    Ok(NetNs::open(FAR)?.run_in(connect)?)
}

/// Waits until connections time out and their packets are counted as dropped for this reason.
pub(super) fn wait_dropped(node: &Node, target: SocketAddr, reason: Reason) -> anyhow::Result<()> {
    let before = counted(node, reason)?;
    wait_for("packets to be dropped", PATIENCE, || {
        let kind = connect(target)?.err().map(|error| error.kind());
        ensure!(kind == Some(ErrorKind::TimedOut), "{kind:?}");
        Ok((counted(node, reason)? > before).then_some(()))
    })
    .with_context(|| target.to_string())
}

/// External or load balancer addresses that the router sends to the first node.
fn external_ips(number: u8) -> [IpAddr; 2] {
    let [v4, v6] = [
        format!("203.0.113.{number}").parse(),
        format!("2001:db8:113::{number:x}").parse(),
    ];
    [v4, v6].map(|ip| ip.expect("an address"))
}

pub(super) fn external_targets(number: u8) -> [SocketAddr; 2] {
    external_ips(number).map(|ip| (ip, 80).into())
}

fn external(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let ips = external_ips(number);
    let service = stand.service("external-ip", number);
    stand.write(&service.spec(json!({ "externalIPs": ips })))?;
    for target in external_targets(number) {
        wait_answered_by(FAR, target, &ALL)?;
        wait_datagrams_answered_by(FAR, target, &ALL)?;
    }
    Ok(())
}

/// Source ranges that contain the client, and ranges that do not.
pub(super) const RANGES_WITH: [&str; 2] = ["192.0.2.0/24", "2001:db8::/64"];
pub(super) const RANGES_WITHOUT: [&str; 2] = ["198.51.100.0/24", "2001:db8:7::/64"];

/// Writes a service with a load balancer at the external addresses, for clients in these source ranges.
pub(super) fn write_balanced(
    stand: &Stand,
    (name, number): (&str, u8),
    ranges: [&str; 2],
) -> anyhow::Result<()> {
    let service = stand.service(name, number).spec(json!({
        "type": "LoadBalancer",
        "loadBalancerSourceRanges": ranges,
    }));
    let service = service.with_node_port(node_port(number));
    stand.write(&service.with_load_balancer(external_ips(number)))
}

fn source_ranges(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let write = |ranges| write_balanced(stand, ("balanced", number), ranges);
    write(RANGES_WITH)?;
    for target in external_targets(number) {
        wait_answered_by(FAR, target, &ALL)?;
    }
    let [v4, v6] = external_targets(number);
    // An IPv4-mapped IPv6 network counts as IPv4, and so does an IPv4 network with leading zeros.
    for ranges in [
        RANGES_WITHOUT,
        ["::ffff:198.51.100.0/120", RANGES_WITHOUT[1]],
    ] {
        write(ranges)?;
        for target in [v4, v6] {
            wait_dropped(stand.bed.node(1), target, Reason::ServiceSourceRange)?;
        }
    }
    for ranges in [
        ["::ffff:192.0.2.0/120", RANGES_WITHOUT[1]],
        ["192.000.002.0/024", RANGES_WITHOUT[1]],
    ] {
        write(ranges)?;
        wait_answered_by(FAR, v4, &ALL)?;
        wait_dropped(stand.bed.node(1), v6, Reason::ServiceSourceRange)?;
    }
    write(RANGES_WITHOUT)?;
    for (target, _) in node_targets(stand, number) {
        wait_answered_by(FAR, target, &ALL)?;
    }
    Ok(())
}

fn cluster_ip(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let mut service = stand.service("routed", number);
    stand.write(&service)?;
    for target in targets(&service) {
        wait_answered_by(FAR, target, &ALL)?;
        wait_datagrams_answered_by(FAR, target, &ALL)?;
    }
    service = service.spec(json!({ "internalTrafficPolicy": "Local" }));
    stand.write(&service)?;
    for target in targets(&service) {
        wait_answered_by(FAR, target, &["web-1"])?;
    }
    Ok(())
}

/// The port on which the servers of [`host_backend`] listen.
const HOST_PORT: u16 = 7070;

/// A server in a node's own network, like a host network pod, which answers until dropped, and a service with only this
/// backend.
pub(super) fn host_backend(
    stand: &Stand,
    node: &Node,
    name: &str,
    number: u8,
) -> anyhow::Result<(Running, ServiceManifest)> {
    let mut server = command_in(node.name(), "python3");
    server.args(["-c", HOST_SERVER, &HOST_PORT.to_string()]);
    let server = Running::start(&mut server)?;
    let mut service = stand.service(name, number);
    service.ports = vec![ServicePort {
        target: HOST_PORT,
        ..ServicePort::http(80)
    }];
    service.endpoints.truncate(1);
    service.endpoints[0].addresses = node.addresses();
    service.endpoints[0].node = node.name().to_owned();
    Ok((server, service.with_node_port(node_port(number))))
}

fn of_the_node(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let node = stand.bed.node(1);
    let (_server, service) = host_backend(stand, node, "host", number)?;
    stand.write(&service)?;
    for (target, client) in node_targets(stand, number) {
        let answers = wait_answered_by(FAR, target, &["host"])?;
        ensure!(
            answers.clients.iter().eq([&client]),
            "{:?}",
            answers.clients
        );
        let listed = node.cli("bpf ct list --proto tcp")?.success()?;
        ensure!(
            listed.contains(&format!(":{HOST_PORT} ")) && listed.contains(&client.to_string()),
            "not in conntrack: {listed}"
        );
    }
    Ok(())
}

/// Answers with a name and the client address that the server sees.
const HOST_SERVER: &str = r#"
import sys, socket, http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        ip = self.client_address[0]
        body = ("host %s\n" % (ip[7:] if ip.startswith("::ffff:") else ip)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args):
        pass
class Server(http.server.ThreadingHTTPServer):
    address_family = socket.AF_INET6
    request_queue_size = 128
Server(("::", int(sys.argv[1])), Handler).serve_forever()
"#;

/// New connections are refused at once from the service's address; existing flows continue.
fn refused(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let mut service = stand
        .service("nobody", number)
        .with_node_port(node_port(number));
    stand.write(&service)?;
    let mut all = node_targets(stand, number);
    all.extend(
        targets(&service)
            .into_iter()
            .map(|target| (target, own(target))),
    );
    let mut flows = Vec::new();
    for (target, _) in &all {
        wait_answered_by(FAR, *target, &ALL)?;
        let mut flow = Connection::open(FAR, *target)?;
        // The server waits one minute for the first request, and one hour for later ones.
        flow.ask()?;
        flows.push(flow);
    }
    service.endpoints.clear();
    stand.write(&service)?;
    for (target, _) in all {
        wait_for("connections to be refused", PATIENCE, || {
            // If the first error arrives while Linux is still sending, the connection waits for the answer to its
            // second SYN.
            let kind = connect_within(target, PATIENCE)?
                .err()
                .map(|error| error.kind());
            ensure!(kind == Some(ErrorKind::ConnectionRefused), "{kind:?}");
            Ok(Some(()))
        })
        .with_context(|| target.to_string())?;
        wait_for(
            "datagrams to be refused",
            PATIENCE,
            || match Datagrams::open(FAR, target)?.ask(SOON) {
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => Ok(Some(())),
                other => anyhow::bail!("{target}: {other:?}"),
            },
        )?;
    }
    for flow in &mut flows {
        flow.ask()?;
    }
    Ok(())
}

/// The health check port of a service with a local policy works, even right after an agent starts without any services.
fn others(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let check = 31_000 + u16::from(number);
    let service = stand.service("checked", number).spec(json!({
        "type": "LoadBalancer",
        "externalTrafficPolicy": "Local",
        "healthCheckNodePort": check,
    }));
    stand.write(&service.with_node_port(node_port(number)))?;
    let all_answer = || {
        node_targets(stand, number)
            .into_iter()
            .try_for_each(|(target, _)| {
                wait_answered_by(FAR, target, &["web-1"])?;
                let url = format!("http://{}/", SocketAddr::new(target.ip(), check));
                wait_for("the check to answer", PATIENCE, || {
                    let mut curl = command_in(FAR, "curl");
                    let said =
                        run(curl.args(["-s", "--noproxy", "*", "--max-time", "5", &url]))?.stdout;
                    ensure!(said.contains("\"localEndpoints\":1"), "{url}: {said:?}");
                    Ok(Some(()))
                })
            })
    };
    all_answer()?;
    let node = stand.bed.node(1);
    node.kill_agent(Signal::SIGKILL)?;
    stand.manifests.while_away(|| {
        node.take_over(None)?;
        all_answer()?;
        let listed = node.cli("service list")?;
        ensure!(listed.stderr.contains("not been read yet"), "{listed:?}");
        Ok(())
    })?;
    wait_for("the services to be read", PATIENCE, || {
        let listed = node.cli("service list")?;
        Ok(listed.stderr.is_empty().then_some(()))
    })?;
    all_answer()
}

/// Like kube-proxy's listener, it answers over both IP versions: a load balancer may use either.
fn check_by_both(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let check = 31_000 + u16::from(number);
    for family in 0..2 {
        let mut service = stand.service("one-family", number).spec(json!({
            "type": "LoadBalancer",
            "externalTrafficPolicy": "Local",
            "healthCheckNodePort": check,
        }));
        service.cluster_ips = vec![service.cluster_ips[family]];
        for (is_ready, code) in [(true, "200"), (false, "503")] {
            service.endpoints[0].set_ready(is_ready);
            stand.write(&service)?;
            for (target, _) in node_targets(stand, number) {
                let url = format!("http://{}/", SocketAddr::new(target.ip(), check));
                wait_for("the check to answer", PATIENCE, || {
                    let mut curl = command_in(FAR, "curl");
                    let asked = [
                        "-s",
                        "--noproxy",
                        "*",
                        "-m",
                        "5",
                        "-w",
                        "%{http_code}",
                        &url,
                    ];
                    let said = run(curl.args(asked))?.stdout;
                    ensure!(said.ends_with(code), "{url}: {said:?}");
                    Ok(Some(()))
                })
                .with_context(|| format!("{:?}, ready: {is_ready}", service.cluster_ips))?;
            }
        }
    }
    Ok(())
}

/// A UDP flow moves to another backend when its own stops serving, on this node and on others.
fn udp_moves(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let mut service = stand
        .service("moving", number)
        .with_node_port(node_port(number));
    for (target, _) in node_targets(stand, number) {
        service = service.of(&stand.backends);
        stand.write(&service)?;
        wait_answered_by(FAR, target, &ALL)?;
        let mut flow = Datagrams::open(FAR, target)?;
        let first = flow.ask(SOON)?.context("no answer")?.backend;
        for _ in 0..5 {
            let again = flow.ask(SOON)?.context("no answer")?.backend;
            ensure!(again == first, "{first}, then {again}");
        }
        let left = stand.backends.iter().filter(|one| one.name != first);
        service = service.of(left);
        stand.write(&service)?;
        wait_for("the flow to move", PATIENCE, || {
            let answer = flow.ask(SOON)?.context("no answer")?;
            Ok((answer.backend != first).then_some(()))
        })?;
    }
    Ok(())
}

/// A backend that gets no new flows keeps its existing ones, whatever happens to the agent.
fn connections(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let mut service = stand
        .service("lasting", number)
        .with_node_port(node_port(number));
    stand.write(&service)?;
    let mut open = Vec::new();
    for (target, _) in node_targets(stand, number) {
        wait_answered_by(FAR, target, &ALL)?;
        for name in ALL {
            open.push(wait_for("a connection to each", PATIENCE, || {
                let mut connection = Connection::open(FAR, target)?;
                let is_to = connection.ask()?.backend == name;
                Ok(is_to.then_some((name, connection)))
            })?);
        }
    }
    let all_answer = |open: &mut Vec<(&str, Connection)>| -> anyhow::Result<()> {
        for (name, connection) in open {
            let answer = connection.upload(1 << 20)?;
            ensure!(answer.backend == *name, "{name}, then {answer:?}");
        }
        Ok(())
    };
    service.endpoints.clear();
    stand.write(&service)?;
    for (target, _) in node_targets(stand, number) {
        wait_for("connections to be refused", PATIENCE, || {
            let kind = connect_within(target, PATIENCE)?
                .err()
                .map(|error| error.kind());
            Ok((kind == Some(ErrorKind::ConnectionRefused)).then_some(()))
        })?;
    }
    all_answer(&mut open)?;
    let node = stand.bed.node(1);
    node.kill_agent(Signal::SIGKILL)?;
    all_answer(&mut open)?;
    node.take_over(None)?;
    all_answer(&mut open)
}

/// Tests backends on both nodes.
fn backwards(stand: &Stand, number: u8) -> anyhow::Result<()> {
    for backend in &stand.backends[..2] {
        let service = ServiceManifest::new("backwards", number)
            .of([backend])
            .with_node_port(node_port(number));
        stand.write(&service)?;
        for (target, _) in node_targets(stand, number) {
            wait_datagrams_answered_by(FAR, target, &[&backend.name])?;
            arrive_backwards(FAR, target)?;
        }
    }
    Ok(())
}

/// Length of a datagram that is sent in fragments.
const LONG: usize = 4000;

/// Later fragments follow the first one in both directions, and a router's errors about packets that exceed the MTU
/// towards the client reach the backend.
fn smaller_path(stand: &Stand, number: u8) -> anyhow::Result<()> {
    const SMALLER: u32 = 1300;
    // Fits into one packet: the router splits IPv4 fragments further without an error.
    const WHOLE: usize = 1400;
    let service = stand
        .service("far", number)
        .with_node_port(node_port(number));
    stand.write(&service)?;
    let ask_all = |length: usize| -> anyhow::Result<()> {
        for (target, _) in node_targets(stand, number) {
            for name in ALL {
                wait_for("long answers of each", PATIENCE, || {
                    let mut flow = Datagrams::open(FAR, target)?;
                    let first = flow.ask(SOON)?.context("no answer")?;
                    if first.backend != name {
                        return Ok(None);
                    }
                    let question = "long".repeat(length / 4);
                    // The first answer may be the packet that causes the error.
                    let answer = match flow.ask_with(question.as_bytes(), SOON)? {
                        Some(answer) => answer,
                        None => flow
                            .ask_with(question.as_bytes(), SOON)?
                            .with_context(|| format!("no long answer of {name}"))?,
                    };
                    ensure!(answer.backend == name, "{name}, then {answer:?}");
                    Ok(Some(()))
                })
                .with_context(|| format!("{name} by {target}"))?;
            }
        }
        Ok(())
    };
    for (target, _) in node_targets(stand, number) {
        wait_answered_by(FAR, target, &ALL)?;
    }
    ask_all(LONG)?;
    let change = |what: &str, mtu: &str| -> anyhow::Result<()> {
        for client in far() {
            ip(
                ROUTER,
                &format!("route {what} {client} dev {ROUTER_DEVICE} {mtu}"),
            )?;
        }
        Ok(())
    };
    change("add", &format!("mtu {SMALLER}"))?;
    let learned = ask_all(WHOLE).and_then(|()| {
        // A backend that sees the client's address learns the MTU of the path to the client.
        for backend in &stand.backends[..1] {
            for client in far() {
                let mut route = command_in(&backend.member.name, "ip");
                let route = run(route.args(["route", "get", &client.to_string()]))?.success()?;
                ensure!(
                    route.contains(&format!("mtu {SMALLER}")),
                    "to {client}: {route}"
                );
            }
        }
        Ok(())
    });
    change("delete", "")?;
    learned
}

/// A service flow without a conntrack entry is not kept.
fn flows_end(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let node = stand.bed.node(1);
    let service = stand
        .service("ends", number)
        .with_node_port(node_port(number));
    stand.write(&service)?;
    for (target, _) in node_targets(stand, number) {
        wait_answered_by(FAR, target, &ALL)?;
    }
    let port = node_port(number).to_string();
    let count = || -> anyhow::Result<usize> {
        let listed = node.cli("bpf lb list --flows")?.success()?;
        Ok(listed.lines().filter(|line| line.contains(&port)).count())
    };
    ensure!(count()? > 0, "no flow is listed");
    // Closed connections expire after 10 s and are collected every 10 s.
    wait_for("the flows to be forgotten", 2 * PATIENCE, || {
        Ok((count()? == 0).then_some(()))
    })
}
