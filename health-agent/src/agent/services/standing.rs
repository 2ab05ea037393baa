//! How this node stands with its cluster, as load balancers are told.

use health_registry::nodes::Standing;
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
