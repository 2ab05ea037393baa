//! The interface for building endpoints' datapaths.

use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;

use health_model::identity::Identity;
use health_model::labels::LabelSet;
use health_net::mac::MacAddr;
use tokio::sync::watch;

/// The intended state of an endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Regeneration {
    /// Its id.
    pub id: u16,
    /// Its identity.
    pub identity: Identity,
    /// The labels of its identity. Empty: unknown, and the identity is `reserved:init`.
    pub labels: LabelSet,
    /// Whether it has labels without an identity: nothing passes except what the rules allow `reserved:init`, even if
    /// no rule selects that.
    pub fails_closed: bool,
    /// Its addresses, IPv4 first.
    pub addresses: Vec<IpAddr>,
    /// Name of the host's end of its pair.
    pub device: String,
    /// Number of the host's end of its pair.
    pub ifindex: u32,
    /// The endpoint's own hardware address.
    pub mac: MacAddr,
    /// The host side's hardware address.
    pub host_mac: MacAddr,
}

/// The policy in force after an endpoint was built.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RealizedPolicy {
    /// Number of its table in `HEALTH_POLICY`; 0 means none.
    pub policy: u32,
    /// Whether packets to it pass only if its policy allows them.
    pub enforces_ingress: bool,
    /// Whether packets from it pass only if its policy allows them.
    pub enforces_egress: bool,
}

/// Why an endpoint was not built, in words for its log. The former policy stays in force.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct RegenerationError(pub String);

/// Builds endpoints' datapaths. Builds of different endpoints may run concurrently; those of one endpoint do not.
pub trait Regenerator: Send + Sync {
    /// Why endpoints of a previous agent must not be built yet; `None` once they may be. Until then they keep what that
    /// agent built.
    fn held_back(&self) -> watch::Receiver<Option<RegenerationError>>;

    /// Waits until everything is known that endpoints are built from, if that can be expected soon: a new endpoint does
    /// not wait for a store that is away.
    fn until_informed(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>>;

    /// Builds the datapath of an endpoint, without waiting for anything. Packets meet either the complete old or the
    /// complete new datapath; after a failure, the old one.
    fn regenerate<'a>(
        &'a self,
        endpoint: &'a Regeneration,
    ) -> Pin<Box<dyn Future<Output = Result<RealizedPolicy, RegenerationError>> + Send + 'a>>;

    /// Drops all traffic of an endpoint that could not be deleted and is not built again. Returns `None` if nothing
    /// serves it.
    fn shut_off(
        &self,
        id: u16,
    ) -> Pin<Box<dyn Future<Output = Result<Option<RealizedPolicy>, RegenerationError>> + Send + '_>>;

    /// Removes everything of an endpoint. It is not a failure if the endpoint does not exist.
    fn remove(
        &self,
        id: u16,
    ) -> Pin<Box<dyn Future<Output = Result<(), RegenerationError>> + Send + '_>>;
}
