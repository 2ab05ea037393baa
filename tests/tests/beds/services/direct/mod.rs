//! Direct server return: backends on other nodes see outside clients, and their nodes answer the clients directly. The
//! node that receives the clients' packets sees no replies.

mod quotes;
mod same_ports;

use std::fs::{self, Permissions};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::PermissionsExt as _;

use anyhow::{Context as _, ensure};
use health_common::metrics::Reason;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;
use tests::bed::{ROUTER, ROUTER4, ROUTER6, add_address, command_in, ip, sysctl};
use tests::outside::FAR;
use tests::process::{run, run_with_input};
use tests::served::{Connection, Datagrams, ServiceManifest};
use tests::{Node, PATIENCE, wait_for};

use super::outside::{self, node_port, node_targets};
use super::{Mode, SOON, Stand, counted, wait_answered_by, wait_datagrams_answered_by};

/// Tests that run on one bed, one after another.
const ROWS: &[outside::Row] = &[
    ("a_backend_elsewhere_sees_the_client", sees_the_client),
    ("no_answer_comes_by_the_first_node", answers_alone),
    ("a_service_may_ask_for_another_way", annotated),
    (
        "a_backend_in_its_nodes_network_sees_the_node",
        in_host_network,
    ),
    ("clients_in_the_cluster_are_answered", inside),
    ("listings_report_it", listings),
    ("a_forged_option_enters_nothing", forged),
    ("no_option_is_shown_to_a_client", quotes::are_plain),
    (
        "a_connection_outlives_what_is_left_of_another_to_its_backend",
        same_ports::outlives,
    ),
    ("ports_of_closed_connections_are_free", same_ports::are_free),
    (
        "a_connection_lasts_that_is_seen_from_one_side",
        seen_from_one_side,
    ),
    ("least_connections_are_counted", counts),
];

/// A mesh with its own key instead of the default one.
struct Keyed {
    stand: Stand,
    _key: TempDir,
}

impl Keyed {
    fn start(forwarding: &str, endpoints: [&str; 2], agent: &str) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let key = folder.path().join("key");
        fs::write(&key, [7; 32])?;
        fs::set_permissions(&key, Permissions::from_mode(0o600))?;
        let agent = format!(
            "--service-forwarding {forwarding} --mesh-key-file {} {agent}",
            key.display()
        );
        let stand = Stand::start_with(Mode::Ebpf, endpoints, &agent)?;
        outside::add_routes(&stand)?;
        let node = stand.bed.node(2);
        for router in [ROUTER4, ROUTER6] {
            ip(node.name(), &format!("route add default via {router}"))?;
        }
        for setting in ["net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1"] {
            sysctl(node.name(), setting)?;
        }
        Ok(Self {
            stand,
            _key: folder,
        })
    }
}

/// Conntrack timeouts as short as possible, to show what keeps flows alive.
const COLLECTED: &str =
    "--conntrack-gc-interval 10s --conntrack-timeout-udp 15s --conntrack-timeout-tcp-syn 5s";

