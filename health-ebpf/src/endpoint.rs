//! `to_endpoint` and `from_endpoint`: the host's end of an endpoint's veth pair.

use aya_ebpf::bindings::BPF_F_INGRESS;
use aya_ebpf::bindings::bpf_adj_room_mode::BPF_ADJ_ROOM_NET;
use aya_ebpf::helpers::generated::bpf_skb_adjust_room;
use aya_log_ebpf::debug;
use health_common::addr::Addr;
use health_common::config::DatapathConfig;
use health_common::ct::{TUPLE_IN, TUPLE_OUT, Tuple4, Tuple6};
use health_common::echo::{
    self, EchoHeader, EchoVerdict, IPV4_OPTIONS_MAX, Ipv4Header, Ipv6Header,
};
use health_common::endpoint::{ENDPOINT_DHCPV6, EndpointInfo};
use health_common::identity;
use health_common::masquerade::Address as _;
use health_common::metrics::{Direction, Reason};
use health_common::neighbour::{
    self, ETHERTYPE_ARP, ETHERTYPE_IPV4, ETHERTYPE_IPV6, Neighbour, Role,
};
use health_common::packet::EXTENSION_HOP_BY_HOP;

use aya_ebpf::EbpfContext as _;
use network_types::arp::ArpHdr;
use network_types::eth::EthHdr;

use crate::bounds::within;
use crate::conntrack::{self, Tracked, Traffic};
use crate::endpoint_flow::{Ways, track};
use crate::fragment::Fragments;
use crate::frame::{Frame, IP_AT, L4_AT4, L4_AT6, MARK_ANSWERED};
use crate::ip_version::Version as _;
use crate::link::Link;
use crate::maps::{HEALTH_CONFIG, HEALTH_ENDPOINTS};
use crate::metrics::{Verdict, count, ignore, pass, redirected, refuse};
use crate::packet::load;
use crate::source::Source;
use crate::{delivery, early, service};

/// Whether an exchange is recorded in conntrack and counted. Only benchmarks skip this.
pub trait State {
    /// See [`State`].
    const IS_STATEFUL: bool;
}

/// Records and counts exchanges.
pub struct Stateful;
/// Does neither.
pub struct Stateless;

impl State for Stateful {
    const IS_STATEFUL: bool = true;
}
impl State for Stateless {
    const IS_STATEFUL: bool = false;
}

/// Handles a packet on its way to an endpoint.
#[inline(always)]
pub fn to_endpoint<S: State>(frame: &Frame) -> Verdict {
    // The endpoint's own packet to itself through a service, or an ICMP error about one of its packets.
    if frame.mark() == MARK_ANSWERED && frame.came_by() == frame.ifindex() {
        frame.set_mark(0);
        return pass(frame, Reason::Forwarded, Direction::Egress);
    }
    // A tagged packet is not for the endpoint's untagged device.
    if frame.has_vlan_tag() {
        return pass(frame, Reason::LeftToStack, Direction::Egress);
    }
    match frame.protocol() {
        ETHERTYPE_IPV4 => to_endpoint_ip::<Tuple4, S>(frame),
        ETHERTYPE_IPV6 => match to_endpoint_solicitation(frame) {
            Some(verdict) => verdict,
            None => to_endpoint_ip::<Tuple6, S>(frame),
        },
        ETHERTYPE_ARP => to_endpoint_arp(frame),
        _ => pass(frame, Reason::LeftToStack, Direction::Egress),
    }
}

/// Handles a packet that an endpoint sent.
#[inline(always)]
pub fn from_endpoint(frame: &Frame) -> Verdict {
    if frame.mark() == MARK_ANSWERED {
        frame.set_mark(0);
        return ignore();
    }
    // The stack would strip up to two tags and deliver the packet inside.
    match (frame.has_vlan_tag(), frame.protocol()) {
        (false, ETHERTYPE_IPV4) => from_endpoint_ip::<Tuple4>(frame),
        (false, ETHERTYPE_IPV6) => match from_endpoint_solicitation(frame) {
            Some(verdict) => verdict,
            None => from_endpoint_ip::<Tuple6>(frame),
        },
        (false, ETHERTYPE_ARP) => from_endpoint_arp(frame),
        _ => refuse(frame, Reason::UnsupportedL2, Direction::Ingress),
    }
}

