//! Local endpoints: `HEALTH_ENDPOINTS`, keyed by [`crate::addr::Addr`]. With IPv6, an endpoint's addresses include
//! the link-local address derived from its hardware address.

/// Flag: the node's health endpoint, whose echo requests the kernel answers.
pub const ENDPOINT_HEALTH: u32 = 1;
/// Flag: only traffic that the endpoint's policy allows may reach it.
pub const ENDPOINT_ENFORCE_INGRESS: u32 = 2;
/// Flag: only traffic that the endpoint's policy allows may leave it.
pub const ENDPOINT_ENFORCE_EGRESS: u32 = 4;

/// Flag: the endpoint may request addresses over DHCPv6.
pub const ENDPOINT_DHCPV6: u32 = 8;
/// Flag: the endpoint's packets get no conntrack entries, and policy judges each packet by itself. Flows through
/// services are tracked even so.
pub const ENDPOINT_UNTRACKED: u32 = 16;
/// Flag: packets that pass to or from the endpoint are events ([`crate::events::EVENT_TRACE`]).
pub const ENDPOINT_DEBUG: u32 = 32;

/// Whether policy applies to traffic from or to an endpoint with these flags: `direction` is
/// [`ENDPOINT_ENFORCE_EGRESS`] or [`ENDPOINT_ENFORCE_INGRESS`]. Never true for the health endpoint: the mesh's probes
/// always pass.
#[inline(always)]
pub const fn is_enforced(flags: u32, direction: u32) -> bool {
    flags & (direction | ENDPOINT_HEALTH) == direction
}

/// What the datapath knows about a local endpoint.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EndpointInfo {
    /// Ifindex of the host's end of the endpoint's veth pair.
    pub ifindex: u32,
    /// Security identity.
    pub identity: u32,
    /// [`ENDPOINT_HEALTH`], [`ENDPOINT_ENFORCE_INGRESS`], [`ENDPOINT_ENFORCE_EGRESS`], [`ENDPOINT_DHCPV6`],
    /// [`ENDPOINT_UNTRACKED`], [`ENDPOINT_DEBUG`].
    pub flags: u32,
    /// Number of the endpoint's table in `HEALTH_POLICY`; 0 for none.
    pub policy: u32,
    /// Endpoint id, unique on this node, 1..=4095.
    pub id: u16,
    /// The endpoint's own hardware address.
    pub mac: [u8; 6],
    /// Hardware address of the host's end, which is the endpoint's gateway.
    pub host_mac: [u8; 6],
    /// Explicit padding, zero.
    pub pad: u16,
}

crate::map_types!(EndpointInfo = 32);
