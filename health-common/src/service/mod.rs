//! Services: `HEALTH_SVC4` and `HEALTH_SVC6` with the frontends, `HEALTH_SLOTS`, `HEALTH_MAGLEV` and `HEALTH_BACKENDS`
//! with what stands behind them, `HEALTH_AFFINITY`, `HEALTH_SOURCE_RANGES`, and the flows that were sent to a backend:
//! `HEALTH_REVNAT4` and `HEALTH_REVNAT6` for TCP, `HEALTH_REVNAT_ANY4` and `HEALTH_REVNAT_ANY6` for all other protocols.
//!
//! A packet to a frontend takes three look-ups: the frontend, a slot of its pool, the backend of the slot. The agent
//! writes a pool where none was, and then has the frontend name it; nothing is changed under a program that reads it.

pub mod choice;
pub mod unreachable;

use crate::addr::Addr;

/// Entries that `HEALTH_SVC4` and `HEALTH_SVC6` have room for each, unless the agent asks for another size.
pub const DEFAULT_FRONTENDS: u32 = 65_536;
/// As [`DEFAULT_FRONTENDS`], of `HEALTH_BACKENDS`. The first one is not used.
pub const DEFAULT_BACKENDS: u32 = 65_536;
/// As [`DEFAULT_FRONTENDS`], of `HEALTH_SLOTS`.
pub const DEFAULT_SLOTS: u32 = 4 * DEFAULT_BACKENDS;
/// As [`DEFAULT_FRONTENDS`], of `HEALTH_MAGLEV`: 64 tables of 16,381 places.
pub const DEFAULT_MAGLEV: u32 = 64 * 16_381;
/// As [`DEFAULT_FRONTENDS`], of `HEALTH_AFFINITY`.
pub const DEFAULT_AFFINITY: u32 = 65_536;
/// As [`DEFAULT_FRONTENDS`], of `HEALTH_SOURCE_RANGES`.
pub const DEFAULT_SOURCE_RANGES: u32 = 65_536;
/// Entries of `HEALTH_REVNAT4` and `HEALTH_REVNAT6`; each flow has two.
pub const REVNAT_ENTRIES: u32 = 131_072;
/// As [`REVNAT_ENTRIES`], of `HEALTH_REVNAT_ANY4` and `HEALTH_REVNAT_ANY6`.
pub const REVNAT_ANY_ENTRIES: u32 = 65_536;

/// Where an IPv4 service is reached.
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

/// Where an IPv6 service is reached.
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

/// Backends to choose from.
///
/// In `HEALTH_SLOTS`, at `at`: a counter for [`ALGORITHM_ROUND_ROBIN`], then `len` indexes of backends; if
/// [`FRONTEND_WEIGHTED`], then `len` thresholds and `len` indexes of the pool, see [`choice::weighted`]. With
/// [`ALGORITHM_MAGLEV`] it is a table in `HEALTH_MAGLEV` instead: `len` indexes of backends, from `at` on.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pool {
    /// Index of the first entry.
    pub at: u32,
    /// How many backends, or places of a Maglev table. 0 for none: then it says in [`Frontend`] what becomes of a flow.
    pub len: u32,
}

/// What becomes of new flows to a frontend.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Frontend {
    /// For flows from this node and its endpoints.
    pub inside: Pool,
    /// For all others.
    pub outside: Pool,
    /// Number of the service's port: its frontends and backends have it too. Never 0.
    pub service: u32,
    /// How long after a client's last packet its flows still go to the same backend, seconds; 0 for no affinity.
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

/// Each backend with the same probability.
pub const ALGORITHM_RANDOM: u8 = 0;
/// One after the other.
pub const ALGORITHM_ROUND_ROBIN: u8 = 1;
/// By a hash of the flow, the same on all nodes.
pub const ALGORITHM_MAGLEV: u8 = 2;
/// Of two random ones the one with fewer flows.
pub const ALGORITHM_LEAST_CONNECTION: u8 = 3;

/// The address that the cluster gave a service.
pub const KIND_CLUSTER_IP: u8 = 1;
/// An address of a service's load balancer.
pub const KIND_LOAD_BALANCER: u8 = 2;
/// An address that somebody routes to the nodes.
pub const KIND_EXTERNAL_IP: u8 = 3;
/// A port of the node's addresses.
pub const KIND_NODE_PORT: u8 = 4;

/// An endpoint of a service's port. All zero: no backend.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Backend {
    /// Where it listens.
    pub addr: Addr,
    /// Number of the service's port; an endpoint of two services is two backends.
    pub service: u32,
    /// Where it listens.
    pub port_be: u16,
    /// [`BACKEND_LINGERS`] or 0.
    pub flags: u16,
    /// Flows that were sent to it and are not over, as far as is known: counted by the programs, and set now and then by
    /// the agent.
    pub flows: u32,
    /// Explicit padding, zero.
    pub pad2: u32,
}

/// Flag: it gets no new flows, not even from clients that stay with it; those that it has go on.
pub const BACKEND_LINGERS: u16 = 1;

/// A client that stays with its backend.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct AffinityKey {
    /// The client.
    pub client: Addr,
    /// Number of the service's port.
    pub service: u32,
}

/// Where a client stays.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Affinity {
    /// Index in `HEALTH_BACKENDS`.
    pub backend: u32,
    /// When a packet went there last: seconds of `CLOCK_MONOTONIC`.
    pub last_used: u32,
}

/// Of an LPM trie: who may use a service's port. Its prefix length counts the bits of `service` too.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SourceRange {
    /// Number of the service's port, network byte order.
    pub service_be: u32,
    /// The source.
    pub addr: Addr,
}

/// Flag: the client's packets come by an uplink.
pub const FLOW_FROM_OUTSIDE: u16 = 1;
/// Flag, with [`FLOW_FROM_OUTSIDE`]: the backend is on another node, and gets the packets from this node's address.
pub const FLOW_MASQUERADED: u16 = 2;
/// Flag, with [`FLOW_FROM_OUTSIDE`]: the backend is no endpoint, so the uplinks' programs enter the flow into conntrack.
pub const FLOW_OF_HOST: u16 = 4;

/// One way of an IPv4 flow through a service. Its key is a tuple: of direction out, of what a client sends to a frontend;
/// of direction in, of what a backend answers.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServiceFlow4 {
    /// The backend for direction out, the frontend for direction in.
    pub addr_be: u32,
    /// Its port.
    pub port_be: u16,
    /// [`FLOW_FROM_OUTSIDE`] and the other bits.
    pub flags: u16,
    /// Index of the backend in `HEALTH_BACKENDS`, where another may stand by now.
    pub backend: u32,
    /// Number of the service's port.
    pub service: u32,
    /// When the flow is over unless another packet comes: seconds of `CLOCK_MONOTONIC`. Not for TCP.
    pub expires: u32,
}

/// One way of an IPv6 flow through a service; as [`ServiceFlow4`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServiceFlow6 {
    /// The backend for direction out, the frontend for direction in.
    pub addr_be: [u32; 4],
    /// Its port.
    pub port_be: u16,
    /// [`FLOW_FROM_OUTSIDE`] and the other bits.
    pub flags: u16,
    /// Index of the backend in `HEALTH_BACKENDS`, where another may stand by now.
    pub backend: u32,
    /// Number of the service's port.
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