fn show_rows<'a>(agent: &str, rows: impl Iterator<Item = &'a outside::Row>) -> anyhow::Result<()> {
    let Keyed { stand, _key } = &Keyed::start("dsr", ["", ""], &format!("{COLLECTED} {agent}"))?;
    for (number, (name, show)) in (1..).zip(rows) {
        show(stand, number).with_context(|| (*name).to_owned())?;
        println!("ok {name}");
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn clients_outside_are_answered_directly() -> anyhow::Result<()> {
    // This row does not hold with direct return.
    let others = outside::ROWS
        .iter()
        .filter(|(name, _)| *name != outside::ELSEWHERE);
    show_rows("", ROWS.iter().chain(others))
}

#[test]
#[ignore = "needs root"]
fn clients_outside_are_answered_directly_by_nodes_that_masquerade() -> anyhow::Result<()> {
    let agent = "--native-routing-cidr 10.244.0.0/16 --native-routing-cidr fd00:10:244::/48";
    show_rows(agent, ROWS.iter())
}

/// A service of all backends on the second node.
fn elsewhere(stand: &Stand, name: &str, number: u8) -> ServiceManifest {
    let service = ServiceManifest::new(name, number).of(&stand.backends[1..]);
    service.with_node_port(node_port(number))
}

const ELSEWHERE: [&str; 2] = ["web-2", "web-3"];

fn sees_the_client(stand: &Stand, number: u8) -> anyhow::Result<()> {
    stand.write(&elsewhere(stand, "seen", number))?;
    for (target, client) in node_targets(stand, number) {
        outside::is_answered_by(target, &ELSEWHERE, client)?;
    }
    Ok(())
}

/// While this exists, the router drops packets from the first node with a service's source address.
struct FirstNodeMute;

impl FirstNodeMute {
    fn new(first: &Node) -> anyhow::Result<Self> {
        // Asks `ip`, because /sys shows the devices of another network namespace.
        let mut show = command_in(first.name(), "ip");
        let shown = run(show.args(["-j", "link", "show", "eth0"]))?.success()?;
        let links: Value = serde_json::from_str(&shown)?;
        let mac = links[0]["address"]
            .as_str()
            .with_context(|| format!("no hardware address in {links}"))?;
        let drops = ["tcp", "udp"]
            .map(|protocol| format!("ether saddr {mac} {protocol} sport 30000-32767 drop\n"));
        let rules = format!(
            "table netdev mute {{\nchain in {{\ntype filter hook ingress device eth0 priority 0;\n{}}}\n}}\n",
            drops.concat()
        );
        let mut nft = command_in(ROUTER, "nft");
        run_with_input(nft.args(["-f", "-"]), &rules)?.success()?;
        Ok(Self)
    }
}

impl Drop for FirstNodeMute {
    fn drop(&mut self) {
        let mut nft = command_in(ROUTER, "nft");
        nft.args(["delete", "table", "netdev", "mute"]);
        if let Err(error) = run(&mut nft).and_then(|ran| ran.success().map(drop)) {
            println!("the first node stays mute: {error:#}");
        }
    }
}

fn answers_alone(stand: &Stand, number: u8) -> anyhow::Result<()> {
    stand.write(&elsewhere(stand, "alone", number))?;
    for (target, _) in node_targets(stand, number) {
        wait_answered_by(FAR, target, &ELSEWHERE)?;
    }
    let _mute = FirstNodeMute::new(stand.bed.node(1))?;
    for (target, client) in node_targets(stand, number) {
        outside::is_answered_by(target, &ELSEWHERE, client)?;
    }
    // When the first node itself answers for a service, the router drops its packets.
    let mut service = elsewhere(stand, "alone", number);
    service.annotations = json!({ "service.health-agent.io/forwarding": "snat" });
    stand.write(&service)?;
    for (target, _) in node_targets(stand, number) {
        wait_for("answers by the first node to be dropped", PATIENCE, || {
            let answer = Datagrams::open(FAR, target)?.ask(SOON)?;
            ensure!(answer.is_none(), "{answer:?}");
            Ok(Some(()))
        })?;
    }
    Ok(())
}

fn annotated(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let mut service = elsewhere(stand, "annotated", number);
    for (forwarding, [tcp_sees_client, udp_sees_client]) in [
        ("snat", [false, false]),
        ("hybrid", [true, false]),
        ("dsr", [true, true]),
    ] {
        service.annotations = json!({ "service.health-agent.io/forwarding": forwarding });
        stand.write(&service)?;
        for (target, client) in node_targets(stand, number) {
            let seen = |is_client: bool| if is_client { client } else { target.ip() };
            wait_for("clients to be seen otherwise", PATIENCE, || {
                let answers = wait_answered_by(FAR, target, &ELSEWHERE)?;
                let wanted = seen(tcp_sees_client);
                ensure!(answers.clients.iter().eq([&wanted]), "{answers:?}");
                let answers = wait_datagrams_answered_by(FAR, target, &ELSEWHERE)?;
                let wanted = seen(udp_sees_client);
                ensure!(answers.clients.iter().eq([&wanted]), "{answers:?}");
                Ok(Some(()))
            })
            .with_context(|| format!("{forwarding} at {target}"))?;
        }
    }
    Ok(())
}

/// Backends in the host network get no options, which would reach the process itself.
fn in_host_network(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let there = stand.bed.node(2);
    let (_server, service) = outside::host_backend(stand, there, "host-elsewhere", number)?;
    stand.write(&service)?;
    for (target, _) in node_targets(stand, number) {
        let answers = wait_answered_by(FAR, target, &["host"])?;
        let clients = &answers.clients;
        ensure!(clients.iter().eq([&target.ip()]), "{target}: {clients:?}");
    }
    Ok(())
}

/// These clients are behind the backend's node, which answers them without an uplink.
fn inside(stand: &Stand, number: u8) -> anyhow::Result<()> {
    stand.write(&elsewhere(stand, "inside", number))?;
    let [_, there] = &stand.clients;
    for (target, _) in node_targets(stand, number) {
        for from in [&*there.name, stand.bed.node(2).name()] {
            wait_answered_by(from, target, &ELSEWHERE)?;
            wait_datagrams_answered_by(from, target, &ELSEWHERE)?;
        }
    }
    Ok(())
}

fn listings(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let (first, second) = (stand.bed.node(1), stand.bed.node(2));
    stand.write(&elsewhere(stand, "listed", number))?;
    for (target, client) in node_targets(stand, number) {
        wait_answered_by(FAR, target, &ELSEWHERE)?;
        let mut open = Connection::open(FAR, target)?;
        let port = open.stream().local_addr()?.port();
        let source = SocketAddr::new(client, port);
        open.ask()?;
        for (node, flag) in [(first, "Direct"), (second, "Relayed")] {
            let listed = node.cli("bpf lb list --flows")?.success()?;
            let mut of_flow = listed
                .lines()
                .filter(|line| line.contains(&source.to_string()) && line.contains(flag));
            ensure!(of_flow.next().is_some(), "{}: {listed}", node.name());
        }
        let traced = first.cli(&format!("service trace {source} {target}"))?;
        let traced = traced.success()?;
        for wanted in [
            "Forwarding:   dsr",
            "its connection is open; its backend answers the client directly",
        ] {
            ensure!(traced.contains(wanted), "no {wanted:?} in {traced}");
        }
    }
    let shown = first.cli("service get listed")?.success()?;
    ensure!(shown.contains("Forwarding:   dsr"), "{shown}");
    let listed = first.cli("bpf lb list")?.success()?;
    ensure!(listed.contains("direct-return"), "{listed}");
    Ok(())
}

/// Connects with an option that differs from a node's only in its tag. Prints the outcome.
const FORGER: &str = r#"
import socket, struct, sys
host, port, option, seconds = sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
family = socket.AF_INET6 if ":" in host else socket.AF_INET
s = socket.socket(family, socket.SOCK_STREAM)
s.settimeout(seconds)
if option:
    if family == socket.AF_INET:
        s.setsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, bytes.fromhex(option))
    else:
        s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_DSTOPTS, bytes.fromhex(option))
