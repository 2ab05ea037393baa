//! The labels of a pod in Kubernetes. Names and sources are Cilium's, so that policies written for it select the same
//! pods.

use std::collections::BTreeMap;

use super::filter::LabelFilter;
use super::{Label, LabelError, LabelSet};

/// Source of labels that come from Kubernetes.
pub const K8S: &str = "k8s";
/// Key of the label, of source [`K8S`], whose value is a pod's namespace.
pub const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
/// Prefix of the keys of labels, of source [`K8S`], that come from the labels of a pod's namespace.
pub const NAMESPACE_LABELS: &str = "io.cilium.k8s.namespace.labels.";
/// Label of every namespace; its value is the namespace's name.
pub const METADATA_NAME: &str = "kubernetes.io/metadata.name";
/// Prefix of the keys of labels, of source [`K8S`], that describe a pod's service account and cluster, or name the
/// object that a policy comes from.
pub const POLICY_LABELS: &str = "io.cilium.k8s.policy.";
/// Prefix of the keys that no pod may give itself: a pod could otherwise pose as one of another namespace or service
/// account.
const RESERVED_KEYS: [&str; 2] = ["io.cilium.k8s.", "io.kubernetes.pod."];

/// Labels of an object in Kubernetes, by key.
pub type Labels = BTreeMap<String, String>;

/// What Kubernetes says about a pod, as far as its labels depend on it.
#[derive(Clone, Copy, Debug)]
pub struct Pod<'a> {
    /// Name of its namespace.
    pub namespace: &'a str,
    /// Its own labels.
    pub labels: &'a Labels,
    /// Its service account, if known.
    pub service_account: Option<&'a str>,
}

/// Returns the labels that count for the identity of a pod of this cluster. `namespace_labels` are those of the pod's
/// namespace; its name is always among them.
///
/// Fails if a label is too long, or if there are too many.
pub fn identity_labels(
    pod: Pod<'_>,
    namespace_labels: &Labels,
    cluster: &str,
    filter: &LabelFilter,
) -> Result<LabelSet, LabelError> {
    let own = pod
        .labels
        .iter()
        .filter(|(key, _)| !RESERVED_KEYS.iter().any(|prefix| key.starts_with(prefix)));
    let own = own.map(|(key, value)| Label::new(K8S, key, value));
    let of_namespace = namespace_labels
        .iter()
        .filter(|(key, _)| *key != METADATA_NAME);
    let of_namespace = of_namespace.map(|(key, value)| (key.as_str(), value.as_str()));
    let of_namespace = of_namespace
        .chain([(METADATA_NAME, pod.namespace)])
        .map(|(key, value)| Label::new(K8S, &format!("{NAMESPACE_LABELS}{key}"), value));
    let policy = [
        ("serviceaccount", pod.service_account),
        ("cluster", Some(cluster)),
    ];
    let policy = policy
        .into_iter()
        .filter_map(|(key, value)| Some(Label::new(K8S, &format!("{POLICY_LABELS}{key}"), value?)));
    let mut labels = Vec::new();
    for label in
        own.chain(of_namespace)
            .chain(policy)
            .chain([Label::new(K8S, POD_NAMESPACE, pod.namespace)])
    {
        let label = label?;
        if filter.includes(&label) {
            labels.push(label);
        }
    }
    LabelSet::new(labels)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(texts: &[&str]) -> Labels {
        let pair = |text: &&str| {
            let (key, value) = text.split_once('=').unwrap();
            (key.to_owned(), value.to_owned())
        };
        texts.iter().map(pair).collect()
    }

    fn labels(own: &[&str], namespace: &[&str]) -> Result<Vec<String>, LabelError> {
        let own = read(own);
        let pod = Pod {
            namespace: "shop",
            labels: &own,
            service_account: Some("web"),
        };
        let filter = LabelFilter::with(&[]);
        let labels = identity_labels(pod, &read(namespace), "east", &filter)?;
        Ok(labels.iter().map(ToString::to_string).collect())
    }

    const ALWAYS: [&str; 4] = [
        "k8s:io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name=shop",
        "k8s:io.cilium.k8s.policy.cluster=east",
        "k8s:io.cilium.k8s.policy.serviceaccount=web",
        "k8s:io.kubernetes.pod.namespace=shop",
    ];

    #[test]
    fn a_pod_has_its_own_labels_and_those_of_its_namespace() {
        let found = labels(&["app=web", "pod-template-hash=5d4f"], &["tier=gold"]).unwrap();
        let mut expected = vec![
            "k8s:app=web",
            ALWAYS[0],
            "k8s:io.cilium.k8s.namespace.labels.tier=gold",
        ];
        expected.extend(&ALWAYS[1..]);
        assert_eq!(found, expected);
    }

    #[test]
    fn no_pod_and_no_namespace_can_pose_as_another() {
        let forged = [
            "io.cilium.k8s.policy.serviceaccount=admin",
            "io.cilium.k8s.namespace.labels.tier=gold",
            "io.kubernetes.pod.namespace=bank",
        ];
        let found = labels(&forged, &["kubernetes.io/metadata.name=bank"]).unwrap();
        assert_eq!(found, ALWAYS);
    }

    #[test]
    fn a_label_that_cannot_be_kept_is_an_error() {
        let long = format!("a={}", "x".repeat(super::super::LABEL_MAX));
        assert!(matches!(
            labels(&[&long], &[]),
            Err(LabelError::TooLong { .. })
        ));
        let many: Vec<String> = (0..300).map(|i| format!("k{i}=v")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert!(matches!(labels(&many, &[]), Err(LabelError::TooMany(_))));
    }
}
