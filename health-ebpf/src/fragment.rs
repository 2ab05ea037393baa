//! The ports of packets that come in fragments: kept from the first one, found for the others.

use aya_ebpf::bindings::BPF_ANY;
use health_common::ct::Timeouts;
use health_common::fragment::FragmentPorts;
use health_common::packet::{Kind, Packet};

use crate::clock::coarse_now_secs;
use crate::ip_version::Version;

/// As [`find`] and [`keep`] together: for packets that nobody judges.
#[inline(always)]
pub fn resolve<T: Version>(packet: &mut Packet<T>, timeouts: &Timeouts) -> bool {
    let is_found = find(packet);
    keep(packet, timeouts);
    is_found
}

/// Gives a later fragment the ports of its packet; `false` when they are not known.
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

/// Keeps the ports of a first fragment for the others.
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
    // Without room, those that follow are of no known flow, and are counted as such.
    let _ = T::fragments().insert(key, ports, u64::from(BPF_ANY));
}

/// Forgets the ports of a first fragment that was sent to `destination`.
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
