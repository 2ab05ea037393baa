//! This node's standing in its cluster, as reported to load balancers, and its zone.

use health_registry::nodes::Standing;
use health_service::choice::Topology;
use health_service::health_check::NodeStanding;
use health_service::services::Handle;
use tokio::sync::watch;

/// Passes this node's standing from the registry to the proxy, until the registry ends.
pub(super) async fn follow(mut standing: watch::Receiver<Standing>, handle: Handle) {
    loop {
        match &*standing.borrow_and_update() {
            // Until the registry answers, the node may receive traffic.
            Standing::Unknown => handle.node(NodeStanding {
                is_deleting: false,
                taints: &[],
            }),
            Standing::Known {
                is_deleting,
                taints,
                ..
            } => {
                let taints: Vec<&str> = taints.iter().map(String::as_str).collect();
                handle.node(NodeStanding {
                    is_deleting: *is_deleting,
                    taints: &taints,
                });
            }
        }
        if standing.changed().await.is_err() {
            return;
        }
    }
}

/// Keeps this node's zone in sync with the registry, until the registry ends.
pub(super) async fn follow_zone(
    mut standing: watch::Receiver<Standing>,
    place: watch::Sender<Topology>,
) {
    loop {
        if let Standing::Known { zone, .. } = &*standing.borrow_and_update() {
            place.send_if_modified(|place| {
                let differs = place.zone.as_deref() != zone.as_deref();
                place.zone = zone.as_deref().map(Into::into);
                differs
            });
        }
        if standing.changed().await.is_err() {
            return;
        }
    }
}
