//! The eBPF programs answer like a Linux host: sent once to the programs and once to the namespace's own stack, the
//! same requests get the same replies, byte for byte.

use std::io::Read as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use nix::sys::signal::Signal;
use socket2::{Domain, Protocol, Socket, Type};
use tests::attached;
use tests::packet::{Ipv4, Ipv6, checksum, echo, echo4, payload};
use tests::{Bed, Node, PATIENCE, wait_for};

/// A reply takes less time than this.
const QUIET: Duration = Duration::from_millis(20);
/// Fits the largest payload, 8972 bytes.
const MTU: u32 = 9000;
/// Identifier of all tested requests.
const ID: u16 = 0x5eed;
/// Identifier of the request whose reply marks the end of the replies to a tested request.
const END_ID: u16 = 0xe0d;

const ETHERTYPE_IPV4: [u8; 2] = [0x08, 0x00];
const ETHERTYPE_IPV6: [u8; 2] = [0x86, 0xdd];
const ICMP: u8 = 1;
const ICMPV6: u8 = 58;

/// Two nodes that reach each other. Only the first has an agent, so the test's traffic is the only traffic to it.
struct Pair {
    bed: Bed,
    endpoint4: Ipv4Addr,
    endpoint6: Ipv6Addr,
}

impl Pair {
    fn start() -> anyhow::Result<Self> {
        let bed = Bed::builder()
            .nodes(2)
            .ipv6(true)
            .mtu(MTU)
            .without_agents()
            .start()?;
        let target = bed.node(1);
        target.start_agent()?;
        let addresses = wait_for("the endpoint's addresses", PATIENCE, || {
            let addresses = target.health_addresses()?;
            Ok((addresses.len() == 2).then_some(addresses))
        })?;
        let (IpAddr::V4(endpoint4), IpAddr::V6(endpoint6)) = (addresses[0], addresses[1]) else {
            anyhow::bail!("addresses of the endpoint: {addresses:?}");
        };
        let prober = bed.node(2);
        for (prefix, via) in target.pod_cidrs().iter().zip(target.addresses()) {
            prober.exec(&format!("ip route add {prefix} via {via}"))?;
        }
        for address in addresses {
            wait_for("an answer", PATIENCE, || {
                Ok(prober.pings(address)?.then_some(()))
            })?;
        }
        Ok(Self {
            bed,
            endpoint4,
            endpoint6,
        })
    }

    fn target(&self) -> &Node {
        self.bed.node(1)
    }

    /// Detaches the programs, which also answered for the gateway; entries in the endpoint's neighbour table take over
    /// that part.
    fn bypass(&self) -> anyhow::Result<()> {
        let target = self.target();
        let endpoint = target.listing("endpoint list")?;
        let gateway_mac = endpoint[0]["host-mac"].as_str().context("no host-mac")?;
        for gateway in [
            Ipv4Addr::new(10, 244, 1, 1).to_string(),
            Ipv6Addr::new(0xfd00, 0x10, 0x244, 1, 0, 0, 0, 1).to_string(),
        ] {
            target.exec(&format!(
                "ip -n health-{} neighbour replace {gateway} lladdr {gateway_mac} dev health0",
                target.name()
            ))?;
        }
        target.kill_agent(Signal::SIGTERM)?;
        attached::take_off(target, "lxc_health")
    }

    fn echoes_answered(&self) -> anyhow::Result<u64> {
        let metrics = self.target().listing("bpf metrics list")?;
        let rows = metrics.as_array().context("not a list")?;
        Ok(rows
            .iter()
            .filter(|row| row["reason"] == "Echo answered")
            .filter_map(|row| row["packets"].as_u64())
            .sum())
    }

    /// The endpoint's replies to each request, without the fields that may differ between hosts.
    fn replies(&self, requests: &[Request]) -> anyhow::Result<Vec<Vec<Vec<u8>>>> {
        let wire = self.bed.node(2).run_in(Wire::open)??;
        requests
            .iter()
            .map(|request| {
                self.exchange(&wire, request)
                    .with_context(|| request.name.clone())
            })
            .collect()
    }

