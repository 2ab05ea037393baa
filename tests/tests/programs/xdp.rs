//! `xdp_netdev` on crafted packets, on devices of a namespace of its own, whose routes and neighbours it asks for.

use std::fmt::Debug;
use std::net::IpAddr;
use std::process::Command;
use std::{fs, thread};

use anyhow::{Context as _, ensure};
use aya::maps::{Array, Map, MapData};
use aya::programs::{TestRun as _, Xdp};
use aya::{Pod, TestRunOptions};
use aya_obj::programs::XdpAttachType;
use health_common::addr::Addr;
use health_common::config::{DatapathConfig, PASSIVE_RTT, SERVICES};
use health_common::ct::{
    CT_RX_CLOSING, CT_SEEN_NON_SYN, CtEntry, CtState, TUPLE_IN, TUPLE_OUT, Tuple4, Tuple6,
};
use health_common::masquerade::Address as _;
use health_common::metrics::Reason;
use health_common::nat::{NAT_HOST_LOCAL, NAT_NEEDS_CT};
use health_common::service::xdp::XdpDevice;
use health_common::service::{Backend, FLOW_FROM_OUTSIDE, FLOW_MASQUERADED};
use health_common::tcp::Peer;
use health_common::tuple::{ServiceFlowParts, Tuple};
use health_common::{LAYOUT_VERSION, identity};
use health_datapath::Hook;
use health_model::settings::ServiceXdp;
use health_registry::config::MasqueradeSettings;
use nix::sched::{CloneFlags, unshare};
use nix::time::{ClockId, clock_gettime};
use tests::packet::{IPV4, IPV6, Ipv4, Ipv6, Tcp, checksum, ethernet, payload, tagged};
use tests::process::run;
use tests::testrun::TestRun;

const PASS: u32 = 2;
const TX: u32 = 3;
const REDIRECT: u32 = 4;

const TCP: u8 = 6;
const UDP: u8 = 17;
const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
const PSH: u8 = 8;
const ACK: u8 = 16;

/// The device towards clients, and the one towards backends.
const DEVICES: [&str; 2] = ["out", "in"];
const MACS: [[u8; 6]; 2] = [[2, 0, 0, 0, 1, 1], [2, 0, 0, 0, 1, 2]];
const CLIENT_MAC: [u8; 6] = [2, 0, 0, 0, 9, 1];
const BACKEND_MAC: [u8; 6] = [2, 0, 0, 0, 9, 2];

const CLIENT_PORT: u16 = 50_000;
const FRONTEND_PORT: u16 = 30_080;
const BACKEND_PORT: u16 = 8_080;
const NODE_PORT: u16 = 40_001;
/// Index of the backend, and number of the service's port.
const BACKEND: u32 = 1;
const SERVICE: u32 = 7;

/// Addresses of one IP version.
#[derive(Clone, Copy, Debug)]
struct Hosts {
    client: IpAddr,
    node: IpAddr,
    /// Behind the other device than the client.
    backend: IpAddr,
    /// Behind the same.
    near_backend: IpAddr,
    /// Known to the routes, and to no neighbour table.
    silent_backend: IpAddr,
}

fn hosts() -> [Hosts; 2] {
    let of = |[client, node, backend, near, silent]: [&str; 5]| {
        let ip = |text: &str| text.parse().expect(text);
        Hosts {
            client: ip(client),
            node: ip(node),
            backend: ip(backend),
            near_backend: ip(near),
            silent_backend: ip(silent),
        }
    };
    [
        of([
            "198.51.100.9",
            "172.30.0.1",
            "172.30.0.2",
            "198.51.100.20",
            "172.30.0.3",
        ]),
        of([
            "2001:db8:1::9",
            "fd00:30::1",
            "fd00:30::2",
            "2001:db8:1::20",
            "fd00:30::3",
        ]),
    ]
}

fn now_secs() -> u32 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("a clock");
    now.tv_sec().try_into().expect("a number of seconds")
}

