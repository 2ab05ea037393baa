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

/// An invalid setting.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{flag} '{value}': {reason}")]
pub struct InvalidSetting {
    /// The flag that sets it.
    pub flag: &'static str,
    /// The given value.
    pub value: String,
    /// Why it is invalid, and what is valid.
    pub reason: String,
}

impl InvalidSetting {
    /// Reports that `value` is invalid for the flag `flag`, and what is valid.
    pub fn new(flag: &'static str, value: impl ToString, reason: impl Into<String>) -> Self {
        Self {
            flag,
            value: value.to_string(),
            reason: reason.into(),
        }
    }
}
