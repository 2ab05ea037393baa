//! Tells policy which service addresses lead to hosts other than this one.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use health_service::services::{Provider, Work};
use health_service::spec::PortKey;
use health_service::state::Listen;
use tokio::sync::watch;

use super::publish::publish;

/// Wraps a provider with which packets still carry the service address when policy checks them. Publishes the addresses
/// before they are served.
pub(super) struct AnnouncingProvider<P> {
    provider: P,
    addresses: watch::Sender<Arc<BTreeSet<IpAddr>>>,
}

impl<P> AnnouncingProvider<P> {
    pub(super) fn new(provider: P, addresses: watch::Sender<Arc<BTreeSet<IpAddr>>>) -> Self {
        Self {
            provider,
            addresses,
        }
    }
}

impl<P: Provider> Provider for AnnouncingProvider<P> {
    type Error = P::Error;

    fn refused(error: &P::Error) -> impl Iterator<Item = (PortKey, String)> {
        P::refused(error)
    }

    async fn sync(&mut self, work: Work<'_>) -> Result<(), P::Error> {
        let frontends = work.state.ports().flat_map(|(_, port)| &port.frontends);
        // NodePorts use the host's addresses.
        let addresses = frontends.filter_map(|frontend| match frontend.listen {
            Listen::Address(address) => Some(address.ip()),
            Listen::NodePort(_) => None,
        });
        let addresses: BTreeSet<_> = addresses.collect();
        publish(&self.addresses, addresses);
        self.provider.sync(work).await
    }
}
