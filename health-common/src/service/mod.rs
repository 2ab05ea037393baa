//! Services: `HEALTH_SVC4` and `HEALTH_SVC6` with the frontends, `HEALTH_SLOTS`, `HEALTH_MAGLEV` and `HEALTH_BACKENDS`
//! with what stands behind them, `HEALTH_AFFINITY`, `HEALTH_SOURCE_RANGES`, and the flows that were sent to a backend:
//! `HEALTH_REVNAT4` and `HEALTH_REVNAT6` for TCP, `HEALTH_REVNAT_ANY4` and `HEALTH_REVNAT_ANY6` for all other protocols,
//! `HEALTH_SOCKETS` for the host's own sockets.
//!
//! A new flow to a frontend takes three look-ups: the frontend, a slot of its pool, the backend of the slot. The agent
//! writes a new pool to free places and then changes the frontend, so no program ever reads a pool that is being changed.

pub mod choice;
pub mod direct;
pub mod outside;
pub mod socket;
pub mod unreachable;
pub mod xdp;

use crate::addr::Addr;

pub use outside::Origin;

/// Entries that `HEALTH_SVC4` and `HEALTH_SVC6` have room for each, unless the agent asks for another size.
pub const DEFAULT_FRONTENDS: u32 = 65_536;
/// As [`DEFAULT_FRONTENDS`], of `HEALTH_BACKENDS`. The first one is not used.
pub const DEFAULT_BACKENDS: u32 = 65_536;
/// As [`DEFAULT_FRONTENDS`], of `HEALTH_SLOTS`.
pub const DEFAULT_SLOTS: u32 = 4 * DEFAULT_BACKENDS;
/// As [`DEFAULT_FRONTENDS`], of `HEALTH_MAGLEV`: tables of 65,537 places.
pub const DEFAULT_MAGLEV: u32 = DEFAULT_MAGLEV_TABLES * 65_537;
/// How many such tables.
pub const DEFAULT_MAGLEV_TABLES: u32 = 32;
/// As [`DEFAULT_FRONTENDS`], of `HEALTH_AFFINITY`.
pub const DEFAULT_AFFINITY: u32 = 65_536;
/// As [`DEFAULT_FRONTENDS`], of `HEALTH_SOURCE_RANGES`.
pub const DEFAULT_SOURCE_RANGES: u32 = 65_536;
/// Entries of `HEALTH_REVNAT4` and `HEALTH_REVNAT6`; each flow has two.
pub const REVNAT_ENTRIES: u32 = 131_072;
/// As [`REVNAT_ENTRIES`], of `HEALTH_REVNAT_ANY4` and `HEALTH_REVNAT_ANY6`.
pub const REVNAT_ANY_ENTRIES: u32 = 65_536;

/// The key of an IPv4 frontend: where clients send to.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FrontendKey4 {
    /// Destination address.
    pub addr_be: u32,
    /// Destination port.
    pub port_be: u16,
    /// IP protocol number.
    pub protocol: u8,
    /// Explicit padding, zero.
    pub pad: u8,
}

/// The key of an IPv6 frontend: where clients send to.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FrontendKey6 {
    /// Destination address.
    pub addr_be: [u32; 4],
    /// Destination port.
    pub port_be: u16,
    /// IP protocol number.
    pub protocol: u8,
    /// Explicit padding, zero.
    pub pad: u8,
}

/// A pool of backends to choose from.
///
/// In `HEALTH_SLOTS`, at `at`: a counter for [`ALGORITHM_ROUND_ROBIN`], then `len` indexes of backends; if
/// [`FRONTEND_WEIGHTED`], then `len` thresholds and `len` indexes of the pool, see [`choice::weighted`]. With
/// [`ALGORITHM_MAGLEV`] it is a table in `HEALTH_MAGLEV` instead: `len` indexes of backends, from `at` on.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pool {
    /// Index of the first entry.
    pub at: u32,
    /// How many backends, or places of a Maglev table. With 0, the flags of the [`Frontend`] say what happens to new flows.
    pub len: u32,
}

