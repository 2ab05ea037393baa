//! The ports of fragmented packets: stored from the first fragment, looked up for the others.

use aya_ebpf::bindings::BPF_ANY;
use health_common::ct::{Timeouts, Tuple4, Tuple6};
use health_common::fragment::{
    Fragment, FragmentHeader, FragmentKey4, FragmentKey6, FragmentPorts,
};
use health_common::packet::{EXTENSION_FRAGMENT, Kind, Packet};

use crate::clock::coarse_now_secs;
use crate::frame::Frame;
use crate::ip_version::Version;
use crate::packet::load;

/// Detects fragments without reading the rest of the packet.
pub trait Fragments: Version {
    /// Whether a packet may be a fragment, judging by its IP header alone.
    fn may_be_fragment(ip: &Self::Header) -> bool;
    /// Fragment information for the packet whose IP header is at `ip_at`, and its protocol (0 for IPv6). With IPv6, the
    /// fragment header must follow the IP header directly.
    fn fragment_at(frame: &Frame, ip_at: usize) -> Option<(Fragment, u8)>;
    /// See [`FragmentKey4`] and [`FragmentKey6`].
    fn fragment_key_of(
        source: Self::Address,
        destination: Self::Address,
        id_be: u32,
        protocol: u8,
    ) -> Self::FragmentKey;
}

impl Fragments for Tuple4 {
    #[inline(always)]
    fn may_be_fragment(ip: &Self::Header) -> bool {
        ip.fragment().is_some()
    }

    #[inline(always)]
    fn fragment_at(frame: &Frame, ip_at: usize) -> Option<(Fragment, u8)> {
        let ip = frame.at::<Self::Header>(ip_at)?;
        Some((ip.fragment()?, ip.protocol))
    }

    #[inline(always)]
    fn fragment_key_of(saddr_be: u32, daddr_be: u32, id_be: u32, protocol: u8) -> FragmentKey4 {
        FragmentKey4 {
            saddr_be,
            daddr_be,
            id_be: id_be as u16,
            protocol,
            pad: 0,
        }
    }
}

impl Fragments for Tuple6 {
    #[inline(always)]
    fn may_be_fragment(ip: &Self::Header) -> bool {
        ip.next_header == EXTENSION_FRAGMENT
    }

    #[inline(always)]
    fn fragment_at(frame: &Frame, ip_at: usize) -> Option<(Fragment, u8)> {
        if !Self::may_be_fragment(frame.at(ip_at)?) {
            return None;
        }
        let mut header = FragmentHeader::default();
        let at = (ip_at + Self::HEADER_LEN) as u32;
        load(frame, at, &mut header, size_of::<FragmentHeader>() as u32)?;
        Some((header.fragment()?, 0))
    }

    #[inline(always)]
    fn fragment_key_of(
        saddr_be: [u32; 4],
        daddr_be: [u32; 4],
        id_be: u32,
        _protocol: u8,
    ) -> FragmentKey6 {
        FragmentKey6 {
            saddr_be,
            daddr_be,
            id_be,
        }
    }
}

/// Whether the ports of a packet are known, which means that its first fragment has passed.
#[inline(always)]
pub fn is_known<T: Fragments>(
    source: T::Address,
    destination: T::Address,
    id_be: u32,
    protocol: u8,
) -> bool {
    let key = T::fragment_key_of(source, destination, id_be, protocol);
    // SAFETY: entries are replaced as a whole.
    let ports = unsafe { T::fragments().get(key) };
    ports.is_some_and(|ports| !ports.has_expired(coarse_now_secs()))
}

/// A packet's [`Kind`], after looking up the ports of a fragment.
pub enum Resolved {
    /// A packet of a flow.
    Flow,
    /// A later fragment of a packet whose first fragment was not seen.
    UnknownFragment,
    /// An ICMP error.
    Error,
    /// None of these.
    Other,
}

impl Resolved {
    /// Classifies a packet. If it is a later fragment, sets its ports to those of its packet.
    #[inline(always)]
    pub fn of<T: Version>(packet: &mut Packet<T>) -> Self {
        match packet.kind {
            Kind::IcmpError => Self::Error,
            Kind::NoFlow => Self::Other,
            Kind::Flow | Kind::Fragment(_) => {
                if find(packet) {
                    Self::Flow
                } else {
                    Self::UnknownFragment
                }
            }
        }
    }
}

/// Sets a later fragment's ports to those of its packet; `false` if they are not known.
#[inline(always)]
pub fn find<T: Version>(packet: &mut Packet<T>) -> bool {
    let fragment = match packet.kind {
        Kind::Fragment(fragment) if !fragment.first => fragment,
        _ => return true,
    };
    let key = packet.tuple.fragment_key(fragment.id_be);
    // SAFETY: entries are replaced as a whole.
    let Some(ports) = (unsafe { T::fragments().get(key) }) else {
        return false;
    };
    if ports.has_expired(coarse_now_secs()) {
        return false;
    }
    packet
        .tuple
        .set_ports(ports.sport_be, ports.dport_be, ports.protocol);
    true
}

/// Stores the ports of a first fragment for the others.
#[inline(always)]
pub fn keep<T: Version>(packet: &Packet<T>, timeouts: &Timeouts) {
    let fragment = match packet.kind {
        Kind::Fragment(fragment) if fragment.first => fragment,
        _ => return,
    };
    let key = packet.tuple.fragment_key(fragment.id_be);
    let ports = FragmentPorts {
        expires: coarse_now_secs() + timeouts.fragment,
        sport_be: packet.tuple.source().1,
        dport_be: packet.tuple.destination().1,
        protocol: packet.tuple.protocol(),
        pad: [0; 3],
    };
    // If there is no space, later fragments belong to no known flow, and are counted as such.
    let _ = T::fragments().insert(key, ports, u64::from(BPF_ANY));
}

/// Removes the ports of a first fragment that was sent to `destination`.
#[inline(always)]
pub fn forget<T: Version>(packet: &Packet<T>, destination: (T::Address, u16)) {
    let fragment = match packet.kind {
        Kind::Fragment(fragment) if fragment.first => fragment,
        _ => return,
    };
    let key = packet
        .tuple
        .with_destination(destination)
        .fragment_key(fragment.id_be);
    let _ = T::fragments().remove(key);
}
