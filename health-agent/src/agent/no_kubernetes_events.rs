//! Replaces `kubernetes_events` in builds without Kubernetes.

use std::convert::Infallible;

use health_model::activity::Controller;
use health_probe::supervisor::{PodEvent, PodEvents};
use health_settings::Settings;

/// Has no values, because such a build writes no events.
#[derive(Clone)]
pub(super) enum KubernetesEvents {}

impl KubernetesEvents {
    pub(super) fn open(_: &Settings) -> Result<Option<Self>, Infallible> {
        Ok(None)
    }

    pub(super) fn controller(&self) -> Controller {
        match *self {}
    }
}

impl PodEvents for KubernetesEvents {
    fn occur(&self, _: PodEvent) {
        match *self {}
    }
}