try:
    s.connect((host, port))
    print("connected")
except socket.timeout:
    print("timeout")
"#;

/// The option for a frontend, with a wrong tag.
fn forged_option(frontend: SocketAddr) -> String {
    let mut bytes = match frontend {
        SocketAddr::V4(_) => vec![0x9e, 16],
        // The kernel sets the first byte, the next header.
        SocketAddr::V6(_) => vec![0, 3, 0x5e, 28],
    };
    bytes.extend(frontend.port().to_be_bytes());
    match frontend.ip() {
        IpAddr::V4(v4) => bytes.extend(v4.octets()),
        IpAddr::V6(v6) => {
            bytes.extend([0; 2]);
            bytes.extend(v6.octets());
        }
    }
    bytes.extend([0x5a; 8]);
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn forged(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let node = stand.bed.node(2);
    stand.write(&elsewhere(stand, "forged", number))?;
    // An attacker who can send to endpoints uses this path.
    for (cidr, via) in ["10.244.2.0/24", "fd00:10:244:2::/64"]
        .into_iter()
        .zip(node.addresses())
    {
        ip(ROUTER, &format!("route replace {cidr} via {via}"))?;
    }
    let flows = || -> anyhow::Result<usize> {
        let listed = node.cli("bpf lb list --flows")?.success()?;
        let port = node_port(number).to_string();
        Ok(listed.lines().filter(|line| line.contains(&port)).count())
    };
    let backend = stand.backend("web-2")?.addresses();
    for ((frontend, _), backend) in node_targets(stand, number).into_iter().zip(backend) {
        ensure!(frontend.is_ipv4() == backend.is_ipv4());
        let connect = |option: &str, seconds: &str| -> anyhow::Result<String> {
            let (host, port) = (backend.ip().to_string(), backend.port().to_string());
            let mut python = command_in(FAR, "python3");
            run(python.args(["-c", FORGER, &host, &port, option, seconds]))?.success()
        };
        let before = counted(node, Reason::DirectInvalid)?;
        let said = connect(&forged_option(frontend), "2.5")?;
        ensure!(said.trim() == "timeout", "{frontend}: {said}");
        let refused = counted(node, Reason::DirectInvalid)? - before;
        ensure!(refused >= 2, "{frontend}: {refused} packets refused");
        ensure!(flows()? == 0, "a flow was entered for {frontend}");
        // The same client reaches the same backend without the option.
        let said = connect("", "10")?;
        ensure!(said.trim() == "connected", "{frontend}: {said}");
    }
    Ok(())
}

/// A connection's entry in a node's conntrack.
fn tracked(node: &Node, source: SocketAddr) -> anyhow::Result<Option<Value>> {
    let listed = node.listing(&format!("bpf ct list --proto tcp --src {}", source.ip()))?;
    let rows = listed.as_array().context("no list")?;
    let is_it = |row: &&Value| row["source-port"] == source.port();
    Ok(rows.iter().find(is_it).cloned())
}

/// A connection survives longer idle periods than the timeouts of a handshake or a closed connection, and ends with the
/// client's side.
fn seen_from_one_side(stand: &Stand, number: u8) -> anyhow::Result<()> {
    stand.write(&elsewhere(stand, "one-sided", number))?;
    let node = stand.bed.node(1);
    for (target, client) in node_targets(stand, number) {
        let connect = || -> anyhow::Result<_> {
            let mut connection = Connection::open(FAR, target)?;
            let source = SocketAddr::new(client, connection.stream().local_addr()?.port());
            connection.ask()?;
            Ok((connection, source))
        };
        wait_answered_by(FAR, target, &ELSEWHERE)?;
        let (mut open, source) = connect()?;
        open.upload(1 << 20)?;
        let known = tracked(node, source)?;
        let known = known.with_context(|| format!("{source} is not in conntrack"))?;
        let (sent, answered) = (&known["rx-packets"], &known["tx-packets"]);
        ensure!(*sent != json!(0) && *answered == json!(0), "{known}");
        let is_over = |source| {
            wait_for("a closed connection to be forgotten", 2 * PATIENCE, || {
                Ok(tracked(node, source)?.is_none().then_some(()))
            })
        };
        let (other, other_source) = connect()?;
        drop(other);
        is_over(other_source)?;
        let first = open.ask()?;
        ensure!(open.ask()? == first, "{target}");
        drop(open);
        is_over(source)?;
    }
    Ok(())
}

/// The first node counts the flows that it forwards until they end.
fn counts(stand: &Stand, number: u8) -> anyhow::Result<()> {
    let mut service = elsewhere(stand, "counted", number);
    service.annotations = json!({ "service.health-agent.io/algorithm": "least-connection" });
    stand.write(&service)?;
    let node = stand.bed.node(1);
    let flows = || -> anyhow::Result<u64> {
        let listed = node.listing("bpf lb list --service counted")?;
        let rows = listed.as_array().context("no list")?;
        let mut total = 0;
        for row in rows
            .iter()
            .filter(|row| row["kind"] == "ClusterIP" && row["protocol"] == "TCP")
        {
            let backends = row["outside"]["backends"]
                .as_array()
                .context("no backends")?;
            total += backends
                .iter()
                .filter_map(|one| one["flows"].as_u64())
                .sum::<u64>();
        }
        Ok(total)
    };
    let mut open = Vec::new();
    for (target, _) in node_targets(stand, number) {
        wait_answered_by(FAR, target, &ELSEWHERE)?;
        for _ in 0..4 {
            let mut connection = Connection::open(FAR, target)?;
            connection.ask()?;
            open.push(connection);
        }
    }
    wait_for("other flows to be forgotten", 8 * PATIENCE, || {
        let (count, open) = (flows()?, open.len() as u64);
        ensure!(count == open, "{count} flows, and {open} connections");
        Ok(Some(()))
    })?;
    drop(open);
    wait_for("all flows to be forgotten", 8 * PATIENCE, || {
        let count = flows()?;
        ensure!(count == 0, "{count} flows");
        Ok(Some(()))
    })
}

/// Only this client may reach the backends; other addresses of its host may not.
const RULES: &str = r#"[
{"labels": ["name=web"], "endpointSelector": {"matchLabels": {"app": "web"}},
 "ingress": [{"fromCIDR": ["192.0.2.9/32", "2001:db8::9/128"],
              "toPorts": [{"ports": [{"port": "8080", "protocol": "ANY"}]}]}]}
]"#;
/// Other addresses of the client's host.
const STRANGER: [&str; 2] = ["192.0.2.77", "2001:db8::77"];

