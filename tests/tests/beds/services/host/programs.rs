//! The programs for the host's own sockets work without an agent, are restored when they are lost, and are removed
//! along with services. They do not affect programs of others or sockets in other network namespaces.

use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::process::Command;

use anyhow::{Context as _, ensure};
use health_common::LAYOUT_VERSION;
use health_common::config::{DatapathConfig, SERVICES};
use health_common::service::{ALGORITHM_RANDOM, KIND_CLUSTER_IP};
use health_datapath::process;
use health_datapath::services::{BackendSpec, FrontendSpec, PortSpec, Target};
use health_service::maglev::{Maglev, SEED, SIZE};
use health_service::provider::ebpf::MaglevTables;
use nix::sys::signal::Signal;
use socket2::SockRef;
use tests::process::run;
use tests::served::{Connection, Datagrams};
use tests::testrun::TestRun;
use tests::upgrade::with_other_programs;
use tests::{Node, PATIENCE, wait_for};

use super::{ALL, SOON, Stand, ask_from, targets, unconnected};
use super::{wait_answered_by, wait_datagrams_answered_by};

/// Sockets that stay in use while agents come and go.
struct InUse {
    connection: Connection,
    connected: Datagrams,
    unconnected: UdpSocket,
    /// The backend that answers each socket.
    by: [String; 3],
    target: SocketAddr,
}

impl InUse {
    fn open(node: &Node, target: SocketAddr) -> anyhow::Result<Self> {
        let mut opened = Self {
            connection: Connection::open(node.name(), target)?,
            connected: Datagrams::open(node.name(), target)?,
            unconnected: unconnected(node, target)?,
            by: Default::default(),
            target,
        };
        opened.by = opened.answers()?;
        Ok(opened)
    }

    /// Sends a request through each socket, and returns the backends that answer.
    fn answers(&mut self) -> anyhow::Result<[String; 3]> {
        let datagram = wait_for("an answer", PATIENCE, || Ok(self.connected.ask(SOON)?))?;
        Ok([
            self.connection.ask()?.backend,
            datagram.backend,
            ask_from(&self.unconnected, self.target)?,
        ])
    }

    /// Checks that the same backends as before answer all sockets.
    fn ask(&mut self) -> anyhow::Result<()> {
        let by = self.answers()?;
        ensure!(by == self.by, "{by:?}, not {:?}", self.by);
        Ok(())
    }
}

/// Cookies of the sockets that are listed in a node's maps.
fn known_sockets(node: &Node) -> anyhow::Result<Vec<u64>> {
    let listed = node.listing("bpf lb list --sockets")?;
    let rows = listed.as_array().context("the sockets are no list")?;
    Ok(rows
        .iter()
        .filter_map(|row| row["cookie"].as_u64())
        .collect())
}

fn connected_socket(target: SocketAddr) -> std::io::Result<(UdpSocket, u64)> {
    let any = if target.is_ipv4() {
        "0.0.0.0:0"
    } else {
        "[::]:0"
    };
    let socket = UdpSocket::bind(any)?;
    socket.connect(target)?;
    let cookie = SockRef::from(&socket).cookie()?;
    Ok((socket, cookie))
}

/// Programs attached to the cgroup, from the agent's own list.
fn at_cgroup(node: &Node) -> anyhow::Result<Vec<String>> {
    let listed = node.listing("bpf prog list")?;
    let rows = listed.as_array().context("the programs are no list")?;
    let of_sockets = rows.iter().filter(|row| {
        let attached = row["attached"].as_array();
        attached.is_some_and(|places| places.iter().any(|place| place == "cgroup"))
    });
    let names = of_sockets.filter_map(|row| row["name"].as_str().map(str::to_owned));
    Ok(names.collect())
}

