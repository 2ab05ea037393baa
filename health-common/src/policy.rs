//! Policy of endpoints: `HEALTH_POLICY` and `HEALTH_POLICY_COUNTERS`.
//!
//! Verdicts stand in tables. An endpoint names the table that holds for it ([`crate::endpoint::EndpointInfo`]),
//! so endpoints of one identity share one, and a new policy is written to a new table before the endpoints
//! change over, each packet meeting the whole of the old or of the new.

use crate::identity;

/// Entries of `HEALTH_POLICY`.
pub const POLICY_ENTRIES: u32 = 262_144;
/// Entries of `HEALTH_POLICY_COUNTERS`.
pub const POLICY_COUNTERS: u32 = 65_536;

/// [`PolicyKey::direction`]: to the endpoint.
pub const POLICY_INGRESS: u8 = 0;
/// [`PolicyKey::direction`]: from the endpoint.
pub const POLICY_EGRESS: u8 = 1;

/// [`PolicyKey::identity`] of the verdicts for peers that have none of their own in a table.
pub const ANY_IDENTITY: u32 = identity::UNKNOWN;

/// Bits of a [`PolicyKey`] that match every protocol and port.
pub const PREFIX_ALL: u32 = 96;
/// Bits of a [`PolicyKey`] that match every port of its protocol.
pub const PREFIX_PROTOCOL: u32 = 112;
/// Bits of a [`PolicyKey`] that match its port alone.
pub const PREFIX_PORT: u32 = 128;

/// [`PolicyEntry::verdict`]: nothing allows it. As though there were no entry, but the search ends.
pub const VERDICT_NONE: u8 = 0;
/// [`PolicyEntry::verdict`]: a rule allows it, and none denies it.
pub const VERDICT_ALLOW: u8 = 1;
/// [`PolicyEntry::verdict`]: a rule denies it.
pub const VERDICT_DENY: u8 = 2;

/// The data of a key of `HEALTH_POLICY`, a trie of the longest prefix.
///
/// Looked up with the peer's identity first and, where nothing is found, with [`ANY_IDENTITY`].
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
    /// Destination port, network byte order; of ICMP the type.
    pub port_be: u16,
}

/// What holds for a [`PolicyKey`]. Never changed by a program: counters are per CPU, in
/// `HEALTH_POLICY_COUNTERS`, and outlive the table.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PolicyEntry {
    /// Index of its counter; 0 is that of all entries without one.
    pub counter: u32,
    /// Whose policy it is: a number of the agent's, the same in the table before and the one after a change.
    pub subject: u32,
    /// [`VERDICT_NONE`], [`VERDICT_ALLOW`] or [`VERDICT_DENY`].
    pub verdict: u8,
    /// Explicit padding, zero.
    pub pad: [u8; 3],
}

crate::map_types!(PolicyKey = 16, PolicyEntry = 12);
