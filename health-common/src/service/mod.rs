//! Services: `HEALTH_SVC4` and `HEALTH_SVC6` for the frontends, `HEALTH_SLOTS`, `HEALTH_MAGLEV` and `HEALTH_BACKENDS`
//! for the backends behind them, `HEALTH_AFFINITY`, `HEALTH_SOURCE_RANGES`, and the flows that were sent to a
//! backend: `HEALTH_REVNAT4` and `HEALTH_REVNAT6` for TCP, `HEALTH_REVNAT_ANY4` and `HEALTH_REVNAT_ANY6` for all
//! other protocols, `HEALTH_SOCKETS` for the host's own sockets.
//!
//! A new flow to a frontend takes three look-ups: the frontend, a slot of its pool, the slot's backend. The agent
//! writes a new pool to free slots and then updates the frontend, so programs never read a pool while it changes.

pub mod choice;
pub mod direct;
pub mod outside;
pub mod socket;
pub mod unreachable;
pub mod xdp;

use crate::addr::Addr;

pub use outside::Origin;

/// Capacity of each of `HEALTH_SVC4` and `HEALTH_SVC6`, unless the agent asks for another size.
pub const DEFAULT_FRONTENDS: u32 = 65_536;
/// Like [`DEFAULT_FRONTENDS`], for `HEALTH_BACKENDS`. The first entry is unused.
pub const DEFAULT_BACKENDS: u32 = 65_536;
/// Like [`DEFAULT_FRONTENDS`], for `HEALTH_SLOTS`.
pub const DEFAULT_SLOTS: u32 = 4 * DEFAULT_BACKENDS;
/// Like [`DEFAULT_FRONTENDS`], for `HEALTH_MAGLEV`: tables of 65,537 slots.
pub const DEFAULT_MAGLEV: u32 = DEFAULT_MAGLEV_TABLES * 65_537;
/// Number of Maglev tables that fit into [`DEFAULT_MAGLEV`] slots.
pub const DEFAULT_MAGLEV_TABLES: u32 = 32;
/// Like [`DEFAULT_FRONTENDS`], for `HEALTH_AFFINITY`.
pub const DEFAULT_AFFINITY: u32 = 65_536;
/// Like [`DEFAULT_FRONTENDS`], for `HEALTH_SOURCE_RANGES`.
pub const DEFAULT_SOURCE_RANGES: u32 = 65_536;
/// Entries of `HEALTH_REVNAT4` and `HEALTH_REVNAT6`; each flow has two.
pub const REVNAT_ENTRIES: u32 = 131_072;
/// Like [`REVNAT_ENTRIES`], for `HEALTH_REVNAT_ANY4` and `HEALTH_REVNAT_ANY6`.
pub const REVNAT_ANY_ENTRIES: u32 = 65_536;

/// The key of a frontend: the destination that clients use. `A` is an address.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FrontendKey<A> {
    /// Destination address.
    pub addr_be: A,
    /// Destination port.
    pub port_be: u16,
    /// IP protocol number.
    pub protocol: u8,
    /// Explicit padding, zero.
    pub pad: u8,
}

/// The key of an IPv4 frontend.
pub type FrontendKey4 = FrontendKey<u32>;

/// The key of an IPv6 frontend.
pub type FrontendKey6 = FrontendKey<[u32; 4]>;

/// A pool of backends to choose from.
///
/// Its entries in `HEALTH_SLOTS` start at `at`: a counter for [`ALGORITHM_ROUND_ROBIN`], then `len` backend indexes;
/// with [`FRONTEND_WEIGHTED`], followed by `len` thresholds and `len` indexes into the pool: see [`choice::weighted`].
/// With [`ALGORITHM_MAGLEV`], the pool is a table in `HEALTH_MAGLEV` instead: `len` backend indexes, starting at `at`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pool {
    /// Index of the first entry.
    pub at: u32,
    /// Number of backends, or of slots of a Maglev table. If 0, the flags of the [`Frontend`] decide what happens to
    /// new flows.
    pub len: u32,
}

/// A frontend: where its new flows are sent.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Frontend {
    /// The pool for flows from this node and its endpoints.
    pub inside: Pool,
    /// The pool for all other flows.
    pub outside: Pool,
    /// Number of the service port, shared by all its frontends and backends. Never 0.
    pub service: u32,
    /// How long a client's new flows stick to the same backend after the client last opened one, in seconds; 0 for no
    /// affinity.
    pub affinity_secs: u32,
    /// [`FRONTEND_RESTRICTED`] and the other bits.
    pub flags: u16,
    /// [`ALGORITHM_RANDOM`] and the others.
    pub algorithm: u8,
    /// [`KIND_CLUSTER_IP`] and the others.
    pub kind: u8,
    /// Explicit padding, zero.
    pub pad: u32,
}

