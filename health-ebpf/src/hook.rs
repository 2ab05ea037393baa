//! The two kinds of devices whose packets the programs handle.

use health_common::service::Origin;

/// A kind of device, where a program's hook is.
pub trait Hook {
    /// Where the flows come from.
    const ORIGIN: Origin;
    /// At an uplink, not at an endpoint's device.
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