#[test]
#[ignore = "needs root"]
fn ingress_policy_of_a_backend_elsewhere_judges_the_client() -> anyhow::Result<()> {
    let Keyed { stand, _key } = &Keyed::start("dsr", ["--label app=web", ""], "")?;
    let number = 1;
    stand.write(&elsewhere(stand, "judged", number))?;
    let rules = _key.path().join("rules.json");
    fs::write(&rules, RULES)?;
    let node = stand.bed.node(2);
    node.cli(&format!("policy import {}", rules.display()))?
        .success()?;
    for (target, client) in node_targets(stand, number) {
        outside::is_answered_by(target, &ELSEWHERE, client)?;
    }
    for (stranger, (target, _)) in STRANGER.into_iter().zip(node_targets(stand, number)) {
        let length = if target.is_ipv4() { 24 } else { 64 };
        add_address(FAR, &format!("{stranger}/{length}"), "eth0")?;
        let before = counted(node, Reason::PolicyDenied)?;
        let mut curl = command_in(FAR, "curl");
        curl.args([
            "-s",
            "--noproxy",
            "*",
            "--max-time",
            "2",
            "--interface",
            stranger,
        ])
        .arg(format!("http://{target}/"));
        let ran = run(&mut curl)?;
        ensure!(
            ran.stdout.is_empty(),
            "{stranger} was answered: {}",
            ran.stdout
        );
        ensure!(
            counted(node, Reason::PolicyDenied)? > before,
            "{stranger} was not refused"
        );
    }
    Ok(())
}