/// Flag: only sources in `HEALTH_SOURCE_RANGES` may open flows.
pub const FRONTEND_RESTRICTED: u16 = 1;
/// Flag: flows from outside keep their source address.
pub const FRONTEND_KEEPS_SOURCE: u16 = 2;
/// Flag: backends have weights.
pub const FRONTEND_WEIGHTED: u16 = 4;
/// Flag: if the pool is empty, flows from inside are dropped silently instead of being rejected.
pub const FRONTEND_DROPS_INSIDE: u16 = 8;
/// Flag: like [`FRONTEND_DROPS_INSIDE`], for flows from outside.
pub const FRONTEND_DROPS_OUTSIDE: u16 = 16;
/// Flag: a loopback address. The host's sockets can reach it; packets to it are left to the host.
pub const FRONTEND_HOST_ONLY: u16 = 32;
/// Flag: flows from inside go only to backends on this node.
pub const FRONTEND_LOCAL_INSIDE: u16 = 64;
/// Flag: like [`FRONTEND_LOCAL_INSIDE`], for flows from outside.
pub const FRONTEND_LOCAL_OUTSIDE: u16 = 128;
/// Flag: backends on other nodes answer outside clients directly, where possible: see [`direct`].
pub const FRONTEND_DIRECT: u16 = 256;

/// Each backend with the same probability.
pub const ALGORITHM_RANDOM: u8 = 0;
/// Each backend in turn; with [`FRONTEND_WEIGHTED`], same as [`ALGORITHM_RANDOM`].
pub const ALGORITHM_ROUND_ROBIN: u8 = 1;
/// The backend selected by a hash of the flow, the same on all nodes.
pub const ALGORITHM_MAGLEV: u8 = 2;
/// Whichever of two random backends has fewer flows.
pub const ALGORITHM_LEAST_CONNECTION: u8 = 3;

/// The address that the cluster assigned to a service.
pub const KIND_CLUSTER_IP: u8 = 1;
/// An address of a service's load balancer.
pub const KIND_LOAD_BALANCER: u8 = 2;
/// An address whose packets are routed to the nodes by external means.
pub const KIND_EXTERNAL_IP: u8 = 3;
/// A port on the node's own addresses.
pub const KIND_NODE_PORT: u8 = 4;

/// A backend: an endpoint of a service port. All zero: no backend.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Backend {
    /// The address that the backend listens on.
    pub addr: Addr,
    /// Number of the service port; an endpoint of two services counts as two backends.
    pub service: u32,
    /// The port that the backend listens on.
    pub port_be: u16,
    /// [`BACKEND_LINGERS`] or 0.
    pub flags: u16,
    /// Number of flows sent to the backend that are not known to be over; maintained by the programs.
    pub flows: u32,
    /// Explicit padding, zero.
    pub pad: u32,
}

impl Backend {
    /// Whether the backend may receive new flows of the service port with this number.
    #[inline(always)]
    pub const fn gets_flows(&self, service: u32) -> bool {
        self.service == service && self.flags & BACKEND_LINGERS == 0
    }
}

/// Flag: the backend receives no new flows, not even from clients with affinity to it. Existing flows continue.
pub const BACKEND_LINGERS: u16 = 1;

/// The key of a client with affinity.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct AffinityKey {
    /// The client's address.
    pub client: Addr,
    /// Number of the service port.
    pub service: u32,
}

/// The backend that a client sticks to.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Affinity {
    /// Index in `HEALTH_BACKENDS`.
    pub backend: u32,
    /// When the client last opened a flow to it: `CLOCK_MONOTONIC`, in seconds.
    pub last_used: u32,
}

impl Affinity {
    /// Whether the affinity still applies at `now` (`CLOCK_MONOTONIC`, in seconds).
    #[inline(always)]
    pub const fn is_fresh(&self, now: u32, affinity_secs: u32) -> bool {
        now.wrapping_sub(self.last_used) < affinity_secs
    }
}

/// Key of an LPM trie of the sources that may use a service port. The prefix length includes the bits of `service_be`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SourceRange {
    /// Number of the service port, network byte order.
    pub service_be: u32,
    /// Address of the source.
    pub addr: Addr,
}

