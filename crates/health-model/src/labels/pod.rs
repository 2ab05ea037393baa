//! The labels of a pod in Kubernetes. Names and sources are Cilium's, so that policies written for it select the same
//! pods.

use std::collections::{BTreeMap, BTreeSet};

use super::filter::LabelFilter;
use super::{LABELS_BYTES_MAX, Label, LabelError, LabelSet};
use crate::policy::L4;

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
/// Source of labels that give the numbers of a pod's named ports, such as `port:web=8080/TCP`. Rules with a port name
/// read them; selectors do not match them.
pub const PORT: &str = "port";
/// Separates the ports in the value of a label of source [`PORT`].
const PORT_SEPARATOR: char = '+';
/// Prefix of the keys that no pod may give itself: a pod could otherwise pose as one of another namespace or service
/// account.
const RESERVED_KEYS: [&str; 2] = ["io.cilium.k8s.", "io.kubernetes.pod."];

/// Labels of an object in Kubernetes, by key.
pub type Labels = BTreeMap<String, String>;

/// The ports of a pod's containers, by name. Two containers may give one name to different ports.
pub type NamedPorts = BTreeMap<String, BTreeSet<L4>>;

/// What Kubernetes says about a pod, as far as its labels depend on it.
#[derive(Clone, Copy, Debug)]
pub struct Pod<'a> {
    /// Name of its namespace.
    pub namespace: &'a str,
    /// Its own labels.
    pub labels: &'a Labels,
    /// Its service account, if known.
    pub service_account: Option<&'a str>,
    /// Its named ports.
    pub ports: &'a NamedPorts,
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
/// namespace; its name is always among them. `filter` does not concern the labels of named ports.
///
/// If the labels exceed a limit (length of one label, number, total length), the pod counts as one without named
/// ports, which no rule with a port name allows. If the other labels still exceed a limit, it also counts as one
/// without labels of its own: policies for its whole namespace must not miss it.
pub fn identity_labels(
    pod: Pod<'_>,
    namespace_labels: &Labels,
    cluster: &str,
    filter: &LabelFilter,
) -> IdentityLabels {
    let own = own_labels(pod.labels);
    let of_namespace = labels_of_namespace(namespace_labels);
    let fixed = fixed_labels(pod, cluster);
    let ports = port_labels(pod.ports);
    let set = |parts: [&[NewLabel]; 3], ports: &[NewLabel]| collect(parts, filter, ports);
    let (labels, problem) = match set([&own, &of_namespace, &fixed], &ports) {
        Ok(labels) => (labels, None),
        Err(problem) => {
            let reduced = set([&own, &of_namespace, &fixed], &[])
                .or_else(|_| set([&[], &of_namespace, &fixed], &[]))
                .or_else(|_| set([&[], &[], &fixed], &[]));
            (reduced.unwrap_or_default(), Some(problem))
        }
    };
    IdentityLabels { labels, problem }
}

/// Returns the ports to which an endpoint with these labels gives this name.
pub fn ports_by_name<'a>(labels: &'a LabelSet, name: &str) -> impl Iterator<Item = L4> + use<'a> {
    let value = labels.get(PORT, name).map_or("", Label::value);
    let ports = value.split(PORT_SEPARATOR);
    ports.filter_map(|port| port.parse().ok())
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

fn port_labels(ports: &NamedPorts) -> Vec<NewLabel> {
    let value = |ports: &BTreeSet<L4>| {
        let ports: Vec<_> = ports.iter().map(ToString::to_string).collect();
        ports.join(&PORT_SEPARATOR.to_string())
    };
    ports
        .iter()
        .map(|(name, ports)| Label::new(PORT, name, &value(ports)))
        .collect()
}

