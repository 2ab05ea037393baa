//! The agent's state as a condition of this node's object in Kubernetes.

use std::sync::Arc;
use std::time::Duration;

use health_model::activity::Controller;
use health_model::task::AbortOnDrop;
use health_registry::kubernetes::{AccessError, ConditionStatus, ConditionWriter, NodeCondition};
use health_server::source::Source as _;
use health_settings::{ApiAccess, Settings};
use tokio::time::{MissedTickBehavior, interval, timeout};
use tracing::warn;

use super::source::AgentSource;

/// How often the agent's state is judged.
const PERIOD: Duration = Duration::from_secs(1);
/// Longest wait for the last write.
const LAST_WRITE: Duration = Duration::from_secs(2);

/// Writes the condition until it is stopped or dropped.
pub(super) struct ReportedCondition {
    writer: Arc<ConditionWriter>,
    _judging: AbortOnDrop,
}

impl ReportedCondition {
    /// Starts to report the state of `source`. Returns `None` if the settings do not ask for it. Fails if no
    /// credentials are available. Must be called in a tokio runtime.
    pub(super) fn start(
        config: &Settings,
        source: Arc<AgentSource>,
    ) -> Result<Option<Self>, AccessError> {
        let node = &config.node;
        let access = ApiAccess::of_cluster(None, &node.registry);
        let (Some(kind), Some(kubeconfig)) = (&node.node_condition, access) else {
            return Ok(None);
        };
        let writer = ConditionWriter::open(kubeconfig, &node.node_name, kind)?;
        let writer = Arc::new(writer);
        Ok(Some(Self {
            _judging: AbortOnDrop::spawn(judge(source, writer.clone())),
            writer,
        }))
    }

    /// Whether the writes succeed.
    pub(super) fn controller(&self) -> Controller {
        self.writer.controller()
    }

    /// Says in the condition that the agent has stopped.
    pub(super) async fn stop(self) {
        let last = NodeCondition {
            status: ConditionStatus::Unknown,
            reason: "AgentStopped",
            message: "the agent has stopped; its programs and endpoints stay".to_owned(),
        };
        let is_written = timeout(LAST_WRITE, self.writer.close(last)).await;
        if !is_written.unwrap_or_default() {
            warn!("the condition of this node does not say that the agent has stopped");
        }
    }
}

/// The condition that fits the agent's state. Other nodes do not count: one that fails would change the conditions of all
/// at once.
fn condition(source: &AgentSource) -> NodeCondition {
    let (status, reason, message) = match (source.starting(), source.failing()) {
        (Some(starting), _) => (ConditionStatus::Unknown, "AgentNotReadyYet", starting),
        (None, Some(problem)) => (ConditionStatus::False, "AgentFailing", problem),
        (None, None) => {
            let message = "the agent does all its work".to_owned();
            (ConditionStatus::True, "AgentOk", message)
        }
    };
    NodeCondition {
        status,
        reason,
        message,
    }
}

/// Judges the agent's state again and again.
async fn judge(source: Arc<AgentSource>, writer: Arc<ConditionWriter>) {
    let mut ticks = interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let source = source.clone();
        if let Ok(condition) = tokio::task::spawn_blocking(move || condition(&source)).await {
            writer.set(condition);
        }
    }
}
