//! The events that the agent writes to the Kubernetes cluster: about refused policies, and about containers.

use std::sync::Arc;

use health_model::activity::Controller;
use health_probe::supervisor::{PodEvent, PodEvents};
use health_registry::kubernetes::{AccessError, EventType, EventWriter, ObjectEvent};
use health_settings::{ApiAccess, Settings};

/// Writes events until the last clone is dropped.
#[derive(Clone)]
pub(super) struct KubernetesEvents(Arc<EventWriter>);

impl KubernetesEvents {
    /// Returns `None` if the settings name no API server. Fails if no credentials are available. Must be called in a
    /// tokio runtime.
    pub(super) fn open(config: &Settings) -> Result<Option<Self>, AccessError> {
        let of_cluster = |access| ApiAccess::of_cluster(access, &config.node.registry);
        let policies = of_cluster(config.policy.policies_from_kubernetes.as_ref());
        let pods = of_cluster(config.containers.pods_from_kubernetes.as_ref());
        let Some(kubeconfig) = policies.or(pods) else {
            return Ok(None);
        };
        let writer = EventWriter::open(kubeconfig, &config.node.node_name)?;
        Ok(Some(Self(Arc::new(writer))))
    }

    /// Whether the writes succeed.
    pub(super) fn controller(&self) -> Controller {
        self.0.controller()
    }

    pub(super) fn writer(&self) -> &EventWriter {
        &self.0
    }
}

impl PodEvents for KubernetesEvents {
    fn occur(&self, event: PodEvent) {
        let PodEvent {
            namespace,
            name,
            uid,
            field_path,
            is_warning,
            reason,
            message,
        } = event;
        self.0.occur(ObjectEvent {
            kind: "Pod".to_owned(),
            api_version: "v1".to_owned(),
            namespace: Some(namespace),
            name,
            uid,
            field_path: Some(field_path),
            event_type: match is_warning {
                true => EventType::Warning,
                false => EventType::Normal,
            },
            reason,
            message,
        });
    }
}
