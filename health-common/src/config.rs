//! Run-time settings for the programs: the single entry of `HEALTH_CONFIG`.

use crate::addr::Addr;
use crate::ct::Timeouts;
use crate::siphash::SipKey;

/// Flag: connections to the addresses in `HEALTH_PEERS` are timed. The map is filled even without this flag.
pub const PASSIVE_RTT: u16 = 1;
/// Flag: packets to services are redirected to the services' backends.
pub const SERVICES: u16 = 2;
/// Flag: another implementation may have handled services before. TCP segments of unknown flows are left to the stack.
pub const SERVICES_HANDOVER: u16 = 4;
/// Flag: packets to endpoints of this node bypass the host's stack. It takes effect only with [`SERVICES`] and
/// without [`SERVICES_HANDOVER`]: nothing else may translate addresses on the way.
pub const HOST_ROUTING: u16 = 8;
/// Flag: fragments that arrive before their packet's first fragment are held until it arrives.
pub const EARLY_FRAGMENTS: u16 = 16;

/// Whether the programs, under these flags, deliver packets to this node's endpoints themselves.
#[inline(always)]
pub const fn routes_itself(flags: u16) -> bool {
    flags & (SERVICES | SERVICES_HANDOVER | HOST_ROUTING) == SERVICES | HOST_ROUTING
}

/// The single value of `HEALTH_CONFIG`, at index 0.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DatapathConfig {
    /// [`crate::LAYOUT_VERSION`] of the agent that wrote this.
    pub layout_version: u32,
    /// ICMP identifier of this agent's probes, network byte order. Chosen at random on each start: agents with the same
    /// identifier would collide in NAT tables along the path.
    pub icmp_id_be: u16,
    /// TCP port of the health agents' HTTP responders, network byte order.
    pub health_port_be: u16,
    /// Key of the tags that mark the mesh's probes.
    pub probe_key: SipKey,
    /// Session of this agent's probes: [`crate::probe::ProbeId::session`].
    pub session: u32,
    /// Ifindex of the health endpoint's device; 0 while the device does not exist.
    pub health_ifindex: u32,
    /// Lifetimes of conntrack entries.
    pub timeouts: Timeouts,
    /// How far `CLOCK_TAI` is ahead of UTC on this host, in nanoseconds: 37 s if the kernel knows about leap seconds,
    /// else 0.
    pub tai_offset_ns: u64,
    /// The host's network namespace (`SO_NETNS_COOKIE`): services work for sockets in this namespace. 0: for no
    /// sockets.
    pub netns_cookie: u64,
    /// IPv4 gateway of this node's endpoints. Unset: no IPv4.
    pub gateway4: Addr,
    /// IPv6 gateway of this node's endpoints. Unset: no IPv6.
    pub gateway6: Addr,
    /// This node's IPv4 address, checked against source ranges for the node's own sockets. Unset: the node has none.
    pub node4: Addr,
    /// As `node4`, for IPv6.
    pub node6: Addr,
    /// The health endpoint's IPv4 address. It is stored here as well as in `HEALTH_ENDPOINTS` because the kernel
    /// inlines array look-ups, which saves a third of the cost of an answer.
    pub health4: Addr,
    /// The health endpoint's IPv6 address.
    pub health6: Addr,
    /// Until this time, `CLOCK_MONOTONIC` in nanoseconds, no service or masqueraded flow may start: maps are about to
    /// be replaced, and a flow that exists only in the old ones would break. 0: flows may start.
    pub flows_held_until_ns: u64,
    /// The health endpoint's hardware address.
    pub health_mac: [u8; 6],
    /// [`PASSIVE_RTT`], [`SERVICES`], [`SERVICES_HANDOVER`], [`HOST_ROUTING`] and [`EARLY_FRAGMENTS`].
    pub flags: u16,
    /// PID of the agent's process in the initial PID namespace; its sockets bypass services. Otherwise the agent could
    /// reach its source of information about services only through a service. 0: unknown.
    pub agent_tgid: u32,
    /// Explicit padding, zero.
    pub pad: u32,
}

crate::map_types!(DatapathConfig = 200);
