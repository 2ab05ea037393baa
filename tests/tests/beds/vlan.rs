//! Probes whose VLAN tag is kept outside the packet data, as the kernel and devices with tag offload do: they are
//! stamped, matched and counted like any other probe.

use std::io::Read as _;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::fd::AsRawFd as _;

use anyhow::{Context as _, ensure};
use health_common::LAYOUT_VERSION;
use health_common::config::DatapathConfig;
use health_common::metrics::Reason;
use health_common::probe::{Path, ProbeId};
use health_common::rtt::{PROTOCOL_ICMP, RttKey, SOURCE_KERNEL};
use health_datapath::rtt_store::{Measurement, RttStore as _};
use health_datapath::{Attachment, Attachments, Hook};
use health_net::netns::NetNs;
use nix::ifaddrs::getifaddrs;
use nix::sys::socket::bind;
use socket2::{Domain, SockFilter, Socket, Type};
use tests::attached::has_tcx;
use tests::bed::FABRIC;
use tests::packet::{IPV4, IPV6, Ipv4, Ipv6, Probe, ethernet, tagged};
use tests::testrun::TestRun;
use tests::{Bed, Node, PATIENCE, wait_for};

const OWN4: Ipv4Addr = Ipv4Addr::new(172, 30, 0, 1);
const PEER4: Ipv4Addr = Ipv4Addr::new(172, 30, 0, 2);
const OWN6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x30, 0, 0, 0, 0, 0, 1);
const PEER6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x30, 0, 0, 0, 0, 0, 2);
const MACS: ([u8; 6], [u8; 6]) = ([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]);
const KEY: [u64; 2] = [0x1122_3344_5566_7788, 0x99aa_bbcc_ddee_ff00];
const SESSION: u32 = 0x0102_0304;
const PROBE_ID: u16 = 0x4240;
/// EtherTypes (802.1Q, 802.1ad) and VLANs of the tags, outermost first. The kernel strips the first tag from every
/// packet that it receives.
const TAGS: [&[(u16, u16)]; 2] = [&[(0x8100, 5)], &[(0x88a8, 5), (0x8100, 7)]];
/// The VLAN of the stripped tag.
const OUTER_VLAN: u32 = 5;
/// A device of the node, and its veth peer. Everything that arrives on the first device is redirected to the uplink,
/// with the tag wherever the kernel has put it.
const FORWARDED: [&str; 2] = ["in0", "in1"];

/// A node without an agent, with the programs attached to its uplink and no other node on the link.
struct Wire {
    // Must be dropped before the bed, which owns its devices.
    run: TestRun,
    /// Packets sent here leave through the uplink.
    outbound: Socket,
    /// Packets sent here arrive through the uplink.
    far: Socket,
    /// Receives packets that cross the uplink in either direction with a tag outside the packet data.
    beside: Socket,
    _bed: Bed,
}

impl Wire {
    fn new() -> anyhow::Result<Self> {
        let bed = Bed::builder().nodes(1).without_agents().start()?;
        let node = bed.node(1);
        bed.cut_off(node)?;
        forward(node)?;
        let mut run = TestRun::load_alone();
        run.datapath.configure(DatapathConfig {
            layout_version: LAYOUT_VERSION,
            icmp_id_be: PROBE_ID.to_be(),
            probe_key: KEY,
            session: SESSION,
            ..DatapathConfig::default()
        })?;
        if !has_tcx()? {
            let attachments = Attachments::all(Attachment::Clsact);
            run.datapath.set_attachments(attachments);
        }
        node.run_in(|| run.datapath.attach(&Hook::uplink("eth0")))??;
        let [_, inlet] = FORWARDED;
        let outbound = node.run_in(|| open(inlet))??;
        let beside = node.run_in(|| open("eth0"))??;
        beside.attach_filter(&tagged_beside(OUTER_VLAN))?;
        let far = NetNs::open(FABRIC)?.run_in(|| open(node.name()))??;
        Ok(Self {
            run,
            outbound,
            far,
            beside,
            _bed: bed,
        })
    }

    /// Sends a frame through one of the sockets with all tags in the packet data, and waits until the frame has crossed
    /// the uplink with its first tag stripped.
    fn cross(&self, by: &Socket, untagged: &[u8], tags: &[(u16, u16)]) -> anyhow::Result<()> {
        by.send(&tagged(untagged, tags))?;
        let inner = tagged(untagged, &tags[1..]);
        let mut buffer = [0; 256];
        let len = (&self.beside)
            .read(&mut buffer)
            .context("nothing crossed the uplink with a tag beside its bytes")?;
        ensure!(buffer[..len] == inner, "{:x?}", &buffer[..len]);
        Ok(())
    }

    /// Waits until this many packets were counted for a reason: the socket sees an incoming packet before the program
    /// does.
    fn counted(&self, reason: Reason, packets: u64) -> anyhow::Result<()> {
        wait_for(&format!("{packets} of {reason:?}"), PATIENCE, || {
            let counted = self.run.counted(reason);
            ensure!(counted <= packets, "there are {counted}");
            Ok((counted == packets).then_some(()))
        })
    }

    /// Number of round trips in the row for `key`, and where the last one was stamped.
    fn samples(&self, key: RttKey) -> anyhow::Result<(u64, u8)> {
        let row = self.run.datapath.rtt()?.row(key)?;
        let row = row.context("there is no such row")?;
        Ok((row.samples, row.source))
    }
}

