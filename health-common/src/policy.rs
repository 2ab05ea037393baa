//! Endpoint policy: `HEALTH_POLICY` and `HEALTH_POLICY_COUNTERS`.
//!
//! Verdicts are stored in tables. Each endpoint refers to a table ([`crate::endpoint::EndpointInfo`]), so endpoints
//! with the same identity share one. A new policy is written to a new table before the endpoints switch to it, so each
//! packet sees either the whole old table or the whole new one.

use crate::identity;

/// Entries of `HEALTH_POLICY`.
pub const POLICY_ENTRIES: u32 = 262_144;
/// Entries of `HEALTH_POLICY_COUNTERS`.
pub const POLICY_COUNTERS: u32 = 65_536;

/// [`PolicyKey::direction`]: to the endpoint.
pub const POLICY_INGRESS: u8 = 0;
/// [`PolicyKey::direction`]: from the endpoint.
pub const POLICY_EGRESS: u8 = 1;

/// [`PolicyKey::identity`] of the verdicts for peers without verdicts of their own in a table.
pub const ANY_IDENTITY: u32 = identity::UNKNOWN;

/// Prefix length of a [`PolicyKey`] that matches every protocol and port.
pub const PREFIX_ALL: u32 = 96;
/// Prefix length of a [`PolicyKey`] that matches every port of its protocol.
pub const PREFIX_PROTOCOL: u32 = 112;
/// Prefix length of a [`PolicyKey`] that matches only its port.
pub const PREFIX_PORT: u32 = 128;

/// [`PolicyEntry::verdict`]: no rule allows the traffic. Equivalent to a missing entry, except that the search ends
/// here.
pub const VERDICT_NONE: u8 = 0;
/// [`PolicyEntry::verdict`]: a rule allows the traffic and none denies it.
pub const VERDICT_ALLOW: u8 = 1;
/// [`PolicyEntry::verdict`]: a rule denies the traffic.
pub const VERDICT_DENY: u8 = 2;

/// Key data of `HEALTH_POLICY`, a longest-prefix-match trie.
///
/// Looked up with the peer's identity first and, if nothing is found, with [`ANY_IDENTITY`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PolicyKey {
    /// Number of the table, from 1.
    pub table: u32,
    /// [`POLICY_INGRESS`] or [`POLICY_EGRESS`].
    pub direction: u8,
    /// Explicit padding, zero.
    pub pad: [u8; 3],
    /// Identity of the other side.
    pub identity: u32,
    /// IP protocol.
    pub protocol: u8,
    /// Explicit padding, zero.
    pub pad2: u8,
    /// Destination port, network byte order; for ICMP, the type.
    pub port_be: u16,
}

/// The verdict for a [`PolicyKey`]. Programs never change it: counters are per CPU, in `HEALTH_POLICY_COUNTERS`, and
/// outlive the table.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PolicyEntry {
    /// Index of the entry's counter; entries without a counter of their own share counter 0.
    pub counter: u32,
    /// Owner of the policy: a number assigned by the agent, the same in an old table and its replacement.
    pub subject: u32,
    /// [`VERDICT_NONE`], [`VERDICT_ALLOW`] or [`VERDICT_DENY`].
    pub verdict: u8,
    /// Explicit padding, zero.
    pub pad: [u8; 3],
}

crate::map_types!(PolicyKey = 16, PolicyEntry = 12);