/// Builds the set of the labels that the filter includes and those of the ports.
fn collect(
    parts: [&[NewLabel]; 3],
    filter: &LabelFilter,
    ports: &[NewLabel],
) -> Result<LabelSet, LabelError> {
    let mut labels = Vec::new();
    for label in parts.into_iter().flatten() {
        let label = label.clone()?;
        if filter.includes(&label) {
            labels.push(label);
        }
    }
    for label in ports {
        labels.push(label.clone()?);
    }
    let set = LabelSet::new(labels)?;
    // Every agent of the cluster keeps each set.
    let bytes = set.iter().map(|label| label.to_string().len()).sum();
    match bytes {
        0..=LABELS_BYTES_MAX => Ok(set),
        _ => Err(LabelError::TooLarge(bytes)),
    }
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

    fn ports(named: &[(&str, &str)]) -> NamedPorts {
        let mut ports = NamedPorts::new();
        for (name, port) in named {
            let of_name = ports.entry((*name).to_owned()).or_default();
            of_name.insert(port.parse().unwrap());
        }
        ports
    }

    fn labels(own: &[&str], namespace: &[&str]) -> (Vec<String>, Option<LabelError>) {
        labels_with_ports(own, namespace, &NamedPorts::new())
    }

    fn labels_with_ports(
        own: &[&str],
        namespace: &[&str],
        ports: &NamedPorts,
    ) -> (Vec<String>, Option<LabelError>) {
        let own = read(own);
        let pod = Pod {
            namespace: "shop",
            labels: &own,
            service_account: Some("web"),
            ports,
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

    #[test]
    fn a_pod_whose_labels_are_too_long_in_all_has_only_those_of_its_namespace() {
        let long: Vec<String> = (0..250)
            .map(|i| format!("k{i}={}", "x".repeat(370)))
            .collect();
        let long: Vec<&str> = long.iter().map(String::as_str).collect();
        let (found, problem) = labels(&long, &["tier=gold"]);
        assert!(
            matches!(problem, Some(LabelError::TooLarge(94_000..))),
            "{problem:?}"
        );
        assert_eq!(found.len(), 5, "{found:?}");
        assert_eq!(labels(&long[..20], &[]).1, None);
        assert_eq!(labels(&[], &long).0, ALWAYS);
    }

    #[test]
    fn each_port_name_is_a_label_with_its_ports_in_order() {
        let ports = ports(&[
            ("web", "8080/TCP"),
            ("dns", "53/UDP"),
            ("dns", "5353/TCP"),
            ("dns", "53/TCP"),
        ]);
        let (found, problem) = labels_with_ports(&[], &[], &ports);
        let expected = ["port:dns=53/TCP+5353/TCP+53/UDP", "port:web=8080/TCP"];
        assert_eq!(
            (&found[ALWAYS.len()..], problem),
            (&expected.map(str::to_owned)[..], None)
        );
        let set = LabelSet::new(found.iter().map(|label| label.parse().unwrap())).unwrap();
        let by_name = |name: &str| ports_by_name(&set, name).collect::<BTreeSet<_>>();
        assert_eq!(by_name("dns"), ports["dns"]);
        assert_eq!(by_name("web"), ports["web"]);
        assert!(by_name("app").is_empty());
    }

    #[test]
    fn no_filter_leaves_out_the_ports() {
        let ports = ports(&[("web", "8080/TCP")]);
        let (own, namespace) = (read(&["app=web"]), Labels::new());
        let pod = Pod {
            namespace: "shop",
            labels: &own,
            service_account: None,
            ports: &ports,
        };
        let filter = LabelFilter::with(&["k8s:team".parse().unwrap(), "!.*".parse().unwrap()]);
        let found = identity_labels(pod, &namespace, "east", &filter).labels;
        assert!(found.get(PORT, "web").is_some() && found.get(K8S, "app").is_none());
    }

    #[test]
    fn a_pod_with_unusable_labels_loses_the_ports_before_its_own() {
        let names: Vec<String> = (0..300).map(|i| format!("p{i}")).collect();
        let many: Vec<(&str, &str)> = names.iter().map(|name| (&**name, "80/TCP")).collect();
        let numbers: Vec<String> = (1..=300).map(|port| format!("{port}/TCP")).collect();
        let long: Vec<(&str, &str)> = numbers.iter().map(|port| ("web", &**port)).collect();
        for (unusable, is_long) in [(many, false), (long, true)] {
            let (found, problem) = labels_with_ports(&["app=web"], &[], &ports(&unusable));
            assert!(found.len() == 5 && found[0] == "k8s:app=web", "{found:?}");
            assert_eq!(matches!(problem, Some(LabelError::TooLong { .. })), is_long);
            assert_eq!(matches!(problem, Some(LabelError::TooMany(_))), !is_long);
        }
        let long = format!("a={}", "x".repeat(super::super::LABEL_MAX));
        let (found, _) = labels_with_ports(&[&long], &[], &ports(&[("web", "80/TCP")]));
        assert_eq!(found, ALWAYS);
    }
}
