//! Conntrack and NAT entries of this agent's own echo probes.

use aya_ebpf::bindings::{__sk_buff, BPF_ANY};
use aya_ebpf::programs::TcContext;
use health_common::addr::Addr;
use health_common::config::DatapathConfig;
use health_common::ct::{TUPLE_IN, TUPLE_OUT, Tuple4, Tuple6};
use health_common::echo::{
    IPV4_LEN, IPV6_LEN, Ipv4Header, Ipv6Header, PROTOCOL_ICMP, PROTOCOL_ICMPV6,
};
use health_common::identity;
use health_common::nat::{NAT_HOST_LOCAL, NatEntry4, NatEntry6};
use health_common::probe::MESSAGE_LEN;

use crate::bounds::forgotten;
use crate::clock::coarse_now_ns;
use crate::conntrack::{self, Tracked, Traffic};
use crate::frame::{Frame, IP_AT_MAX, words};
use crate::maps::{HEALTH_CONFIG, HEALTH_CT4, HEALTH_CT6, HEALTH_NAT4, HEALTH_NAT6};

const PACKET_LEN4: u32 = (IPV4_LEN + MESSAGE_LEN) as u32;
const PACKET_LEN6: u32 = (IPV6_LEN + MESSAGE_LEN) as u32;

/// Enters a probe that leaves, at a time that `stamp` tells: when all is done that can take long.
#[inline(always)]
pub fn sent4(
    frame: &Frame,
    ip_at: usize,
    ip: &Ipv4Header,
    config: &DatapathConfig,
    stamp: impl FnOnce() -> u64,
) {
    let tuple = out4(ip.saddr_be, ip.daddr_be, config);
    let known = HEALTH_CT4.get_ptr_mut(tuple);
    if known.is_none() && begin4(frame.skb(), ip_at as u32) != 0 {
        reserve4(frame.skb(), ip_at as u32);
    }
    let now_ns = stamp();
    if let Some(entry) = known {
        let traffic = sent(PACKET_LEN4, frame);
        // SAFETY: a value of that map.
        unsafe { conntrack::update(entry, &tuple, traffic, &config.timeouts, now_ns) };
    }
}

/// Makes the conntrack entry of a probe that leaves. 1 when it was made, else 0.
///
/// A function of its own in the kernel too, as are its likes: what each probe needs has then not to share
/// registers with what the first one does, nor one step the stack with the other.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn begin4(skb: *mut __sk_buff, ip_at: u32) -> u32 {
    let ctx = TcContext::new(skb);
    let frame = Frame::new(&ctx);
    let Some((ip, config)) = probe::<Ipv4Header>(&frame, ip_at) else {
        return 0;
    };
    let tuple = out4(ip.saddr_be, ip.daddr_be, config);
    let traffic = sent(PACKET_LEN4, &frame);
    let tracked = conntrack::track(&HEALTH_CT4, &tuple, traffic, &config.timeouts);
    (tracked == Tracked::New).into()
}

/// Reserves the probes' identifier. The result is of no meaning: functions in the kernel have one.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn reserve4(skb: *mut __sk_buff, ip_at: u32) -> u32 {
    let ctx = TcContext::new(skb);
    let frame = Frame::new(&ctx);
    let Some((ip, config)) = probe::<Ipv4Header>(&frame, ip_at) else {
        return 0;
    };
    let tuple = out4(ip.saddr_be, ip.daddr_be, config);
    let back = Tuple4 {
        saddr_be: ip.daddr_be,
        daddr_be: ip.saddr_be,
        sport_be: 0,
        dport_be: config.icmp_id_be,
        direction: TUPLE_IN,
        ..tuple
    };
    let entry = NatEntry4 {
        created_ns: coarse_now_ns(),
        flags: NAT_HOST_LOCAL,
        addr_be: ip.saddr_be,
        port_be: config.icmp_id_be,
        ..NatEntry4::default()
    };
    // Host-local entries only reserve the identifier: without room, nothing is translated wrongly.
    let _ = HEALTH_NAT4.insert(tuple, entry, u64::from(BPF_ANY));
    let _ = HEALTH_NAT4.insert(back, entry, u64::from(BPF_ANY));
    0
}

/// As [`sent4`].
#[inline(always)]
pub fn sent6(
    frame: &Frame,
    ip_at: usize,
    ip: &Ipv6Header,
    config: &DatapathConfig,
    stamp: impl FnOnce() -> u64,
) {
    let tuple = out6(ip.saddr_be, ip.daddr_be, config);
    let known = HEALTH_CT6.get_ptr_mut(tuple);
    if known.is_none() && begin6(frame.skb(), ip_at as u32) != 0 {
        reserve6(frame.skb(), ip_at as u32);
    }
    let now_ns = stamp();
    if let Some(entry) = known {
        let traffic = sent(PACKET_LEN6, frame);
        // SAFETY: a value of that map.
        unsafe { conntrack::update(entry, &tuple, traffic, &config.timeouts, now_ns) };
    }
}

/// As [`begin4`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn begin6(skb: *mut __sk_buff, ip_at: u32) -> u32 {
    let ctx = TcContext::new(skb);
    let frame = Frame::new(&ctx);
    let Some((ip, config)) = probe::<Ipv6Header>(&frame, ip_at) else {
        return 0;
    };
    let tuple = out6(ip.saddr_be, ip.daddr_be, config);
    let traffic = sent(PACKET_LEN6, &frame);
    let tracked = conntrack::track(&HEALTH_CT6, &tuple, traffic, &config.timeouts);
    (tracked == Tracked::New).into()
}

/// As [`reserve4`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn reserve6(skb: *mut __sk_buff, ip_at: u32) -> u32 {
    let ctx = TcContext::new(skb);
    let frame = Frame::new(&ctx);
    let Some((ip, config)) = probe::<Ipv6Header>(&frame, ip_at) else {
        return 0;
    };
    let tuple = out6(ip.saddr_be, ip.daddr_be, config);
    let back = Tuple6 {
        saddr_be: ip.daddr_be,
        daddr_be: ip.saddr_be,
        sport_be: 0,
        dport_be: config.icmp_id_be,
        direction: TUPLE_IN,
        ..tuple
    };
    let entry = NatEntry6 {
        created_ns: coarse_now_ns(),
        flags: NAT_HOST_LOCAL,
        addr_be: ip.saddr_be,
        port_be: config.icmp_id_be,
        pad: 0,
    };
    let _ = HEALTH_NAT6.insert(tuple, entry, u64::from(BPF_ANY));
    let _ = HEALTH_NAT6.insert(back, entry, u64::from(BPF_ANY));
    0
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

/// As [`received4`], for either IP version.
#[inline(always)]
pub fn received(local: &Addr, peer: &Addr, config: &DatapathConfig, now_ns: u64) {
    if peer.is_v4() {
        received4(local.words_be[3], peer.words_be[3], config, now_ns);
    } else {
        received6(local.words_be, peer.words_be, config, now_ns);
    }
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

/// IP header of a probe, and the settings.
#[inline(always)]
fn probe<'a, H>(frame: &Frame<'a>, ip_at: u32) -> Option<(&'a H, &'static DatapathConfig)> {
    let ip_at = forgotten(ip_at);
    if ip_at > IP_AT_MAX {
        return None;
    }
    Some((frame.at(ip_at as usize)?, HEALTH_CONFIG.get(0)?))
}

/// A probe of so many bytes that leaves.
#[inline(always)]
fn sent(bytes: u32, frame: &Frame) -> Traffic {
    Traffic {
        tx_bytes: bytes,
        ifindex: frame.ifindex(),
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