/// Redirects everything that arrives on the first device to the uplink.
fn forward(node: &Node) -> anyhow::Result<()> {
    let [device, other] = FORWARDED;
    for command in [
        format!("ip link add {device} type veth peer name {other}"),
        format!("ip link set {device} up"),
        format!("ip link set {other} up"),
        format!("tc qdisc add dev {device} clsact"),
        format!(
            "tc filter add dev {device} ingress protocol all u32 match u32 0 0 \
             action mirred egress redirect dev eth0"
        ),
    ] {
        node.exec(&command)?;
    }
    Ok(())
}

/// Opens a packet socket on a device in the calling thread's namespace.
pub(crate) fn open(device: &str) -> anyhow::Result<Socket> {
    let all = i32::from((libc::ETH_P_ALL as u16).to_be());
    let socket = Socket::new(Domain::PACKET, Type::RAW, Some(all.into()))?;
    let address = getifaddrs()?
        .filter(|entry| entry.interface_name == device)
        .find_map(|entry| entry.address?.as_link_addr().copied());
    let address = address.with_context(|| format!("there is no device {device}"))?;
    bind(socket.as_raw_fd(), &address)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    Ok(socket)
}

/// A socket filter for packets with a tag of this VLAN outside the packet data (Documentation/networking/filter.rst).
fn tagged_beside(vlan: u32) -> [SockFilter; 7] {
    const LOAD: u16 = 0x20;
    const AND: u16 = 0x54;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    const ANCILLARY: u32 = (-0x1000_i32).cast_unsigned();
    const VLAN_TAG: u32 = ANCILLARY + 44;
    const VLAN_TAG_PRESENT: u32 = ANCILLARY + 48;
    [
        (LOAD, 0, 0, VLAN_TAG_PRESENT),
        (JUMP_IF_EQUAL, 0, 4, 1),
        (LOAD, 0, 0, VLAN_TAG),
        (AND, 0, 0, 0xfff),
        (JUMP_IF_EQUAL, 0, 1, vlan),
        (RETURN, 0, 0, u32::MAX),
        (RETURN, 0, 0, 0),
    ]
    .map(|(code, jt, jf, k)| SockFilter::new(code, jt, jf, k))
}

/// An echo request (8) or echo reply (0) with a probe as its payload, to or from the peer.
fn frame(v6: bool, outbound: bool, kind: u8, probe: &Probe) -> Vec<u8> {
    let (own, peer) = MACS;
    let (to, from) = if outbound { (peer, own) } else { (own, peer) };
    if v6 {
        let (source, target) = if outbound {
            (OWN6, PEER6)
        } else {
            (PEER6, OWN6)
        };
        let ip = Ipv6::icmp(source, target);
        let kind = if kind == 8 { 128 } else { 129 };
        ethernet(to, from, IPV6, &ip.packet(&probe.message6(kind, &ip)))
    } else {
        let (source, target) = if outbound {
            (OWN4, PEER4)
        } else {
            (PEER4, OWN4)
        };
        let ip = Ipv4::icmp(source, target);
        ethernet(to, from, IPV4, &ip.packet(&probe.message4(kind)))
    }
}

fn probe(sequence: u16) -> Probe {
    Probe {
        key: KEY,
        id: PROBE_ID,
        sequence,
        session: SESSION,
        round: 0,
        path: Path::Host as u8,
        flags: 0,
        turnround: 0,
        arrived: 0,
    }
}

#[test]
#[ignore = "needs root"]
fn probes_with_a_tag_beside_their_bytes_are_measured() -> anyhow::Result<()> {
    let wire = Wire::new()?;
    let mut sequence = 0;
    for v6 in [false, true] {
        let key = RttKey {
            peer: if v6 { PEER6.into() } else { PEER4.into() },
            path: Path::Host as u8,
            protocol: PROTOCOL_ICMP,
            pad: 0,
        };
        wire.run.datapath.rtt()?.ensure(key)?;
        for (samples, tags) in (1..).zip(TAGS) {
            sequence += 1;
            let own = probe(sequence);
            wire.cross(&wire.outbound, &frame(v6, true, 8, &own), tags)?;
            wire.counted(Reason::ProbeStamped, sequence.into())?;
            wire.cross(&wire.far, &frame(v6, false, 0, &own), tags)?;
            wire.counted(Reason::ProbeMatched, sequence.into())?;
            let what = format!("IPv6 {v6}, tags {tags:x?}");
            let number = ProbeId {
                session: SESSION,
                round: 0,
                sequence,
            };
            let heard = wire.run.datapath.rtt()?.answered(key, number, u64::MAX)?;
            assert!(
                matches!(heard, Measurement::ByKernel(_)),
                "{what}: {heard:?}"
            );
            assert_eq!(wire.samples(key)?, (samples, SOURCE_KERNEL), "{what}");

            let of_peer = Probe {
                id: PROBE_ID + 1,
                session: SESSION + 1,
                ..own
            };
            wire.cross(&wire.far, &frame(v6, false, 8, &of_peer), tags)?;
            wire.counted(Reason::ProbeArrived, sequence.into())?;
        }
    }
    Ok(())
}