/// How the IP versions differ in handling an endpoint's packets.
pub(crate) trait Packets:
    Link + service::Direct + service::Unreachable + Source + Fragments
{
    /// Whether a protocol other than ICMP in the IP header rules out an echo request. Not so for IPv6, where an
    /// extension header may precede the request.
    const HEADER_NAMES_PROTOCOL: bool;
    /// Whether routers on a packet's path must examine more than its fixed header.
    fn has_options(ip: &Self::Header) -> bool;
    /// Judges a packet to the health endpoint, whose hardware address is `mac`, and cuts off options that the reply
    /// must not contain.
    fn judge(frame: &Frame, mac: [u8; 6]) -> EchoVerdict;
    /// Turns an echo request into its reply.
    fn turn(ip: &mut Self::Header, echo: &mut EchoHeader);
}

impl Packets for Tuple4 {
    const HEADER_NAMES_PROTOCOL: bool = true;

    #[inline(always)]
    fn has_options(ip: &Ipv4Header) -> bool {
        ip.header_len() as usize != Self::HEADER_LEN
    }

    #[inline(always)]
    fn judge(frame: &Frame, mac: [u8; 6]) -> EchoVerdict {
        match judge4(frame, mac) {
            EchoVerdict::AnswerWithoutOptions(len) => judge_and_cut_options(frame, len),
            verdict => verdict,
        }
    }

    #[inline(always)]
    fn turn(ip: &mut Ipv4Header, echo: &mut EchoHeader) {
        echo::turn4(ip, echo);
    }
}

impl Packets for Tuple6 {
    const HEADER_NAMES_PROTOCOL: bool = false;

    #[inline(always)]
    fn has_options(ip: &Ipv6Header) -> bool {
        ip.next_header == EXTENSION_HOP_BY_HOP
    }

    #[inline(always)]
    fn judge(frame: &Frame, mac: [u8; 6]) -> EchoVerdict {
        if !frame.pull(L4_AT6 + echo::ECHO_LEN) {
            return EchoVerdict::Stack;
        }
        let Some((ethernet, ip, echo)) = frame.headers::<Ipv6Header, EchoHeader>(L4_AT6) else {
            return EchoVerdict::Stack;
        };
        if ethernet.dst_addr != mac {
            return EchoVerdict::Stack;
        }
        echo::judge6(ip, echo, frame.length())
    }

    #[inline(always)]
    fn turn(ip: &mut Ipv6Header, echo: &mut EchoHeader) {
        echo::turn6(ip, echo);
    }
}

#[inline(always)]
fn to_endpoint_ip<T: Packets, S: State>(frame: &Frame) -> Verdict {
    if !frame.pull(T::L4_AT) {
        return pass(frame, Reason::LeftToStack, Direction::Egress);
    }
    let Some(ip) = frame.at::<T::Header>(IP_AT) else {
        return pass(frame, Reason::LeftToStack, Direction::Egress);
    };
    if let Some(reason) = T::refused_end(ip) {
        return refuse(frame, reason, Direction::Egress);
    }
    let destination = T::ends(ip).1.to_addr();
    // No router forwards a link-local packet, so this one is the host's own.
    if T::has_link_destination(ip) {
        return pass(frame, Reason::Forwarded, Direction::Egress);
    }
    let Some(config) = for_health_endpoint(frame, destination) else {
        return match endpoint_at(frame, destination) {
            Some(endpoint) => match admit::<T>(frame, endpoint) {
                Ok(()) => pass(frame, Reason::Forwarded, Direction::Egress),
                Err(verdict) => verdict,
            },
            None => pass(frame, Reason::Forwarded, Direction::Egress),
        };
    };
    let verdict = if T::HEADER_NAMES_PROTOCOL && T::protocol_behind(ip) != T::ICMP {
        EchoVerdict::Stack
    } else {
        T::judge(frame, config.health_mac)
    };
    match verdict {
        EchoVerdict::Answer | EchoVerdict::AnswerWithoutOptions(_) => answer::<T, S>(frame, config),
        EchoVerdict::Stack => match track::<T>(frame, TUPLE_IN, None) {
            Ok(_) => pass(frame, Reason::LeftToStack, Direction::Egress),
            Err(refusal) => refuse_flow(frame, refusal, Direction::Egress),
        },
        EchoVerdict::Refuse(reason) => {
            debug!(frame.ctx(), "echo request refused, reason {}", reason as u8);
            refuse(frame, reason, Direction::Egress)
        }
    }
}

/// Records a packet to an endpoint in the entry of its flow. If the packet is an answer from a service, rewrites its
/// source to the service's address. `Err` if the packet goes no further.
#[inline(always)]
pub(crate) fn admit<T: Packets>(frame: &Frame, endpoint: &EndpointInfo) -> Result<(), Verdict> {
    let tracked = track::<T>(frame, TUPLE_IN, Some(endpoint));
    if service::is_on()
        && let Some(verdict) = service::answer::<T>(frame, tracked.is_ok())
    {
        return Err(verdict);
    }
    match tracked {
        Ok(_) => Ok(()),
        Err(refusal) => Err(refuse_flow(frame, refusal, Direction::Egress)),
    }
}

