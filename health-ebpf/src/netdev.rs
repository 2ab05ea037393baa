//! `to_netdev` and `from_netdev`: the uplinks.

use health_common::arrivals::{self, Prober};
use health_common::config::DatapathConfig;
use health_common::ct::{Tuple4, Tuple6};
use health_common::masquerade::Address as _;
use health_common::metrics::{Direction, Reason};
use health_common::neighbour::{ETHERTYPE_IPV4, ETHERTYPE_IPV6};
use health_common::probe::{MESSAGE_LEN, ProbeMessage};

use crate::clock::received_ns;
use crate::frame::Frame;
use crate::ip_version::Version;
use crate::maps::HEALTH_CONFIG;
use crate::metrics::{Verdict, ignore, pass, refuse};
use crate::source::is_spoofed;
use crate::tcp::{self, Packet};
use crate::{arrivals as counts, early, nat, probe_flow, rtt, service, turnround};

/// Handles a packet that leaves on an uplink.
#[inline(always)]
pub fn to_netdev(frame: &Frame) -> Verdict {
    let Some((ethertype, ip_at)) = frame.network() else {
        return ignore();
    };
    if let Some(packet) = Packet::read(frame, ethertype, ip_at, Direction::Egress) {
        tcp::sent(frame, &packet);
        return service::leave(frame, ethertype);
    }
    let probe = match ethertype {
        ETHERTYPE_IPV4 => probe_leaves::<Tuple4>(frame, ip_at),
        ETHERTYPE_IPV6 => probe_leaves::<Tuple6>(frame, ip_at),
        _ => return ignore(),
    };
    match probe {
        Some(verdict) => verdict,
        None => service::leave(frame, ethertype),
    }
}

/// Handles a packet that came in on an uplink.
#[inline(always)]
pub fn from_netdev(frame: &Frame) -> Verdict {
    // The host's own copy of a packet that it sends to a group; it has no link header.
    if frame.is_looped_back() {
        return ignore();
    }
    let Some((ethertype, ip_at)) = frame.network() else {
        return ignore();
    };
    if is_spoofed(frame, ethertype, ip_at) {
        return refuse(frame, Reason::InvalidSource, Direction::Ingress);
    }
    let waits = match ethertype {
        ETHERTYPE_IPV4 => early::put_in_order::<Tuple4>(frame, ip_at),
        ETHERTYPE_IPV6 => early::put_in_order::<Tuple6>(frame, ip_at),
        _ => return ignore(),
    };
    if let Some(verdict) = waits {
        return verdict;
    }
    if let Some(packet) = Packet::read(frame, ethertype, ip_at, Direction::Ingress) {
        tcp::received(frame, &packet);
        return nat::arrive(frame, ethertype);
    }
    let probe = match ethertype {
        ETHERTYPE_IPV4 => probe_comes::<Tuple4>(frame, ip_at),
        ETHERTYPE_IPV6 => probe_comes::<Tuple6>(frame, ip_at),
        _ => return ignore(),
    };
    match probe {
        Some(verdict) => verdict,
        None => nat::arrive(frame, ethertype),
    }
}

/// Handles a leaving probe of this agent, or this host's reply to another agent's probe; `None` for everything else.
#[inline(always)]
fn probe_leaves<T: Version>(frame: &Frame, ip_at: usize) -> Option<Verdict> {
    let (ip, message, config) = probe::<T>(frame, ip_at)?;
    if message.echo.kind == T::ECHO_REQUEST && is_own(message, config) {
        let verdict = pass(frame, Reason::ProbeStamped, Direction::Egress);
        let (local, peer) = T::ends(ip);
        rtt::stamp(local.to_addr(), peer.to_addr(), message, frame.ifindex());
        Some(verdict)
    } else if message.echo.kind == T::ECHO_REPLY {
        Some(depart::<T>(frame, ip_at, message, config))
    } else {
        None
    }
}