/// A frontend: where its new flows go.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Frontend {
    /// For flows from this node and its endpoints.
    pub inside: Pool,
    /// For all others.
    pub outside: Pool,
    /// Number of the service's port, which all its frontends and backends have. Never 0.
    pub service: u32,
    /// How long a client's new flows go to the same backend after it last opened one, seconds; 0 for no affinity.
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
/// Flag: with an empty pool, flows from inside are dropped silently; without it they are rejected.
pub const FRONTEND_DROPS_INSIDE: u16 = 8;
/// Flag: as [`FRONTEND_DROPS_INSIDE`], of flows from outside.
pub const FRONTEND_DROPS_OUTSIDE: u16 = 16;
/// Flag: an address of the loopback. Sockets of the host reach it; packets to it are nobody's business but the host's.
pub const FRONTEND_HOST_ONLY: u16 = 32;
/// Flag: flows from inside go to backends of this node alone.
pub const FRONTEND_LOCAL_INSIDE: u16 = 64;
/// Flag: as [`FRONTEND_LOCAL_INSIDE`], of flows from outside.
pub const FRONTEND_LOCAL_OUTSIDE: u16 = 128;
/// Flag: backends on other nodes answer clients outside themselves, where that is possible: see [`direct`].
pub const FRONTEND_DIRECT: u16 = 256;

/// Each backend with the same probability.
pub const ALGORITHM_RANDOM: u8 = 0;
/// Each backend in turn; with [`FRONTEND_WEIGHTED`] as [`ALGORITHM_RANDOM`].
pub const ALGORITHM_ROUND_ROBIN: u8 = 1;
/// By a hash of the flow, the same on all nodes.
pub const ALGORITHM_MAGLEV: u8 = 2;
/// Of two random backends the one with fewer flows.
pub const ALGORITHM_LEAST_CONNECTION: u8 = 3;

/// The address that the cluster assigned to a service.
pub const KIND_CLUSTER_IP: u8 = 1;
/// An address of a service's load balancer.
pub const KIND_LOAD_BALANCER: u8 = 2;
/// An address that somebody routes to the nodes.
pub const KIND_EXTERNAL_IP: u8 = 3;
/// A port at the node's own addresses.
pub const KIND_NODE_PORT: u8 = 4;

/// An endpoint of a service's port. All zero: no backend.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Backend {
    /// The address where it listens.
    pub addr: Addr,
    /// Number of the service's port; an endpoint of two services is two backends.
    pub service: u32,
    /// The port where it listens.
    pub port_be: u16,
    /// [`BACKEND_LINGERS`] or 0.
    pub flags: u16,
    /// Flows that were sent to it and are not over, as far as is known: counted by the programs.
    pub flows: u32,
    /// Explicit padding, zero.
    pub pad: u32,
}

impl Backend {
    /// Whether it may get new flows of the port with this number.
    #[inline(always)]
    pub const fn gets_flows(&self, service: u32) -> bool {
        self.service == service && self.flags & BACKEND_LINGERS == 0
    }
}

/// Flag: it gets no new flows, not even from clients that stay with it; those that it has go on.
pub const BACKEND_LINGERS: u16 = 1;

/// The key of a client with affinity.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct AffinityKey {
    /// The client's address.
    pub client: Addr,
    /// Number of the service's port.
    pub service: u32,
}

/// The backend that a client stays with.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Affinity {
    /// Index in `HEALTH_BACKENDS`.
    pub backend: u32,
    /// When the client last opened a flow to it: seconds of `CLOCK_MONOTONIC`.
    pub last_used: u32,
}

impl Affinity {
    /// Whether the client still stays at `now`: seconds of `CLOCK_MONOTONIC`.
    #[inline(always)]
    pub const fn is_fresh(&self, now: u32, affinity_secs: u32) -> bool {
        now.wrapping_sub(self.last_used) < affinity_secs
    }
}

/// Of an LPM trie: who may use a service's port. Its prefix length counts the bits of `service` too.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SourceRange {
    /// Number of the service's port, network byte order.
    pub service_be: u32,
    /// Address of the source.
    pub addr: Addr,
}

