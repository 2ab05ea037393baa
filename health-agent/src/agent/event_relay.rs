//! Relays the programs' events to monitor clients.

use std::sync::Arc;

use anyhow::Context as _;
use health_datapath::events::{self, Hub};
use health_model::activity::{self, Activity};
use health_model::task::AbortOnDrop;

use super::node::NodeDatapath;

/// Relays events until it is stopped or dropped.
pub(super) struct EventRelay {
    pub(super) hub: Arc<Hub>,
    pub(super) activity: Activity,
    _task: AbortOnDrop,
}

impl EventRelay {
    /// Starts the relay. Must be called in a tokio runtime.
    pub(super) fn start(node: &NodeDatapath) -> anyhow::Result<Self> {
        let hub = Hub::new(node.datapath().event_switch()?)
            .context("cannot turn off the programs' events")?;
        let hub = Arc::new(hub);
        let (reporter, activity) = activity::channel();
        let ring = node.datapath().ring()?;
        let task = AbortOnDrop::spawn(events::relay(ring, hub.clone(), reporter));
        Ok(Self {
            hub,
            activity,
            _task: task,
        })
    }

    /// Ends the clients' subscriptions.
    pub(super) fn stop(self) {
        self.hub.close();
    }
}
