//! `to_netdev` and `from_netdev`: the uplinks.

use health_common::addr::Addr;
use health_common::arrivals::{self, Prober};
use health_common::config::DatapathConfig;
use health_common::echo::{
    ICMP_ECHO_REPLY, ICMP_ECHO_REQUEST, ICMPV6_ECHO_REPLY, ICMPV6_ECHO_REQUEST, IPV4_LEN, IPV6_LEN,
    Ipv4Header, Ipv6Header, PROTOCOL_ICMP, PROTOCOL_ICMPV6,
};
use health_common::metrics::{Direction, Reason};
use health_common::neighbour::{ETHERTYPE_IPV4, ETHERTYPE_IPV6};
use health_common::probe::{
    MESSAGE_LEN, ProbeMessage, is_intact4, is_intact6, may_be_probe4, may_be_probe6,
};

use crate::clock::received_ns;
use crate::frame::Frame;
use crate::maps::HEALTH_CONFIG;
use crate::metrics::{Verdict, ignore, pass};
use crate::tcp::{self, Packet};
use crate::{arrivals as counts, flow, nat, rtt, turnround};

/// A packet that leaves by an uplink.
#[inline(always)]
pub fn to_netdev(frame: &Frame) -> Verdict {
    let Some((ethertype, ip_at)) = frame.network() else {
        return ignore();
    };
    if let Some(packet) = Packet::read(frame, ethertype, ip_at, Direction::Egress) {
        tcp::sent(frame, &packet);
        return nat::leave(frame, ethertype);
    }
    let probe = match ethertype {
        ETHERTYPE_IPV4 => to_netdev4(frame, ip_at),
        ETHERTYPE_IPV6 => to_netdev6(frame, ip_at),
        _ => return ignore(),
    };
    match probe {
        Some(verdict) => verdict,
        None => nat::leave(frame, ethertype),
    }
}

/// A packet that came by an uplink.
#[inline(always)]
pub fn from_netdev(frame: &Frame) -> Verdict {
    let Some((ethertype, ip_at)) = frame.network() else {
        return ignore();
    };
    if let Some(packet) = Packet::read(frame, ethertype, ip_at, Direction::Ingress) {
        tcp::received(frame, &packet);
        return nat::arrive(frame, ethertype);
    }
    let probe = match ethertype {
        ETHERTYPE_IPV4 => from_netdev4(frame, ip_at),
        ETHERTYPE_IPV6 => from_netdev6(frame, ip_at),
        _ => return ignore(),
    };
    match probe {
        Some(verdict) => verdict,
        None => nat::arrive(frame, ethertype),
    }
}

/// A probe that leaves, of this agent or answered by this host; `None` for everything else.
#[inline(always)]
fn to_netdev4(frame: &Frame, ip_at: usize) -> Option<Verdict> {
    let (ip, message, config) = probe4(frame, ip_at)?;
    match message.echo.kind {
        ICMP_ECHO_REQUEST if is_own(message, config) => {
            let verdict = pass(frame, Reason::ProbeStamped, Direction::Egress);
            let (local, peer) = (Addr::v4(ip.saddr_be), Addr::v4(ip.daddr_be));
            rtt::stamp(local, peer, message, frame.ifindex());
            Some(verdict)
        }
        ICMP_ECHO_REPLY => Some(depart(frame, true, ip_at + IPV4_LEN, message, config)),
        _ => None,
    }
}

/// As [`to_netdev4`].
#[inline(always)]
fn to_netdev6(frame: &Frame, ip_at: usize) -> Option<Verdict> {
    let (ip, message, config) = probe6(frame, ip_at)?;
    match message.echo.kind {
        ICMPV6_ECHO_REQUEST if is_own(message, config) => {
            let verdict = pass(frame, Reason::ProbeStamped, Direction::Egress);
            let (local, peer) = (Addr::v6(ip.saddr_be), Addr::v6(ip.daddr_be));
            rtt::stamp(local, peer, message, frame.ifindex());
            Some(verdict)
        }
        ICMPV6_ECHO_REPLY => Some(depart(frame, false, ip_at + IPV6_LEN, message, config)),
        _ => None,
    }
}

