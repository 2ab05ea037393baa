//! Remembers what existed before an agent's start, so that a failed start can be rolled back.

use health_datapath::Datapath;
use health_endpoint::health::{self, DEVICE, HealthEndpointSpec};
use health_model::settings::Location;
use health_net::link;
use health_net::netlink::Handle;
use tracing::warn;

/// The state before a start.
#[derive(Clone, Debug)]
pub(super) struct PreviousState {
    location: Location,
    /// Whether a device with the health endpoint's name existed.
    endpoint: bool,
    /// Whether the pin folder existed.
    pins: bool,
    /// The saved state of the health endpoint.
    state: Option<health::State>,
}

impl PreviousState {
    pub(super) async fn find(location: &Location, netlink: &Handle) -> anyhow::Result<Self> {
        Ok(Self {
            location: location.clone(),
            endpoint: link::by_name(netlink, DEVICE).await?.is_some(),
            pins: location.pins().exists(),
            state: health::saved_state(&location.state_dir),
        })
    }

    /// Removes whatever has been created since.
    pub(super) async fn restore(self, spec: &HealthEndpointSpec) {
        if !self.pins
            && let Err(error) = Datapath::remove(&self.location)
        {
            warn!(%error, "cannot remove the pins of the failed start");
        }
        if !self.endpoint {
            health::take_back(spec, self.state.as_ref()).await;
        }
    }
}
