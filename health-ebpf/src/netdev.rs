//! `to_netdev` and `from_netdev`: the uplinks.

use aya_ebpf::bindings::BPF_ANY;
use aya_ebpf::helpers::bpf_ktime_get_ns;
use aya_ebpf::helpers::generated::bpf_ktime_get_coarse_ns;
use health_common::addr::Addr;
use health_common::config::DatapathConfig;
use health_common::ct::{TUPLE_IN, TUPLE_OUT, Tuple4, Tuple6};
use health_common::echo::{
    ICMP_ECHO_REPLY, ICMP_ECHO_REQUEST, ICMPV6_ECHO_REPLY, ICMPV6_ECHO_REQUEST, IPV4_LEN, IPV6_LEN,
    Ipv4Header, Ipv6Header, PROTOCOL_ICMP, PROTOCOL_ICMPV6,
};
use health_common::identity;
use health_common::metrics::{Direction, Reason};
use health_common::nat::{NAT_HOST_LOCAL, NatEntry4, NatEntry6};
use health_common::neighbour::{ETHERTYPE_IPV4, ETHERTYPE_IPV6};
use health_common::probe::{
    MESSAGE_LEN, ProbeMessage, is_intact4, is_intact6, may_be_probe4, may_be_probe6,
};

use crate::conntrack::{self, Tracked, Traffic};
use crate::frame::Frame;
use crate::maps::{HEALTH_CONFIG, HEALTH_CT4, HEALTH_CT6, HEALTH_NAT4, HEALTH_NAT6};
use crate::metrics::{Verdict, ignore, pass};
use crate::{rtt, turnround};

/// A packet that leaves by an uplink.
#[inline(always)]
pub fn to_netdev(frame: &Frame) -> Verdict {
    match frame.network() {
        Some((ETHERTYPE_IPV4, ip_at)) => to_netdev4(frame, ip_at),
        Some((ETHERTYPE_IPV6, ip_at)) => to_netdev6(frame, ip_at),
        _ => ignore(),
    }
}

/// A packet that came by an uplink.
#[inline(always)]
pub fn from_netdev(frame: &Frame) -> Verdict {
    match frame.network() {
        Some((ETHERTYPE_IPV4, ip_at)) => from_netdev4(frame, ip_at),
        Some((ETHERTYPE_IPV6, ip_at)) => from_netdev6(frame, ip_at),
        _ => ignore(),
    }
}

#[inline(always)]
fn to_netdev4(frame: &Frame, ip_at: usize) -> Verdict {
    let Some((ip, message, config)) = probe4(frame, ip_at) else {
        return ignore();
    };
    match message.echo.kind {
        ICMP_ECHO_REQUEST if is_own(message, config) => {
            let id_be = message.echo.id_be;
            let tuple = out4(ip.saddr_be, ip.daddr_be, id_be);
            if conntrack::track(&HEALTH_CT4, &tuple, sent(frame, ip_at, config)) == Tracked::New {
                reserve4(ip, tuple, id_be);
            }
            rtt::stamp(Addr::v4(ip.daddr_be), message);
            pass(frame, Reason::ProbeStamped, Direction::Egress)
        }
        ICMP_ECHO_REPLY => depart(frame, ip_at + IPV4_LEN, message, config),
        _ => ignore(),
    }
}

#[inline(always)]
fn to_netdev6(frame: &Frame, ip_at: usize) -> Verdict {
    let Some((ip, message, config)) = probe6(frame, ip_at) else {
        return ignore();
    };
    match message.echo.kind {
        ICMPV6_ECHO_REQUEST if is_own(message, config) => {
            let id_be = message.echo.id_be;
            let tuple = out6(ip.saddr_be, ip.daddr_be, id_be);
            if conntrack::track(&HEALTH_CT6, &tuple, sent(frame, ip_at, config)) == Tracked::New {
                reserve6(ip, tuple, id_be);
            }
            rtt::stamp(Addr::v6(ip.daddr_be), message);
            pass(frame, Reason::ProbeStamped, Direction::Egress)
        }
        ICMPV6_ECHO_REPLY => depart(frame, ip_at + IPV6_LEN, message, config),
        _ => ignore(),
    }
}

