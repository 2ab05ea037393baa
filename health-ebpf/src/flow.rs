//! Conntrack and NAT entries of this agent's own echo probes.

use aya_ebpf::bindings::BPF_ANY;
use health_common::config::DatapathConfig;
use health_common::ct::{TUPLE_IN, TUPLE_OUT, Tuple4, Tuple6};
use health_common::echo::{IPV4_LEN, IPV6_LEN, PROTOCOL_ICMP, PROTOCOL_ICMPV6};
use health_common::identity;
use health_common::inflight::Inflight;
use health_common::nat::{NAT_HOST_LOCAL, NatEntry4, NatEntry6};
use health_common::probe::MESSAGE_LEN;

use crate::conntrack::{self, Tracked, Traffic};
use crate::frame::words;
use crate::maps::{HEALTH_CT4, HEALTH_CT6, HEALTH_NAT4, HEALTH_NAT6};

const PACKET_LEN4: u32 = (IPV4_LEN + MESSAGE_LEN) as u32;
const PACKET_LEN6: u32 = (IPV6_LEN + MESSAGE_LEN) as u32;

/// Enters a probe that left by an uplink, and its answer if there was one, of which the agent heard at
/// `now_ns`.
#[inline(always)]
pub fn exchanged(probe: &Inflight, is_answered: bool, config: &DatapathConfig, now_ns: u64) {
    if probe.peer.is_v4() {
        exchanged4(probe, is_answered, config, now_ns);
    } else {
        exchanged6(probe, is_answered, config, now_ns);
    }
}

#[inline(always)]
fn exchanged4(probe: &Inflight, is_answered: bool, config: &DatapathConfig, now_ns: u64) {
    let (local_be, peer_be) = (probe.local.words_be[3], probe.peer.words_be[3]);
    let tuple = out4(local_be, peer_be, config);
    let traffic = exchange(PACKET_LEN4, is_answered, probe.ifindex);
    let tracked = conntrack::track_at(&HEALTH_CT4, &tuple, traffic, &config.timeouts, now_ns);
    if tracked != Tracked::New {
        return;
    }
    let back = Tuple4 {
        saddr_be: peer_be,
        daddr_be: local_be,
        sport_be: 0,
        dport_be: config.icmp_id_be,
        direction: TUPLE_IN,
        ..tuple
    };
    let entry = NatEntry4 {
        created_ns: now_ns,
        flags: NAT_HOST_LOCAL,
        addr_be: local_be,
        port_be: config.icmp_id_be,
        ..NatEntry4::default()
    };
    // Host-local entries only reserve the identifier: without room, nothing is translated wrongly.
    let _ = HEALTH_NAT4.insert(tuple, entry, u64::from(BPF_ANY));
    let _ = HEALTH_NAT4.insert(back, entry, u64::from(BPF_ANY));
}

/// As [`exchanged4`].
#[inline(always)]
fn exchanged6(probe: &Inflight, is_answered: bool, config: &DatapathConfig, now_ns: u64) {
    let tuple = out6(probe.local.words_be, probe.peer.words_be, config);
    let traffic = exchange(PACKET_LEN6, is_answered, probe.ifindex);
    let tracked = conntrack::track_at(&HEALTH_CT6, &tuple, traffic, &config.timeouts, now_ns);
    if tracked != Tracked::New {
        return;
    }
    let back = Tuple6 {
        saddr_be: tuple.daddr_be,
        daddr_be: tuple.saddr_be,
        sport_be: 0,
        dport_be: config.icmp_id_be,
        direction: TUPLE_IN,
        ..tuple
    };
    let entry = NatEntry6 {
        created_ns: now_ns,
        flags: NAT_HOST_LOCAL,
        addr_be: probe.local.words_be,
        port_be: config.icmp_id_be,
        pad: 0,
    };
    let _ = HEALTH_NAT6.insert(tuple, entry, u64::from(BPF_ANY));
    let _ = HEALTH_NAT6.insert(back, entry, u64::from(BPF_ANY));
}

/// Enters a reply that came at `now_ns` from `peer_be` to this host's `local_be`.
#[inline(always)]
pub fn received4(local_be: u32, peer_be: u32, config: &DatapathConfig, now_ns: u64) {
    let tuple = out4(local_be, peer_be, config);
    let traffic = Traffic {
        rx_bytes: PACKET_LEN4,
        ..traffic()
    };
    conntrack::track_at(&HEALTH_CT4, &tuple, traffic, &config.timeouts, now_ns);
}

/// As [`received4`].
#[inline(always)]
pub fn received6(local_be: [u32; 4], peer_be: [u32; 4], config: &DatapathConfig, now_ns: u64) {
    let tuple = out6(local_be, peer_be, config);
    let traffic = Traffic {
        rx_bytes: PACKET_LEN6,
        ..traffic()
    };
    conntrack::track_at(&HEALTH_CT6, &tuple, traffic, &config.timeouts, now_ns);
}

#[inline(always)]
fn out4(local_be: u32, peer_be: u32, config: &DatapathConfig) -> Tuple4 {
    Tuple4 {
        saddr_be: local_be,
        daddr_be: peer_be,
        sport_be: config.icmp_id_be,
        dport_be: 0,
        protocol: PROTOCOL_ICMP,
        direction: TUPLE_OUT,
        pad: 0,
    }
}

#[inline(always)]
fn out6(local_be: [u32; 4], peer_be: [u32; 4], config: &DatapathConfig) -> Tuple6 {
    Tuple6 {
        saddr_be: words(local_be),
        daddr_be: words(peer_be),
        sport_be: config.icmp_id_be,
        dport_be: 0,
        protocol: PROTOCOL_ICMPV6,
        direction: TUPLE_OUT,
        pad: 0,
    }
}

/// A probe of so many bytes that left, and its answer if there was one.
#[inline(always)]
fn exchange(bytes: u32, is_answered: bool, ifindex: u32) -> Traffic {
    Traffic {
        tx_bytes: bytes,
        rx_bytes: if is_answered { bytes } else { 0 },
        ifindex,
        ..traffic()
    }
}

#[inline(always)]
fn traffic() -> Traffic {
    Traffic {
        source_identity: identity::HOST,
        ..Traffic::default()
    }
}
