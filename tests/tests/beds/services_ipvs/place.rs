//! This machine as a node, a client behind it, and two pods whose servers report their own name and the client's
//! address.

use std::io::{self, BufRead as _, BufReader, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use health_net::netns::NetNs;
use tests::process::run;

/// Port on which pods serve.
pub(super) const POD_PORT: u16 = 8080;
/// Networks of pods.
pub(super) const POD_NETWORKS: [&str; 2] = ["10.1.0.0/16", "fd01::/16"];
/// Addresses of the client.
pub(super) const CLIENT: [&str; 2] = ["192.168.77.5", "fd77::5"];
/// Addresses of the node on the link to the client.
pub(super) const NODE: [&str; 2] = ["192.168.77.1", "fd77::1"];
/// Names of the pods.
pub(super) const PODS: [&str; 2] = ["pod1", "pod2"];

/// How long a successful connection may take.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long to wait for a reply before packets count as dropped.
const SILENCE: Duration = Duration::from_millis(1500);

/// Address of the pod with this index, starting at 1.
pub(super) fn pod(number: u8, is_ipv6: bool) -> String {
    match is_ipv6 {
        false => format!("10.1.{number}.2"),
        true => format!("fd01:{number}::2"),
    }
}

/// All namespaces except the node's own.
pub(super) struct Place {
    pub(super) client: NetNs,
    pub(super) pods: Vec<NetNs>,
}

impl Place {
    pub(super) fn new() -> anyhow::Result<Self> {
        command("ip link set lo up")?;
        command("sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1")?;
        let client = join(
            "client",
            [(NODE[0], CLIENT[0], 24), (NODE[1], CLIENT[1], 64)],
        )?;
        let pods = PODS.iter().zip(1..).map(|(name, number)| {
            let ends = [
                (&*format!("10.1.{number}.1"), &*pod(number, false), 24),
                (&*format!("fd01:{number}::1"), &*pod(number, true), 64),
            ];
            let pod = join(name, ends)?;
            serve(name, &pod)?;
            Ok(pod)
        });
        Ok(Self {
            client,
            pods: pods.collect::<anyhow::Result<_>>()?,
        })
    }
}

/// A namespace with a veth device to the node and a default route through it. `ends` are the addresses of the node's
/// end and of the namespace's end.
fn join(name: &str, ends: [(&str, &str, u8); 2]) -> anyhow::Result<NetNs> {
    let netns = NetNs::create(name)?;
    command(&format!(
        "ip link add {name} type veth peer name eth0 netns {name}"
    ))?;
    command(&format!("ip link set {name} up"))?;
    for device in ["lo", "eth0"] {
        command(&format!("ip -n {name} link set {device} up"))?;
    }
    for (node, own, prefix) in ends {
        command(&format!("ip address add {node}/{prefix} dev {name} nodad"))?;
        command(&format!(
            "ip -n {name} address add {own}/{prefix} dev eth0 nodad"
        ))?;
        command(&format!("ip -n {name} route add default via {node}"))?;
    }
    Ok(netns)
}

/// Starts TCP and UDP servers that answer each line or datagram with their name and the client's address.
fn serve(name: &'static str, netns: &NetNs) -> anyhow::Result<()> {
    let any = SocketAddr::new(std::net::Ipv6Addr::UNSPECIFIED.into(), POD_PORT);
    let (listener, socket) = netns.run_in(|| (TcpListener::bind(any), UdpSocket::bind(any)))?;
    let (listener, socket) = (listener?, socket?);
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || answer(name, stream));
        }
    });
    thread::spawn(move || {
        let mut buffer = [0; 64];
        while let Ok((_, from)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(reported(name, from).as_bytes(), from);
        }
    });
    Ok(())
}

fn answer(name: &str, stream: TcpStream) -> io::Result<()> {
    let from = stream.peer_addr()?;
    let mut writer = stream.try_clone()?;
    for line in BufReader::new(stream).lines() {
        line?;
        writer.write_all(reported(name, from).as_bytes())?;
    }
    Ok(())
}

fn reported(name: &str, from: SocketAddr) -> String {
    format!("{name} {}\n", from.ip().to_canonical())
}

/// The parsed answer of a server.
#[derive(Debug, PartialEq)]
pub(super) struct Reported {
    pub(super) server: String,
    pub(super) client: IpAddr,
}

/// A connection that stays open.
pub(super) struct Connection(BufReader<TcpStream>);

impl Connection {
    /// Connects from a namespace, or from the node if `from` is `None`.
    pub(super) fn open(from: Option<&NetNs>, to: SocketAddr) -> anyhow::Result<Self> {
        let open = || TcpStream::connect_timeout(&to, PATIENCE);
        let stream = match from {
            Some(netns) => netns.run_in(open)?,
            None => open(),
        };
        let stream = stream.with_context(|| format!("cannot connect to {to}"))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Self(BufReader::new(stream)))
    }

    pub(super) fn ask(&mut self) -> anyhow::Result<Reported> {
        self.0.get_mut().write_all(b"who\n")?;
        let mut line = String::new();
        self.0.read_line(&mut line).context("no answer")?;
        parse(&line)
    }

    /// Closes the connection at once on both sides.
    pub(super) fn reset(self) -> anyhow::Result<()> {
        let socket = socket2::Socket::from(self.0.into_inner());
        Ok(socket.set_linger(Some(Duration::ZERO))?)
    }
}

fn parse(line: &str) -> anyhow::Result<Reported> {
    let (server, client) = line.trim().split_once(' ').context("a broken answer")?;
    Ok(Reported {
        server: server.to_owned(),
        client: client.parse()?,
    })
}

/// Sends one request over TCP.
pub(super) fn ask(from: Option<&NetNs>, to: SocketAddr) -> anyhow::Result<Reported> {
    let mut connection = Connection::open(from, to)?;
    let reported = connection.ask()?;
    connection.reset()?;
    Ok(reported)
}

/// Sends one request over UDP.
pub(super) fn ask_udp(from: &NetNs, to: SocketAddr) -> anyhow::Result<Reported> {
    let socket = udp(from, to)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    exchange(&socket)
}

/// A connected UDP socket, which receives only packets from `to`.
pub(super) fn udp(from: &NetNs, to: SocketAddr) -> anyhow::Result<UdpSocket> {
    let any: IpAddr = match to {
        SocketAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = from.run_in(|| UdpSocket::bind(SocketAddr::new(any, 0)))??;
    socket.connect(to)?;
    Ok(socket)
}

/// Sends one request through a connected socket.
pub(super) fn exchange(socket: &UdpSocket) -> anyhow::Result<Reported> {
    socket.send(b"who")?;
    let mut buffer = [0; 64];
    let len = socket.recv(&mut buffer).context("no answer by UDP")?;
    parse(str::from_utf8(&buffer[..len])?)
}

/// The error with which a connection fails: `TimedOut` if there is no answer.
pub(super) fn refusal(from: Option<&NetNs>, to: SocketAddr) -> anyhow::Result<io::ErrorKind> {
    let open = || TcpStream::connect_timeout(&to, SILENCE);
    let result = match from {
        Some(netns) => netns.run_in(open)?,
        None => open(),
    };
    let error = result.err().with_context(|| format!("{to} lets in"))?;
    Ok(error.kind())
}

/// Runs a command whose words are separated by spaces. Returns its output.
pub(super) fn command(words: &str) -> anyhow::Result<String> {
    let mut words = words.split(' ');
    let program = words.next().unwrap_or_default();
    run(Command::new(program).args(words))?.success()
}
