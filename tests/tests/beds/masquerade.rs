//! Real traffic through masquerading: transfers, very many connections, traceroute, links with smaller MTUs on the
//! path, DNS, port exhaustion, and an agent that restarts in the meantime.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Lines};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use health_net::netns::NetNs;
use nix::sys::signal::Signal;
use serde_json::Value;
use socket2::{Domain, Socket, Type};
use tests::bed::{Node, ROUTER, ROUTER4, ROUTER6, command_in, ip, sysctl};
use tests::outside::{self, CLIENT_CIDRS, FAR, FAR4, FAR6, ROUTER_DEVICE, far, serve, sources};
use tests::ping::is_answered;
use tests::process::{run, run_with_input};
use tests::transfer::Path;
use tests::{Bed, PATIENCE, wait_for};

/// Port on which servers of connections listen.
const SERVICE: u16 = 7000;
/// How long to wait for a connection that must not be established, enough for two SYNs of the kernel.
const IN_VAIN: Duration = Duration::from_secs(2);
/// How long conntrack keeps a closed connection, whose port stays in use.
const CLOSING: Duration = Duration::from_secs(10);

const NATIVE: &str = "--native-routing-cidr 10.244.0.0/16 --native-routing-cidr fd00:10:244::/48";

/// A node with a route to the outside.
fn bed(flags: &str) -> anyhow::Result<Bed> {
    let bed = Bed::builder()
        .nodes(1)
        .ipv6(true)
        .agent_args(flags)
        .start()?;
    bed.wait_all_reachable(PATIENCE)?;
    outside::add(bed.node(1))?;
    Ok(bed)
}

/// A node that masquerades its endpoints and its client, with these extra flags.
fn masquerading(flags: &str) -> anyhow::Result<Bed> {
    let [v4, v6] = CLIENT_CIDRS;
    bed(&format!(
        "{NATIVE} --gateway-cidr {v4} --gateway-cidr {v6} {flags}"
    ))
}

#[test]
#[ignore = "needs root"]
fn nothing_reaches_the_outside_unless_it_is_masqueraded() -> anyhow::Result<()> {
    let bed = bed("")?;
    let node = bed.node(1);
    for address in far() {
        ensure!(node.pings(address)?, "{address} from the node itself");
        for source in sources(node) {
            ensure!(!is_answered(&source, address)?, "{address} from {source}");
        }
    }
    Ok(())
}

/// Port of the servers for transfers.
const TRANSFERS: u16 = 7001;

fn path(source: &str, address: IpAddr) -> anyhow::Result<Path> {
    Path::open(source, FAR, address, TRANSFERS)
}

/// The node's address of the same IP version as `like`.
fn node_address(node: &Node, like: IpAddr) -> Option<IpAddr> {
    match like {
        IpAddr::V4(_) => Some(node.ipv4().into()),
        IpAddr::V6(_) => node.ipv6().map(IpAddr::from),
    }
}

#[test]
#[ignore = "needs root"]
fn transfers_go_both_ways() -> anyhow::Result<()> {
    const BYTES: u64 = 20 << 20;
    const DATAGRAMS: u64 = 2000;
    let bed = masquerading("")?;
    let node = bed.node(1);
    for source in sources(node) {
        for address in far() {
            let transfer = || -> anyhow::Result<()> {
                let path = path(&source, address)?;
                assert_eq!(Some(path.stream(BYTES)?), node_address(node, address));
                let (_, peer) = path.datagrams(Duration::ZERO, |sent| sent < DATAGRAMS)?;
                assert_eq!(Some(peer), node_address(node, address));
                Ok(())
            };
            transfer().with_context(|| format!("from {source} to {address}"))?;
        }
    }
    Ok(())
}

/// The peers' addresses are known to the programs whether or not connections to peers are timed.
#[test]
#[ignore = "needs root"]
fn flows_to_other_nodes_keep_their_source_without_passive_round_trips() -> anyhow::Result<()> {
    let bed = Bed::builder()
        .nodes(2)
        .ipv6(true)
        .agent_args(&format!("{NATIVE} --passive-rtt off"))
        .start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let (node, peer) = (bed.node(1), bed.node(2));
    let [endpoint, _] = sources(node);
    for address in peer.addresses() {
        let own = node.health_addresses()?.into_iter();
        let own = own.filter(|own| own.is_ipv4() == address.is_ipv4());
        let path = Path::open(&endpoint, peer.name(), address, TRANSFERS)?;
        assert_eq!(own.collect::<Vec<_>>(), [path.stream(1)?], "to {address}");
    }
    Ok(())
}

