//! The two kinds of devices whose packets the programs handle.

use health_common::service::Origin;

/// The kind of device that a program is attached to.
pub trait Hook {
    /// Where the flows come from.
    const ORIGIN: Origin;
    /// Whether the hook is at an uplink rather than at an endpoint's device.
    const IS_UPLINK: bool = matches!(Self::ORIGIN, Origin::Outside);
}

/// At the device of an endpoint.
pub struct AtEndpoint;
/// At an uplink.
pub struct AtUplink;

impl Hook for AtEndpoint {
    const ORIGIN: Origin = Origin::Inside;
}

impl Hook for AtUplink {
    const ORIGIN: Origin = Origin::Outside;
}