/// Loaded programs, with the program of XDP on the devices of this thread's own namespace.
struct Stand {
    run: TestRun,
    program: Xdp,
    numbers: [u32; 2],
    config: DatapathConfig,
}

/// Runs a test in a namespace of its own.
fn in_namespace(
    test: impl FnOnce(&mut Stand) -> anyhow::Result<()> + Send + 'static,
) -> anyhow::Result<()> {
    let thread = thread::spawn(|| {
        unshare(CloneFlags::CLONE_NEWNET)?;
        test(&mut Stand::new()?)
    });
    thread.join().map_err(|_| anyhow::anyhow!("it panicked"))?
}

fn ip(words: &str) -> anyhow::Result<()> {
    run(Command::new("ip").args(words.split_whitespace()))?
        .success()
        .with_context(|| format!("ip {words}"))?;
    Ok(())
}

fn mac(bytes: [u8; 6]) -> String {
    bytes.map(|byte| format!("{byte:02x}")).join(":")
}

fn set_forwarding(is_on: bool) -> anyhow::Result<()> {
    for family in ["ipv4", "ipv6"] {
        let setting = format!("/proc/sys/net/{family}/conf/all/forwarding");
        fs::write(&setting, if is_on { "1" } else { "0" }).context(setting)?;
    }
    Ok(())
}

impl Stand {
    fn new() -> anyhow::Result<Self> {
        for (device, bytes) in DEVICES.into_iter().zip(MACS) {
            ip(&format!(
                "link add {device} address {} up type veth peer name {device}-peer",
                mac(bytes)
            ))?;
            ip(&format!("link set {device}-peer up"))?;
        }
        set_forwarding(true)?;
        for address in ["198.51.100.1/24", "2001:db8:1::1/64 nodad"] {
            ip(&format!("address add {address} dev out"))?;
        }
        for address in ["172.30.0.1/24", "fd00:30::1/64 nodad"] {
            ip(&format!("address add {address} dev in"))?;
        }
        for hosts in hosts() {
            let known = [
                (hosts.client, CLIENT_MAC, "out"),
                (hosts.backend, BACKEND_MAC, "in"),
                (hosts.near_backend, BACKEND_MAC, "out"),
            ];
            for (address, bytes, device) in known {
                let bytes = mac(bytes);
                ip(&format!(
                    "neighbour add {address} lladdr {bytes} dev {device}"
                ))?;
            }
        }
        let mut run = TestRun::load_alone();
        run.datapath.set_xdp(ServiceXdp::Generic);
        run.datapath.attach(&DEVICES.map(Hook::xdp))?;
        ensure!(
            run.datapath.refused().is_empty(),
            "{:?}",
            run.datapath.refused()
        );
        let settings = MasqueradeSettings {
            native_routing_cidrs: vec!["0.0.0.0/0".parse()?, "::/0".parse()?],
            masquerade_ports: "40000-40999".parse()?,
            masquerade_excludes: Vec::new(),
            gateway_cidrs: Vec::new(),
        };
        let nodes = hosts().map(|hosts| hosts.node);
        run.datapath
            .set_masquerade(settings.of_node(&nodes, &[])?)?;
        let program = run.location.pins().join("programs/xdp_netdev");
        let mut stand = Self {
            program: Xdp::from_pin(program, XdpAttachType::Interface)?,
            run,
            numbers: [0; 2],
            config: DatapathConfig {
                layout_version: LAYOUT_VERSION,
                flags: SERVICES,
                ..DatapathConfig::default()
            },
        };
        for (number, device) in stand.numbers.iter_mut().zip(DEVICES) {
            *number = nix::net::if_::if_nametoindex(device)?;
        }
        stand.configure(SERVICES)?;
        Ok(stand)
    }

    fn configure(&mut self, flags: u16) -> anyhow::Result<()> {
        self.config.flags = flags;
        Ok(self.run.datapath.configure(self.config)?)
    }