/// A process of the `connections` program.
struct Connections {
    child: Child,
    input: Option<ChildStdin>,
    output: Lines<BufReader<ChildStdout>>,
}

impl Connections {
    /// Starts the program in a namespace, and waits until it prints that it is ready.
    fn start(namespace: &str, words: &str, ready: &str) -> anyhow::Result<Self> {
        let mut started = Self::spawn(namespace, words)?;
        started.wait_for_line(ready)?;
        Ok(started)
    }

    fn spawn(namespace: &str, words: &str) -> anyhow::Result<Self> {
        let mut child = command_in(namespace, env!("CARGO_BIN_EXE_connections"))
            .args(words.split_whitespace())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let input = child.stdin.take();
        let output = child.stdout.take().context("no standard output")?;
        Ok(Self {
            child,
            input,
            output: BufReader::new(output).lines(),
        })
    }

    fn wait_for_line(&mut self, line: &str) -> anyhow::Result<()> {
        let said = self.output.next().context("it ended early")??;
        ensure!(said == line, "it said {said}");
        Ok(())
    }

    /// Stops the process, and returns its remaining output.
    fn end(mut self) -> anyhow::Result<Vec<String>> {
        self.input.take();
        let said = self.output.by_ref().collect::<Result<_, _>>()?;
        ensure!(self.child.wait()?.success(), "it failed");
        Ok(said)
    }
}

