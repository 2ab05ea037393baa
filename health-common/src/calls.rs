//! Tail-call targets: `HEALTH_CALLS`, by index.

/// `masquerade`, called from `to_netdev`.
pub const CALL_MASQUERADE: u32 = 0;
/// `unmasquerade`, called from `from_netdev`.
pub const CALL_UNMASQUERADE: u32 = 1;
/// `to_service`, called from `from_netdev`, after `unmasquerade` if that is enabled.
pub const CALL_TO_SERVICE: u32 = 2;
/// `from_service`, called from `to_netdev`, before `masquerade`.
pub const CALL_FROM_SERVICE: u32 = 3;
/// `deliver`, called from `from_endpoint` and `to_service` with host routing. It has no slot in `HEALTH_IP_CALLS`.
pub const CALL_DELIVER: u32 = 4;

/// Number of entries.
pub const CALLS_ENTRIES: u32 = 5;
