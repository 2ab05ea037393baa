//! Flows from one client port to one backend over several paths at once: each gets its own replies, through another
//! source port where the backend could not tell the flows apart.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::panic::resume_unwind;
use std::thread;

use aya::Pod;
use health_common::ct::{CtEntry, TUPLE_OUT, Timeouts, Tuple4, Tuple6};
use health_common::service::{ALGORITHM_RANDOM, KIND_CLUSTER_IP, KIND_NODE_PORT};
use health_common::tuple::Tuple;
use health_datapath::conntrack::{Family, Tables as _};
use health_datapath::services::{PortSpec, Target};
use nix::sched::{CloneFlags, unshare};
use socket2::{Domain, Socket, Type};
use tests::bed::wait_local;
use tests::packet::IPV4;
use tests::testrun::{DROP, GO_ON, LONG_TIMEOUTS, REDIRECT, TestRun};
use tests::xdp::ip;

use crate::endpoint_packets::Way::{In, Out};
use crate::endpoint_packets::{ACK, RST, SCTP, SYN, TCP, UDP, Way, frame, segment, with_ports};
use crate::service_packets::{
    BACKEND_PORT, Hosts, NODE_PORT, Stand, at_uplink, backend, frontend, hosts, segment_at_uplink,
    two_services,
};

/// Destination of a client's packets: one of two services, or the backend itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    ClusterIp,
    NodePort,
    Nothing,
}
use By::{ClusterIp, NodePort, Nothing};

const WAYS: [By; 3] = [ClusterIp, NodePort, Nothing];

/// The client's location.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// An endpoint whose backend is on another node.
    Endpoint,
    /// Outside the cluster; the backend is an endpoint.
    Outside,
}

/// A client's port, and how the client reaches its backend.
#[derive(Clone, Copy, Debug)]
struct Client {
    hosts: Hosts,
    protocol: u8,
    from: Place,
    port: u16,
}

/// The part of a frame to compare: for a datagram, up to the ports, which the checksum follows.
fn comparable(protocol: u8, frame: &[u8]) -> &[u8] {
    let ip_len = if frame[12..14] == IPV4.to_be_bytes() {
        20
    } else {
        40
    };
    match protocol {
        TCP => frame,
        _ => &frame[..14 + ip_len + 4],
    }
}

fn source_port(frame: &[u8]) -> u16 {
    let at = 14
        + if frame[12..14] == IPV4.to_be_bytes() {
            20
        } else {
            40
        };
    u16::from_be_bytes([frame[at], frame[at + 1]])
}

impl Client {
    fn address(&self) -> IpAddr {
        match self.from {
            Place::Endpoint => self.hosts.endpoint,
            Place::Outside => self.hosts.client,
        }
    }

    fn backend(&self) -> (IpAddr, u16) {
        let address = match self.from {
            Place::Endpoint => self.hosts.elsewhere,
            Place::Outside => self.hosts.endpoint,
        };
        (address, BACKEND_PORT)
    }

    fn target(&self, by: By) -> (IpAddr, u16) {
        match by {
            ClusterIp => (self.hosts.cluster_ip, NODE_PORT),
            NodePort => (self.hosts.node, NODE_PORT),
            Nothing => self.backend(),
        }
    }

    /// A packet from or to the endpoint.
    fn at_endpoint(&self, way: Way, peer: (IpAddr, u16), port: u16, flags: u8) -> Vec<u8> {
        let ports = match way {
            Out => (port, peer.1),
            In => (peer.1, port),
        };
        match self.protocol {
            TCP => segment(way, peer.0, ports, flags),
            protocol => frame(way, peer.0, protocol, &with_ports(ports.0, ports.1)),
        }
    }

    fn at_uplink(&self, source: (IpAddr, u16), destination: (IpAddr, u16), flags: u8) -> Vec<u8> {
        match self.protocol {
            TCP => segment_at_uplink(source, destination, flags),
            protocol => at_uplink(source, destination, protocol),
        }
    }