/// Judges a packet by its fixed headers. After options, the echo header is further back and is read separately.
#[inline(always)]
fn judge4(frame: &Frame, mac: [u8; 6]) -> EchoVerdict {
    if !frame.pull(L4_AT4 + echo::ECHO_LEN) {
        return EchoVerdict::Stack;
    }
    let Some((ethernet, ip, at_20)) = frame.headers::<Ipv4Header, EchoHeader>(L4_AT4) else {
        return EchoVerdict::Stack;
    };
    // A host does not answer packets sent to a group's hardware address, or to another host's.
    if ethernet.dst_addr != mac {
        return EchoVerdict::Stack;
    }
    if ip.version_ihl == 0x45 {
        return echo::judge4(ip, at_20, frame.length());
    }
    let mut behind = EchoHeader::default();
    if load(
        frame,
        IP_AT as u32 + ip.header_len(),
        &mut behind,
        echo::ECHO_LEN as u32,
    )
    .is_none()
    {
        return EchoVerdict::Stack;
    }
    match frame.at::<Ipv4Header>(IP_AT) {
        Some(ip) => echo::judge4(ip, &behind, frame.length()),
        None => EchoVerdict::Stack,
    }
}

/// Cuts off the options if they are of a kind that is not echoed.
#[inline(always)]
fn judge_and_cut_options(frame: &Frame, len: u32) -> EchoVerdict {
    let mut options = [0_u32; IPV4_OPTIONS_MAX / 4];
    // The verifier requires the bounds of the length right before the call.
    let Some(len) = within(len, 1, IPV4_OPTIONS_MAX as u32) else {
        return EchoVerdict::Stack;
    };
    if load(frame, L4_AT4 as u32, &mut options, len).is_none() {
        return EchoVerdict::Stack;
    }
    let Some(ip) = frame.at::<Ipv4Header>(IP_AT) else {
        return EchoVerdict::Stack;
    };
    let verdict = echo::judge_options(ip, &options, len);
    if let EchoVerdict::AnswerWithoutOptions(_) = verdict {
        // SAFETY: a valid context; the helper checks the rest.
        let cut = unsafe {
            bpf_skb_adjust_room(
                frame.ctx().as_ptr().cast(),
                -(len as i32),
                BPF_ADJ_ROOM_NET,
                0,
            )
        };
        if cut != 0 || !frame.pull(L4_AT4 + echo::ECHO_LEN) {
            return EchoVerdict::Stack;
        }
        let Some(ip) = frame.at::<Ipv4Header>(IP_AT) else {
            return EchoVerdict::Stack;
        };
        echo::drop_options(ip, len);
    }
    verdict
}

#[inline(always)]
fn answer<T: Packets, S: State>(frame: &Frame, config: &DatapathConfig) -> Verdict {
    let Some((ethernet, ip, echo)) = frame.headers::<T::Header, EchoHeader>(T::L4_AT) else {
        return pass(frame, Reason::LeftToStack, Direction::Egress);
    };
    if S::IS_STATEFUL {
        let (source, destination) = T::ends(ip);
        let tuple = T::of_echo(source, destination, echo.id_be, TUPLE_IN);
        note(
            frame,
            conntrack::track(T::flows(), &tuple, exchange(frame), &config.timeouts),
        );
    }
    T::turn(ip, echo);
    turn_round::<S>(frame, ethernet, config)
}

/// Traffic of one echo: the request and the reply have the same length.
#[inline(always)]
fn exchange(frame: &Frame) -> Traffic {
    let bytes = frame.length() - IP_AT as u32;
    Traffic {
        rx_bytes: bytes,
        tx_bytes: bytes,
        source_identity: identity::UNKNOWN,
        ifindex: frame.ifindex(),
        ..Traffic::default()
    }
}

#[inline(always)]
fn note(frame: &Frame, tracked: Tracked) {
    if tracked == Tracked::Full {
        count(frame, Reason::CtFull, Direction::Egress);
    }
}

/// Sends the packet, now a reply, back the way it came.
#[inline(always)]
fn turn_round<S: State>(frame: &Frame, ethernet: &mut EthHdr, config: &DatapathConfig) -> Verdict {
    core::mem::swap(&mut ethernet.dst_addr, &mut ethernet.src_addr);
    frame.set_mark(MARK_ANSWERED);
    let code = frame.redirect(config.health_ifindex, u64::from(BPF_F_INGRESS));
    if S::IS_STATEFUL {
        redirected(frame, Reason::EchoAnswered, Direction::Egress, code)
    } else {
        crate::metrics::redirected_uncounted(code)
    }
}

