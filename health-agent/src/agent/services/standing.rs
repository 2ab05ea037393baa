//! How this node stands with its cluster, as load balancers are told, and where it is.

use health_registry::nodes::Standing;
use health_service::choice::Topology;
use health_service::health_check::NodeStanding;
use health_service::services::Handle;
use tokio::sync::watch;

/// Tells what the registry says, as long as it says anything.
pub(super) async fn tell(mut standing: watch::Receiver<Standing>, handle: Handle) {
    loop {
        match &*standing.borrow_and_update() {
            // As long as nobody says otherwise, it may get traffic.
            Standing::Untold => handle.node(NodeStanding {
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

/// Keeps the zone of this node as the registry says, as long as it says anything.
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
