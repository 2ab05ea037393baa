//! The programs that others go on with: `HEALTH_CALLS`, by index.

/// `masquerade`, where `to_netdev` goes on.
pub const CALL_MASQUERADE: u32 = 0;
/// `unmasquerade`, where `from_netdev` goes on.
pub const CALL_UNMASQUERADE: u32 = 1;

/// Number of entries.
pub const CALLS_ENTRIES: u32 = 2;