    fn exchange(&self, wire: &Wire, request: &Request) -> anyhow::Result<Vec<Vec<u8>>> {
        let endpoint = match request.family() {
            Family::V4 => self.endpoint4.into(),
            Family::V6 => self.endpoint6.into(),
        };
        for packet in &request.packets {
            wire.send(endpoint, packet)?;
        }
        let end = match request.family() {
            Family::V4 => self.v4().packet(&echo4(8, 0, END_ID, 0, &[])),
            Family::V6 => {
                let ip = self.v6();
                ip.packet(&ip.with_checksum(echo(128, 0, END_ID, 0, &[])))
            }
        };
        wire.send(endpoint, &end)?;
        let mut replies = wire.replies_until_end(self.bed.node(2))?;
        for reply in &mut replies {
            blank(reply)?;
        }
        Ok(replies)
    }

    /// An IPv4 header from the prober to the endpoint, with a nonzero identification: the kernel would replace zero.
    fn v4(&self) -> Ipv4 {
        Ipv4 {
            id: 0x1234,
            ..Ipv4::icmp(self.bed.node(2).ipv4(), self.endpoint4)
        }
    }

    fn v6(&self) -> Ipv6 {
        let prober = self.bed.node(2).ipv6().expect("a bed with IPv6");
        Ipv6::icmp(prober, self.endpoint6)
    }

    fn requests4(&self) -> Vec<Request> {
        let v4 = || self.v4();
        let message = |len| echo4(8, 0, ID, 7, &payload(len));
        let mut requests = Vec::new();
        let mut add = |name: &str, packets: Vec<Vec<u8>>| {
            requests.push(Request {
                name: format!("IPv4, {name}"),
                packets,
            });
        };
        for len in [0, 1, 2, 3, 56, 57, 1471, 1472, 8971, 8972] {
            add(&format!("{len} bytes"), vec![v4().packet(&message(len))]);
        }
        for tos in [0x01, 0x03, 0x20, 0xb8, 0xff] {
            add(
                &format!("type of service {tos:#x}"),
                vec![Ipv4 { tos, ..v4() }.packet(&message(56))],
            );
        }
        for fragment in [0, 0x4000] {
            add(
                &format!("flags {fragment:#x}"),
                vec![Ipv4 { fragment, ..v4() }.packet(&message(56))],
            );
        }
        for ttl in [2, 255] {
            add(
                &format!("TTL {ttl}"),
                vec![Ipv4 { ttl, ..v4() }.packet(&message(56))],
            );
        }
        let record_route = |slots: u8| {
            let len = 3 + 4 * slots;
            let mut option = vec![7, len, 4];
            option.resize(usize::from(len).next_multiple_of(4), 0);
            option
        };
        let mut timestamps = vec![68, 12, 5, 0];
        timestamps.resize(12, 0);
        for (name, options) in [
            ("no-operation options", vec![1, 1, 1, 1]),
            ("end of options", vec![0, 0, 0, 0]),
            ("no-operations, then the end", vec![1, 1, 1, 0]),
            ("record route with 1 slot", record_route(1)),
            ("record route with 3 slots", record_route(3)),
            ("record route with 9 slots", record_route(9)),
            ("router alert", vec![148, 4, 0, 0]),
            ("an unknown option", vec![30, 4, 0, 0]),
            ("an option longer than the header", vec![7, 40, 4, 0]),
            ("an option of length 0", vec![7, 0, 4, 0]),
        ] {
            add(name, vec![Ipv4 { options, ..v4() }.packet(&message(56))]);
        }
        for code in [1, 255] {
            add(
                &format!("code {code}"),
                vec![v4().packet(&echo4(8, code, ID, 7, &payload(56)))],
            );
        }
        add("half an ICMP header", vec![v4().packet(&message(56)[..4])]);
        let long = message(2000);
        let (first, rest) = long.split_at(1000);
        let more = |fragment, part: &[u8]| Ipv4 { fragment, ..v4() }.packet(part);
        let fragments = vec![more(0x2000, first), more(1000 / 8, rest)];
        add("two fragments", fragments.clone());
        add(
            "two fragments, the last first",
            fragments.into_iter().rev().collect(),
        );
        add(
            "a first fragment alone",
            vec![
                Ipv4 {
                    id: 0x77,
                    fragment: 0x2000,
                    ..v4()
                }
                .packet(first),
            ],
        );
        add(
            "a last fragment alone",
            vec![
                Ipv4 {
                    id: 0x78,
                    fragment: 125,
                    ..v4()
                }
                .packet(rest),
            ],
        );
        requests
    }