    /// Sends a packet to the backend. Returns the source port with which it arrives, or `None` if it does not arrive.
    fn send(&self, stand: &Stand, by: By, flags: u8) -> Option<u16> {
        let to = self.target(by);
        let (program, packet) = match self.from {
            Place::Endpoint => (Out.program(), self.at_endpoint(Out, to, self.port, flags)),
            Place::Outside => {
                let client = (self.address(), self.port);
                ("from_netdev", self.at_uplink(client, to, flags))
            }
        };
        let outcome = stand.run.run(program, &packet);
        if outcome.code != GO_ON {
            return None;
        }
        let port = source_port(&outcome.bytes);
        let backend = self.backend();
        let expected = match self.from {
            Place::Endpoint => self.at_endpoint(Out, backend, port, flags),
            Place::Outside => self.at_uplink((self.address(), port), backend, flags),
        };
        let [sent, expected] = [&outcome.bytes, &expected].map(|it| comparable(self.protocol, it));
        assert_eq!(sent, expected, "{self:?} {by:?}");
        if self.from == Place::Outside {
            let client = (self.address(), port);
            let reached = self.at_endpoint(In, client, BACKEND_PORT, flags);
            assert_eq!(stand.run.run(In.program(), &reached).code, GO_ON);
        }
        Some(port)
    }

    /// Makes the backend reply to the port that it saw, and checks that the client gets the reply from the address that
    /// it contacted.
    fn check_answer(&self, stand: &Stand, by: By, seen: u16, flags: u8) {
        let (asked, backend) = (self.target(by), self.backend());
        let (outcome, expected) = match self.from {
            Place::Endpoint => {
                let answer = self.at_endpoint(In, backend, seen, flags);
                let outcome = stand.run.run(In.program(), &answer);
                (outcome, self.at_endpoint(In, asked, self.port, flags))
            }
            Place::Outside => {
                let client = (self.address(), seen);
                let answer = self.at_endpoint(Out, client, BACKEND_PORT, flags);
                assert_eq!(stand.run.run(Out.program(), &answer).bytes, answer);
                let leaving = self.at_uplink(backend, client, flags);
                let outcome = stand.run.run("to_netdev", &leaving);
                let client = (self.address(), self.port);
                (outcome, self.at_uplink(asked, client, flags))
            }
        };
        let [got, expected] = [&outcome.bytes, &expected].map(|it| comparable(self.protocol, it));
        assert_eq!(
            (outcome.code, got),
            (GO_ON, expected),
            "{self:?} {by:?} {seen}"
        );
    }

    /// Opens a flow and completes the handshake. Returns the client port that the backend sees.
    fn open(&self, stand: &Stand, by: By) -> u16 {
        let seen = self.send(stand, by, SYN);
        let seen = seen.unwrap_or_else(|| panic!("{self:?} by {by:?} does not reach its backend"));
        self.check_answer(stand, by, seen, SYN | ACK);
        self.go_on(stand, by, seen);
        seen
    }

    /// Sends a packet in each direction.
    fn go_on(&self, stand: &Stand, by: By, seen: u16) {
        assert_eq!(self.send(stand, by, ACK), Some(seen), "{self:?} {by:?}");
        self.check_answer(stand, by, seen, ACK);
    }
}

/// Calls `each` for clients of both kinds with different ports, in each IP version and protocol.
fn clients(mut each: impl FnMut(&mut Stand, Client)) {
    let mut stand = Stand::new();
    for hosts in hosts() {
        for protocol in [TCP, UDP] {
            for from in [Place::Endpoint, Place::Outside] {
                let client = Client {
                    hosts,
                    protocol,
                    from,
                    port: 4000,
                };
                stand.serve(&two_services(protocol, &hosts, client.backend().0));
                each(&mut stand, client);
            }
        }
    }
}