impl Drop for Connections {
    fn drop(&mut self) {
        // The process may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
#[ignore = "needs root"]
fn twenty_thousand_connections_are_open_at_once_each_with_a_port_of_its_own() -> anyhow::Result<()>
{
    const EACH: usize = 10_000;
    let bed = masquerading("")?;
    let node = bed.node(1);
    let address = SocketAddr::from((FAR4, SERVICE));
    // The limit of open files in one process is below the number of connections at one end.
    let servers: Vec<_> = (0..2)
        .map(|_| Connections::start(FAR, &format!("serve {address}"), "listening"))
        .collect::<Result<_, _>>()?;
    // Both sources choose ports from the same range, so that many ports are chosen twice.
    let hold = format!("hold {address} {EACH}");
    let mut holders = Vec::new();
    for source in sources(node) {
        holders.push(Connections::spawn(&source, &hold)?);
    }
    for holder in &mut holders {
        holder.wait_for_line("open")?;
    }
    for holder in holders {
        assert_eq!(holder.end()?, ["alive"]);
    }
    let mut peers = Vec::new();
    for server in servers {
        peers.extend(server.end()?);
    }
    let peers: Vec<SocketAddr> = peers
        .iter()
        .map(|peer| peer.parse())
        .collect::<Result<_, _>>()?;
    assert_eq!(peers.len(), 2 * EACH);
    assert!(peers.iter().all(|peer| peer.ip() == node.ipv4()));
    let ports: BTreeSet<u16> = peers.iter().map(SocketAddr::port).collect();
    assert_eq!(ports.len(), 2 * EACH);
    Ok(())
}

/// The addresses along the path that answer `traceroute`.
fn hops(source: &str, address: IpAddr, method: &str) -> anyhow::Result<Vec<String>> {
    let mut traceroute = command_in(source, "traceroute");
    traceroute.args(["-n", "-q", "1", "-N", "1", "-w", "3", "-m", "6", method]);
    let output = run(traceroute.arg(address.to_string()))?.success()?;
    let lines = output.lines().skip(1);
    Ok(lines
        .filter_map(|line| line.split_whitespace().nth(1).map(str::to_owned))
        .collect())
}

#[test]
#[ignore = "needs root"]
fn errors_of_routers_come_to_those_whose_packets_they_are_about() -> anyhow::Result<()> {
    let bed = masquerading("")?;
    let node = bed.node(1);
    for source in sources(node) {
        for (address, router) in far().into_iter().zip([ROUTER4, ROUTER6]) {
            // By UDP, where the final destination also answers with an error, and by echo.
            for method in ["-U", "-I"] {
                let hops = hops(&source, address, method)?;
                ensure!(
                    hops.len() == 3 && hops[1..] == [router.to_owned(), address.to_string()],
                    "traceroute {method} from {source} to {address}: {hops:?}"
                );
            }
        }
    }

    // From here on, the router sends no larger packets. Routes set this limit, because a device with a smaller MTU
    // would also receive no larger packets and silently drop the replies.
    for address in far() {
        let route = format!("route add {address} dev {ROUTER_DEVICE} mtu 1400");
        ip(ROUTER, &route)?;
    }
    for source in sources(node) {
        for (address, says) in [
            (FAR4.into(), "Frag needed and DF set (mtu = 1400)"),
            (FAR6.into(), "Packet too big: mtu=1400"),
        ] {
            let mut ping = command_in(&source, "ping");
            ping.args(["-n", "-c", "1", "-W", "3", "-M", "do", "-s", "1440"]);
            let said = run(ping.arg(IpAddr::to_string(&address)))?.stdout;
            ensure!(
                said.contains(says),
                "ping from {source} to {address}: {said}"
            );

            let family = if address.is_ipv4() { "-4" } else { "-6" };
            let mut flush = Command::new("ip");
            flush.args(["-n", &source, family, "route", "flush", "cache"]);
            run(&mut flush)?.success()?;
            let before = known_mtu(&source, address)?;
            ensure!(before != Some(1400), "{source} to {address}: known still");
            // A few full-sized segments are enough.
            path(&source, address)?.stream(256 << 10)?;
            let learned = known_mtu(&source, address)?;
            ensure!(learned == Some(1400), "{source} to {address}: {learned:?}");
        }
    }
    Ok(())
}

/// The path MTU to a destination in a namespace's kernel, whether configured or learned.
fn known_mtu(source: &str, address: IpAddr) -> anyhow::Result<Option<u32>> {
    let route = run(Command::new("ip").args(["-n", source, "route", "get", &address.to_string()]))?;
    let route = route.success()?;
    let mut words = route.split_whitespace();
    Ok(words
        .find(|&word| word == "mtu")
        .and_then(|_| words.next()?.parse().ok()))
}

#[test]
#[ignore = "needs root"]
fn names_are_resolved_by_many_queries_at_once() -> anyhow::Result<()> {
    const RESOLVERS: usize = 8;
    const NAMES: usize = 100;
    let bed = masquerading("")?;
    let node = bed.node(1);
    let mut dnsmasq = command_in(FAR, "dnsmasq");
    dnsmasq.args([
        "--keep-in-foreground",
        "--conf-file=/dev/null",
        "--pid-file=",
        "--user=root",
        "--no-resolv",
        "--no-hosts",
        "--address=/health.test/198.51.100.7",
    ]);
    let _server = serve(&mut dnsmasq, "-u", 53)?;
    let names: String = (0..NAMES).map(|n| format!("n{n}.health.test\n")).collect();
    for source in sources(node) {
        for address in far() {
            let resolve = || -> anyhow::Result<usize> {
                let mut dig = command_in(&source, "dig");
                dig.args(["+short", "+tries=3", "+time=5", "-f", "-"]);
                let answers = run_with_input(dig.arg(format!("@{address}")), &names)?.success()?;
                Ok(answers
                    .lines()
                    .filter(|&line| line == "198.51.100.7")
                    .count())
            };
            let answers = std::thread::scope(|scope| {
                let all: Vec<_> = (0..RESOLVERS).map(|_| scope.spawn(resolve)).collect();
                all.into_iter()
                    .map(|one| one.join().expect("no panic"))
                    .sum::<anyhow::Result<usize>>()
            })?;
            assert_eq!(answers, RESOLVERS * NAMES, "from {source} at {address}");
        }
    }
    Ok(())
}

/// Number of packets dropped because no port was free.
fn exhausted(node: &Node) -> anyhow::Result<u64> {
    let rows = node.listing("bpf metrics list")?;
    let rows = rows.as_array().context("no counters")?;
    let found = rows
        .iter()
        .find(|row| row["reason"] == "No mapping for NAT masquerade");
    Ok(found.and_then(|row| row["packets"].as_u64()).unwrap_or(0))
}

/// Connects to the outside service from a namespace.
fn connect(namespace: &str, deadline: Duration) -> anyhow::Result<Option<TcpStream>> {
    let address = SocketAddr::from((FAR4, SERVICE));
    let connect = || TcpStream::connect_timeout(&address, deadline);
    Ok(NetNs::open(namespace)?.run_in(connect)?.ok())
}

/// Connects to the outside service from this port of the node.
fn connect_from(node: &Node, port: u16) -> anyhow::Result<TcpStream> {
    node.run_in(|| {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.bind(&SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)).into())?;
        socket.connect(&SocketAddr::from((FAR4, SERVICE)).into())?;
        Ok(socket.into())
    })?
}

