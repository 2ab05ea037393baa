//! Label selectors (Kubernetes' `LabelSelector`, with Cilium's sources in the keys).

use health_model::identity::{Identity, KUBE_APISERVER};
use health_model::labels::pod::{K8S, METADATA_NAME, NAMESPACE_LABELS, POD_NAMESPACE, PORT};
use health_model::labels::{LABEL_MAX, LABELS_MAX, Label, LabelSet, NODE, RESERVED};
use health_model::manifest::{self, check_label_key, check_label_value};

use super::error::{PolicyError, Problem};
use super::field::Field;

/// Source in a key that stands for every source.
const ANY_SOURCE: &str = "any";
/// Source of the labels of CIDRs' identities.
const CIDR: &str = "cidr";

/// Requirements on label sets. Without any, the selector selects every set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Selector(Vec<Requirement>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Requirement {
    key: Key,
    test: Test,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Key {
    /// The key's source; `None` means any source.
    source: Option<String>,
    name: String,
    /// Whether the key is for the namespace's name, given among the namespace's labels.
    is_metadata_name: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Test {
    /// Sorted.
    In(Vec<String>),
    /// Sorted. A set without the key passes too.
    NotIn(Vec<String>),
    Exists,
    DoesNotExist,
}

impl Selector {
    /// Whether the selector selects every set.
    pub(super) fn is_wildcard(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn matches(&self, labels: &LabelSet) -> bool {
        self.0.iter().all(|requirement| requirement.holds(labels))
    }

    /// Adds the requirement that a label has this value.
    pub(super) fn require(&mut self, source: &str, name: &str, value: &str) {
        self.push(source, name, Test::In(vec![value.to_owned()]));
    }

    /// Adds the requirement that a label exists.
    pub(super) fn require_key(&mut self, source: &str, name: &str) {
        self.push(source, name, Test::Exists);
    }

    fn push(&mut self, source: &str, name: &str, test: Test) {
        let key = Key::new(Some(source), name.to_owned());
        self.0.push(Requirement { key, test });
    }

    /// Adds the requirements of another selector.
    pub(super) fn and(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// Whether a requirement concerns a key that `is` accepts, of this source or of any source.
    fn names(&self, source: &str, is: impl Fn(&str) -> bool) -> bool {
        self.0.iter().any(|requirement| {
            let key = &requirement.key;
            key.source.as_deref().is_none_or(|named| named == source) && is(&key.name)
        })
    }

    /// Returns the keys of the labels of nodes that the selector names. `with_any` also returns those without a source.
    pub(super) fn node_keys(&self, with_any: bool) -> impl Iterator<Item = &str> {
        let keys = self.0.iter().map(|requirement| &requirement.key);
        let keys = keys.filter(move |key| match key.source.as_deref() {
            None => with_any,
            Some(source) => source == NODE,
        });
        keys.map(|key| key.name.as_str())
    }

    /// Whether a requirement concerns API servers.
    pub(super) fn names_api_servers(&self) -> bool {
        self.names(RESERVED, |name| name == KUBE_APISERVER)
    }

    /// Whether a requirement concerns the namespace's name.
    pub(super) fn names_namespace(&self) -> bool {
        self.names(K8S, |name| name == POD_NAMESPACE)
    }

    /// Whether a requirement concerns the namespace's labels.
    pub(super) fn names_namespace_labels(&self) -> bool {
        self.names(K8S, |name| name.starts_with(NAMESPACE_LABELS))
    }

    /// Whether a requirement concerns reserved identities.
    pub(super) fn names_reserved(&self) -> bool {
        self.0
            .iter()
            .any(|requirement| requirement.key.source.as_deref() == Some(RESERVED))
    }

    /// Returns the names of the reserved identities that the selector requires.
    pub(super) fn required_reserved(&self) -> impl Iterator<Item = &str> {
        let required = self.0.iter().filter(|requirement| {
            requirement.key.source.as_deref() == Some(RESERVED)
                && matches!(requirement.test, Test::In(_) | Test::Exists)
        });
        required.map(|requirement| requirement.key.name.as_str())
    }

    /// Whether the selector selects only endpoints whose labels are not known yet.
    pub(super) fn requires_init(&self) -> bool {
        let init = Identity::INIT.reserved_name();
        self.required_reserved().any(|name| Some(name) == init)
    }

    /// Returns the values that the selector lists for the namespace's name.
    pub(super) fn namespaces(&self) -> impl Iterator<Item = &str> {
        let of_namespace = self.0.iter().filter(|requirement| {
            requirement.key.name == POD_NAMESPACE || requirement.key.is_metadata_name
        });
        of_namespace.flat_map(|requirement| match &requirement.test {
            Test::In(values) => values.iter().map(String::as_str).collect(),
            _ => Vec::new(),
        })
    }

    /// Reads a selector with keys as Cilium writes them: `SOURCE:KEY`, or `KEY` for any source.
    pub(super) fn read(field: &Field<'_>) -> Result<Self, PolicyError> {
        Self::read_with(field, &|text| {
            let (source, name) = match text.split_once(':') {
                None => (None, text),
                Some((ANY_SOURCE, name)) => (None, name),
                Some((source, name)) => (Some(source), name),
            };
            match source {
                Some(RESERVED) if Identity::by_reserved_name(name).is_none() => {
                    return Err(Problem::value(
                        text,
                        "not a reserved identity; for `all` and `none`, use `fromEntities` and `toEntities`",
                    ));
                }
                Some(CIDR) => {
                    return Err(Problem::value(
                        text,
                        "not an endpoint label; select addresses with fromCIDR or toCIDR",
                    ));
                }
                _ => {}
            }
            Ok(Key::new(source, name.to_owned()))
        })
    }

    /// Reads a Kubernetes selector. Its keys are Kubernetes label keys, which get `prefix` here.
    pub(super) fn read_k8s(field: &Field<'_>, prefix: &str) -> Result<Self, PolicyError> {
        Self::read_with(field, &|text| {
            Ok(Key::new(Some(K8S), format!("{prefix}{text}")))
        })
    }

    fn read_with(
        field: &Field<'_>,
        key: &dyn Fn(&str) -> Result<Key, Problem>,
    ) -> Result<Self, PolicyError> {
        let read_key = |field: &Field<'_>, text: &str| -> Result<Key, PolicyError> {
            let key = key(text).map_err(|problem| field.error(problem))?;
            let source = key.source.as_deref().unwrap_or(ANY_SOURCE);
            if source == PORT {
                let problem = "not an endpoint label; select named ports with `ports`";
                field.check(Err(Problem::value(text, problem)))?;
            }
            Label::new(source, &key.name, "").map_err(|error| field.error(error))?;
            let own_name = key.name.strip_prefix(NAMESPACE_LABELS);
            field.check(check_label_key(own_name.unwrap_or(&key.name)))?;
            Ok(key)
        };
        let value = |field: &Field<'_>| {
            let text = field.text()?;
            field.check(check_label_value(text))?;
            if text.len() > LABEL_MAX {
                let problem = format!("too long for a label; expected at most {LABEL_MAX} bytes");
                return Err(field.error(Problem::value(text, problem)));
            }
            Ok(text.to_owned())
        };

        let fields = field.fields(&["matchLabels", "matchExpressions"])?;
        let mut requirements = Vec::new();
        if let Some(labels) = fields.get("matchLabels") {
            let labels_fields = labels.any_fields()?;
            let count = labels_fields.len();
            if count > LABELS_MAX {
                let max = LABELS_MAX;
                return Err(labels.error(Problem::TooMany { count, max }));
            }
            for (text, field) in labels_fields.iter() {
                requirements.push(Requirement {
                    key: read_key(&labels, text)?,
                    test: Test::In(vec![value(&field)?]),
                });
            }
        }
        let expressions = match fields.get("matchExpressions") {
            Some(field) => field.list_of_at_most(LABELS_MAX)?,
            None => Vec::new(),
        };
        for expression in expressions {
            let fields = expression.fields(&["key", "operator", "values"])?;
            let key = fields.required("key")?;
            let operator = fields.required("operator")?;
            let mut values = Vec::new();
            for field in fields.items("values")? {
                values.push(value(&field)?);
            }
            values.sort_unstable();
            let test = match operator.text()? {
                "In" | "NotIn" if values.is_empty() => {
                    let detail = "must be specified when `operator` is 'In' or 'NotIn'";
                    return Err(fields.error_at("values", manifest::Problem::Required(detail)));
                }
                "In" => Test::In(values),
                "NotIn" => Test::NotIn(values),
                "Exists" | "DoesNotExist" if !values.is_empty() => {
                    let detail =
                        "may not be specified when `operator` is 'Exists' or 'DoesNotExist'";
                    return Err(fields.error_at("values", manifest::Problem::Forbidden(detail)));
                }
                "Exists" => Test::Exists,
                "DoesNotExist" => Test::DoesNotExist,
                other => {
                    let detail =
                        "not a valid selector operator: write In, NotIn, Exists or DoesNotExist";
                    return Err(operator.error(manifest::Problem::invalid(other, detail)));
                }
            };
            requirements.push(Requirement {
                key: read_key(&key, key.text()?)?,
                test,
            });
        }
        Ok(Self(requirements))
    }
}

impl Requirement {
    fn holds(&self, labels: &LabelSet) -> bool {
        let has = |values: &[String]| {
            self.key.any_of(labels, |label| {
                values
                    .binary_search_by(|value| value.as_str().cmp(label.value()))
                    .is_ok()
            })
        };
        match &self.test {
            Test::In(values) => has(values),
            Test::NotIn(values) => !has(values),
            Test::Exists => self.key.any_of(labels, |_| true),
            Test::DoesNotExist => !self.key.any_of(labels, |_| true),
        }
    }
}

impl Key {
    fn new(source: Option<&str>, name: String) -> Self {
        let of_kubernetes = source.is_none_or(|source| source == K8S);
        let is_metadata_name =
            of_kubernetes && name.strip_prefix(NAMESPACE_LABELS) == Some(METADATA_NAME);
        Self {
            source: source.map(str::to_owned),
            name,
            is_metadata_name,
        }
    }

    fn any_of(&self, labels: &LabelSet, is: impl Fn(&Label) -> bool) -> bool {
        // Only Kubernetes itself sets this label of a namespace, and the value is the namespace's name.
        if self.is_metadata_name
            && let Some(namespace) = labels.get(K8S, POD_NAMESPACE)
        {
            return is(namespace);
        }
        match &self.source {
            Some(source) => labels.get(source, &self.name).is_some_and(is),
            // The names of ports are not labels that someone gave the pod.
            None => labels
                .iter()
                .any(|label| label.key() == self.name && label.source() != PORT && is(label)),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn matches(selector: &Value, labels: &[&str]) -> bool {
        let labels = LabelSet::new(labels.iter().map(|label| label.parse().unwrap())).unwrap();
        let selector = Selector::read(&Field::root(selector)).unwrap();
        selector.matches(&labels)
    }

    fn expression(operator: &str, values: &[&str]) -> Value {
        json!({"matchExpressions": [{"key": "k8s:tier", "operator": operator, "values": values}]})
    }

    #[test]
    fn keys_select_their_source_and_keys_without_one_every_source() {
        let bare = json!({"matchLabels": {"app": "web"}});
        let any = json!({"matchLabels": {"any:app": "web"}});
        let k8s = json!({"matchLabels": {"k8s:app": "web"}});
        for (label, by_bare, by_k8s) in [
            ("k8s:app=web", true, true),
            ("container:app=web", true, false),
            ("app=web", true, false),
            ("k8s:app=db", false, false),
            ("k8s:k8s.app=web", false, false),
        ] {
            assert_eq!(matches(&bare, &[label]), by_bare, "{label}");
            assert_eq!(matches(&any, &[label]), by_bare, "{label}");
            assert_eq!(matches(&k8s, &[label]), by_k8s, "{label}");
        }
        let dotted = json!({"matchLabels": {"k8s.app": "web"}});
        assert!(matches(&dotted, &["k8s:k8s.app=web"]));
        assert!(!matches(&dotted, &["k8s:app=web"]));
        assert!(matches(
            &json!({"matchLabels": {"reserved:init": ""}}),
            &["reserved:init"]
        ));
    }

    #[test]
    fn no_selector_sees_the_names_of_ports() {
        let matches = |key: &str, operator: &str, labels: &[&str]| {
            let expression = json!({"key": key, "operator": operator});
            matches(&json!({"matchExpressions": [expression]}), labels)
        };
        let ports = &["k8s:app=web", "port:http=80/TCP"][..];
        for key in ["http", "any:http"] {
            assert!(!matches(key, "Exists", ports));
            assert!(matches(key, "DoesNotExist", ports));
            assert!(matches(key, "Exists", &["k8s:http=", "port:http=80/TCP"]));
        }
    }

    #[test]
    fn expressions_are_those_of_kubernetes() {
        let (web, none): (&[&str], &[&str]) = (&["k8s:tier=web"], &["k8s:app=a"]);
        for (selector, of_web, of_none) in [
            (expression("In", &["web", "db"]), true, false),
            (expression("In", &["db"]), false, false),
            (expression("NotIn", &["web"]), false, true),
            (expression("NotIn", &["db"]), true, true),
            (expression("Exists", &[]), true, false),
            (expression("DoesNotExist", &[]), false, true),
            (json!({}), true, true),
        ] {
            assert_eq!(matches(&selector, web), of_web, "{selector}");
            assert_eq!(matches(&selector, none), of_none, "{selector}");
        }
    }

    #[test]
    fn every_namespace_has_its_name_among_its_labels() {
        const BANK: &str = "k8s:io.kubernetes.pod.namespace=bank";
        const SHOP: &str = "k8s:io.kubernetes.pod.namespace=shop";
        const OLD: &str = "k8s:io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name=bank";
        let by_name = |operator: &str, values: &[&str]| {
            json!({"matchExpressions": [
                {"key": METADATA_NAME, "operator": operator, "values": values}
            ]})
        };
        for (selector, bank, shop, labelled) in [
            (
                json!({"matchLabels": {METADATA_NAME: "bank"}}),
                true,
                false,
                true,
            ),
            (by_name("In", &["bank", "x"]), true, false, true),
            (by_name("NotIn", &["bank"]), false, true, false),
            (by_name("Exists", &[]), true, true, true),
            (by_name("DoesNotExist", &[]), false, false, false),
        ] {
            let field = Field::root(&selector);
            let of_kubernetes = Selector::read_k8s(&field, NAMESPACE_LABELS).unwrap();
            let text = selector.to_string();
            let cilium = |source: &str| {
                let key = format!("{source}{NAMESPACE_LABELS}{METADATA_NAME}");
                let selector: Value =
                    serde_json::from_str(&text.replace(METADATA_NAME, &key)).unwrap();
                Selector::read(&Field::root(&selector)).unwrap()
            };
            for selector in [of_kubernetes, cilium("k8s:"), cilium("any:"), cilium("")] {
                let matches = |labels: &[&str]| {
                    let labels = labels.iter().map(|label| label.parse().unwrap());
                    selector.matches(&LabelSet::new(labels).unwrap())
                };
                assert_eq!(matches(&[BANK]), bank, "{selector:?}");
                assert_eq!(matches(&[SHOP]), shop, "{selector:?}");
                // The name decides if it is known, whatever the label says; otherwise the label decides.
                assert_eq!(matches(&[SHOP, OLD]), shop, "{selector:?}");
                assert_eq!(matches(&[OLD]), labelled, "{selector:?}");
                assert!(selector.names_namespace_labels());
            }
        }
        // A label of that name from another source is an ordinary label.
        let other = json!({"matchLabels": {
            "container:io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name": "bank"
        }});
        assert!(!matches(&other, &[BANK]));
    }

    #[test]
    fn what_is_no_selector_is_named() {
        let many: serde_json::Map<_, _> = (0..=LABELS_MAX)
            .map(|i| (format!("k{i}"), json!("")))
            .collect();
        for (selector, message) in [
            (json!([]), "must be a map, not a list"),
            (json!({"matchLabel": {}}), "matchLabel: unknown field"),
            (
                json!({"matchLabels": {"a": 1}}),
                "matchLabels.a: must be text",
            ),
            (json!({"matchLabels": {"": ""}}), "has no key"),
            (
                json!({"matchLabels": {"k8s:a b": ""}}),
                "matchLabels: Invalid value: \"a b\": name part must consist",
            ),
            (
                json!({"matchLabels": {"k8s:a": "b c"}}),
                "matchLabels.k8s:a: Invalid value: \"b c\": a valid label must",
            ),
            (json!({"matchLabels": {":a": ""}}), "has an empty source"),
            (json!({"matchLabels": {"a\n": ""}}), "control character"),
            (
                json!({"matchLabels": {"reserved:hots": ""}}),
                "not a reserved identity",
            ),
            (json!({"matchLabels": {"cidr:10.0.0.0/8": ""}}), "fromCIDR"),
            (
                json!({"matchLabels": {"port:http": "a"}}),
                "matchLabels: \"port:http\" is not an endpoint label; select named ports",
            ),
            (
                json!({"matchLabels": many}),
                "too many entries: 257; at most 256 are allowed",
            ),
            (
                expression("in", &["a"]),
                "matchExpressions[0].operator: Invalid value: \"in\": not a valid selector operator",
            ),
            (
                expression("In", &[]),
                "matchExpressions[0].values: Required value: must be specified",
            ),
            (
                expression("Exists", &["a"]),
                "matchExpressions[0].values: Forbidden: may not be specified",
            ),
            (
                json!({"matchExpressions": [{"key": "a"}]}),
                "matchExpressions[0].operator: missing",
            ),
        ] {
            let error = Selector::read(&Field::root(&selector))
                .unwrap_err()
                .to_string();
            assert!(error.contains(message), "{error}");
        }
    }
}
