//! Replaces `kubernetes_policies` in builds without Kubernetes.

use health_endpoint::enforcement::Enforcer;
use health_model::activity::{Controller, Reporter};
use health_model::task::AbortOnDrop;
use health_settings::Settings;

use super::kubernetes_events::KubernetesEvents;

/// Has no values, because such a build has no policies from Kubernetes.
pub(super) enum KubernetesPolicies {}

impl KubernetesPolicies {
    /// Fails if the settings require policies from Kubernetes.
    pub(super) fn open(
        config: &Settings,
        _: Option<KubernetesEvents>,
    ) -> anyhow::Result<Option<Self>> {
        anyhow::ensure!(
            config.policy.policies_from_kubernetes.is_none(),
            "cannot use --policies-from-kubernetes: this agent was built without Kubernetes; use another build, or \
             `policy import`"
        );
        Ok(None)
    }

    pub(super) fn controllers(&self) -> [Controller; 0] {
        match *self {}
    }

    pub(super) fn follow(
        self,
        _: Enforcer,
        _: impl Fn() -> usize + Send + 'static,
        _: Reporter,
    ) -> AbortOnDrop {
        match self {}
    }
}
