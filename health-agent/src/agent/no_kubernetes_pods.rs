//! Replaces `kubernetes_pods` in builds without Kubernetes.

use std::sync::Arc;

use health_endpoint::pods::PodLabels;
use health_model::activity::Controller;
use health_probe::source::PodSet;
use health_settings::Settings;
use tokio::sync::watch;

/// Has no values, because such a build has no pods from Kubernetes.
pub(super) enum KubernetesPods {}

impl KubernetesPods {
    /// Fails if the settings require pods from Kubernetes.
    pub(super) fn open(config: &Settings) -> anyhow::Result<Option<Self>> {
        anyhow::ensure!(
            config.containers.pods_from_kubernetes.is_none(),
            "cannot use --pods-from-kubernetes: this agent was built without Kubernetes; use another build, or \
             --pod-manifests"
        );
        Ok(None)
    }

    pub(super) fn controllers(&self) -> [Controller; 0] {
        match *self {}
    }

    pub(super) fn labels(&self) -> watch::Receiver<Arc<PodLabels>> {
        match *self {}
    }

    pub(super) fn probed(&self) -> Option<watch::Receiver<Arc<PodSet>>> {
        match *self {}
    }
}