#[test]
#[ignore = "needs root"]
fn flows_from_one_port_to_one_backend_are_each_answered_whichever_way_comes_first() {
    let mut pairs = 0;
    clients(|stand, mut client| {
        for first in WAYS {
            for second in WAYS.into_iter().filter(|way| *way != first) {
                let others = WAYS
                    .into_iter()
                    .filter(|way| ![first, second].contains(way));
                client.port += 1;
                let mut seen = Vec::new();
                for by in [first, second].into_iter().chain(others) {
                    let port = client.open(stand, by);
                    assert!(
                        !seen.iter().any(|(_, other)| *other == port),
                        "{client:?} {seen:?}"
                    );
                    seen.push((by, port));
                    pairs += 1;
                }
                assert_eq!(seen[0].1, client.port, "the first keeps its own");
                for _ in 0..3 {
                    for (by, port) in &seen {
                        client.go_on(stand, *by, *port);
                    }
                }
            }
        }
    });
    assert_eq!(pairs, 2 * 2 * 2 * 6 * 3);
}

#[test]
#[ignore = "needs root"]
fn an_endpoint_that_is_its_own_backend_has_each_of_its_flows_answered() {
    let mut stand = Stand::new();
    for hosts in hosts() {
        for protocol in [TCP, UDP] {
            stand.serve(&two_services(protocol, &hosts, hosts.endpoint));
            let client = Client {
                hosts,
                protocol,
                from: Place::Endpoint,
                port: 4000,
            };
            let run = |peer: (IpAddr, u16), port: u16, flags: u8| {
                let packet = client.at_endpoint(Out, peer, port, flags);
                let outcome = stand.run.run(Out.program(), &packet);
                assert_eq!(outcome.code, REDIRECT, "{client:?}");
                outcome.bytes
            };
            let turned = |source: (IpAddr, u16), port: u16, flags: u8| {
                client.at_endpoint(In, source, port, flags)
            };
            let mut seen = Vec::new();
            for by in [ClusterIp, NodePort, ClusterIp, NodePort] {
                let flags = if seen.len() < 2 { SYN } else { ACK };
                let asked = client.target(by);
                let reached = run(asked, client.port, flags);
                let port = source_port(&reached);
                let expected = turned((hosts.gateway, port), BACKEND_PORT, flags);
                let [got, expected] =
                    [&reached, &expected].map(|it| &comparable(protocol, it)[12..]);
                assert_eq!(got, expected);
                let answered = run((hosts.gateway, port), BACKEND_PORT, flags | ACK);
                let expected = turned(asked, client.port, flags | ACK);
                let [got, expected] =
                    [&answered, &expected].map(|it| &comparable(protocol, it)[12..]);
                assert_eq!(got, expected);
                seen.push(port);
            }
            assert_eq!(seen[..2], seen[2..]);
            assert!(seen[0] == client.port && seen[1] != client.port);
        }
    }
}

#[test]
#[ignore = "needs root"]
fn a_flow_between_ports_that_are_taken_keeps_its_backend_and_its_client_too() {
    let mut stand = Stand::new();
    for hosts in hosts() {
        for protocol in [TCP, UDP] {
            let frontends = [
                frontend(hosts.cluster_ip, KIND_CLUSTER_IP, Target::Cluster),
                frontend(hosts.node, KIND_NODE_PORT, Target::Cluster),
            ];
            let backends = [hosts.elsewhere, hosts.client];
            stand.serve(&[PortSpec {
                protocol,
                frontends: frontends.to_vec(),
                cluster: backends.map(backend).to_vec(),
                affinity_secs: 10_800,
                algorithm: ALGORITHM_RANDOM,
                ..PortSpec::default()
            }]);
            let mut went_to = Vec::new();
            for port in 4000..4100 {
                for to in [hosts.cluster_ip, hosts.node] {
                    let packet = match protocol {
                        TCP => segment(Out, to, (port, NODE_PORT), SYN),
                        _ => frame(Out, to, UDP, &with_ports(port, NODE_PORT)),
                    };
                    let sent = stand.run.run(Out.program(), &packet).bytes;
                    let seen = source_port(&sent);
                    assert_eq!(seen == port, to == hosts.cluster_ip);
                    let is_to = |ip: &IpAddr| {
                        let expected = match protocol {
                            TCP => segment(Out, *ip, (seen, BACKEND_PORT), SYN),
                            _ => frame(Out, *ip, UDP, &with_ports(seen, BACKEND_PORT)),
                        };
                        comparable(protocol, &sent) == comparable(protocol, &expected)
                    };
                    went_to.push(backends.iter().position(is_to).expect("it was sent on"));
                }
            }
            assert!(went_to.iter().all(|backend| *backend == went_to[0]));
        }
    }
}