/// Writes a service at each of these addresses directly into the maps, with a backend on another node.
fn serve_alone(run: &mut TestRun, frontends: [SocketAddr; 2], protocol: u8) -> anyhow::Result<()> {
    let mut tables = run.datapath.services()?;
    let mut maglev = MaglevTables::new(Maglev::new(SIZE, SEED)?);
    let mut change = tables.change(0);
    for address in frontends {
        let spec = PortSpec {
            protocol,
            frontends: vec![FrontendSpec {
                address,
                kind: KIND_CLUSTER_IP,
                flags: 0,
                inside: Target::Cluster,
                outside: Target::Cluster,
            }],
            cluster: vec![BackendSpec {
                address: SocketAddr::new(address.ip(), BACKEND_PORT),
                weight: 1,
            }],
            algorithm: ALGORITHM_RANDOM,
            ..PortSpec::default()
        };
        change.set(None, &spec, &mut maglev)?;
    }
    change.commit()?;
    Ok(())
}

/// The port of the backends of [`serve_alone`].
const BACKEND_PORT: u16 = 7;

/// Whether the programs redirect a socket of this process to a backend. The socket itself always sees the service
/// address, so this asks the kernel for the peer.
fn is_translated(target: SocketAddr) -> anyhow::Result<bool> {
    let (socket, _) = connected_socket(target)?;
    let local = socket.local_addr()?;
    let listed = Command::new("ss")
        .args(["-Hun", "sport", "=", &format!(":{}", local.port())])
        .output()?;
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    let is_at = |port: u16| {
        let peer = SocketAddr::new(target.ip(), port).to_string();
        listed.split_whitespace().any(|word| word == peer)
    };
    ensure!(
        is_at(BACKEND_PORT) != is_at(target.port()),
        "{target}: {listed:?}"
    );
    Ok(is_at(BACKEND_PORT))
}

