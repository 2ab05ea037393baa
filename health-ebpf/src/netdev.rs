//! `to_netdev` and `from_netdev`: the uplinks.

use aya_ebpf::bindings::BPF_ANY;
use aya_ebpf::helpers::bpf_ktime_get_ns;
use aya_ebpf::helpers::generated::bpf_ktime_get_coarse_ns;
use health_common::addr::Addr;
use health_common::config::DatapathConfig;
use health_common::ct::{TUPLE_IN, TUPLE_OUT, Tuple4, Tuple6};
use health_common::echo::{
    ECHO_LEN, EchoHeader, ICMP_ECHO_REPLY, ICMP_ECHO_REQUEST, ICMPV6_ECHO_REPLY,
    ICMPV6_ECHO_REQUEST, Ipv4Header, Ipv6Header, PROTOCOL_ICMP, PROTOCOL_ICMPV6,
};
use health_common::identity;
use health_common::metrics::{Direction, Reason};
use health_common::nat::{NAT_HOST_LOCAL, NatEntry4, NatEntry6};
use health_common::neighbour::{ETHERTYPE_IPV4, ETHERTYPE_IPV6};
use health_common::probe::{PROBE_LEN, ProbePayload};

use crate::conntrack::{self, Tracked, Traffic};
use crate::frame::{Frame, IP_AT, L4_AT4, L4_AT6};
use crate::maps::{HEALTH_CONFIG, HEALTH_CT4, HEALTH_CT6, HEALTH_NAT4, HEALTH_NAT6};
use crate::metrics::{Verdict, ignore, pass};
use crate::{rtt, tcp};

/// One of our own echoes: request or reply.
struct Probe<'a> {
    echo: &'a EchoHeader,
    payload: &'a ProbePayload,
}

/// A packet that leaves by an uplink.
#[inline(always)]
pub fn to_netdev(frame: &Frame) -> Verdict {
    let Some(config) = HEALTH_CONFIG.get(0) else {
        return ignore();
    };
    match frame.protocol() {
        ETHERTYPE_IPV4 => to_netdev4(frame, config),
        ETHERTYPE_IPV6 => to_netdev6(frame, config),
        _ => ignore(),
    }
}

/// A packet that came by an uplink.
#[inline(always)]
pub fn from_netdev(frame: &Frame) -> Verdict {
    let Some(config) = HEALTH_CONFIG.get(0) else {
        return ignore();
    };
    match frame.protocol() {
        ETHERTYPE_IPV4 => from_netdev4(frame, config),
        ETHERTYPE_IPV6 => from_netdev6(frame, config),
        _ => ignore(),
    }
}

#[inline(always)]
fn to_netdev4(frame: &Frame, config: &DatapathConfig) -> Verdict {
    let Some((ip, probe)) = probe4(frame, config, ICMP_ECHO_REQUEST) else {
        tcp::sent4(frame, config);
        return ignore();
    };
    let id_be = probe.echo.id_be;
    let tuple = out4(ip.saddr_be, ip.daddr_be, id_be);
    if conntrack::track(&HEALTH_CT4, &tuple, sent(frame, config)) == Tracked::New {
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
        // Host-local entries only reserve the identifier: without room, nothing is translated wrongly.
        let _ = HEALTH_NAT4.insert(tuple, entry, u64::from(BPF_ANY));
        let _ = HEALTH_NAT4.insert(back, entry, u64::from(BPF_ANY));
    }
    rtt::stamp(Addr::v4(ip.daddr_be), probe.echo, probe.payload);
    pass(frame, Reason::ProbeStamped, Direction::Egress)
}

#[inline(always)]
fn to_netdev6(frame: &Frame, config: &DatapathConfig) -> Verdict {
    let Some((ip, probe)) = probe6(frame, config, ICMPV6_ECHO_REQUEST) else {
        tcp::sent6(frame, config);
        return ignore();
    };
    let id_be = probe.echo.id_be;
    let tuple = out6(ip.saddr_be, ip.daddr_be, id_be);
    if conntrack::track(&HEALTH_CT6, &tuple, sent(frame, config)) == Tracked::New {
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
        // As for IPv4.
        let _ = HEALTH_NAT6.insert(tuple, entry, u64::from(BPF_ANY));
        let _ = HEALTH_NAT6.insert(back, entry, u64::from(BPF_ANY));
    }
    rtt::stamp(Addr::v6(ip.daddr_be), probe.echo, probe.payload);
    pass(frame, Reason::ProbeStamped, Direction::Egress)
}

