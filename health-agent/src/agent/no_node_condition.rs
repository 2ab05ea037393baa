//! Replaces `node_condition` in builds without Kubernetes.

use std::convert::Infallible;
use std::sync::Arc;

use health_model::activity::Controller;
use health_settings::Settings;

use super::source::AgentSource;

/// Has no values: such a build refuses the registry that a condition needs.
pub(super) enum ReportedCondition {}

impl ReportedCondition {
    pub(super) fn start(_: &Settings, _: Arc<AgentSource>) -> Result<Option<Self>, Infallible> {
        Ok(None)
    }

    pub(super) fn controller(&self) -> Controller {
        match *self {}
    }

    pub(super) async fn stop(self) {
        match self {}
    }
}
