//! Events that the programs report: on crafted packets, and through `health-agent monitor` on a bed.

use std::io::{BufRead as _, BufReader, Read as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd as _;
use std::process::{Child, ChildStderr, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use anyhow::{Context as _, ensure};
use aya::TestRunOptions;
use aya::programs::TestRun as _;
use health_common::addr::Addr;
use health_common::config::DatapathConfig;
use health_common::ct::{TUPLE_IN, TUPLE_OUT};
use health_common::endpoint::{ENDPOINT_DEBUG, EndpointInfo};
use health_common::events::{
    EVENT_CT_CLOSED, EVENT_CT_CREATED, EVENT_CT_REOPENED, EVENT_DROP, EVENT_TRACE, EVENTS_BYTES,
    Event, MonitorFilter, Network, WANT_CT, WANT_DROP, WANT_NAT, WANT_TRACE,
};
use health_common::identity;
use health_common::metrics::{Direction, Reason};
use health_datapath::events::{KernelRing, Ring as _, Switch as _};
use health_net::netns::NetNs;
use health_settings::MasqueradeSettings;
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrIn, bind, setsockopt, socket, sockopt,
};
use nix::unistd::Pid;
use serde_json::Value;
use tests::packet::{Tcp, tagged};
use tests::ping::{Pace, Pinging};
use tests::testrun::{DROP, GO_ON, IFINDEX, TestRun};
use tests::{Bed, Member, Node, PATIENCE, wait_for};
use tokio::runtime::{Builder, Runtime};

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 0x0e];
const HOST_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const ENDPOINT4: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 7);
const ENDPOINT6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x10, 0x244, 1, 0, 0, 0, 7);
const FAR4: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 9);
const FAR6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 9);
/// An address that does not belong to the endpoint.
const FORGED: Ipv4Addr = Ipv4Addr::new(10, 9, 9, 9);
const FORGED_PORT: u16 = 4000;
const PORT: u16 = 5001;
/// Size of a record in the ring, including its header.
const RECORD: u32 = size_of::<Event>() as u32 + 8;

const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
const ACK: u8 = 16;

const ALL: MonitorFilter = MonitorFilter {
    wanted: WANT_DROP | WANT_CT,
    endpoint: 0,
    port_be: 0,
    source: ANY,
    destination: ANY,
    protocol: 0,
    pad: [0; 3],
};
const ANY: Network = Network {
    address: health_common::addr::Addr { words_be: [0; 4] },
    mask: health_common::addr::Addr { words_be: [0; 4] },
};

/// An endpoint's programs, and the ring to which they write events.
struct Programs {
    run: TestRun,
    ring: KernelRing,
    _runtime: Runtime,
}

impl Programs {
    fn load(filter: &MonitorFilter) -> anyhow::Result<Self> {
        let mut run = TestRun::load();
        let settings = DatapathConfig::default();
        run.set_health_endpoint((ENDPOINT4, ENDPOINT6), MAC, HOST_MAC, settings);
        run.datapath.event_switch()?.set(filter)?;
        let runtime = Builder::new_current_thread().enable_io().build()?;
        let ring = {
            let _inside = runtime.enter();
            run.datapath.ring()?
        };
        Ok(Self {
            run,
            ring,
            _runtime: runtime,
        })
    }

    fn events(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        while self.ring.take(|event| events.push(*event)) {}
        events
    }
}

fn segment(source: IpAddr, destination: IpAddr, ports: (u16, u16), flags: u8) -> Vec<u8> {
    Tcp::between(ports, flags).frame(source, destination)
}

fn forged() -> Vec<u8> {
    segment(FORGED.into(), FAR4.into(), (FORGED_PORT, 80), SYN)
}

