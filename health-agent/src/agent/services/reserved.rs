//! The addresses that this node uses itself, so that no service takes them from their users.

use std::net::IpAddr;
use std::sync::Arc;

use health_endpoint::manager::Manager;
use health_service::state::{ReservedAddresses, ReservedFor};
use tokio::sync::watch;

use super::publish;

/// Follows the addresses of endpoints, the health endpoint's among them, beside these gateways. Ends when nobody listens.
/// Must be called in a tokio runtime.
pub(in crate::agent) fn follow(
    gateways: Vec<IpAddr>,
    endpoints: Manager,
) -> watch::Receiver<Arc<ReservedAddresses>> {
    let mut changes = endpoints.changes();
    let (sender, reserved) = watch::channel(Arc::new(now(&gateways, &endpoints)));
    tokio::spawn(async move {
        loop {
            tokio::select! {
                () = sender.closed() => return,
                changed = changes.changed() => if changed.is_err() { return },
            }
            publish(&sender, now(&gateways, &endpoints));
        }
    });
    reserved
}

fn now(gateways: &[IpAddr], endpoints: &Manager) -> ReservedAddresses {
    // A node without a pod CIDR has no endpoints.
    let taken = endpoints.taken_addresses().unwrap_or_default().into_iter();
    let taken = taken.map(|taken| (taken.address, ReservedFor::Endpoint(taken.name)));
    let gateways = gateways.iter();
    let gateways = gateways.map(|address| (*address, ReservedFor::Gateway));
    taken.chain(gateways).collect()
}