#[test]
#[ignore = "needs root"]
fn another_port_is_of_the_same_kind() {
    clients(|stand, client| {
        for (port, kind) in [
            (111, 512..=1023),
            (1023, 512..=1023),
            (1024, 1024..=u16::MAX),
        ] {
            let client = Client { port, ..client };
            client.open(stand, NodePort);
            let seen = client.open(stand, ClusterIp);
            assert!(kind.contains(&seen) && seen != port, "{client:?} {seen}");
        }
    });
}

#[test]
#[ignore = "needs root"]
fn a_port_is_its_clients_again_once_the_other_flow_is_over() {
    clients(|stand, client| {
        if client.protocol != TCP {
            return;
        }
        let first = client.open(stand, ClusterIp);
        let second = client.open(stand, Nothing);
        assert!(first == client.port && second != client.port);
        assert_eq!(client.send(stand, ClusterIp, RST), Some(first));
        // The remaining flow keeps its port.
        client.go_on(stand, Nothing, second);
        assert_eq!(client.send(stand, Nothing, RST), Some(second));
        assert_eq!(client.open(stand, Nothing), client.port);
        assert_ne!(client.open(stand, ClusterIp), client.port);
    });
}

#[test]
#[ignore = "needs root"]
fn nothing_is_left_of_flows_with_another_port_after_their_time() {
    let mut tested = 0;
    clients(|stand, client| {
        stand.configure(LONG_TIMEOUTS);
        for by in WAYS {
            client.open(stand, by);
        }
        let (own, moved): (Vec<_>, Vec<_>) = stand
            .all_flows()
            .into_iter()
            .partition(|(_, flow)| flow.client_port.is_none());
        assert_eq!((own.len(), moved.len()), (2, 4), "{client:?}");
        for name in ["HEALTH_CT4", "HEALTH_CT_ANY4"] {
            stand
                .run
                .change_flows::<Tuple4>(name, |entry: &mut CtEntry| entry.expires = 0);
        }
        for name in ["HEALTH_CT6", "HEALTH_CT_ANY6"] {
            stand
                .run
                .change_flows::<Tuple6>(name, |entry: &mut CtEntry| entry.expires = 0);
        }
        let tables = stand.run.datapath.tables().expect("the maps");
        for family in [Family::Ipv4, Family::Ipv6] {
            tables.collect(family).expect("a collection");
        }
        assert_eq!(stand.all_flows(), [], "{client:?}");
        stand.configure(Timeouts::default());
        tested += 1;
    });
    assert_eq!(tested, 8);
}

#[test]
#[ignore = "needs root"]
fn no_packet_in_a_peers_name_takes_the_answers_of_a_flow_that_the_backend_opened() {
    clients(|stand, client| {
        if client.from != Place::Outside {
            return;
        }
        let peer = (client.address(), client.port);
        let own = |flags: u8| client.at_endpoint(Out, peer, BACKEND_PORT, flags);
        let leaves = |stand: &Stand, flags: u8| {
            assert_eq!(stand.run.run(Out.program(), &own(flags)).bytes, own(flags));
            let leaving = client.at_uplink(client.backend(), peer, flags);
            stand.run.run("to_netdev", &leaving).bytes == leaving
        };
        assert!(leaves(stand, SYN));
        let answer = client.at_endpoint(In, peer, BACKEND_PORT, SYN | ACK);
        assert_eq!(stand.run.run(In.program(), &answer).code, GO_ON);
        assert!(leaves(stand, ACK));
        for by in [ClusterIp, NodePort] {
            let seen = client.send(stand, by, SYN);
            assert!(seen.is_some_and(|seen| seen != client.port), "{client:?}");
            assert!(leaves(stand, ACK), "{client:?}");
        }
    });
}