    /// Has the backend serve at this address, or nothing.
    fn serve(&self, address: Option<IpAddr>) -> anyhow::Result<()> {
        let pin = self.run.location.pins().join("HEALTH_BACKENDS");
        let map = Map::from_map_data(MapData::from_pin(pin)?)?;
        let mut backends: Array<MapData, Backend> = map.try_into()?;
        let backend = address.map(|address| Backend {
            addr: address.into(),
            service: SERVICE,
            port_be: BACKEND_PORT.to_be(),
            ..Backend::default()
        });
        Ok(backends.set(BACKEND, backend.unwrap_or_default(), 0)?)
    }

    /// Runs the program on a packet that came by a device; what it returned, and the packet afterwards.
    fn send(&self, device: usize, packet: &[u8]) -> anyhow::Result<(u32, Vec<u8>)> {
        // `struct xdp_md`: nothing before the packet, its end, no metadata, then the device, its queue, no other one.
        let len = packet.len() as u32;
        let context = [0, len, 0, self.numbers[device], 0, 0].map(u32::to_ne_bytes);
        let mut out = vec![0; packet.len()];
        let result = self.program.test_run(TestRunOptions {
            data_in: Some(packet),
            data_out: Some(&mut out),
            ctx_in: Some(&context.concat()),
            ..TestRunOptions::new()
        })?;
        out.truncate(result.data_size_out as usize);
        Ok((result.return_value, out))
    }
}

/// A flow from outside, of an IP version's tuples.
struct Known<'a, T> {
    stand: &'a Stand,
    hosts: Hosts,
    backend: IpAddr,
    protocol: u8,
    /// From the client to the frontend.
    sent: T,
    /// From the client to the backend.
    flow: T,
    /// From the client's place to the backend, as translated.
    key: T,
}

trait Version: Tuple + Pod + Debug {
    const MAPS: [[&str; 3]; 2];
    fn of(ends: [(Self::Address, u16); 2], protocol: u8, direction: u8) -> Self;
}

macro_rules! version {
    ($tuple:ty, $maps:expr) => {
        impl Version for $tuple {
            const MAPS: [[&str; 3]; 2] = $maps;
            fn of(ends: [(Self::Address, u16); 2], protocol: u8, direction: u8) -> Self {
                let [(saddr_be, sport), (daddr_be, dport)] = ends;
                Self {
                    saddr_be,
                    daddr_be,
                    sport_be: sport.to_be(),
                    dport_be: dport.to_be(),
                    protocol,
                    direction,
                    pad: 0,
                }
            }
        }
    };
}

version!(
    Tuple4,
    [
        ["HEALTH_CT4", "HEALTH_NAT4", "HEALTH_REVNAT4"],
        ["HEALTH_CT_ANY4", "HEALTH_NAT_ANY4", "HEALTH_REVNAT_ANY4"],
    ]
);
version!(
    Tuple6,
    [
        ["HEALTH_CT6", "HEALTH_NAT6", "HEALTH_REVNAT6"],
        ["HEALTH_CT_ANY6", "HEALTH_NAT_ANY6", "HEALTH_REVNAT_ANY6"],
    ]
);

fn address<T: Tuple>(address: IpAddr) -> T::Address {
    T::Address::of_addr(&Addr::from(address))
}

