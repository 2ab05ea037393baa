//! Run-time settings that the programs read, the one entry of `HEALTH_CONFIG`.

use crate::addr::Addr;
use crate::ct::Timeouts;
use crate::siphash::SipKey;

/// Flag: connections to the addresses in `HEALTH_PEERS` are timed. The addresses are there without it too.
pub const PASSIVE_RTT: u16 = 1;
/// Flag: packets to services are sent to their backends.
pub const SERVICES: u16 = 2;
/// Flag: something else may have served services before. Segments of a TCP connection that is no known flow are left to
/// the stack.
pub const SERVICES_HANDOVER: u16 = 4;
/// Flag: packets to endpoints of this node do not go through the host's stack. It counts with [`SERVICES`] and without
/// [`SERVICES_HANDOVER`] only: nothing else may translate addresses on the way.
pub const HOST_ROUTING: u16 = 8;
/// Flag: fragments that come before the first one of their packet wait for it.
pub const EARLY_FRAGMENTS: u16 = 16;

/// Whether programs with these flags deliver packets to endpoints of this node themselves.
#[inline(always)]
pub const fn routes_itself(flags: u16) -> bool {
    flags & (SERVICES | SERVICES_HANDOVER | HOST_ROUTING) == SERVICES | HOST_ROUTING
}

/// The one value of `HEALTH_CONFIG`, under index 0.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DatapathConfig {
    /// [`crate::LAYOUT_VERSION`] of the agent that wrote this.
    pub layout_version: u32,
    /// ICMP identifier of this agent's probes, network byte order. Random for each start: equal
    /// identifiers of several agents collide in other people's NAT tables.
    pub icmp_id_be: u16,
    /// TCP port of the health agents' HTTP responders, network byte order.
    pub health_port_be: u16,
    /// Key of the tags that mark the mesh's probes.
    pub probe_key: SipKey,
    /// Session of this agent's probes: [`crate::probe::ProbeId::session`].
    pub session: u32,
    /// Device of the health endpoint; 0 while there is none.
    pub health_ifindex: u32,
    /// Lifetimes of conntrack entries.
    pub timeouts: Timeouts,
    /// By how much `CLOCK_TAI` is ahead of UTC on this host, nanoseconds: 37 s where the kernel was
    /// told of leap seconds, else 0.
    pub tai_offset_ns: u64,
    /// The host's network namespace (`SO_NETNS_COOKIE`): services are there for sockets of this one. 0: for none.
    pub netns_cookie: u64,
    /// The gateway of this node's endpoints, IPv4. Unset: no IPv4.
    pub gateway4: Addr,
    /// The gateway of this node's endpoints, IPv6. Unset: no IPv6.
    pub gateway6: Addr,
    /// This node's IPv4 address, by which source ranges judge its own sockets. Unset: it has none.
    pub node4: Addr,
    /// This node's IPv6 address, likewise.
    pub node6: Addr,
    /// The health endpoint's IPv4 address. It stands here and not only in `HEALTH_ENDPOINTS`, since the
    /// kernel inlines the look-up in an array: a third of the cost of an answer.
    pub health4: Addr,
    /// The health endpoint's IPv6 address.
    pub health6: Addr,
    /// Until then, `CLOCK_MONOTONIC` in nanoseconds, no flow of a service or of masquerading begins: maps are about to be
    /// replaced, and a flow that is only in the former ones would break. 0: they may begin.
    pub flows_held_until_ns: u64,
    /// The health endpoint's hardware address.
    pub health_mac: [u8; 6],
    /// [`PASSIVE_RTT`], [`SERVICES`], [`SERVICES_HANDOVER`] and [`HOST_ROUTING`].
    pub flags: u16,
    /// The agent's process, by its number in the first PID namespace: its sockets go where they are sent, whatever services
    /// there are. Otherwise a service could stand between the agent and what tells it of services. 0: none is known.
    pub agent_tgid: u32,
    /// Explicit padding, zero.
    pub pad: u32,
}

crate::map_types!(DatapathConfig = 200);
