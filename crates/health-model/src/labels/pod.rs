//! The labels of a pod in Kubernetes. Names and sources are Cilium's, so that policies written for it select the same
//! pods.

use std::collections::BTreeMap;

use super::filter::LabelFilter;
use super::{Label, LabelError, LabelSet};

/// Source of labels that come from Kubernetes.
pub const K8S: &str = "k8s";
/// Key of the [`K8S`] label whose value is a pod's namespace.
pub const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
/// Key prefix of [`K8S`] labels that are copied from the labels of a pod's namespace.
pub const NAMESPACE_LABELS: &str = "io.cilium.k8s.namespace.labels.";
/// Label of every namespace; its value is the namespace's name.
pub const METADATA_NAME: &str = "kubernetes.io/metadata.name";
/// Key prefix of [`K8S`] labels that describe a pod's service account and cluster, or name the object that a policy
/// comes from.
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

/// The labels of a pod's identity.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IdentityLabels {
    /// The labels.
    pub labels: LabelSet,
    /// Why labels of the pod, or also of its namespace, are missing.
    pub problem: Option<LabelError>,
}

/// Returns the labels that count for the identity of a pod of this cluster. `namespace_labels` are those of the pod's
/// namespace; its name is always among them.
///
/// If they make no set, because one is too long or because there are too many, the pod counts as one without labels of
/// its own: policies for its whole namespace must not miss it.
pub fn identity_labels(
    pod: Pod<'_>,
    namespace_labels: &Labels,
    cluster: &str,
    filter: &LabelFilter,
) -> IdentityLabels {
    let own = own_labels(pod.labels);
    let of_namespace = labels_of_namespace(namespace_labels);
    let fixed = fixed_labels(pod, cluster);
    let set = |parts: [&[NewLabel]; 3]| collect(parts, filter);
    let (labels, problem) = match set([&own, &of_namespace, &fixed]) {
        Ok(labels) => (labels, None),
        Err(problem) => {
            let reduced = set([&[], &of_namespace, &fixed]).or_else(|_| set([&[], &[], &fixed]));
            (reduced.unwrap_or_default(), Some(problem))
        }
    };
    IdentityLabels { labels, problem }
}

type NewLabel = Result<Label, LabelError>;

fn own_labels(labels: &Labels) -> Vec<NewLabel> {
    let is_reserved = |key: &str| RESERVED_KEYS.iter().any(|prefix| key.starts_with(prefix));
    let own = labels.iter().filter(|(key, _)| !is_reserved(key));
    own.map(|(key, value)| Label::new(K8S, key, value))
        .collect()
}

fn labels_of_namespace(labels: &Labels) -> Vec<NewLabel> {
    let others = labels.iter().filter(|(key, _)| *key != METADATA_NAME);
    others
        .map(|(key, value)| Label::new(K8S, &format!("{NAMESPACE_LABELS}{key}"), value))
        .collect()
}

/// Namespace, service account and cluster. Kubernetes limits the lengths of these names.
fn fixed_labels(pod: Pod<'_>, cluster: &str) -> Vec<NewLabel> {
    let name = format!("{NAMESPACE_LABELS}{METADATA_NAME}");
    let policy = |key: &str| format!("{POLICY_LABELS}{key}");
    let fixed = [
        (POD_NAMESPACE.to_owned(), Some(pod.namespace)),
        (name, Some(pod.namespace)),
        (policy("serviceaccount"), pod.service_account),
        (policy("cluster"), Some(cluster)),
    ];
    let fixed = fixed.into_iter();
    fixed
        .filter_map(|(key, value)| Some(Label::new(K8S, &key, value?)))
        .collect()
}

fn collect(parts: [&[NewLabel]; 3], filter: &LabelFilter) -> Result<LabelSet, LabelError> {
    let mut labels = Vec::new();
    for label in parts.into_iter().flatten() {
        let label = label.clone()?;
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

    fn labels(own: &[&str], namespace: &[&str]) -> (Vec<String>, Option<LabelError>) {
        let own = read(own);
        let pod = Pod {
            namespace: "shop",
            labels: &own,
            service_account: Some("web"),
        };
        let filter = LabelFilter::with(&[]);
        let found = identity_labels(pod, &read(namespace), "east", &filter);
        let labels = found.labels.iter().map(ToString::to_string).collect();
        (labels, found.problem)
    }

    const ALWAYS: [&str; 4] = [
        "k8s:io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name=shop",
        "k8s:io.cilium.k8s.policy.cluster=east",
        "k8s:io.cilium.k8s.policy.serviceaccount=web",
        "k8s:io.kubernetes.pod.namespace=shop",
    ];

    #[test]
    fn a_pod_has_its_own_labels_and_those_of_its_namespace() {
        let found = labels(&["app=web", "pod-template-hash=5d4f"], &["tier=gold"]);
        let mut expected = vec![
            "k8s:app=web",
            ALWAYS[0],
            "k8s:io.cilium.k8s.namespace.labels.tier=gold",
        ];
        expected.extend(&ALWAYS[1..]);
        let expected: Vec<String> = expected.into_iter().map(str::to_owned).collect();
        assert_eq!(found, (expected, None));
    }

    #[test]
    fn no_pod_and_no_namespace_can_pose_as_another() {
        let forged = [
            "io.cilium.k8s.policy.serviceaccount=admin",
            "io.cilium.k8s.namespace.labels.tier=gold",
            "io.kubernetes.pod.namespace=bank",
        ];
        let (found, problem) = labels(&forged, &["kubernetes.io/metadata.name=bank"]);
        assert_eq!(
            (found.as_slice(), problem),
            (&ALWAYS.map(str::to_owned)[..], None)
        );
    }

    #[test]
    fn a_pod_with_unusable_labels_still_has_those_of_its_namespace() {
        let long = format!("a={}", "x".repeat(super::super::LABEL_MAX));
        let many: Vec<String> = (0..300).map(|i| format!("k{i}=v")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        let gold = "k8s:io.cilium.k8s.namespace.labels.tier=gold".to_owned();
        let (found, problem) = labels(&[&long, "app=web"], &["tier=gold"]);
        assert!(matches!(problem, Some(LabelError::TooLong { .. })));
        assert!(found.len() == 5 && found.contains(&gold), "{found:?}");
        let (found, problem) = labels(&many, &["tier=gold"]);
        assert!(matches!(problem, Some(LabelError::TooMany(_))));
        assert!(found.len() == 5 && found.contains(&gold), "{found:?}");
        let (found, problem) = labels(&["app=web"], &many);
        assert_eq!(found, ALWAYS);
        assert!(problem.is_some());
    }
}