/// Handles an arriving probe of another agent, or a reply to this agent's probe; `None` for everything else.
#[inline(always)]
fn probe_comes<T: Version>(frame: &Frame, ip_at: usize) -> Option<Verdict> {
    let (ip, message, config) = probe::<T>(frame, ip_at)?;
    if message.echo.kind == T::ECHO_REPLY && message.echo.id_be == config.icmp_id_be {
        let now_ns = received_ns(frame, config);
        let is_intact = match frame.at(ip_at + T::HEADER_LEN) {
            Some(words) => T::is_intact(ip, words),
            None => false,
        };
        if !is_intact {
            return Some(pass(frame, Reason::ProbeDamaged, Direction::Ingress));
        }
        if rtt::matched(T::ends(ip).0.to_addr(), message, config, now_ns) {
            return Some(pass(frame, Reason::ProbeMatched, Direction::Ingress));
        }
        let (peer, local) = T::ends(ip);
        probe_flow::received::<T>(local, peer, config, now_ns);
        Some(pass(frame, Reason::ProbeUnmatched, Direction::Ingress))
    } else if message.echo.kind == T::ECHO_REQUEST {
        Some(arrive::<T>(frame, ip_at, message, config))
    } else {
        None
    }
}

/// Handles another agent's request.
#[inline(always)]
fn arrive<T: Version>(
    frame: &Frame,
    ip_at: usize,
    message: &ProbeMessage,
    config: &DatapathConfig,
) -> Verdict {
    let (prober, way) = (prober(message), way::<T>(message));
    // A packet can cross two uplinks (a bridge and its port); only its arrival at the first one counts.
    let is_first = message.payload.turnround_be == 0;
    if !turnround::arrive(frame, ip_at + T::HEADER_LEN, message, config) {
        return ignore();
    }
    if is_first {
        counts::arrived(&prober, way);
    }
    pass(frame, Reason::ProbeArrived, Direction::Ingress)
}

/// Handles a reply to another agent.
#[inline(always)]
fn depart<T: Version>(
    frame: &Frame,
    ip_at: usize,
    message: &ProbeMessage,
    config: &DatapathConfig,
) -> Verdict {
    let (prober, way) = (prober(message), way::<T>(message));
    if !turnround::depart(frame, ip_at + T::HEADER_LEN, message, config) {
        return ignore();
    }
    counts::replied(&prober, way);
    pass(frame, Reason::ProbeReturned, Direction::Egress)
}

#[inline(always)]
fn way<T: Version>(message: &ProbeMessage) -> usize {
    arrivals::way(T::IP_VERSION == 4, message.payload.path)
}

/// The agent that sent this probe, or whose probe this answers.
#[inline(always)]
fn prober(message: &ProbeMessage) -> Prober {
    Prober {
        session: u32::from_be(message.payload.session_be),
        icmp_id_be: message.echo.id_be,
        pad: 0,
    }
}

/// Whether a leaving request is a probe of this agent.
#[inline(always)]
fn is_own(message: &ProbeMessage, config: &DatapathConfig) -> bool {
    let ProbeMessage { echo, payload } = message;
    echo.id_be == config.icmp_id_be
        && payload.session_be == config.session.to_be()
        && payload.is_genuine(config.probe_key, echo.id_be, echo.sequence_be)
}

/// Headers and message of a packet that may be a probe of the mesh, and the settings.
#[inline(always)]
fn probe<T: Version>(
    frame: &Frame,
    ip_at: usize,
) -> Option<(&T::Header, &ProbeMessage, &'static DatapathConfig)> {
    // Most packets are not ours; filter them out before pulling anything.
    if T::protocol_behind(frame.at::<T::Header>(ip_at)?) != T::ICMP
        || !frame.pull(ip_at + T::HEADER_LEN + MESSAGE_LEN)
    {
        return None;
    }
    let (ip, message) = (frame.at(ip_at)?, frame.at(ip_at + T::HEADER_LEN)?);
    if !T::may_be_probe(ip, message) {
        return None;
    }
    Some((ip, message, HEALTH_CONFIG.get(0)?))
}