/// A probe that came, of another agent or answering this one's; `None` for everything else.
#[inline(always)]
fn from_netdev4(frame: &Frame, ip_at: usize) -> Option<Verdict> {
    let (ip, message, config) = probe4(frame, ip_at)?;
    let peer = Addr::v4(ip.saddr_be);
    match message.echo.kind {
        ICMP_ECHO_REPLY if message.echo.id_be == config.icmp_id_be => {
            let now_ns = received_ns(frame, config);
            let is_intact = match (frame.at(ip_at), frame.at(ip_at + IPV4_LEN)) {
                (Some(ip), Some(message)) => is_intact4(ip, message),
                _ => false,
            };
            if !is_intact {
                return Some(pass(frame, Reason::ProbeDamaged, Direction::Ingress));
            }
            if rtt::matched(peer, message, config, now_ns) {
                return Some(pass(frame, Reason::ProbeMatched, Direction::Ingress));
            }
            flow::received4(ip.daddr_be, ip.saddr_be, config, now_ns);
            Some(pass(frame, Reason::ProbeUnmatched, Direction::Ingress))
        }
        ICMP_ECHO_REQUEST => Some(arrive(frame, true, ip_at + IPV4_LEN, message, config)),
        _ => None,
    }
}

/// As [`from_netdev4`].
#[inline(always)]
fn from_netdev6(frame: &Frame, ip_at: usize) -> Option<Verdict> {
    let (ip, message, config) = probe6(frame, ip_at)?;
    let peer = Addr::v6(ip.saddr_be);
    match message.echo.kind {
        ICMPV6_ECHO_REPLY if message.echo.id_be == config.icmp_id_be => {
            let now_ns = received_ns(frame, config);
            let is_intact = match frame.at(ip_at + IPV6_LEN) {
                Some(message) => is_intact6(ip, message),
                None => false,
            };
            if !is_intact {
                return Some(pass(frame, Reason::ProbeDamaged, Direction::Ingress));
            }
            if rtt::matched(peer, message, config, now_ns) {
                return Some(pass(frame, Reason::ProbeMatched, Direction::Ingress));
            }
            flow::received6(ip.daddr_be, ip.saddr_be, config, now_ns);
            Some(pass(frame, Reason::ProbeUnmatched, Direction::Ingress))
        }
        ICMPV6_ECHO_REQUEST => Some(arrive(frame, false, ip_at + IPV6_LEN, message, config)),
        _ => None,
    }
}

/// A request of somebody else, whose message begins at `offset`.
#[inline(always)]
fn arrive(
    frame: &Frame,
    is_v4: bool,
    offset: usize,
    message: &ProbeMessage,
    config: &DatapathConfig,
) -> Verdict {
    let (prober, way) = (prober(message), arrivals::way(is_v4, message.payload.path));
    // A packet can cross two uplinks, a bridge and its port: it arrives at the first.
    let is_first = message.payload.turnround_be == 0;
    if !turnround::arrive(frame, offset, message, config) {
        return ignore();
    }
    if is_first {
        counts::arrived(&prober, way);
    }
    pass(frame, Reason::ProbeArrived, Direction::Ingress)
}

/// A reply to somebody else, whose message begins at `offset`.
#[inline(always)]
fn depart(
    frame: &Frame,
    is_v4: bool,
    offset: usize,
    message: &ProbeMessage,
    config: &DatapathConfig,
) -> Verdict {
    let (prober, way) = (prober(message), arrivals::way(is_v4, message.payload.path));
    if !turnround::depart(frame, offset, message, config) {
        return ignore();
    }
    counts::replied(&prober, way);
    pass(frame, Reason::ProbeReturned, Direction::Egress)
}

/// Whose probe a message is, or answers.
#[inline(always)]
fn prober(message: &ProbeMessage) -> Prober {
    Prober {
        session: u32::from_be(message.payload.session_be),
        icmp_id_be: message.echo.id_be,
        pad: 0,
    }
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