/// The event names the sending device's endpoint: the owner of the forged address did not send the packet, and the
/// destination did nothing.
#[test]
#[ignore = "needs root"]
fn a_false_source_is_reported_with_the_device_that_it_came_by() -> anyhow::Result<()> {
    const OTHER: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 8);
    const SENDER: u16 = 300;
    let mut programs = Programs::load(&ALL)?;
    programs.run.datapath.configure(DatapathConfig::default())?;
    let mut endpoints = programs.run.hash_map("HEALTH_ENDPOINTS");
    let mut devices = programs.run.hash_map("HEALTH_DEVICES");
    for (address, ifindex, id) in [(ENDPOINT4, IFINDEX, SENDER), (OTHER, IFINDEX + 1, 301)] {
        let info = EndpointInfo {
            ifindex,
            id,
            ..EndpointInfo::default()
        };
        endpoints.insert(Addr::from(address), info, 0)?;
        devices.insert(ifindex, u32::from(id), 0)?;
    }
    let mut reported = |program: &str, source: Ipv4Addr, destination: Ipv4Addr| {
        let packet = segment(source.into(), destination.into(), (FORGED_PORT, 80), SYN);
        assert_eq!(programs.run.run(program, &packet).code, DROP);
        let events = programs.events();
        let [event] = &events[..] else {
            panic!("one event, not {events:?}")
        };
        assert_eq!(event.reason, Reason::InvalidSource as u8);
        assert_eq!(event.ifindex, IFINDEX);
        event.endpoint
    };
    for (source, destination) in [(OTHER, FAR4), (FORGED, OTHER), (FORGED, FAR4)] {
        assert_eq!(reported("from_endpoint", source, destination), SENDER);
    }
    // The device now belongs to no endpoint, like an uplink.
    devices.remove(&IFINDEX)?;
    for (source, destination) in [(OTHER, FAR4), (OTHER, ENDPOINT4), (ENDPOINT4, OTHER)] {
        assert_eq!(reported("from_netdev", source, destination), 0);
    }
    Ok(())
}