/// Flag: the client's packets come by an uplink.
pub const FLOW_FROM_OUTSIDE: u16 = 1;
/// Flag, with [`FLOW_FROM_OUTSIDE`]: the backend is on another node, and gets the packets from this node's address.
pub const FLOW_MASQUERADED: u16 = 2;
/// Flag, with [`FLOW_FROM_OUTSIDE`]: the backend is no endpoint, so the uplinks' programs enter the flow into conntrack.
pub const FLOW_OF_HOST: u16 = 4;
/// Flag, with [`FLOW_FROM_OUTSIDE`]: the backend is on another node, and answers the client itself: see [`direct`].
pub const FLOW_DIRECT: u16 = 8;
/// Flag, with [`FLOW_FROM_OUTSIDE`]: another node sent the flow to a backend here, and told by which frontend. Such an entry
/// has no index of a backend and no number of a service: that node counts the flow.
pub const FLOW_RELAYED: u16 = 16;
/// Flag: the same client asks the same backend between the same ports through another frontend, too. Each of its packets has the
/// answers be for its own frontend. Never of TCP.
pub const FLOW_SHARED: u16 = 32;
/// Flag, with [`FLOW_FROM_OUTSIDE`]: host routing hands the client's packets to an endpoint of this node past the host's stack.
/// So what the endpoint answers goes past it, too: netfilter would see half of a connection.
pub const FLOW_PAST_STACK: u16 = 64;

/// Flag: the backend sees the client by another port than the client's own, since another flow of the client's has that port
/// there. The entry holds the port of the other side: [`with_half_ports`].
pub const FLOW_MOVED: u16 = 128;
/// Flag, with [`FLOW_MOVED`]: there is no service. The client sends to the backend itself, between the ports of a flow through
/// one. Such an entry has no index of a backend and no number of a service.
pub const FLOW_PLAIN: u16 = 256;

/// The bits that an index of a backend or the number of a service's port has in the entry of a flow: `HEALTH_BACKENDS` has no
/// more places. The bits above hold half of a port each, which is 0 where it is the same on both sides.
pub const NUMBER_MASK: u32 = 0xff_ffff;

/// The index of a backend and the number of a service's port as the entry of a flow holds them, with a port.
#[inline(always)]
pub const fn with_half_ports([backend, service]: [u32; 2], port_be: u16) -> [u32; 2] {
    let port = port_be as u32;
    [
        backend & NUMBER_MASK | port << 24,
        service & NUMBER_MASK | (port >> 8) << 24,
    ]
}

/// The port in such numbers, as it was given.
#[inline(always)]
pub const fn joined_port([backend, service]: [u32; 2]) -> u16 {
    (backend >> 24 | service >> 24 << 8) as u16
}

/// One direction of an IPv4 flow through a service. Its key is a tuple: of direction out, of what a client sends to a
/// frontend; of direction in, of what a backend answers.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServiceFlow4 {
    /// The backend for direction out, the frontend for direction in.
    pub addr_be: u32,
    /// Its port.
    pub port_be: u16,
    /// [`FLOW_FROM_OUTSIDE`] and the other bits.
    pub flags: u16,
    /// Index of the backend in `HEALTH_BACKENDS`, where another may stand by now; and half of a port: [`with_half_ports`].
    pub backend: u32,
    /// Number of the service's port; and the other half.
    pub service: u32,
    /// When the flow is over unless another packet comes: seconds of `CLOCK_MONOTONIC`. Not for TCP.
    pub expires: u32,
}

/// One direction of an IPv6 flow through a service; as [`ServiceFlow4`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServiceFlow6 {
    /// The backend for direction out, the frontend for direction in.
    pub addr_be: [u32; 4],
    /// Its port.
    pub port_be: u16,
    /// [`FLOW_FROM_OUTSIDE`] and the other bits.
    pub flags: u16,
    /// Index of the backend in `HEALTH_BACKENDS`, where another may stand by now; and half of a port: [`with_half_ports`].
    pub backend: u32,
    /// Number of the service's port; and the other half.
    pub service: u32,
    /// When the flow is over unless another packet comes: seconds of `CLOCK_MONOTONIC`. Not for TCP.
    pub expires: u32,
}

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
