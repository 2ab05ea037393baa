//! The path between an endpoint and a distant host, with a packet socket at each end.

use std::io::{ErrorKind, Read as _};
use std::os::fd::AsRawFd as _;

use anyhow::{Context as _, bail};
use health_net::netns::NetNs;
use nix::ifaddrs::getifaddrs;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::sys::socket::{LinkAddr, bind, setsockopt, sockopt};
use nix::unistd::Pid;
use socket2::{Domain, Socket, Type};

use super::packets::{Hosts, icmp, icmp_protocol, packet};
use crate::PATIENCE;
use crate::packet::{IPV4, IPV6, ethernet};

/// Size of a socket's receive buffer in bytes.
const RECEIVE_BUFFER: usize = 8 << 20;
const LONGEST: usize = 1 << 17;

/// Direction of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// From the endpoint.
    Out,
    /// To the endpoint.
    In,
}

/// A device with its address and next hop.
#[derive(Debug)]
struct End {
    socket: Socket,
    own: [u8; 6],
    next_hop: [u8; 6],
}

impl End {
    fn open(netns: &str, device: &str, next_hop: LinkAddr) -> anyhow::Result<Self> {
        let address = link(netns, device)?;
        let open = || {
            let all = i32::from((libc::ETH_P_ALL as u16).to_be());
            let socket = Socket::new(Domain::PACKET, Type::RAW, Some(all.into()))?;
            bind(socket.as_raw_fd(), &address)?;
            setsockopt(&socket, sockopt::RcvBufForce, &RECEIVE_BUFFER)?;
            socket.set_read_timeout(Some(PATIENCE))?;
            anyhow::Ok(socket)
        };
        let hardware = |address: LinkAddr| address.addr().context("no hardware address");
        Ok(Self {
            socket: NetNs::open(netns)?.run_in(open)??,
            own: hardware(address)?,
            next_hop: hardware(next_hop)?,
        })
    }

    fn send(&self, packet: &[u8]) -> anyhow::Result<()> {
        let ethertype = if packet[0] >> 4 == 4 { IPV4 } else { IPV6 };
        let frame = ethernet(self.next_hop, self.own, ethertype, packet);
        self.socket.send(&frame).context("cannot send a packet")?;
        Ok(())
    }

    /// Receives packets until one ends with these bytes.
    fn receive_to(&self, mark: &[u8]) -> anyhow::Result<()> {
        let mut buffer = vec![0; LONGEST];
        loop {
            match (&self.socket).read(&mut buffer) {
                Ok(len) if buffer[..len].ends_with(mark) => return Ok(()),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => bail!("no packet within {PATIENCE:?}: {error}"),
            }
        }
    }
}

/// Returns the hardware address of a device.
fn link(netns: &str, device: &str) -> anyhow::Result<LinkAddr> {
    let find = || {
        let found = getifaddrs()?
            .filter(|entry| entry.interface_name == device)
            .find_map(|entry| entry.address?.as_link_addr().copied());
        anyhow::Ok(found)
    };
    let found = NetNs::open(netns)?.run_in(find)??;
    found.with_context(|| format!("{netns} has no device {device}"))
}

/// Where one end of a path is: its namespace and device, and the node's device that faces it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place<'a> {
    /// The end's namespace.
    pub(super) netns: &'a str,
    /// The end's device.
    pub(super) device: &'a str,
    /// The node's namespace.
    pub(super) node: &'a str,
    /// The node's device that faces the end.
    pub(super) facing: &'a str,
}

/// Both ends of the path.
#[derive(Debug)]
pub struct Wire {
    endpoint: End,
    far: End,
    /// Endpoint and distant host, for IPv4 and for IPv6, of mark packets. A mark packet shows that all packets before
    /// it have passed.
    mark_hosts: [Hosts; 2],
    marks: u64,
}

impl Wire {
    /// Opens both ends, and pins the calling thread to one CPU, so that its packets stay in order.
    pub(super) fn open(
        endpoint: Place<'_>,
        far: Place<'_>,
        mark_hosts: [Hosts; 2],
    ) -> anyhow::Result<Self> {
        let own = Pid::from_raw(0);
        let allowed = sched_getaffinity(own)?;
        let first = (0..CpuSet::count()).find(|&cpu| allowed.is_set(cpu) == Ok(true));
        let mut only = CpuSet::new();
        only.set(first.context("no CPU to run on")?)?;
        sched_setaffinity(own, &only)?;
        let end = |place: Place<'_>| {
            End::open(place.netns, place.device, link(place.node, place.facing)?)
        };
        Ok(Self {
            endpoint: end(endpoint)?,
            far: end(far)?,
            mark_hosts,
            marks: 0,
        })
    }

    /// Sends IP packets of one version. Returns once all those that pass the node have passed it.
    pub fn carry(&mut self, way: Way, packets: &[Vec<u8>]) -> anyhow::Result<()> {
        let is_v6 = packets.first().is_some_and(|packet| packet[0] >> 4 == 6);
        let (endpoint, far) = self.mark_hosts[usize::from(is_v6)];
        let (from, to, hosts) = match way {
            Way::Out => (&self.endpoint, &self.far, (endpoint, far)),
            Way::In => (&self.far, &self.endpoint, (far, endpoint)),
        };
        self.marks += 1;
        let mark = [&b"all before have passed"[..], &self.marks.to_be_bytes()].concat();
        for packet in packets {
            from.send(packet)?;
        }
        from.send(&mark_packet(hosts, &mark))?;
        to.receive_to(&mark)
    }
}

/// Builds a packet that ends with these bytes: a timestamp request or a multicast listener report. Neither conntrack
/// creates an entry for it, except nf_conntrack for IPv4.
fn mark_packet(hosts: Hosts, mark: &[u8]) -> Vec<u8> {
    const TIMESTAMP_REQUEST: u8 = 13;
    const LISTENER_REPORT: u8 = 131;
    let kind = if hosts.0.is_ipv4() {
        TIMESTAMP_REQUEST
    } else {
        LISTENER_REPORT
    };
    let message = [&[kind, 0, 0, 0][..], &[0; 20], mark].concat();
    packet(hosts, icmp_protocol(hosts), &icmp(hosts, message))
}