#[inline(always)]
fn from_netdev4(frame: &Frame, ip_at: usize) -> Verdict {
    let Some((ip, message, config)) = probe4(frame, ip_at) else {
        return ignore();
    };
    let peer = Addr::v4(ip.saddr_be);
    match message.echo.kind {
        ICMP_ECHO_REPLY if message.echo.id_be == config.icmp_id_be => {
            // SAFETY: a helper without arguments.
            let now_ns = unsafe { bpf_ktime_get_ns() };
            let is_intact = match (frame.at(ip_at), frame.at(ip_at + IPV4_LEN)) {
                (Some(ip), Some(message)) => is_intact4(ip, message),
                _ => false,
            };
            if !is_intact {
                return pass(frame, Reason::ProbeDamaged, Direction::Ingress);
            }
            let reason = rtt::matched(peer, message, config, now_ns);
            let tuple = out4(ip.daddr_be, ip.saddr_be, message.echo.id_be);
            conntrack::track(&HEALTH_CT4, &tuple, received(frame, ip_at, config));
            pass(frame, reason, Direction::Ingress)
        }
        ICMP_ECHO_REQUEST => arrive(frame, peer, ip_at + IPV4_LEN, message, config),
        _ => ignore(),
    }
}

#[inline(always)]
fn from_netdev6(frame: &Frame, ip_at: usize) -> Verdict {
    let Some((ip, message, config)) = probe6(frame, ip_at) else {
        return ignore();
    };
    let peer = Addr::v6(ip.saddr_be);
    match message.echo.kind {
        ICMPV6_ECHO_REPLY if message.echo.id_be == config.icmp_id_be => {
            // SAFETY: a helper without arguments.
            let now_ns = unsafe { bpf_ktime_get_ns() };
            let is_intact = match frame.at(ip_at + IPV6_LEN) {
                Some(message) => is_intact6(ip, message),
                None => false,
            };
            if !is_intact {
                return pass(frame, Reason::ProbeDamaged, Direction::Ingress);
            }
            let reason = rtt::matched(peer, message, config, now_ns);
            let tuple = out6(ip.daddr_be, ip.saddr_be, message.echo.id_be);
            conntrack::track(&HEALTH_CT6, &tuple, received(frame, ip_at, config));
            pass(frame, reason, Direction::Ingress)
        }
        ICMPV6_ECHO_REQUEST => arrive(frame, peer, ip_at + IPV6_LEN, message, config),
        _ => ignore(),
    }
}

/// A request of somebody else, whose message begins at `offset`.
#[inline(always)]
fn arrive(
    frame: &Frame,
    peer: Addr,
    offset: usize,
    message: &ProbeMessage,
    config: &DatapathConfig,
) -> Verdict {
    let path = message.payload.path;
    if !turnround::arrive(frame, offset, message, config) {
        return ignore();
    }
    rtt::received(peer, path);
    pass(frame, Reason::ProbeArrived, Direction::Ingress)
}

/// A reply to somebody else, whose message begins at `offset`.
#[inline(always)]
fn depart(
    frame: &Frame,
    offset: usize,
    message: &ProbeMessage,
    config: &DatapathConfig,
) -> Verdict {
    if !turnround::depart(frame, offset, message, config) {
        return ignore();
    }
    pass(frame, Reason::ProbeReturned, Direction::Egress)
}

/// Whether a request that leaves is a probe of this agent.
#[inline(always)]
fn is_own(message: &ProbeMessage, config: &DatapathConfig) -> bool {
    let ProbeMessage { echo, payload } = message;
    echo.id_be == config.icmp_id_be
        && payload.session_be == config.session.to_be()
        && payload.is_genuine(config.probe_key, echo.id_be, echo.sequence_be)
}

/// Headers and message of a packet that may be a probe of the mesh, and the settings.
#[inline(always)]
fn probe4<'a>(
    frame: &Frame<'a>,
    ip_at: usize,
) -> Option<(&'a Ipv4Header, &'a ProbeMessage, &'static DatapathConfig)> {
    // Most packets are none of ours; they are told apart before anything is pulled.
    if frame.at::<Ipv4Header>(ip_at)?.protocol != PROTOCOL_ICMP
        || !frame.pull(ip_at + IPV4_LEN + MESSAGE_LEN)
    {
        return None;
    }
    let (ip, message) = (frame.at(ip_at)?, frame.at(ip_at + IPV4_LEN)?);
    if !may_be_probe4(ip, message) {
        return None;
    }
    Some((ip, message, HEALTH_CONFIG.get(0)?))
}

