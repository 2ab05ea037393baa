//! The interface for building endpoints' datapaths.

use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;

use health_model::api::EndpointSettings;
use health_model::identity::Identity;
use health_model::labels::LabelSet;
use health_net::mac::MacAddr;
use tokio::sync::watch;

/// The intended state of an endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Regeneration {
    /// The endpoint's id.
    pub id: u16,
    /// The endpoint's identity.
    pub identity: Identity,
    /// The labels of the identity. Empty: unknown, and the identity is `reserved:init`.
    pub labels: LabelSet,
    /// Whether the endpoint has labels without an identity. Then only traffic that the rules allow to `reserved:init`
    /// passes, even if no rule selects that identity.
    pub fails_closed: bool,
    /// The endpoint's settings.
    pub settings: EndpointSettings,
    /// The endpoint's addresses, IPv4 first.
    pub addresses: Vec<IpAddr>,
    /// Name of the host's end of the pair.
    pub device: String,
    /// Ifindex of the host's end of the pair.
    pub ifindex: u32,
    /// The endpoint's own hardware address.
    pub mac: MacAddr,
    /// The host side's hardware address.
    pub host_mac: MacAddr,
}

/// The policy in force after an endpoint was built.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RealizedPolicy {
    /// Number of the endpoint's table in `HEALTH_POLICY`; 0 means none.
    pub policy: u32,
    /// Whether packets to the endpoint pass only if its policy allows them.
    pub enforces_ingress: bool,
    /// Whether packets from the endpoint pass only if its policy allows them.
    pub enforces_egress: bool,
}

/// Why an endpoint was not built, as shown in its log. The old policy stays in force.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct RegenerationError(pub String);

/// Builds endpoints' datapaths. Different endpoints may be built concurrently, but not the same one.
pub trait Regenerator: Send + Sync {
    /// Follows why endpoints of the previous agent must not be built yet; `None` once they may be. Until then they keep
    /// the datapath of that agent.
    fn held_back(&self) -> watch::Receiver<Option<RegenerationError>>;

    /// Waits until all inputs for building endpoints are known, if that can be expected soon: a new endpoint does not
    /// wait for an unavailable store.
    fn until_informed(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>>;

    /// Waits until the policies of all endpoints cover an identity, if that can be expected soon. If an endpoint got the
    /// identity before, packets that its former and its new policy allow would be dropped at the others.
    fn until_covered(&self, identity: Identity) -> Pin<Box<dyn Future<Output = ()> + Send + '_>>;

    /// Builds the datapath of an endpoint without waiting for anything. Packets meet either the complete old or the
    /// complete new datapath, and after a failure the old one.
    fn regenerate<'a>(
        &'a self,
        endpoint: &'a Regeneration,
    ) -> Pin<Box<dyn Future<Output = Result<RealizedPolicy, RegenerationError>> + Send + 'a>>;

    /// Drops all traffic of an endpoint that could not be deleted and will not be built again. Returns `None` if
    /// nothing serves it.
    fn shut_off(
        &self,
        id: u16,
    ) -> Pin<Box<dyn Future<Output = Result<Option<RealizedPolicy>, RegenerationError>> + Send + '_>>;

    /// Removes all state of an endpoint. Succeeds if the endpoint does not exist.
    fn remove(
        &self,
        id: u16,
    ) -> Pin<Box<dyn Future<Output = Result<(), RegenerationError>> + Send + '_>>;
}