/// Only packets that pass, in both directions.
#[test]
#[ignore = "needs root"]
fn packets_are_traced_if_their_endpoint_and_a_monitor_want_it() -> anyhow::Result<()> {
    const ID: u16 = 300;
    for (flags, wanted, is_traced) in [
        (0, WANT_TRACE, false),
        (ENDPOINT_DEBUG, WANT_DROP | WANT_CT, false),
        (ENDPOINT_DEBUG, WANT_TRACE, true),
    ] {
        let mut programs = Programs::load(&MonitorFilter { wanted, ..ALL })?;
        programs.run.datapath.configure(DatapathConfig::default())?;
        let info = EndpointInfo {
            ifindex: IFINDEX,
            id: ID,
            flags,
            ..EndpointInfo::default()
        };
        let mut endpoints = programs.run.hash_map("HEALTH_ENDPOINTS");
        for address in [Addr::from(ENDPOINT4), Addr::from(ENDPOINT6)] {
            endpoints.insert(address, info, 0)?;
        }
        let mut devices = programs.run.hash_map("HEALTH_DEVICES");
        devices.insert(IFINDEX, u32::from(ID), 0)?;
        let mut expected = Vec::new();
        for (own, far) in [
            (IpAddr::from(ENDPOINT4), IpAddr::from(FAR4)),
            (ENDPOINT6.into(), FAR6.into()),
        ] {
            let sent = segment(own, far, (40_000, 80), SYN);
            let answered = segment(far, own, (80, 40_000), SYN | ACK);
            assert_eq!(programs.run.run("from_endpoint", &sent).code, GO_ON);
            assert_eq!(programs.run.run("to_endpoint", &answered).code, GO_ON);
            expected.push((far, 80, Direction::Ingress as u8, sent.len()));
            expected.push((own, 40_000, Direction::Egress as u8, answered.len()));
        }
        assert_eq!(programs.run.run("from_endpoint", &forged()).code, DROP);
        let mut events = programs.events();
        events.retain(|event| event.kind == EVENT_TRACE);
        let traced: Vec<_> = events
            .iter()
            .map(|event| {
                assert_eq!((event.endpoint, event.ifindex), (ID, IFINDEX));
                (
                    event.destination.to_ip(),
                    u16::from_be(event.dport_be),
                    event.direction,
                    event.length as usize,
                )
            })
            .collect();
        assert_eq!(traced, if is_traced { expected } else { Vec::new() });
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn nothing_is_written_unless_somebody_wants_it() -> anyhow::Result<()> {
    let opening = segment(ENDPOINT4.into(), FAR4.into(), (40_000, 80), SYN);
    let networks = |source: Ipv4Addr| Network::new(source.into(), 128);
    for (filter, drops, flows) in [
        (MonitorFilter::default(), 0, 0),
        (ALL, 1, 1),
        (
            MonitorFilter {
                wanted: WANT_DROP,
                ..ALL
            },
            1,
            0,
        ),
        (
            MonitorFilter {
                wanted: WANT_CT,
                ..ALL
            },
            0,
            1,
        ),
        (
            MonitorFilter {
                protocol: 17,
                ..ALL
            },
            0,
            0,
        ),
        (
            MonitorFilter {
                port_be: FORGED_PORT.to_be(),
                ..ALL
            },
            1,
            0,
        ),
        (
            MonitorFilter {
                endpoint: 77,
                ..ALL
            },
            1,
            1,
        ),
        (
            MonitorFilter {
                endpoint: 78,
                ..ALL
            },
            0,
            0,
        ),
        (
            MonitorFilter {
                source: networks(ENDPOINT4),
                ..ALL
            },
            0,
            1,
        ),
        (
            MonitorFilter {
                destination: networks(FAR4),
                ..ALL
            },
            1,
            1,
        ),
    ] {
        let mut programs = Programs::load(&filter)?;
        assert_eq!(programs.run.run("from_endpoint", &forged()).code, DROP);
        assert_eq!(programs.run.run("from_endpoint", &opening).code, GO_ON);
        let kinds: Vec<u8> = programs.events().iter().map(|event| event.kind).collect();
        let expected = [vec![EVENT_DROP; drops], vec![EVENT_CT_CREATED; flows]].concat();
        assert_eq!(kinds, expected, "{filter:?}");
        assert_eq!(programs.run.counted(Reason::EventLost), 0);
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_drop_says_which_packet_of_which_endpoint_it_was() -> anyhow::Result<()> {
    let mut programs = Programs::load(&ALL)?;
    programs.run.run("from_endpoint", &forged());
    let events = programs.events();
    let [event] = &events[..] else {
        panic!("one event, not {events:?}");
    };
    assert!(event.time_ns > 0);
    let expected = Event {
        time_ns: event.time_ns,
        source: FORGED.into(),
        destination: FAR4.into(),
        ifindex: IFINDEX,
        source_identity: 0,
        length: forged().len() as u32,
        sport_be: FORGED_PORT.to_be(),
        dport_be: 80_u16.to_be(),
        endpoint: 77,
        kind: EVENT_DROP,
        protocol: 6,
        reason: Reason::InvalidSource as u8,
        direction: Direction::Ingress as u8,
        pad: [0; 2],
    };
    assert_eq!(*event, expected);

    // Even for a packet with a truncated TCP header, the event has the addresses.
    let mut cut = forged();
    cut.truncate(14 + 20 + 4);
    programs.run.run("from_endpoint", &cut);
    let event = programs.events().pop().context("an event")?;
    assert_eq!((event.source, event.sport_be), (FORGED.into(), 0));
    assert_eq!((event.protocol, event.length), (6, cut.len() as u32));

    let forged6 = segment("fd00::bad".parse()?, FAR6.into(), (FORGED_PORT, 80), SYN);
    programs.run.run("from_endpoint", &forged6);
    let event = programs.events().pop().context("an event")?;
    assert_eq!(event.source.to_ip(), "fd00::bad".parse::<IpAddr>()?);
    assert_eq!((event.endpoint, event.sport_be), (77, FORGED_PORT.to_be()));
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn what_cannot_be_masqueraded_is_distinguished_from_other_drops() -> anyhow::Result<()> {
    let of_nat = MonitorFilter {
        wanted: WANT_NAT,
        ..ALL
    };
    // The segment belongs to no flow and does not start one.
    let reset = segment(ENDPOINT4.into(), FAR4.into(), (40_000, 80), RST);
    for (filter, count) in [(of_nat, 2), (ALL, 0)] {
        let mut programs = Programs::load(&filter)?;
        let masquerade = MasqueradeSettings {
            native_routing_cidrs: vec!["10.0.0.0/8".parse()?],
            masquerade_excludes: Vec::new(),
            masquerade_ports: "32768-65535".parse()?,
            gateway_cidrs: Vec::new(),
        };
        let masquerade = masquerade.of_node(&["172.30.0.1".parse()?], &[])?;
        programs.run.datapath.set_masquerade(masquerade)?;
        programs.run.run("from_endpoint", &forged());
        // A VLAN tag in front of the packet makes no difference.
        for packet in [reset.clone(), tagged(&reset, &[(0x8100, 7)])] {
            assert_eq!(programs.run.run("to_netdev", &packet).code, DROP);
        }
        let events = programs.events();
        let reported: Vec<_> = events
            .iter()
            .filter(|event| event.reason == Reason::NatUnsupported as u8)
            .map(|event| (event.source.to_ip(), event.sport_be, event.endpoint))
            .collect();
        let expected = (IpAddr::from(ENDPOINT4), 40_000_u16.to_be(), 77);
        assert_eq!(reported, vec![expected; count]);
        let drops_of_others = events.len() - reported.len();
        assert_eq!(drops_of_others, usize::from(filter == ALL));
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn each_turn_of_a_connection_is_reported_once() -> anyhow::Result<()> {
    for (endpoint, far) in [
        (IpAddr::from(ENDPOINT4), IpAddr::from(FAR4)),
        (ENDPOINT6.into(), FAR6.into()),
    ] {
        for is_out in [true, false] {
            let mut programs = Programs::load(&ALL)?;
            let (opener, answerer, direction, opened_by) = match is_out {
                true => (endpoint, far, TUPLE_OUT, identity::HEALTH),
                false => (far, endpoint, TUPLE_IN, identity::WORLD),
            };
            let mut reported = Vec::new();
            for (is_opener, flags) in [
                (true, SYN),
                (true, SYN),
                (false, SYN | ACK),
                (true, ACK),
                (true, FIN | ACK),
                (false, ACK),
                (false, FIN | ACK),
                (true, ACK),
                (true, SYN),
                (false, SYN | ACK),
            ] {
                let packet = match is_opener {
                    true => segment(opener, answerer, (40_000, 80), flags),
                    false => segment(answerer, opener, (80, 40_000), flags),
                };
                let program = match is_opener == is_out {
                    true => "from_endpoint",
                    false => "to_endpoint",
                };
                assert_eq!(programs.run.run(program, &packet).code, GO_ON);
                for event in programs.events() {
                    assert_eq!(event.source.to_ip(), opener);
                    assert_eq!(event.destination.to_ip(), answerer);
                    assert_eq!(
                        (event.sport_be, event.dport_be),
                        (40_000_u16.to_be(), 80_u16.to_be())
                    );
                    assert_eq!((event.direction, event.endpoint), (direction, 77));
                    assert_eq!((event.source_identity, event.ifindex), (opened_by, IFINDEX));
                    reported.push((flags, event.kind));
                }
            }
            assert_eq!(
                reported,
                [
                    (SYN, EVENT_CT_CREATED),
                    (FIN | ACK, EVENT_CT_CLOSED),
                    (SYN, EVENT_CT_REOPENED),
                ]
            );
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn what_the_ring_has_no_room_for_is_counted() -> anyhow::Result<()> {
    let mut programs = Programs::load(&ALL)?;
    let sent = EVENTS_BYTES / RECORD + 1_000;
    let packet = forged();
    let options = TestRunOptions {
        data_in: Some(&packet),
        repeat: sent,
        ..TestRunOptions::new()
    };
    programs.run.program("from_endpoint").test_run(options)?;
    let read = programs.events().len() as u64;
    assert!(read >= u64::from(EVENTS_BYTES / RECORD) - 1, "{read}");
    let lost = programs.run.counted(Reason::EventLost);
    assert_eq!(read + lost, u64::from(sent));
    // The ring has space again.
    programs.run.run("from_endpoint", &forged());
    assert_eq!(programs.events().len(), 1);
    assert_eq!(programs.run.counted(Reason::EventLost), lost);
    Ok(())
}

/// A running `health-agent monitor -o jsonl`; killed on drop.
struct Monitor {
    child: Child,
    stderr: BufReader<ChildStderr>,
    lines: Arc<Mutex<Vec<Value>>>,
    reader: Option<JoinHandle<()>>,
}

impl Monitor {
    /// Starts a monitor, and waits until the programs write the events that it has selected.
    fn start(node: &Node, flags: &str) -> anyhow::Result<Self> {
        let mut child = node
            .cli_command()
            .args(["monitor", "-o", "jsonl"])
            .args(flags.split_whitespace())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let stdout = BufReader::new(child.stdout.take().context("its output")?);
        let stderr = BufReader::new(child.stderr.take().context("its messages")?);
        let lines = Arc::new(Mutex::new(Vec::new()));
        let taken = lines.clone();
        let reader = thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                let line = serde_json::from_str(&line).expect("JSON");
                taken.lock().expect("no panic").push(line);
            }
        });
        let mut monitor = Self {
            child,
            stderr,
            lines,
            reader: Some(reader),
        };
        let mut first = String::new();
        monitor.stderr.read_line(&mut first)?;
        ensure!(first.starts_with("Monitoring"), "{first}");
        Ok(monitor)
    }

    fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        Ok(kill(Pid::from_raw(self.child.id().cast_signed()), signal)?)
    }

    fn lines(&self) -> Vec<Value> {
        self.lines.lock().expect("no panic").clone()
    }

    /// Waits for a matching line.
    fn wait(&self, what: &str, is: impl Fn(&Value) -> bool) -> anyhow::Result<Value> {
        wait_for(what, PATIENCE, || {
            let found = self.lines().into_iter().find(&is);
            found
                .map(Some)
                .with_context(|| format!("there are {:?}", self.lines()))
        })
    }

    /// The exit code and output of the monitor, after waiting until it exits.
    fn ended(mut self) -> anyhow::Result<(Option<i32>, String, Vec<Value>)> {
        let status = wait_for("the monitor to end", PATIENCE, || {
            Ok(self.child.try_wait()?)
        })?;
        let mut said = String::new();
        self.stderr.read_to_string(&mut said)?;
        if let Some(reader) = self.reader.take() {
            reader.join().ok().context("the reader panicked")?;
        }
        Ok((status.code(), said, self.lines()))
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends UDP packets from the health endpoint's namespace with a source address that is not the endpoint's.
fn forge(node: &Node, count: usize, to: Ipv4Addr) -> anyhow::Result<()> {
    let send = || -> anyhow::Result<()> {
        let socket = socket(
            AddressFamily::Inet,
            SockType::Datagram,
            SockFlag::SOCK_CLOEXEC,
            None,
        )?;
        setsockopt(&socket, sockopt::IpTransparent, &true)?;
        let from = SockaddrIn::from(std::net::SocketAddrV4::new(FORGED, FORGED_PORT));
        bind(socket.as_raw_fd(), &from)?;
        let socket = UdpSocket::from(socket);
        for _ in 0..count {
            socket.send_to(b"forged", (to, PORT))?;
        }
        Ok(())
    };
    NetNs::open(&format!("health-{}", node.name()))?.run_in(send)?
}

/// Event types that a node's programs currently write.
fn written(node: &Node) -> anyhow::Result<Value> {
    let mut dump = node.listing("bpf map dump HEALTH_MONITOR")?;
    Ok(dump[0]["value"]["types"].take())
}

fn wait_nothing_is_written(node: &Node) -> anyhow::Result<()> {
    wait_for("the programs to write no events", PATIENCE, || {
        Ok((written(node)? == Value::Array(Vec::new())).then_some(()))
    })
}

/// The value of a metric without labels, as exported by the node's agent.
fn metric(node: &Node, name: &str) -> anyhow::Result<u64> {
    let text = node.run_in(|| -> anyhow::Result<String> {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, 9962))?;
        std::io::Write::write_all(&mut stream, b"GET /metrics HTTP/1.0\r\nHost: node\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    })??;
    let value = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    Ok(value
        .with_context(|| format!("no {name} in\n{text}"))?
        .parse()?)
}

#[test]
#[ignore = "needs root"]
fn a_monitor_shows_drops_and_flows_as_they_happen() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(2).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let (node, peer) = (bed.node(1), bed.node(2));
    let id = node.listing("endpoint list")?[0]["id"].clone();
    let endpoint = node.health_ipv4()?;

    let drops = Monitor::start(node, "--type drop")?;
    forge(node, 1, peer.ipv4())?;
    let dropped = drops.wait("a drop", |_| true)?;
    assert_eq!(dropped["type"], "drop");
    assert_eq!(dropped["reason"], "Invalid source IP");
    assert_eq!(dropped["direction"], "ingress");
    assert_eq!(dropped["endpoint"], id);
    assert_eq!(dropped["device"], "lxc_health");
    assert_eq!(
        dropped["packet"],
        serde_json::json!({
            "protocol": "UDP", "source": FORGED.to_string(), "source-port": FORGED_PORT,
            "destination": peer.ipv4().to_string(), "destination-port": PORT,
        })
    );
    let name = "health_agent_drop_count_total{reason=\"Invalid source IP\",direction=\"INGRESS\"}";
    assert!(metric(node, name)? >= 1);

    let flows = Monitor::start(
        node,
        &format!(
            "--type ct --endpoint {id} --proto tcp --src {} --port {PORT}",
            peer.ipv4()
        ),
    )?;
    let listener = NetNs::open(&format!("health-{}", node.name()))?
        .run_in(|| TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT)))??;
    let client = peer.run_in(|| TcpStream::connect(SocketAddr::new(endpoint, PORT)))??;
    let (server, _) = listener.accept()?;
    let port = client.local_addr()?.port();
    drop(client);
    drop(server);
    for event in ["created", "closed"] {
        let flow = flows.wait(event, |line| line["event"] == event)?;
        assert_eq!(flow["type"], "ct");
        assert_eq!(flow["direction"], "in");
        assert_eq!(flow["endpoint"], id);
        assert_eq!(flow["flow"]["source"], peer.ipv4().to_string());
        assert_eq!(flow["flow"]["source-port"], port);
        assert_eq!(flow["flow"]["destination"], endpoint.to_string());
    }
    assert_eq!(flows.lines().len(), 2, "probes are none of it");
    assert_eq!(drops.lines().len(), 1);
    drop((drops, flows));
    wait_nothing_is_written(node)?;

    // The programs do not even write events that the filter excludes.
    let others = Monitor::start(node, "--type drop --proto sctp")?;
    let before = metric(node, "health_agent_monitor_events_total")?;
    forge(node, 5, peer.ipv4())?;
    let some = Monitor::start(node, "--type drop --proto udp --count 2")?;
    forge(node, 2, peer.ipv4())?;
    let (code, _, lines) = some.ended()?;
    assert_eq!((code, lines.len()), (Some(0), 2));
    assert_eq!(
        metric(node, "health_agent_monitor_events_total")?,
        before + 2
    );
    assert_eq!(others.lines().len(), 0);

    let text = node.cli("monitor --type drop --for 10ms")?;
    assert_eq!((text.code, text.stdout.as_str()), (Some(0), ""));
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn monitors_that_stall_die_or_lose_their_agent_do_no_harm() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(2).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let (node, peer) = (bed.node(1), bed.node(2));

    // More events than the monitor's queue in the agent and its socket can hold.
    let sent = 6_000;
    let stalled = Monitor::start(node, "--type drop")?;
    let quick = Monitor::start(node, "--type drop")?;
    stalled.signal(Signal::SIGSTOP)?;
    forge(node, sent, peer.ipv4())?;
    let lost = |monitor: &Monitor| -> u64 {
        let lines = monitor.lines();
        let lost = lines.iter().filter_map(|line| line["events"].as_u64());
        lost.sum()
    };
    let seen = |monitor: &Monitor| {
        let lines = monitor.lines();
        let events = lines.iter().filter(|line| line["type"] == "drop");
        events.count() as u64 + lost(monitor)
    };
    let all = |monitor: &Monitor| {
        wait_for("all events", PATIENCE, || {
            let seen = seen(monitor);
            Ok((seen == sent as u64).then_some(()))
        })
    };
    all(&quick)?;
    stalled.signal(Signal::SIGCONT)?;
    all(&stalled)?;
    assert!(lost(&stalled) > 0, "{} lines", stalled.lines().len());
    let of_readers = "health_agent_monitor_lost_events_total{cause=\"slow-reader\"}";
    assert!(metric(node, of_readers)? >= lost(&stalled));

    stalled.signal(Signal::SIGKILL)?;
    quick.signal(Signal::SIGKILL)?;
    wait_nothing_is_written(node)?;

    // An agent that stops tells its monitors and cleans up; after a kill, the next agent cleans up.
    let monitor = Monitor::start(node, "")?;
    node.kill_agent(Signal::SIGTERM)?;
    let (code, said, _) = monitor.ended()?;
    assert_eq!(code, Some(1));
    assert!(said.contains("the agent stopped"), "{said}");
    wait_nothing_is_written(node)?;
    let ran = node.cli("monitor")?;
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.contains("no agent"), "{}", ran.stderr);

    node.start_agent()?;
    let monitor = wait_for("the agent to have its programs", PATIENCE, || {
        Monitor::start(node, "--type drop").map(Some)
    })?;
    node.kill_agent(Signal::SIGKILL)?;
    let (code, said, _) = monitor.ended()?;
    assert_eq!(code, Some(1));
    assert!(said.contains("health.sock"), "{said}");
    assert_eq!(written(node)?, serde_json::json!(["drop"]));
    node.start_agent()?;
    wait_nothing_is_written(node)
}

#[test]
#[ignore = "needs root"]
fn the_packets_of_an_endpoint_with_debug_are_shown_also_after_a_restart() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(1).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let node = bed.node(1);
    let watched = Member::on(node, "watched", "--label app=watched")?;
    let peer = Member::on(node, "peer", "--label app=peer")?;
    let id = watched.endpoint.id;
    let said = node.cli(&format!("endpoint config {id} debug=on"))?;
    assert!(said.success()?.contains("debug=on\n"));
    let log = node.cli(&format!("endpoint log {id}"))?.success()?;
    assert!(log.contains("settings changed: debug=on"), "{log}");
    let are_shown = || -> anyhow::Result<()> {
        let pinging = Pinging::start(&peer.name, watched.ipv4()?, Pace::DENSE);
        let lines = node.listing("monitor --type trace --count 6")?;
        pinging.end()?;
        let lines = lines.as_array().context("the events are no list")?;
        assert!(lines.iter().all(|line| line["endpoint"] == id), "{lines:?}");
        for direction in ["egress", "ingress"] {
            let are_there = lines.iter().any(|line| line["direction"] == direction);
            assert!(are_there, "{direction}: {lines:?}");
        }
        Ok(())
    };
    are_shown()?;
    node.kill_agent(Signal::SIGKILL)?;
    node.start_agent()?;
    wait_for("the endpoint to be ready again", PATIENCE, || {
        let shown = node.listing(&format!("endpoint get {id}"));
        Ok(shown.ok().filter(|shown| shown["state"] == "ready"))
    })?;
    let shown = node.listing(&format!("endpoint get {id}"))?;
    assert_eq!(shown["settings"]["debug"], true);
    are_shown()
}