#[inline(always)]
fn from_netdev4(frame: &Frame, config: &DatapathConfig) -> Verdict {
    let Some((ip, probe)) = probe4(frame, config, ICMP_ECHO_REPLY) else {
        tcp::received4(frame, config);
        return ignore();
    };
    // SAFETY: a helper without arguments.
    let now_ns = unsafe { bpf_ktime_get_ns() };
    let matched = rtt::matched(
        Addr::v4(ip.saddr_be),
        probe.echo,
        probe.payload.path,
        now_ns,
    );
    let tuple = out4(ip.daddr_be, ip.saddr_be, probe.echo.id_be);
    conntrack::track(&HEALTH_CT4, &tuple, received(frame, config));
    pass(frame, reason_of(matched), Direction::Ingress)
}

#[inline(always)]
fn from_netdev6(frame: &Frame, config: &DatapathConfig) -> Verdict {
    let Some((ip, probe)) = probe6(frame, config, ICMPV6_ECHO_REPLY) else {
        tcp::received6(frame, config);
        return ignore();
    };
    // SAFETY: a helper without arguments.
    let now_ns = unsafe { bpf_ktime_get_ns() };
    let matched = rtt::matched(
        Addr::v6(ip.saddr_be),
        probe.echo,
        probe.payload.path,
        now_ns,
    );
    let tuple = out6(ip.daddr_be, ip.saddr_be, probe.echo.id_be);
    conntrack::track(&HEALTH_CT6, &tuple, received(frame, config));
    pass(frame, reason_of(matched), Direction::Ingress)
}

/// The packet's headers if it is an echo of type `kind` with this agent's identifier and magic.
#[inline(always)]
fn probe4<'a>(
    frame: &Frame<'a>,
    config: &DatapathConfig,
    kind: u8,
) -> Option<(&'a Ipv4Header, Probe<'a>)> {
    // Most packets are none of ours; they are told apart before anything is pulled.
    let ip = frame.at::<Ipv4Header>(IP_AT)?;
    if ip.protocol != PROTOCOL_ICMP || ip.version_ihl != 0x45 {
        return None;
    }
    if !frame.pull(L4_AT4 + ECHO_LEN + PROBE_LEN) {
        return None;
    }
    let ip = frame.at::<Ipv4Header>(IP_AT)?;
    Some((ip, probe_at(frame, config, kind, L4_AT4)?))
}

/// As [`probe4`].
#[inline(always)]
fn probe6<'a>(
    frame: &Frame<'a>,
    config: &DatapathConfig,
    kind: u8,
) -> Option<(&'a Ipv6Header, Probe<'a>)> {
    let ip = frame.at::<Ipv6Header>(IP_AT)?;
    if ip.next_header != PROTOCOL_ICMPV6 {
        return None;
    }
    if !frame.pull(L4_AT6 + ECHO_LEN + PROBE_LEN) {
        return None;
    }
    let ip = frame.at::<Ipv6Header>(IP_AT)?;
    Some((ip, probe_at(frame, config, kind, L4_AT6)?))
}

#[inline(always)]
fn probe_at<'a>(
    frame: &Frame<'a>,
    config: &DatapathConfig,
    kind: u8,
    offset: usize,
) -> Option<Probe<'a>> {
    let echo = frame.at::<EchoHeader>(offset)?;
    let payload = frame.at::<ProbePayload>(offset + ECHO_LEN)?;
    (echo.kind == kind && echo.id_be == config.icmp_id_be && payload.magic == config.probe_magic)
        .then_some(Probe { echo, payload })
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
fn sent(frame: &Frame, config: &DatapathConfig) -> Traffic {
    Traffic {
        tx_bytes: frame.length() - IP_AT as u32,
        ..traffic(frame, config)
    }
}

#[inline(always)]
fn received(frame: &Frame, config: &DatapathConfig) -> Traffic {
    Traffic {
        rx_bytes: frame.length() - IP_AT as u32,
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
fn reason_of(matched: bool) -> Reason {
    if matched {
        Reason::ProbeMatched
    } else {
        Reason::ProbeUnmatched
    }
}

#[inline(always)]
fn coarse_now_ns() -> u64 {
    // SAFETY: a helper without arguments.
    unsafe { bpf_ktime_get_coarse_ns() }
}