#[test]
#[ignore = "needs root"]
fn at_the_end_of_the_ports_new_flows_are_dropped_until_one_is_free() -> anyhow::Result<()> {
    const PORTS: u16 = 64;
    const FIRST: u16 = 40_000;
    let last = FIRST + PORTS - 1;
    let (listened_on, connected_from) = (FIRST + 10, FIRST + 20);
    let bed = masquerading(&format!(
        "--masquerade-ports {FIRST}-{last} --conntrack-gc-interval 1s"
    ))?;
    let node = bed.node(1);
    let [endpoint, client] = sources(node);
    let server = Connections::start(FAR, &format!("serve {FAR4}:{SERVICE}"), "listening")?;
    // The host uses only two of these ports.
    sysctl(node.name(), "net.ipv4.ip_local_port_range=50000 60999")?;
    let _listener = node.run_in(|| TcpListener::bind((Ipv4Addr::UNSPECIFIED, listened_on)))??;
    let host = connect_from(node, connected_from)?;

    let mut held = Vec::new();
    while held.len() < usize::from(PORTS) - 2 {
        // One attempt does not try all ports, but each SYN that the kernel retransmits tries others.
        let opened = connect(&endpoint, PATIENCE)?;
        held.push(opened.context("no port, though some are free")?);
    }
    let before = exhausted(node)?;
    for source in [&endpoint, &client] {
        ensure!(
            connect(source, IN_VAIN)?.is_none(),
            "a port more than there are"
        );
    }
    ensure!(exhausted(node)? > before, "drops were not counted");

    // The host itself is not affected, nor are connections that have a port.
    let more = node.run_in(|| TcpStream::connect((FAR4, SERVICE)))??;
    for stream in held.iter().chain([&host, &more]) {
        round_trip(stream)?;
    }

    // Ports of closed connections become free after a while.
    let closed = held.split_off(held.len() - 8);
    drop(closed);
    for source in [&client, &endpoint] {
        let opened = wait_for("a port to be free", CLOSING + PATIENCE, || {
            connect(source, IN_VAIN)
        })?;
        round_trip(&opened)?;
        held.push(opened);
    }
    round_trip(&host)?;

    drop((held, host, more));
    let peers = server.end()?;
    let peers: Vec<SocketAddr> = peers
        .iter()
        .map(|peer| peer.parse())
        .collect::<Result<_, _>>()?;
    let translated: Vec<u16> = peers
        .iter()
        .map(SocketAddr::port)
        .filter(|port| (FIRST..=last).contains(port))
        .collect();
    assert!(translated.len() >= usize::from(PORTS) - 2 + 1 + 2);
    let ports: BTreeSet<u16> = translated.iter().copied().collect();
    assert_eq!(ports.len(), usize::from(PORTS) - 1);
    let of_host = translated.iter().filter(|&&port| port == connected_from);
    assert_eq!(of_host.count(), 1);
    assert!(!translated.contains(&listened_on));
    Ok(())
}

/// Sends a word and reads it back.
fn round_trip(mut stream: &TcpStream) -> anyhow::Result<()> {
    use std::io::{Read as _, Write as _};
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(b"word")?;
    let mut word = [0; 4];
    stream.read_exact(&mut word)?;
    assert_eq!(&word, b"word");
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_transfer_does_not_notice_that_the_agent_is_killed_and_started_anew() -> anyhow::Result<()> {
    let bed = masquerading("")?;
    let node = bed.node(1);
    for (source, address) in sources(node).iter().zip(far()) {
        let path = path(source, address)?;
        let is_over = AtomicBool::new(false);
        let interval = Duration::from_millis(3);
        let go_on = |_| !is_over.load(Ordering::Relaxed);
        let (sent, peer) = std::thread::scope(|scope| {
            let transfer = scope.spawn(|| path.datagrams(interval, go_on));
            let is_going = wait_for("the transfer to begin", PATIENCE, || {
                Ok((!flows_to(node, address)?.is_empty()).then_some(()))
            });
            let restarted = is_going
                .and_then(|()| node.kill_agent(Signal::SIGKILL))
                .and_then(|()| node.start_agent());
            is_over.store(true, Ordering::Relaxed);
            let transfer = transfer.join().expect("no panic");
            restarted.and(transfer)
        })?;
        println!("{sent} datagrams from {source} to {address}");
        assert_eq!(Some(peer), node_address(node, address));
    }
    Ok(())
}

/// UDP flows to the servers for transfers.
fn flows_to(node: &Node, address: IpAddr) -> anyhow::Result<Vec<Value>> {
    let list = format!("bpf ct list --proto udp --dst {address} --port {TRANSFERS}");
    let rows = node.listing(&list)?;
    Ok(rows.as_array().context("no flows")?.clone())
}