/// Otherwise, anyone who may write a service could intercept the agent's traffic to its API server.
#[test]
#[ignore = "needs root"]
fn sockets_of_the_agent_go_where_they_are_sent() -> anyhow::Result<()> {
    let targets: [SocketAddr; 2] = ["127.0.0.77:4240".parse()?, "[::1]:4240".parse()?];
    let mut run = TestRun::load_alone();
    let root = health_net::cgroup::root()?.context("no control groups")?;
    run.datapath.set_socket_root(Some(&root))?;
    serve_alone(&mut run, targets, 17)?;
    run.datapath.attach(&[])?;
    let this = process::tgid()?;
    for (agent_tgid, is_served) in [(0, true), (this, false), (this + 1, true)] {
        run.datapath.configure(DatapathConfig {
            layout_version: LAYOUT_VERSION,
            netns_cookie: health_net::netns::cookie()?,
            flags: SERVICES,
            agent_tgid,
            ..DatapathConfig::default()
        })?;
        for target in targets {
            ensure!(
                is_translated(target)? == is_served,
                "{target}, agent {agent_tgid}"
            );
            // The exemption covers all threads.
            let of_thread = std::thread::spawn(move || is_translated(target));
            let of_thread = of_thread.join().expect("a thread")?;
            ensure!(
                of_thread == is_served,
                "{target}, agent {agent_tgid}, a thread"
            );
        }
    }
    // A process that starts beside a running agent does not take over that agent's exemption.
    process::spare_own_sockets(&run.location)?;
    for target in targets {
        ensure!(is_translated(target)?, "{target}");
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn sockets_of_the_host_are_served_without_an_agent_and_until_services_are_off() -> anyhow::Result<()>
{
    let mut foreign = TestRun::load_alone();
    let root = health_net::cgroup::root()?.context("no control groups")?;
    foreign.datapath.set_socket_root(Some(&root))?;
    foreign.datapath.attach(&[])?;
    let stand = Stand::start()?;
    let service = stand.service("of-host", 1);
    stand.write(&service)?;
    let node = stand.bed.node(1);
    let targets = targets(&service);
    for target in &targets {
        wait_answered_by(node.name(), *target, &ALL)?;
    }
    let names = at_cgroup(node)?;
    ensure!(names.len() == 9, "{names:?}");

    // Sockets of endpoints are not recorded.
    let [client, _] = &stand.clients;
    for target in &targets {
        wait_datagrams_answered_by(&client.name, *target, &ALL)?;
        let (_of_client, cookie) = client.netns.run_in(|| connected_socket(*target))??;
        let (own, own_cookie) = node.run_in(|| connected_socket(*target))??;
        let known = known_sockets(node)?;
        ensure!(!known.contains(&cookie), "{known:?} has {cookie}");
        ensure!(known.contains(&own_cookie), "{known:?} lacks {own_cookie}");
        drop(own);
        wait_for("a closed socket to be forgotten", PATIENCE, || {
            Ok((!known_sockets(node)?.contains(&own_cookie)).then_some(()))
        })?;
    }

    // First without an agent, then with the programs of another version.
    let folder = tempfile::tempdir()?;
    let other = folder.path().join("health-agent");
    with_other_programs(&other)?;
    let in_use = targets.iter().map(|target| InUse::open(node, *target));
    let mut in_use: Vec<InUse> = in_use.collect::<anyhow::Result<_>>()?;
    for (signal, binary) in [
        (Signal::SIGKILL, Some(other.as_path())),
        (Signal::SIGTERM, None),
    ] {
        node.kill_agent(signal)?;
        for sockets in &mut in_use {
            sockets.ask().context("no agent")?;
            wait_answered_by(node.name(), sockets.target, &ALL)?;
        }
        node.take_over(binary)?;
        for sockets in &mut in_use {
            sockets.ask().context("the next agent")?;
            let target = sockets.target;
            wait_answered_by(node.name(), target, &ALL)?;
            let peer = node.run_in(|| TcpStream::connect(target)?.peer_addr())??;
            ensure!(peer == target, "{peer} instead of {target}");
        }
    }

    // Links that others detach are restored.
    let pin = node.pins().join("links/sock_connect4");
    let mut detach = Command::new("nsenter");
    detach
        .args(["--mount", "--target", &node.agent_pid()?.to_string()])
        .args(["bpftool", "link", "detach", "pinned"])
        .arg(&pin);
    run(&mut detach)?.success()?;
    wait_answered_by(node.name(), targets[0], &ALL)?;
    wait_for("the repair to be logged", PATIENCE, || {
        let repaired = node.logged(&["program sock_connect4", "was detached"])?;
        Ok((!repaired.is_empty()).then_some(()))
    })?;

    // Without services, the programs are removed.
    node.kill_agent(Signal::SIGTERM)?;
    node.start_agent_with("")?;
    for target in &targets {
        wait_for("the service to be gone", PATIENCE, || {
            let connected = node.run_in(|| TcpStream::connect_timeout(target, SOON))?;
            Ok(connected.is_err().then_some(()))
        })?;
    }
    // The agent first makes the programs serve nothing, and then detaches them.
    wait_for("the programs to be gone", PATIENCE, || {
        let names = at_cgroup(node)?;
        ensure!(names.is_empty(), "{names:?}");
        ensure!(!pin.exists(), "{} is there", pin.display());
        Ok(Some(()))
    })?;

    // A cleanup removes them too.
    node.kill_agent(Signal::SIGTERM)?;
    node.take_over(None)?;
    for target in &targets {
        wait_answered_by(node.name(), *target, &ALL)?;
    }
    node.kill_agent(Signal::SIGTERM)?;
    node.cli("cleanup")?.success()?;
    for target in &targets {
        let connected = node.run_in(|| TcpStream::connect_timeout(target, SOON))?;
        ensure!(connected.is_err(), "{target} is reached");
    }
    // Links of another instance are not affected.
    let faults = foreign.datapath.socket_faults();
    ensure!(faults.is_empty(), "{faults:?}");
    Ok(())
}
