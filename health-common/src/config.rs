//! Run-time settings that the programs read, the one entry of `HEALTH_CONFIG`.

use crate::addr::Addr;

/// The one value of `HEALTH_CONFIG`, under index 0.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DatapathConfig {
    /// [`crate::LAYOUT_VERSION`] of the agent that wrote this.
    pub layout_version: u32,
    /// ICMP identifier of this agent's probes, network byte order. Random for each start: equal
    /// identifiers of several agents collide in other people's NAT tables.
    pub icmp_id_be: u16,
    /// Explicit padding, zero.
    pub pad: u16,
    /// Magic that marks a probe of this agent, compared as it lies in memory.
    pub probe_magic: u64,
    /// Lifetime of a conntrack entry that is neither TCP nor a service, seconds.
    pub ct_any_timeout_secs: u32,
    /// Explicit padding, zero.
    pub pad2: u32,
    /// The gateway of this node's endpoints, IPv4. Unset: no IPv4.
    pub gateway4: Addr,
    /// The gateway of this node's endpoints, IPv6. Unset: no IPv6.
    pub gateway6: Addr,
}

crate::map_types!(DatapathConfig = 56);
