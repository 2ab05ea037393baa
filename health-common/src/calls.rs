//! The programs that others go on with: `HEALTH_CALLS`, by index.

/// `masquerade`, where `to_netdev` goes on.
pub const CALL_MASQUERADE: u32 = 0;
/// `unmasquerade`, where `from_netdev` goes on.
pub const CALL_UNMASQUERADE: u32 = 1;
/// `to_service`, where `from_netdev` goes on, after `unmasquerade` if that is on.
pub const CALL_TO_SERVICE: u32 = 2;
/// `from_service`, where `to_netdev` goes on, before `masquerade`.
pub const CALL_FROM_SERVICE: u32 = 3;
/// `deliver`, where `from_endpoint` and `to_service` go on with host routing. It has no place in `HEALTH_IP_CALLS`.
pub const CALL_DELIVER: u32 = 4;

/// Number of entries.
pub const CALLS_ENTRIES: u32 = 5;
