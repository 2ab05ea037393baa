//! Settings that several parts of the agent use, and the error for an invalid one.

mod attach;
mod host_routing;
mod location;
mod service_forwarding;
mod service_xdp;

pub use self::attach::AttachMode;
pub use self::host_routing::HostRouting;
pub use self::location::Location;
pub use self::service_forwarding::ServiceForwarding;
pub use self::service_xdp::ServiceXdp;

/// A setting that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{flag} '{value}': {reason}")]
pub struct InvalidSetting {
    /// The flag that it was given by.
    pub flag: &'static str,
    /// What was given.
    pub value: String,
    /// Why it cannot be used, and what can.
    pub reason: String,
}

impl InvalidSetting {
    /// Says of the flag `flag` that `value` cannot be used, and what can.
    pub fn new(flag: &'static str, value: impl ToString, reason: impl Into<String>) -> Self {
        Self {
            flag,
            value: value.to_string(),
            reason: reason.into(),
        }
    }
}