/// The error output of an agent that is started with these flags and exits.
fn refused(node: &Node, flags: &str) -> anyhow::Result<String> {
    let mut command = node.cli_command();
    command
        .args(["run", "--node-name", node.name(), "--registry"])
        .arg(format!("file:{}", tests::bed::NODES_FILE))
        .args(flags.split_whitespace());
    let ran = run(&mut command)?;
    ensure!(ran.code != Some(0), "{flags}: it ran");
    Ok(ran.stderr)
}

#[test]
#[ignore = "needs root"]
fn without_a_key_of_its_own_a_mesh_has_no_direct_return() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let public = folder.path().join("key");
    fs::write(&public, "health-agent-key")?;
    fs::set_permissions(&public, Permissions::from_mode(0o600))?;
    let stand = Stand::start()?;
    let node = stand.bed.node(1);
    let mut service = elsewhere(&stand, "asking", 1);
    service.annotations = json!({ "service.health-agent.io/forwarding": "dsr" });
    stand.write(&service)?;
    wait_for("the service to be reported", PATIENCE, || {
        let shown = node.cli("service get asking")?.success()?;
        for wanted in [
            "Forwarding:   snat",
            "cannot use dsr, which its annotation requests",
        ] {
            ensure!(shown.contains(wanted), "no {wanted:?} in {shown}");
        }
        Ok(Some(()))
    })?;
    node.kill_agent(Signal::SIGTERM)?;
    let with_public = format!(
        "--service-forwarding dsr --mesh-key-file {}",
        public.display()
    );
    for (flags, wanted) in [
        ("--service-forwarding dsr", "needs --mesh-key-file"),
        (&with_public, "needs --mesh-key-file"),
        (
            "--service-forwarding hybrid --service-proxy-mode ipvs",
            "not with --service-proxy-mode ipvs",
        ),
    ] {
        let said = refused(node, flags)?;
        ensure!(said.contains(wanted), "{flags}: {said}");
    }
    Ok(())
}