/// Evicts the entries for client packets to a destination, and keeps the entries for the replies.
fn evict_requests(run: &TestRun, to: (IpAddr, u16)) {
    let mut evicted = 0;
    for name in ["HEALTH_REVNAT4", "HEALTH_REVNAT_ANY4"] {
        evicted += evict_from::<Tuple4>(run, name, |key| {
            let address = IpAddr::V4(key.daddr_be.to_ne_bytes().into());
            (address, u16::from_be(key.dport_be)) == to
        });
    }
    for name in ["HEALTH_REVNAT6", "HEALTH_REVNAT_ANY6"] {
        evicted += evict_from::<Tuple6>(run, name, |key| {
            let octets = key.daddr_be.map(u32::to_ne_bytes).concat();
            let octets: [u8; 16] = octets.try_into().expect("an address");
            (IpAddr::V6(octets.into()), u16::from_be(key.dport_be)) == to
        });
    }
    assert_ne!(evicted, 0, "{to:?}");
}

fn evict_from<T: Tuple<ServiceFlow: Pod> + Pod>(
    run: &TestRun,
    name: &str,
    is_evicted: impl Fn(&T) -> bool,
) -> usize {
    let mut flows = run.hash_map::<T, T::ServiceFlow>(name);
    let keys = flows.keys().map(|key| key.expect("a key"));
    let keys = keys.filter(|key| key.direction() == TUPLE_OUT && is_evicted(key));
    let keys: Vec<T> = keys.collect();
    for key in &keys {
        flows.remove(key).expect("an entry");
    }
    keys.len()
}

#[test]
#[ignore = "needs root"]
fn datagrams_whose_flow_lost_one_of_its_entries_keep_their_port() {
    clients(|stand, client| {
        if client.protocol != UDP {
            return;
        }
        let seen = WAYS.map(|by| client.open(stand, by));
        for (by, seen) in WAYS.into_iter().zip(seen) {
            // The first flow goes to the backend directly, so it has no entry.
            if by != Nothing || seen != client.port {
                evict_requests(&stand.run, client.target(by));
            }
            client.go_on(stand, by, seen);
        }
    });
}

#[test]
#[ignore = "needs root"]
fn an_answer_to_datagrams_whose_entry_was_evicted_has_them_keep_port_and_backend() {
    clients(|stand, client| {
        if client.protocol != UDP || client.from != Place::Endpoint {
            return;
        }
        let hosts = client.hosts;
        let mut services = two_services(UDP, &hosts, hosts.elsewhere);
        for service in &mut services {
            service.cluster = [hosts.elsewhere, hosts.client].map(backend).to_vec();
            service.algorithm = ALGORITHM_RANDOM;
        }
        stand.serve(&services);
        for port in 4000..4032 {
            let asked = client.target(ClusterIp);
            let request = client.at_endpoint(Out, asked, port, 0);
            let sent = stand.run.run(Out.program(), &request).bytes;
            let backends = [hosts.elsewhere, hosts.client].map(|ip| (ip, BACKEND_PORT));
            let mut chosen = backends.into_iter().filter(|to| {
                let expected = client.at_endpoint(Out, *to, port, 0);
                comparable(UDP, &sent) == comparable(UDP, &expected)
            });
            let chosen = chosen.next().expect("one of both backends");
            evict_requests(&stand.run, asked);
            let answer = client.at_endpoint(In, chosen, port, 0);
            let got = stand.run.run(In.program(), &answer).bytes;
            let expected = client.at_endpoint(In, asked, port, 0);
            assert_eq!(comparable(UDP, &got), comparable(UDP, &expected));
            assert_eq!(stand.run.run(Out.program(), &request).bytes, sent);
        }
    });
}

