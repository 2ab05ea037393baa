//! What builds the datapath of endpoints.

use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;

use health_model::identity::Identity;
use health_model::labels::LabelSet;
use health_net::mac::MacAddr;
use tokio::sync::watch;

/// An endpoint as it is to be built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Regeneration {
    /// Its id.
    pub id: u16,
    /// Its identity.
    pub identity: Identity,
    /// The labels of its identity. Empty: not known, the identity is `reserved:init`.
    pub labels: LabelSet,
    /// Whether it has labels and no identity of them: nothing passes but what the rules allow `reserved:init`, also
    /// where none selects that.
    pub fails_closed: bool,
    /// Its addresses, IPv4 first.
    pub addresses: Vec<IpAddr>,
    /// Name of the host's end of its pair.
    pub device: String,
    /// Number of the host's end.
    pub ifindex: u32,
    /// The endpoint's own hardware address.
    pub mac: MacAddr,
    /// The host side's hardware address.
    pub host_mac: MacAddr,
}

/// What is in force since an endpoint was built.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RealizedPolicy {
    /// Number of its table in `HEALTH_POLICY`; 0 for none.
    pub policy: u32,
    /// Whether what goes to it passes only where its policy allows it.
    pub enforces_ingress: bool,
    /// Whether what it sends passes only where its policy allows it.
    pub enforces_egress: bool,
}

/// Why an endpoint was not built: in words for its log. What was in force before still is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct RegenerationError(pub String);

/// Builds the datapath of endpoints. Different endpoints may be asked for at a time, one only once.
pub trait Regenerator: Send + Sync {
    /// Why endpoints of an agent before this one are not to be built yet; `None` once they are. Until then they keep
    /// what that agent built.
    fn held_back(&self) -> watch::Receiver<Option<RegenerationError>>;

    /// Waits until all is known that endpoints are built from, as long as that can be expected soon: a new endpoint
    /// does not wait for a store that is away.
    fn until_informed(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>>;

    /// Builds the datapath of an endpoint, without waiting for anything. Its packets meet all of the old or all of the
    /// new; after a failure they meet the old.
    fn regenerate<'a>(
        &'a self,
        endpoint: &'a Regeneration,
    ) -> Pin<Box<dyn Future<Output = Result<RealizedPolicy, RegenerationError>> + Send + 'a>>;

    /// Drops all traffic of an endpoint that could not be deleted, and is not built again. `None` if nothing serves it.
    fn shut_off(
        &self,
        id: u16,
    ) -> Pin<Box<dyn Future<Output = Result<Option<RealizedPolicy>, RegenerationError>> + Send + '_>>;

    /// Takes away all of an endpoint. One that is not there is no failure.
    fn remove(
        &self,
        id: u16,
    ) -> Pin<Box<dyn Future<Output = Result<(), RegenerationError>> + Send + '_>>;
}