    fn requests6(&self) -> Vec<Request> {
        let v6 = || self.v6();
        let message = |len| v6().with_checksum(echo(128, 0, ID, 7, &payload(len)));
        let with_header = |kind: u8, header: &[u8], message: &[u8]| {
            let ip = Ipv6 {
                next_header: kind,
                ..v6()
            };
            ip.packet(&[header, message].concat())
        };
        let mut requests = Vec::new();
        let mut add = |name: &str, packets: Vec<Vec<u8>>| {
            requests.push(Request {
                name: format!("IPv6, {name}"),
                packets,
            });
        };
        for len in [0, 1, 2, 3, 56, 57, 1451, 1452, 8951, 8952] {
            add(&format!("{len} bytes"), vec![v6().packet(&message(len))]);
        }
        for class in [0x01, 0x03, 0xb8, 0xff] {
            add(
                &format!("traffic class {class:#x}"),
                vec![Ipv6 { class, ..v6() }.packet(&message(56))],
            );
        }
        add(
            "a flow label",
            vec![
                Ipv6 {
                    flow: 0x12345,
                    ..v6()
                }
                .packet(&message(56)),
            ],
        );
        for hop_limit in [2, 255] {
            add(
                &format!("hop limit {hop_limit}"),
                vec![Ipv6 { hop_limit, ..v6() }.packet(&message(56))],
            );
        }
        let (hop_by_hop, destination, fragment) = (0, 60, 44);
        for (name, kind, header) in [
            ("hop-by-hop padding", hop_by_hop, [58, 0, 1, 4, 0, 0, 0, 0]),
            (
                "hop-by-hop router alert",
                hop_by_hop,
                [58, 0, 5, 2, 0, 1, 1, 0],
            ),
            (
                "destination padding",
                destination,
                [58, 0, 1, 4, 0, 0, 0, 0],
            ),
            (
                "an unknown destination option, to be skipped",
                destination,
                [58, 0, 0x1e, 4, 0, 0, 0, 0],
            ),
            (
                "an unknown destination option, to be refused",
                destination,
                [58, 0, 0x9e, 4, 0, 0, 0, 0],
            ),
            ("an atomic fragment", fragment, [58, 0, 0, 0, 0, 0, 0, 9]),
        ] {
            add(name, vec![with_header(kind, &header, &message(56))]);
        }
        for code in [1, 255] {
            let message = v6().with_checksum(echo(128, code, ID, 7, &payload(56)));
            add(&format!("code {code}"), vec![v6().packet(&message)]);
        }
        add(
            "half an ICMPv6 header",
            vec![v6().packet(&message(56)[..4])],
        );
        let long = message(2000);
        let (first, rest) = long.split_at(1000);
        let fragments = vec![
            with_header(fragment, &[58, 0, 0, 1, 0, 0, 0, 10], first),
            with_header(fragment, &[58, 0, 0x03, 0xe8, 0, 0, 0, 10], rest),
        ];
        add("two fragments", fragments);
        requests
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Family {
    V4,
    V6,
}

struct Request {
    name: String,
    packets: Vec<Vec<u8>>,
}

impl Request {
    fn family(&self) -> Family {
        match self.packets[0][0] >> 4 {
            4 => Family::V4,
            _ => Family::V6,
        }
    }
}

/// Sends packets with crafted headers, and receives every incoming frame.
struct Wire {
    ipv4: Socket,
    ipv6: Socket,
    frames: Socket,
}

impl Wire {
    fn open() -> anyhow::Result<Self> {
        let ipv4 = Socket::new(
            Domain::IPV4,
            Type::RAW,
            Some(Protocol::from(libc::IPPROTO_RAW)),
        )?;
        ipv4.set_header_included_v4(true)?;
        let ipv6 = Socket::new(
            Domain::IPV6,
            Type::RAW,
            Some(Protocol::from(libc::IPPROTO_RAW)),
        )?;
        ipv6.set_header_included_v6(true)?;
        let all = u16::try_from(libc::ETH_P_ALL)?.to_be();
        let frames = Socket::new(
            Domain::PACKET,
            Type::RAW,
            Some(Protocol::from(i32::from(all))),
        )?;
        frames.set_read_timeout(Some(QUIET))?;
        Ok(Self { ipv4, ipv6, frames })
    }

    fn send(&self, to: IpAddr, packet: &[u8]) -> anyhow::Result<()> {
        let socket = match to {
            IpAddr::V4(_) => &self.ipv4,
            IpAddr::V6(_) => &self.ipv6,
        };
        let sent = socket.send_to(packet, &SocketAddr::new(to, 0).into())?;
        ensure!(
            sent == packet.len(),
            "sent {sent} of {} bytes",
            packet.len()
        );
        Ok(())
    }

    /// All ICMP packets to `node` except requests, up to the reply to the end-marking request and a quiet period after
    /// it.
    fn replies_until_end(&self, node: &Node) -> anyhow::Result<Vec<Vec<u8>>> {
        let mut replies = Vec::new();
        let mut ended = false;
        wait_for("the last reply", PATIENCE, || {
            let mut frame = vec![0; 16_384];
            match (&self.frames).read(&mut frame) {
                Ok(len) => frame.truncate(len),
                // No frame has arrived for a while.
                Err(_) => return Ok(ended.then_some(())),
            }
            if let Some((packet, message)) = reply_to(node, &frame) {
                if message.get(4..6) == Some(&END_ID.to_be_bytes()) {
                    ended = true;
                } else {
                    replies.push(packet);
                }
            }
            Ok(None)
        })?;
        Ok(replies)
    }
}

/// The IP packet and the ICMP message in a frame that carries a reply or an error to `node`.
fn reply_to(node: &Node, frame: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
    let ethertype: [u8; 2] = frame.get(12..14)?.try_into().ok()?;
    let packet = frame.get(14..)?;
    let (is_for_us, len, message_at, protocol) = match ethertype {
        ETHERTYPE_IPV4 => (
            packet.get(16..20)? == node.ipv4().octets(),
            usize::from(u16::from_be_bytes([*packet.get(2)?, *packet.get(3)?])),
            usize::from(packet.first()? & 0xf) * 4,
            *packet.get(9)?,
        ),
        ETHERTYPE_IPV6 => (
            packet.get(24..40)? == node.ipv6()?.octets(),
            40 + usize::from(u16::from_be_bytes([*packet.get(4)?, *packet.get(5)?])),
            40,
            *packet.get(6)?,
        ),
        _ => return None,
    };
    // A frame may be padded.
    let packet = packet.get(..len)?;
    let message = packet.get(message_at..)?;
    let is_reply = match (protocol, *message.first()?) {
        (ICMP, kind) => kind != 8,
        // Excludes requests and neighbour discovery.
        (ICMPV6, kind) => kind < 128 || kind == 129,
        _ => false,
    };
    (is_for_us && is_reply).then(|| (packet.to_vec(), message.to_vec()))
}

/// Zeroes the fields in which two Linux hosts differ: the flow label, the identification, and the header checksum that
/// covers it, which must be correct.
fn blank(packet: &mut [u8]) -> anyhow::Result<()> {
    match packet[0] >> 4 {
        4 => {
            let header = usize::from(packet[0] & 0xf) * 4;
            ensure!(
                checksum(&[&packet[..header]]) == 0,
                "wrong checksum: {packet:02x?}"
            );
            packet[4..6].fill(0);
            packet[10..12].fill(0);
        }
        _ => {
            packet[1] &= 0xf0;
            packet[2..4].fill(0);
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn the_programs_answer_as_the_stack_does() -> anyhow::Result<()> {
    let pair = Pair::start()?;
    let mut requests = pair.requests4();
    requests.extend(pair.requests6());

    let by_programs = pair.replies(&requests)?;
    let answered = pair.echoes_answered()?;
    assert!(
        answered > requests.len() as u64,
        "the programs answered {answered} only"
    );
    pair.bypass()?;
    // Up to now, the programs also answered the agents' own probes.
    let answered = pair.echoes_answered()?;
    let by_stack = pair.replies(&requests)?;
    assert_eq!(
        pair.echoes_answered()?,
        answered,
        "the programs are still there"
    );

    let differing: Vec<String> = requests
        .iter()
        .zip(by_programs.iter().zip(&by_stack))
        .filter(|(_, (programs, stack))| programs != stack)
        .map(|(request, (programs, stack))| {
            format!(
                "{}\n  programs: {programs:02x?}\n  stack:    {stack:02x?}",
                request.name
            )
        })
        .collect();
    assert!(differing.is_empty(), "{}", differing.join("\n"));
    // At least some requests must have replies.
    assert!(
        by_stack
            .iter()
            .filter(|replies| !replies.is_empty())
            .count()
            > requests.len() / 2
    );
    Ok(())
}
