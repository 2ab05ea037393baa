//! Pods as Kubernetes API objects.

use std::sync::Arc;

use health_model::api::PodProblem;
use health_model::manifest::MIRROR_ANNOTATION;
use serde_json::Value;
use tracing::warn;

use super::{Keeper, SourcedPod};
use crate::spec;

/// The value of [`SourcedPod::source`] for pods of the API.
pub(crate) const SOURCE: &str = "kubernetes";

/// The pod read from an object.
#[derive(Clone, Debug, PartialEq)]
pub struct ObjectPod {
    /// `NAMESPACE/NAME`.
    name: String,
    /// The object's own UID.
    uid: String,
    pod: Option<SourcedPod>,
    errors: Vec<String>,
}

impl ObjectPod {
    /// Reads an object of kind `Pod`; `before` is the last value read for this name. If the object has an error, the
    /// probes stay unchanged, but the state of its containers is still updated.
    pub fn read(object: Value, before: Option<&Self>) -> Self {
        let text = |pointer: &str| {
            let found = object.pointer(pointer).and_then(Value::as_str);
            found.unwrap_or_default().to_owned()
        };
        let name = format!("{}/{}", text("/metadata/namespace"), text("/metadata/name"));
        let uid = text("/metadata/uid");
        let mirrored = object["metadata"]["annotations"][MIRROR_ANNOTATION].as_str();
        let mirrored = mirrored.filter(|uid| !uid.is_empty()).map(str::to_owned);
        let keeper = Keeper::Kubelet {
            is_mirror: mirrored.is_some(),
        };
        let status = spec::read_status(&object).unwrap_or_default();
        let (spec, errors) = match spec::read_pod(object) {
            Ok((mut spec, _)) => {
                if let Some(uid) = mirrored {
                    spec.mirror(&uid);
                }
                (Some(Arc::new(spec)), Vec::new())
            }
            Err(errors) => {
                let before = before.filter(|before| before.uid == uid);
                let before = before.and_then(|before| before.pod.as_ref());
                let errors = errors.iter().map(ToString::to_string).collect();
                (before.map(|pod| pod.spec.clone()), errors)
            }
        };
        if !errors.is_empty() && before.is_none_or(|before| before.errors != errors) {
            let problems = errors.join("; ");
            warn!(
                pod = name,
                problems, "a Kubernetes pod has errors; its probes are unchanged"
            );
        }
        Self {
            name,
            uid,
            pod: spec.map(|spec| SourcedPod {
                spec,
                status: Some(status),
                source: Arc::from(SOURCE),
                keeper,
            }),
            errors,
        }
    }

    /// The pod, if it has anything to probe.
    pub fn pod(&self) -> Option<&SourcedPod> {
        self.pod.as_ref()
    }

    /// Problems with the object.
    pub fn problems(&self) -> impl Iterator<Item = PodProblem> {
        self.errors.iter().map(|error| PodProblem {
            subject: format!("{SOURCE}: {}", self.name),
            problem: error.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker::Phase;
    use serde_json::json;

    fn object(port: u32) -> Value {
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "namespace": "shop", "name": "web", "uid": "u-1" },
            "spec": { "containers": [{ "name": "app", "livenessProbe": { "tcpSocket": { "port": port } } }] },
            "status": { "phase": "Running", "podIP": "10.0.0.7" },
        })
    }

    #[test]
    fn a_pod_with_an_error_stays_as_it_was_but_for_its_status() {
        let first = ObjectPod::read(object(80), None);
        let spec = first.pod().unwrap().spec.clone();
        assert_eq!(spec.ips, ["10.0.0.7".parse::<std::net::IpAddr>().unwrap()]);
        let mut bad = object(0);
        bad["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
        let kept = ObjectPod::read(bad.clone(), Some(&first));
        let pod = kept.pod().unwrap();
        assert_eq!(pod.spec, spec);
        assert!(pod.status.as_ref().unwrap().deleting);
        let problems: Vec<_> = kept.problems().collect();
        assert_eq!(problems[0].subject, "kubernetes: shop/web");
        assert!(
            problems[0].problem.contains("tcpSocket.port"),
            "{problems:?}"
        );
        // Another pod with the same name does not inherit the probes.
        bad["metadata"]["uid"] = "u-2".into();
        assert_eq!(ObjectPod::read(bad, Some(&first)).pod(), None);
    }

    #[test]
    fn a_mirror_has_the_uid_of_what_it_shows_and_a_status_without_containers_counts() {
        let mut object = object(80);
        object["metadata"]["annotations"] = json!({ MIRROR_ANNOTATION: "0123" });
        object["status"]["phase"] = "Failed".into();
        let read = ObjectPod::read(object, None);
        let pod = read.pod().unwrap();
        assert_eq!(pod.spec.known_uid(), Some("0123"));
        assert_eq!(pod.spec.shown_uid(), "0123");
        assert_eq!(&*pod.spec.uid, "0123@shop/web");
        assert_eq!(pod.keeper, Keeper::Kubelet { is_mirror: true });
        assert_eq!(pod.status.as_ref().unwrap().phase, Phase::Failed);
    }
}