impl<'a, T: Version> Known<'a, T>
where
    T::Translation: Pod,
    T::ServiceFlow: Pod,
{
    /// Enters a flow, as the programs of tc do.
    fn enter(
        stand: &'a Stand,
        hosts: Hosts,
        backend: IpAddr,
        protocol: u8,
    ) -> anyhow::Result<Self> {
        let end = |host: IpAddr, port: u16| (address::<T>(host), port);
        let client = end(hosts.client, CLIENT_PORT);
        let (frontend, server) = (end(hosts.node, FRONTEND_PORT), end(backend, BACKEND_PORT));
        let node = end(hosts.node, NODE_PORT);
        let known = Self {
            stand,
            hosts,
            backend,
            protocol,
            sent: T::of([client, frontend], protocol, TUPLE_OUT),
            flow: T::of([client, server], protocol, TUPLE_OUT),
            key: T::of([server, node], protocol, TUPLE_IN),
        };
        stand.serve(Some(backend))?;
        known.serve(now_secs() + 5, FLOW_FROM_OUTSIDE | FLOW_MASQUERADED)?;
        known.translate(NAT_NEEDS_CT)?;
        known.track(|_| {})?;
        Ok(known)
    }

    fn map<V: Pod>(&self, which: usize) -> aya::maps::HashMap<MapData, T, V> {
        let maps = T::MAPS[usize::from(self.protocol != TCP)];
        self.stand.run.hash_map(maps[which])
    }

    /// Enters it as a flow of a service, to the backend and back from the frontend.
    fn serve(&self, expires: u32, flags: u16) -> anyhow::Result<()> {
        let be = |host: IpAddr, port: u16| (address::<T>(host), port.to_be());
        let server = be(self.backend, BACKEND_PORT);
        let frontend = be(self.hosts.node, FRONTEND_PORT);
        let mut flows = self.map(2);
        for (key, to) in [(self.sent, server), (self.flow.reply(), frontend)] {
            let flow = T::service_flow(&ServiceFlowParts {
                to,
                backend: BACKEND,
                service: SERVICE,
                expires,
                flags,
            });
            flows.insert(key, flow, 0)?;
        }
        Ok(())
    }

    /// Translates it, with these flags.
    fn translate(&self, flags: u32) -> anyhow::Result<()> {
        let node = (address::<T>(self.hosts.node), NODE_PORT.to_be());
        let client = (address::<T>(self.hosts.client), CLIENT_PORT.to_be());
        let mut translations = self.map(1);
        translations.insert(self.flow, T::translation(node, flags, 1), 0)?;
        translations.insert(self.key, T::translation(client, flags, 1), 0)?;
        Ok(())
    }

    /// Enters it into conntrack, open both ways.
    fn track(&self, change: impl FnOnce(&mut CtEntry)) -> anyhow::Result<()> {
        let mut entry = CtEntry {
            expires: now_secs() + 5,
            source_identity: identity::WORLD,
            ..CtEntry::default()
        };
        if self.protocol == TCP {
            entry.set_state(CtState::new(CT_SEEN_NON_SYN, SYN | ACK, SYN | ACK));
        }
        change(&mut entry);
        self.map(0).insert(self.flow, entry, 0)?;
        Ok(())
    }

    fn tracked(&self) -> anyhow::Result<CtEntry> {
        Ok(self.map(0).get(&self.flow, 0)?)
    }

    /// What the client sends.
    fn request(&self) -> Packet {
        Packet {
            macs: [MACS[0], CLIENT_MAC],
            ends: [
                (self.hosts.client, CLIENT_PORT),
                (self.hosts.node, FRONTEND_PORT),
            ],
            ..Packet::of(self.protocol)
        }
    }

    /// The same on its way to the backend, by this device.
    fn sent_on(&self, device: usize) -> Packet {
        Packet {
            macs: [BACKEND_MAC, MACS[device]],
            ends: [(self.hosts.node, NODE_PORT), (self.backend, BACKEND_PORT)],
            hops: 63,
            ..self.request()
        }
    }

    /// What the backend answers, by this device.
    fn answer(&self, device: usize) -> Packet {
        Packet {
            macs: [MACS[device], BACKEND_MAC],
            ends: [(self.backend, BACKEND_PORT), (self.hosts.node, NODE_PORT)],
            ..Packet::of(self.protocol)
        }
    }

    /// The same on its way to the client.
    fn returned(&self, device: usize) -> Packet {
        Packet {
            macs: [CLIENT_MAC, MACS[0]],
            ends: [
                (self.hosts.node, FRONTEND_PORT),
                (self.hosts.client, CLIENT_PORT),
            ],
            hops: 63,
            ..self.answer(device)
        }
    }
}