/// As [`probe4`].
#[inline(always)]
fn probe6<'a>(
    frame: &Frame<'a>,
    ip_at: usize,
) -> Option<(&'a Ipv6Header, &'a ProbeMessage, &'static DatapathConfig)> {
    if frame.at::<Ipv6Header>(ip_at)?.next_header != PROTOCOL_ICMPV6
        || !frame.pull(ip_at + IPV6_LEN + MESSAGE_LEN)
    {
        return None;
    }
    let (ip, message) = (frame.at(ip_at)?, frame.at(ip_at + IPV6_LEN)?);
    if !may_be_probe6(ip, message) {
        return None;
    }
    Some((ip, message, HEALTH_CONFIG.get(0)?))
}

/// Reserves the identifier of this agent's probes for it.
#[inline(always)]
fn reserve4(ip: &Ipv4Header, tuple: Tuple4, id_be: u16) {
    let back = Tuple4 {
        saddr_be: ip.daddr_be,
        daddr_be: ip.saddr_be,
        sport_be: 0,
        dport_be: id_be,
        direction: TUPLE_IN,
        ..tuple
    };
    let entry = NatEntry4 {
        created_ns: coarse_now_ns(),
        flags: NAT_HOST_LOCAL,
        addr_be: ip.saddr_be,
        port_be: id_be,
        pad: [0; 3],
    };
    // Without room, nothing is translated wrongly.
    let _ = HEALTH_NAT4.insert(tuple, entry, u64::from(BPF_ANY));
    let _ = HEALTH_NAT4.insert(back, entry, u64::from(BPF_ANY));
}

/// As [`reserve4`].
#[inline(always)]
fn reserve6(ip: &Ipv6Header, tuple: Tuple6, id_be: u16) {
    let back = Tuple6 {
        saddr_be: ip.daddr_be,
        daddr_be: ip.saddr_be,
        sport_be: 0,
        dport_be: id_be,
        direction: TUPLE_IN,
        ..tuple
    };
    let entry = NatEntry6 {
        created_ns: coarse_now_ns(),
        flags: NAT_HOST_LOCAL,
        addr_be: ip.saddr_be,
        port_be: id_be,
        pad: 0,
    };
    let _ = HEALTH_NAT6.insert(tuple, entry, u64::from(BPF_ANY));
    let _ = HEALTH_NAT6.insert(back, entry, u64::from(BPF_ANY));
}

#[inline(always)]
fn out4(saddr_be: u32, daddr_be: u32, id_be: u16) -> Tuple4 {
    Tuple4 {
        saddr_be,
        daddr_be,
        sport_be: id_be,
        dport_be: 0,
        protocol: PROTOCOL_ICMP,
        direction: TUPLE_OUT,
        pad: 0,
    }
}

#[inline(always)]
fn out6(saddr_be: [u32; 4], daddr_be: [u32; 4], id_be: u16) -> Tuple6 {
    Tuple6 {
        saddr_be,
        daddr_be,
        sport_be: id_be,
        dport_be: 0,
        protocol: PROTOCOL_ICMPV6,
        direction: TUPLE_OUT,
        pad: 0,
    }
}

#[inline(always)]
fn sent(frame: &Frame, ip_at: usize, config: &DatapathConfig) -> Traffic {
    Traffic {
        tx_bytes: frame.length() - ip_at as u32,
        ..traffic(frame, config)
    }
}

#[inline(always)]
fn received(frame: &Frame, ip_at: usize, config: &DatapathConfig) -> Traffic {
    Traffic {
        rx_bytes: frame.length() - ip_at as u32,
        ..traffic(frame, config)
    }
}

#[inline(always)]
fn traffic(frame: &Frame, config: &DatapathConfig) -> Traffic {
    Traffic {
        rx_bytes: 0,
        tx_bytes: 0,
        source_identity: identity::HOST,
        ifindex: frame.ifindex(),
        timeout_secs: config.ct_any_timeout_secs,
    }
}

#[inline(always)]
fn coarse_now_ns() -> u64 {
    // SAFETY: a helper without arguments.
    unsafe { bpf_ktime_get_coarse_ns() }
}