#[inline(always)]
fn to_endpoint_arp(frame: &Frame) -> Verdict {
    let Some((ethernet, arp)) = arp(frame) else {
        return pass(frame, Reason::LeftToStack, Direction::Egress);
    };
    let target = Addr::v4(u32::from_ne_bytes(arp.tpa));
    match endpoint_at(frame, target) {
        Some(endpoint)
            if neighbour::is_for(ethernet, endpoint.mac)
                && neighbour::is_arp_request(ethernet, arp) =>
        {
            neighbour::turn_arp(ethernet, arp, endpoint.mac);
            answer_neighbour(frame, endpoint.ifindex, Direction::Egress)
        }
        _ => pass(frame, Reason::LeftToStack, Direction::Egress),
    }
}

/// Answers a solicitation for the endpoint's address, and leaves others to the endpoint; `None` for everything else.
#[inline(always)]
fn to_endpoint_solicitation(frame: &Frame) -> Option<Verdict> {
    let (ethernet, ip, message) = solicitation(frame)?;
    Some(match endpoint_at(frame, Addr::v6(message.target_be)) {
        Some(endpoint) if neighbour::is_for(ethernet, endpoint.mac) => {
            neighbour::turn_solicitation(ethernet, ip, message, endpoint.mac, Role::Endpoint);
            answer_neighbour(frame, endpoint.ifindex, Direction::Egress)
        }
        _ => pass(frame, Reason::LeftToStack, Direction::Egress),
    })
}

#[inline(always)]
fn from_endpoint_ip<T: Packets>(frame: &Frame) -> Verdict {
    // Processes in the endpoint can keep the header out of the linear area, but they cannot keep it from being checked.
    if !frame.pull(T::L4_AT) {
        return refuse(frame, Reason::InvalidPacket, Direction::Ingress);
    }
    let Some(ip) = frame.at::<T::Header>(IP_AT) else {
        return refuse(frame, Reason::InvalidPacket, Direction::Ingress);
    };
    if let Some(reason) = T::refused_end(ip) {
        return refuse(frame, reason, Direction::Ingress);
    }
    let source = T::ends(ip).0.to_addr();
    if T::has_link_source(ip) {
        // Otherwise, the endpoint could talk to the host from an address that no policy knows, and could fill the
        // host's neighbour table with other addresses.
        let endpoint = endpoint_at(frame, source);
        let may_ask = endpoint.is_some_and(|endpoint| endpoint.flags & ENDPOINT_DHCPV6 != 0);
        return if (endpoint.is_some() || source.is_unset()) && T::is_needed(frame, may_ask) {
            pass(frame, Reason::Forwarded, Direction::Ingress)
        } else {
            refuse(frame, Reason::InvalidSource, Direction::Ingress)
        };
    }
    if let Some(endpoint) = endpoint_at(frame, source) {
        if let Some(verdict) = early::put_in_order::<T>(frame, IP_AT) {
            return verdict;
        }
        let mut is_new = false;
        if service::is_on() {
            match service::send::<T>(frame, endpoint) {
                Ok(of_new_flow) => is_new = of_new_flow,
                Err(verdict) => return verdict,
            }
        }
        let ways = match track::<T>(frame, TUPLE_OUT, Some(endpoint)) {
            Ok(ways) => ways,
            Err(refusal) => {
                if service::is_on() {
                    service::withdraw::<T>(frame, is_new);
                }
                return refuse_flow(frame, refusal, Direction::Ingress);
            }
        };
        let verdict = pass(frame, Reason::Forwarded, Direction::Ingress);
        if delivery::is_on() {
            match ways {
                Ways::All => delivery::hand_over(frame),
                Ways::PastStack => delivery::hand_over_answer(frame),
                Ways::HostStack => {}
            }
        }
        return verdict;
    }
    debug!(
        frame.ctx(),
        "IPv{} source is not the endpoint's",
        T::IP_VERSION
    );
    refuse(frame, Reason::InvalidSource, Direction::Ingress)
}