/// A packet in the making.
#[derive(Clone, Debug)]
struct Packet {
    /// Hardware addresses of receiver and sender.
    macs: [[u8; 6]; 2],
    /// Source and destination.
    ends: [(IpAddr, u16); 2],
    protocol: u8,
    hops: u8,
    /// Of TCP.
    flags: u8,
    /// Of IPv4.
    fragment: u16,
    /// Of IPv4.
    options: Vec<u8>,
    data: Vec<u8>,
    /// Of UDP.
    has_checksum: bool,
}

impl Packet {
    fn of(protocol: u8) -> Self {
        let nobody = (IpAddr::from([0; 4]), 0);
        Self {
            macs: [[0; 6]; 2],
            ends: [nobody; 2],
            protocol,
            hops: 64,
            flags: PSH | ACK,
            fragment: 0x4000,
            options: Vec::new(),
            data: payload(100),
            has_checksum: true,
        }
    }

    fn transport(&self) -> Vec<u8> {
        let [(source, sport), (destination, dport)] = self.ends;
        if self.protocol == TCP {
            let segment = Tcp {
                data: self.data.clone(),
                ..Tcp::between((sport, dport), self.flags)
            };
            return segment.segment(source, destination);
        }
        let len = 8 + self.data.len();
        let mut datagram = [sport, dport, len as u16, 0].map(u16::to_be_bytes).concat();
        datagram.extend(&self.data);
        if self.has_checksum {
            let octets = |address| match address {
                IpAddr::V4(v4) => v4.octets().to_vec(),
                IpAddr::V6(v6) => v6.octets().to_vec(),
            };
            let check = checksum(&[
                &octets(source),
                &octets(destination),
                &(len as u32).to_be_bytes(),
                &[0, 0, 0, UDP],
                &datagram,
            ]);
            datagram[6..8].copy_from_slice(&check.to_be_bytes());
        }
        datagram
    }

    fn frame(&self) -> Vec<u8> {
        let transport = self.transport();
        let (ethertype, packet) = match (self.ends[0].0, self.ends[1].0) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let header = Ipv4 {
                    protocol: self.protocol,
                    ttl: self.hops,
                    fragment: self.fragment,
                    options: self.options.clone(),
                    tos: 0x28,
                    ..Ipv4::icmp(source, destination)
                };
                (IPV4, header.packet(&transport))
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                let header = Ipv6 {
                    next_header: self.protocol,
                    hop_limit: self.hops,
                    class: 0x28,
                    flow: 0x12345,
                    ..Ipv6::icmp(source, destination)
                };
                (IPV6, header.packet(&transport))
            }
            ends => panic!("{ends:?} are of two IP versions"),
        };
        ethernet(self.macs[0], self.macs[1], ethertype, &packet)
    }
}

/// Sends a packet through, and holds what comes out against another.
fn goes_on(
    stand: &Stand,
    (device, packet): (usize, &Packet),
    (code, expected): (u32, &Packet),
) -> anyhow::Result<()> {
    let (returned, bytes) = stand.send(device, &packet.frame())?;
    ensure!(returned == code, "it returned {returned}: {packet:?}");
    ensure!(
        bytes == expected.frame(),
        "{bytes:02x?}\nand not\n{:02x?}",
        expected.frame()
    );
    Ok(())
}