/// Flag: the client's packets arrive over an uplink.
pub const FLOW_FROM_OUTSIDE: u16 = 1;
/// Flag, with [`FLOW_FROM_OUTSIDE`]: the backend is on another node and receives the packets from this node's
/// address.
pub const FLOW_MASQUERADED: u16 = 2;
/// Flag, with [`FLOW_FROM_OUTSIDE`]: the backend is not an endpoint, so the uplinks' programs track the flow in
/// conntrack.
pub const FLOW_OF_HOST: u16 = 4;
/// Flag, with [`FLOW_FROM_OUTSIDE`]: the backend is on another node and answers the client directly: see [`direct`].
pub const FLOW_DIRECT: u16 = 8;
/// Flag, with [`FLOW_FROM_OUTSIDE`]: another node forwarded the flow to a backend here and named the flow's frontend.
/// Such an entry has no backend index and no service number: the other node counts the flow.
pub const FLOW_RELAYED: u16 = 16;
/// Flag: the same client also reaches the same backend, with the same ports, through another frontend. Each packet
/// switches the answers to the frontend that it was sent to. Never set for TCP.
pub const FLOW_SHARED: u16 = 32;
/// Flag, with [`FLOW_FROM_OUTSIDE`]: host routing delivers the client's packets to an endpoint of this node, bypassing
/// the host's stack. The endpoint's answers must bypass the stack too, because netfilter would otherwise see only half
/// of the connection.
pub const FLOW_PAST_STACK: u16 = 64;

/// Flag: the backend sees a port other than the client's own, because another flow from the client to the backend
/// already uses that port. The entry contains the port on the other side: [`with_half_ports`].
pub const FLOW_MOVED: u16 = 128;
/// Flag, with [`FLOW_MOVED`]: no service is involved. The client sends directly to the backend, with the same ports as
/// a flow through a service. Such an entry has no backend index and no service number.
pub const FLOW_PLAIN: u16 = 256;

/// Mask for a backend index or a service port number in a flow's entry: `HEALTH_BACKENDS` has no more slots than this.
/// The upper bits of each hold half of a port, which is 0 if the port is the same on both sides.
pub const NUMBER_MASK: u32 = 0xff_ffff;

/// Combines a backend index and a service port number with a port, as stored in a flow's entry.
#[inline(always)]
pub const fn with_half_ports([backend, service]: [u32; 2], port_be: u16) -> [u32; 2] {
    let port = port_be as u32;
    [
        backend & NUMBER_MASK | port << 24,
        service & NUMBER_MASK | (port >> 8) << 24,
    ]
}

/// Extracts the port from a pair returned by [`with_half_ports`].
#[inline(always)]
pub const fn joined_port([backend, service]: [u32; 2]) -> u16 {
    (backend >> 24 | service >> 24 << 8) as u16
}

/// One direction of a flow through a service. `A` is an address. The key is a tuple: for direction out, that of the
/// client's packets to a frontend; for direction in, that of the backend's answers.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServiceFlow<A> {
    /// Address of the backend for direction out, of the frontend for direction in.
    pub addr_be: A,
    /// Port of the backend or frontend.
    pub port_be: u16,
    /// [`FLOW_FROM_OUTSIDE`] and the other bits.
    pub flags: u16,
    /// Index of the backend in `HEALTH_BACKENDS`, where another backend may have replaced it; and half of a port:
    /// [`with_half_ports`].
    pub backend: u32,
    /// Number of the service port, and the other half of the port.
    pub service: u32,
    /// When the flow expires unless another packet comes: `CLOCK_MONOTONIC`, in seconds. Not used for TCP.
    pub expires: u32,
}

/// One direction of an IPv4 flow through a service.
pub type ServiceFlow4 = ServiceFlow<u32>;

/// One direction of an IPv6 flow through a service.
pub type ServiceFlow6 = ServiceFlow<[u32; 4]>;

crate::map_types!(
    FrontendKey4 = 8,
    FrontendKey6 = 20,
    Frontend = 32,
    Backend = 32,
    AffinityKey = 20,
    Affinity = 8,
    SourceRange = 20,
    ServiceFlow4 = 20,
    ServiceFlow6 = 32,
);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_port_of_a_flow_stands_beside_its_numbers(
            backend in 0..=NUMBER_MASK,
            service in 0..=NUMBER_MASK,
            port_be: u16,
        ) {
            let both = with_half_ports([backend, service], port_be);
            prop_assert_eq!(both.map(|number| number & NUMBER_MASK), [backend, service]);
            prop_assert_eq!(joined_port(both), port_be);
            prop_assert_eq!(with_half_ports([backend, service], 0), [backend, service]);
        }
    }
}