/// Answers a solicitation for the gateway; `None` for everything else.
#[inline(always)]
fn from_endpoint_solicitation(frame: &Frame) -> Option<Verdict> {
    let (ethernet, ip, message) = solicitation(frame)?;
    if Addr::v6(message.target_be) != config()?.gateway6 {
        return None;
    }
    let endpoint = endpoint_at(frame, Addr::v6(ip.saddr_be))?;
    if !neighbour::is_for(ethernet, endpoint.host_mac) {
        return None;
    }
    neighbour::turn_solicitation(ethernet, ip, message, endpoint.host_mac, Role::Gateway);
    Some(answer_neighbour(
        frame,
        endpoint.ifindex,
        Direction::Ingress,
    ))
}

#[inline(always)]
fn from_endpoint_arp(frame: &Frame) -> Verdict {
    let Some((ethernet, arp)) = arp(frame) else {
        return refuse(frame, Reason::InvalidPacket, Direction::Ingress);
    };
    let Some(endpoint) = endpoint_at(frame, Addr::v4(u32::from_ne_bytes(arp.spa))) else {
        // With another sender address, the endpoint could take over that address's entry in the host's neighbour table,
        // or fill the table. A request without a sender address creates no entry (RFC 5227 section 2.1.1).
        return if arp.spa == [0; 4] {
            pass(frame, Reason::Forwarded, Direction::Ingress)
        } else {
            refuse(frame, Reason::InvalidSource, Direction::Ingress)
        };
    };
    if neighbour::is_arp_request(ethernet, arp)
        && let Some(config) = config()
        && Addr::v4(u32::from_ne_bytes(arp.tpa)) == config.gateway4
        && neighbour::is_for(ethernet, endpoint.host_mac)
    {
        neighbour::turn_arp(ethernet, arp, endpoint.host_mac);
        return answer_neighbour(frame, endpoint.ifindex, Direction::Ingress);
    }
    pass(frame, Reason::Forwarded, Direction::Ingress)
}

/// Splits an ARP packet into its parts.
#[inline(always)]
fn arp(frame: &Frame) -> Option<(&mut EthHdr, &mut ArpHdr)> {
    if !frame.pull(IP_AT + ArpHdr::LEN) {
        return None;
    }
    let (ethernet, _, arp) = frame.headers::<(), ArpHdr>(IP_AT)?;
    Some((ethernet, arp))
}

/// Splits a valid neighbour solicitation into its parts.
#[inline(always)]
fn solicitation(frame: &Frame) -> Option<(&mut EthHdr, &mut Ipv6Header, &mut Neighbour)> {
    // Only solicitations of this exact length are answered, so nothing is pulled for other packets.
    if frame.length() as usize != L4_AT6 + size_of::<Neighbour>()
        || !frame.pull(L4_AT6 + size_of::<Neighbour>())
    {
        return None;
    }
    let headers = frame.headers::<Ipv6Header, Neighbour>(L4_AT6)?;
    let holds_v4 =
        Tuple6::refused_end(headers.1).is_some() || Addr::v6(headers.2.target_be).is_v4();
    (!holds_v4 && neighbour::is_solicitation(headers.1, headers.2, frame.length()))
        .then_some(headers)
}

/// Sends a neighbour reply to whichever side asked: back in to the host, or out to the endpoint.
#[inline(always)]
fn answer_neighbour(frame: &Frame, ifindex: u32, direction: Direction) -> Verdict {
    let flags = match direction {
        Direction::Egress => {
            frame.set_mark(MARK_ANSWERED);
            u64::from(BPF_F_INGRESS)
        }
        Direction::Ingress => 0,
    };
    let code = frame.redirect(ifindex, flags);
    redirected(frame, Reason::NeighbourAnswered, direction, code)
}

/// Drops a packet that policy refuses.
#[inline(always)]
fn refuse_flow(frame: &Frame, refusal: Reason, direction: Direction) -> Verdict {
    debug!(frame.ctx(), "refused by policy, reason {}", refusal as u8);
    refuse(frame, refusal, direction)
}

/// The settings, if the packet is at the health endpoint's device and `addr` is that endpoint's address.
#[inline(always)]
fn for_health_endpoint(frame: &Frame, addr: Addr) -> Option<&'static DatapathConfig> {
    config().filter(|config| {
        config.health_ifindex == frame.ifindex()
            && (addr == config.health4 || addr == config.health6)
    })
}

#[inline(always)]
fn endpoint_at(frame: &Frame, addr: Addr) -> Option<&'static EndpointInfo> {
    // SAFETY: the agent replaces entries as a whole, and programs never change them.
    let endpoint = unsafe { HEALTH_ENDPOINTS.get(addr) }?;
    (endpoint.ifindex == frame.ifindex()).then_some(endpoint)
}

#[inline(always)]
fn config() -> Option<&'static DatapathConfig> {
    HEALTH_CONFIG.get(0)
}