/// Runs a test in a namespace that has the addresses of the node and the client.
fn in_namespace(test: fn()) -> anyhow::Result<()> {
    let thread = thread::spawn(move || {
        unshare(CloneFlags::CLONE_NEWNET)?;
        ip("link set lo up")?;
        for hosts in hosts() {
            for address in [hosts.node, hosts.client] {
                ip(&format!("address add {address} dev lo nodad"))?;
                wait_local(&address.to_string(), &[])?;
            }
        }
        test();
        anyhow::Ok(())
    });
    thread.join().unwrap_or_else(|panic| resume_unwind(panic))
}

/// A server socket that is connected to the client; for TCP, also the client's socket.
fn connected(protocol: u8, server: SocketAddr, client: SocketAddr) -> anyhow::Result<Vec<Socket>> {
    let domain = Domain::for_address(server);
    if protocol == UDP {
        let socket = Socket::new(domain, Type::DGRAM, None)?;
        socket.bind(&server.into())?;
        socket.connect(&client.into())?;
        return Ok(vec![socket]);
    }
    let listener = TcpListener::bind(server)?;
    let socket = Socket::new(domain, Type::STREAM, None)?;
    socket.bind(&client.into())?;
    socket.connect(&server.into())?;
    Ok(vec![listener.accept()?.0.into(), socket])
}

#[test]
#[ignore = "needs root"]
fn the_socket_of_a_flow_itself_does_not_take_its_port() -> anyhow::Result<()> {
    in_namespace(|| {
        let mut stand = Stand::new();
        for hosts in hosts() {
            for protocol in [TCP, UDP] {
                stand.serve(&two_services(protocol, &hosts, hosts.node));
                let asked = (hosts.cluster_ip, NODE_PORT);
                let server = (hosts.node, BACKEND_PORT);
                let client = (hosts.client, 4000);
                let send = |client: (IpAddr, u16), flags: u8| {
                    let packet = match protocol {
                        TCP => segment_at_uplink(client, asked, flags),
                        _ => at_uplink(client, asked, UDP),
                    };
                    let sent = stand.run.run("from_netdev", &packet).bytes;
                    assert_ne!(sent, packet, "{hosts:?} {protocol}");
                    source_port(&sent)
                };
                assert_eq!(send(client, SYN), client.1);
                let connect = |client: (IpAddr, u16)| {
                    connected(protocol, server.into(), client.into()).expect("a socket")
                };
                let own = connect(client);
                assert_eq!(send(client, ACK), client.1);
                evict_requests(&stand.run, asked);
                assert_eq!(send(client, ACK), client.1, "{hosts:?} {protocol}");
                // A socket that existed before the flow owns its port.
                if protocol == UDP {
                    let other = (hosts.client, 4001);
                    drop(own);
                    let _socket = connect(other);
                    assert_ne!(send(other, SYN), other.1, "{hosts:?} {protocol}");
                }
            }
        }
    })
}

#[test]
#[ignore = "needs root"]
fn associations_whose_ports_cannot_change_get_another_backend() {
    let mut stand = Stand::new();
    for hosts in hosts() {
        let mut services = two_services(SCTP, &hosts, hosts.elsewhere);
        for service in &mut services {
            service.cluster = [hosts.elsewhere, hosts.client].map(backend).to_vec();
            for backend in &mut service.cluster {
                backend.address.set_port(NODE_PORT);
            }
        }
        stand.serve(&services);
        let sent = [hosts.cluster_ip, hosts.node].map(|ip| {
            let packet = frame(Out, ip, SCTP, &with_ports(4000, NODE_PORT));
            let outcome = stand.run.run(Out.program(), &packet);
            assert_ne!(outcome.code, DROP);
            assert_eq!(source_port(&outcome.bytes), 4000);
            outcome.bytes
        });
        assert_ne!(sent[0], sent[1]);
    }
}