fn both_ways_of<T: Version>(stand: &Stand, hosts: Hosts, protocol: u8) -> anyhow::Result<()>
where
    T::Translation: Pod,
    T::ServiceFlow: Pod,
{
    for (backend, device, code) in [(hosts.backend, 1, REDIRECT), (hosts.near_backend, 0, TX)] {
        let known = Known::<T>::enter(stand, hosts, backend, protocol)?;
        let (request, answer) = (known.request(), known.answer(device));
        let counted = stand.run.counted(Reason::ForwardedByXdp);
        goes_on(stand, (0, &request), (code, &known.sent_on(device)))?;
        goes_on(stand, (device, &answer), (code, &known.returned(device)))?;
        goes_on(stand, (device, &answer), (code, &known.returned(device)))?;
        assert_eq!(stand.run.counted(Reason::ForwardedByXdp) - counted, 3);

        let entry = known.tracked()?;
        let len = request.frame().len() as u64 - 14;
        assert_eq!((entry.tx_packets, entry.tx_bytes), (1, len));
        assert_eq!((entry.rx_packets, entry.rx_bytes), (2, 2 * len));
        let (lifetime, seen) = match protocol {
            TCP => (8000, [SYN | PSH | ACK; 2]),
            _ => (60, [0; 2]),
        };
        assert_eq!([entry.rx_flags_seen, entry.tx_flags_seen], seen);
        let lasts = |expires: u32| expires.abs_diff(now_secs() + lifetime) <= 2;
        assert!(lasts(entry.expires), "{entry:?}");
        if protocol == UDP {
            for key in [known.sent, known.flow.reply()] {
                let flow: T::ServiceFlow = known.map(2).get(&key, 0)?;
                assert!(lasts(T::service_flow_parts(&flow).expires));
            }
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn packets_of_known_flows_are_sent_on_both_ways_and_counted_as_by_tc() -> anyhow::Result<()> {
    in_namespace(|stand| {
        let [v4, v6] = hosts();
        for protocol in [TCP, UDP] {
            both_ways_of::<Tuple4>(stand, v4, protocol).context("IPv4")?;
            both_ways_of::<Tuple6>(stand, v6, protocol).context("IPv6")?;
        }
        Ok(())
    })
}

#[test]
#[ignore = "needs root"]
fn a_datagram_without_a_checksum_gets_none() -> anyhow::Result<()> {
    in_namespace(|stand| {
        let [v4, _] = hosts();
        let known = Known::<Tuple4>::enter(stand, v4, v4.backend, UDP)?;
        let without = |packet: Packet| Packet {
            has_checksum: false,
            ..packet
        };
        goes_on(
            stand,
            (0, &without(known.request())),
            (REDIRECT, &without(known.sent_on(1))),
        )
    })
}

/// The program lets a packet pass as it is, and does nothing about its flow.
fn is_left<T: Version>(known: &Known<'_, T>, device: usize, frame: &[u8]) -> anyhow::Result<()>
where
    T::Translation: Pod,
    T::ServiceFlow: Pod,
{
    let before = known.tracked().ok();
    let (code, bytes) = known.stand.send(device, frame)?;
    ensure!(code == PASS, "it returned {code}");
    ensure!(bytes == frame, "it changed the packet");
    ensure!(known.tracked().ok() == before, "it entered the packet");
    Ok(())
}

/// A way in which a packet of a known flow is none that XDP takes.
type Left<T> = (
    &'static str,
    fn(&Known<'_, T>, &mut Packet) -> anyhow::Result<()>,
);

fn ways<T: Version>() -> Vec<Left<T>>
where
    T::Translation: Pod,
    T::ServiceFlow: Pod,
{
    vec![
        ("its time is over", |_, packet| {
            packet.hops = 1;
            Ok(())
        }),
        ("it is for another host on the link", |_, packet| {
            packet.macs[0] = [2, 0, 0, 0, 7, 7];
            Ok(())
        }),
        ("it is larger than the next device takes", |_, packet| {
            packet.data = payload(1_473);
            Ok(())
        }),
        ("conntrack does not know the flow", |known, _| {
            Ok(known.map::<CtEntry>(0).remove(&known.flow)?)
        }),
        ("conntrack knows that the flow is over", |known, _| {
            known.track(|entry| entry.expires = 1)
        }),
        ("the translation is the host's own", |known, _| {
            known.translate(NAT_HOST_LOCAL | NAT_NEEDS_CT)
        }),
        ("the translation is an endpoint's", |known, _| {
            known.translate(0)
        }),
        ("there is no translation", |known, _| {
            let mut translations = known.map::<T::Translation>(1);
            translations.remove(&known.flow)?;
            Ok(translations.remove(&known.key)?)
        }),
        ("the flow is an endpoint's", |known, _| {
            known.serve(now_secs() + 5, 0)
        }),
        ("the backend is on this node", |known, _| {
            known.serve(now_secs() + 5, FLOW_FROM_OUTSIDE)
        }),
        ("there is no flow of a service", |known, _| {
            let mut flows = known.map::<T::ServiceFlow>(2);
            flows.remove(&known.sent)?;
            Ok(flows.remove(&known.flow.reply())?)
        }),
    ]
}

fn ways_of_tcp<T: Version>() -> Vec<Left<T>>
where
    T::Translation: Pod,
    T::ServiceFlow: Pod,
{
    fn with(packet: &mut Packet, flags: u8) -> anyhow::Result<()> {
        packet.flags = flags;
        Ok(())
    }
    vec![
        ("it opens a connection", |_, packet| with(packet, SYN)),
        ("it answers that", |_, packet| with(packet, SYN | ACK)),
        ("it ends one", |_, packet| with(packet, FIN | ACK)),
        ("it resets one", |_, packet| with(packet, RST | ACK)),
        ("it says nothing", |_, packet| with(packet, 0)),
        ("the connection is not open yet", |known, _| {
            known.track(|entry| entry.set_state(CtState::new(0, SYN, SYN | ACK)))
        }),
        ("one side has ended it", |known, _| {
            known.track(|entry| {
                let state = CtState::new(CT_SEEN_NON_SYN | CT_RX_CLOSING, SYN | FIN, SYN);
                entry.set_state(state);
            })
        }),
    ]
}

fn ways_of_udp<T: Version>() -> Vec<Left<T>>
where
    T::Translation: Pod,
    T::ServiceFlow: Pod,
{
    vec![("the flow is over", |known, _| {
        known.serve(1, FLOW_FROM_OUTSIDE | FLOW_MASQUERADED)
    })]
}

fn ways_of_ipv4() -> Vec<Left<Tuple4>> {
    vec![
        ("it has options", |_, packet| {
            packet.options = vec![1; 4];
            Ok(())
        }),
        ("it is a first fragment", |_, packet| {
            packet.fragment = 0x2000;
            Ok(())
        }),
        ("it is a later fragment", |_, packet| {
            packet.fragment = 0x0001;
            Ok(())
        }),
    ]
}

fn are_left<T: Version>(
    stand: &Stand,
    hosts: Hosts,
    protocol: u8,
    ways: &[Left<T>],
) -> anyhow::Result<()>
where
    T::Translation: Pod,
    T::ServiceFlow: Pod,
{
    for (why, make) in ways {
        for is_answer in [false, true] {
            let known = Known::<T>::enter(stand, hosts, hosts.backend, protocol)?;
            let device = usize::from(is_answer);
            let mut packet = match is_answer {
                true => known.answer(1),
                false => known.request(),
            };
            make(&known, &mut packet)?;
            is_left(&known, device, &packet.frame())
                .with_context(|| format!("{why}, answer: {is_answer}, protocol {protocol}"))?;
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn all_else_goes_on_to_the_stack_as_it_is() -> anyhow::Result<()> {
    in_namespace(|stand| {
        let [v4, v6] = hosts();
        for protocol in [TCP, UDP] {
            are_left(stand, v4, protocol, &ways::<Tuple4>())?;
            are_left(stand, v6, protocol, &ways::<Tuple6>())?;
            are_left(stand, v4, protocol, &ways_of_ipv4())?;
        }
        are_left(stand, v4, TCP, &ways_of_tcp::<Tuple4>())?;
        are_left(stand, v6, TCP, &ways_of_tcp::<Tuple6>())?;
        are_left(stand, v4, UDP, &ways_of_udp::<Tuple4>())?;
        are_left(stand, v6, UDP, &ways_of_udp::<Tuple6>())?;

        let known = Known::<Tuple4>::enter(stand, v4, v4.backend, TCP)?;
        let frame = known.request().frame();
        is_left(&known, 0, &tagged(&frame, &[(0x8100, 5)])).context("a tag")?;
        for len in [0, 13, 14, 33, 34, 53, frame.len() - 1] {
            // The kernel takes no shorter packets for test runs.
            if let Some(frame) = frame.get(..len).filter(|frame| frame.len() >= 14) {
                is_left(&known, 0, frame).with_context(|| format!("cut to {len} bytes"))?;
            }
        }
        let silent = Known::<Tuple4>::enter(stand, v4, v4.silent_backend, TCP)?;
        is_left(&silent, 0, &silent.request().frame()).context("an unknown neighbour")
    })
}

#[test]
#[ignore = "needs root"]
fn datagrams_to_a_backend_that_serves_no_more_are_left_and_segments_are_not() -> anyhow::Result<()>
{
    in_namespace(|stand| {
        let [v4, _] = hosts();
        let udp = Known::<Tuple4>::enter(stand, v4, v4.backend, UDP)?;
        let tcp = Known::<Tuple4>::enter(stand, v4, v4.backend, TCP)?;
        stand.serve(None)?;
        is_left(&udp, 0, &udp.request().frame())?;
        goes_on(stand, (0, &tcp.request()), (REDIRECT, &tcp.sent_on(1)))
    })
}

#[test]
#[ignore = "needs root"]
fn the_settings_of_host_and_agent_decide() -> anyhow::Result<()> {
    in_namespace(|stand| {
        let [v4, v6] = hosts();
        let is_taken = |stand: &Stand| -> anyhow::Result<[bool; 2]> {
            let four = Known::<Tuple4>::enter(stand, v4, v4.backend, TCP)?;
            let six = Known::<Tuple6>::enter(stand, v6, v6.backend, TCP)?;
            let is_taken = |frame: Vec<u8>| anyhow::Ok(stand.send(0, &frame)?.0 == REDIRECT);
            Ok([
                is_taken(four.request().frame())?,
                is_taken(six.request().frame())?,
            ])
        };
        assert_eq!(is_taken(stand)?, [true; 2]);
        set_forwarding(false)?;
        assert_eq!(is_taken(stand)?, [false; 2], "the host does not forward");
        set_forwarding(true)?;
        stand.configure(0)?;
        assert_eq!(is_taken(stand)?, [false; 2], "no services");
        stand.configure(SERVICES | PASSIVE_RTT)?;
        assert_eq!(is_taken(stand)?, [true; 2]);
        let mut peers = stand.run.hash_map("HEALTH_PEERS");
        for address in [v4.backend, v6.client] {
            peers.insert(Addr::from(address), Peer::default(), 0)?;
        }
        assert_eq!(
            is_taken(stand)?,
            [false; 2],
            "round trips to peers are timed by tc"
        );
        stand.configure(SERVICES)?;
        assert_eq!(is_taken(stand)?, [true; 2]);

        let mut devices = stand.run.hash_map::<u32, XdpDevice>("HEALTH_XDP_DEVICES");
        let inner = devices.get(&stand.numbers[1], 0)?;
        assert_eq!(inner.mac, MACS[1]);
        devices.remove(&stand.numbers[1])?;
        assert_eq!(is_taken(stand)?, [false; 2], "no device to send by");
        stand.run.datapath.note_xdp_devices()?;
        assert_eq!(is_taken(stand)?, [true; 2]);
        ip("link set in address 02:00:00:00:01:77")?;
        stand.run.datapath.note_xdp_devices()?;
        let inner = devices.get(&stand.numbers[1], 0)?;
        assert_eq!(inner.mac, [2, 0, 0, 0, 1, 0x77]);
        Ok(())
    })
}
