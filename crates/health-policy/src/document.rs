//! Converts documents to policies: Kubernetes objects, lists of them, and bare lists of rules.

use std::collections::BTreeMap;
use std::sync::Arc;

use health_common::siphash::siphash24_words;
use health_model::document;
use health_model::labels::pod::{K8S, POLICY_LABELS};
use health_model::labels::{Label, LabelSet};
use health_model::manifest::{
    check_dns_label, check_label_key, check_label_value, check_name, check_subdomain,
};
use health_model::policy::Direction;
use serde_json::Value;

use super::cilium::{self, Scope};
use super::error::{Place, PolicyError, Problem};
use super::field::{Field, Fields};
use super::kubernetes;
use super::rule::{Kind, PolicyName, Rule};

/// Maximum number of allow and deny rules in one import or one object of the cluster, both directions together.
const RULES_MAX: usize = 10_000;

/// Namespace of Kubernetes objects that do not name one.
const DEFAULT_NAMESPACE: &str = "default";

/// Source and key of the label given to a bare rule without labels; the value depends on the rule's contents.
const UNLABELLED: (&str, &str) = ("health-agent", "rule");

/// Maximum number of skipped objects to list, and maximum characters of each.
const SKIPPED_MAX: usize = 1000;
const NAME_SHOWN: usize = 400;

/// Fields of an object's `metadata`. Only those for the name and namespace matter here.
const METADATA: [&str; 15] = [
    "name",
    "namespace",
    "labels",
    "annotations",
    "uid",
    "resourceVersion",
    "generation",
    "generateName",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "managedFields",
    "ownerReferences",
    "finalizers",
    "selfLink",
];

/// A policy: rules that are imported together, share one name, and are deleted together.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    name: Arc<PolicyName>,
    document: Value,
    rules: Vec<Arc<Rule>>,
}

impl Policy {
    /// Returns the policy's name.
    pub fn name(&self) -> &PolicyName {
        &self.name
    }

    /// Returns the document from which the policy was imported: an object, or the list of its bare rules.
    pub const fn document(&self) -> &Value {
        &self.document
    }

    /// Returns the UID of the object from which the policy was read, if it has one.
    pub fn uid(&self) -> Option<&str> {
        let uid = self.document.pointer("/metadata/uid")?.as_str();
        uid.filter(|uid| !uid.is_empty())
    }

    pub(super) fn shared_name(&self) -> Arc<PolicyName> {
        self.name.clone()
    }

    /// Returns the labels of the policy's rules, including those derived from its object.
    pub fn labels(&self) -> impl Iterator<Item = &LabelSet> {
        self.rules.iter().map(|rule| &rule.labels)
    }

    /// Fails if a rule names its peers by objects of a Kubernetes cluster. An agent that follows no cluster cannot enforce
    /// such a policy.
    pub fn check_without_cluster(&self) -> Result<(), PolicyError> {
        for direction in Direction::ALL {
            let preposition = match direction {
                Direction::Ingress => "from",
                Direction::Egress => "to",
            };
            let sections = self.rules.iter().map(|rule| rule.section(direction));
            for entry in sections.flat_map(|section| &section.entries) {
                let Some((what, field)) = entry.peers.cluster_field() else {
                    continue;
                };
                let error = PolicyError {
                    place: Place {
                        policy: None,
                        path: format!("{}.{preposition}{field}", entry.place.field),
                    },
                    problem: Problem::NeedsCluster(what),
                };
                return Err(error.of_policy(&self.name));
            }
        }
        Ok(())
    }

    pub(super) fn rules(&self) -> &[Arc<Rule>] {
        &self.rules
    }
}

/// The contents of a YAML or JSON document.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Documents {
    /// The policies, with unique names.
    pub policies: Vec<Policy>,
    /// The skipped objects of other kinds, each as kind, namespace and name.
    pub skipped: Vec<String>,
}

/// Parses policies from JSON, or from YAML, which may contain several documents. If any policy is invalid, refuses all.
/// Skips objects of kinds that are not policies.
pub fn parse(text: &str) -> Result<Documents, PolicyError> {
    let mut policies = BTreeMap::new();
    let mut skipped = Vec::new();
    let documents = document::parse(text).map_err(Problem::from)?;
    for document in documents.iter().filter(|document| !document.is_null()) {
        let found = read_document(&Field::root(document))?;
        skipped.extend(found.skipped);
        for policy in found.policies {
            let name = policy.name.clone();
            if policies.insert(name.clone(), policy).is_some() {
                let problem = Problem::Conflict("it appears twice".to_owned());
                return Err(PolicyError::from(problem).of_policy(&name));
            }
        }
    }
    if policies.is_empty() {
        return Err(Problem::Empty { skipped }.into());
    }
    check_rules(policies.values(), "one import")?;
    skipped.truncate(SKIPPED_MAX);
    Ok(Documents {
        policies: policies.into_values().collect(),
        skipped,
    })
}

/// Reads a policy from an object of one of the [kinds of policy](Kind).
pub fn read_policy(object: &Value) -> Result<Policy, PolicyError> {
    let policy = read_object(&Field::root(object))?;
    let checked = check_rules([&policy], "one object");
    checked.map_err(|error| error.of_policy(&policy.name))?;
    Ok(policy)
}

/// Fails if policies have more than [`RULES_MAX`] rules together.
fn check_rules<'a>(
    policies: impl IntoIterator<Item = &'a Policy>,
    place: &str,
) -> Result<(), PolicyError> {
    let rules = policies.into_iter().flat_map(|policy| &policy.rules);
    let count: usize = rules
        .map(|rule| rule.ingress.entries.len() + rule.egress.entries.len())
        .sum();
    if count > RULES_MAX {
        let problem = Problem::Conflict(format!(
            "too many rules in {place}: {count}; at most {RULES_MAX} are allowed"
        ));
        return Err(problem.into());
    }
    Ok(())
}

/// Reads a policy from the document that [`Policy::document`] keeps, accepting all that earlier versions accepted. Also
/// returns why the policy could no longer be imported, if so.
pub(super) fn read_stored(document: &Value) -> Result<(Policy, Option<PolicyError>), PolicyError> {
    let refused = read_document(&Field::root(document)).err();
    let mut policies = read_document(&Field::stored(document))?.policies;
    match (policies.pop(), policies.is_empty()) {
        (Some(policy), true) => Ok((policy, refused)),
        _ => Err(Problem::Conflict("expected one policy".to_owned()).into()),
    }
}

fn read_document(field: &Field<'_>) -> Result<Documents, PolicyError> {
    if field.value().is_array() {
        return Ok(Documents {
            policies: read_bare(field)?,
            skipped: Vec::new(),
        });
    }
    let mut found = Documents::default();
    let kind = field.any_fields()?.required("kind")?;
    let kind = kind.text()?;
    let implied = Kind::ALL.into_iter().find(|known| {
        let item = kind.strip_suffix("List");
        item == Some(known.name())
    });
    if implied.is_none() && kind != "List" {
        found.read_object(field)?;
        return Ok(found);
    }
    let fields = field.fields(&["apiVersion", "kind", "metadata", "items"])?;
    for item in fields.items("items")? {
        match (implied, item.value()) {
            (Some(kind), Value::Object(given)) => {
                // The API omits both fields from the items of a list of one kind.
                let mut object = given.clone();
                let version = || kind.api_version().into();
                object.entry("apiVersion").or_insert_with(version);
                object.entry("kind").or_insert_with(|| kind.name().into());
                found.read_object(&item.with_value(&Value::Object(object)))?;
            }
            _ => found.read_object(&item)?,
        }
    }
    Ok(found)
}

impl Documents {
    fn read_object(&mut self, field: &Field<'_>) -> Result<(), PolicyError> {
        match other_object(field)? {
            Some(name) => self.skipped.push(name),
            None => self.policies.push(read_object(field)?),
        }
        Ok(())
    }
}

/// Returns the name under which to report an object that is not a policy. Returns `None` if the object looks like a
/// policy: skipping it might allow traffic that it should deny.
fn other_object(field: &Field<'_>) -> Result<Option<String>, PolicyError> {
    let fields = field.any_fields()?;
    let kind = fields.required("kind")?;
    let kind = kind.text()?;
    let Some(version) = fields.get("apiVersion") else {
        return Ok(None);
    };
    let group = version.text()?.split_once('/').map(|(group, _)| group);
    let lower = kind.to_ascii_lowercase();
    let is_misspelt =
        matches!(group, Some("networking.k8s.io" | "cilium.io")) && lower.contains("network");
    if kind.ends_with("List") || lower.contains("policy") || is_misspelt {
        return Ok(None);
    }
    let part = |name: &str| {
        let text = field.value().pointer(&format!("/metadata/{name}"));
        text.and_then(Value::as_str).filter(|text| !text.is_empty())
    };
    let namespace = part("namespace").map_or_else(String::new, |namespace| format!("{namespace}/"));
    let name = part("name").or_else(|| part("generateName"));
    let shown = format!("{kind} {namespace}{}", name.unwrap_or("without a name"));
    Ok(Some(shown.escape_debug().take(NAME_SHOWN).collect()))
}

fn read_object(field: &Field<'_>) -> Result<Policy, PolicyError> {
    let kind_field = field.any_fields()?.required("kind")?;
    let kind = read_kind(&kind_field)?;
    let spec_names: &[&str] = match kind {
        Kind::NetworkPolicy => &["apiVersion", "kind", "metadata", "status", "spec"],
        _ => &["apiVersion", "kind", "metadata", "status", "spec", "specs"],
    };
    let fields = field.any_fields()?;
    read_api_version(&fields, kind)?;
    let name = Arc::new(read_name(&fields, kind)?);
    let fields = field.fields(spec_names);
    let rules = fields.and_then(|fields| read_specs(&fields, kind, &name));
    let rules = rules.map_err(|error| error.of_policy(&name))?;
    Ok(Policy {
        name,
        document: field.value().clone(),
        rules: rules.into_iter().map(Arc::new).collect(),
    })
}

fn read_kind(field: &Field<'_>) -> Result<Kind, PolicyError> {
    let text = field.text()?;
    let known = Kind::ALL.into_iter().find(|kind| kind.name() == text);
    known.ok_or_else(|| {
        let [a, b, c] = Kind::ALL.map(Kind::name);
        let problem = format!("not a policy kind; expected {a}, {b} or {c}");
        field.error(Problem::value(text, problem))
    })
}

fn read_api_version(fields: &Fields<'_>, kind: Kind) -> Result<(), PolicyError> {
    let expected = kind.api_version();
    let field = fields.required("apiVersion")?;
    let text = field.text()?;
    if text != expected {
        let problem = format!("not a supported version of {kind}; expected {expected}");
        return Err(field.error(Problem::value(text, problem)));
    }
    Ok(())
}

fn read_name(fields: &Fields<'_>, kind: Kind) -> Result<PolicyName, PolicyError> {
    let metadata = fields.required("metadata")?;
    let metadata = metadata.fields(&METADATA)?;
    let name = metadata.required("name")?;
    name.check(check_subdomain(name.text()?))?;
    let name = read_metadata_name(&name)?;
    // Earlier versions did not read labels.
    let labels = metadata.get("labels");
    if let Some(labels) = labels.filter(|labels| !labels.is_stored()) {
        for (key, value) in labels.any_fields()?.iter() {
            labels.check(check_label_key(key))?;
            labels.check(check_label_value(value.text()?))?;
        }
    }
    let namespace = metadata.get("namespace");
    let namespace = match (kind, namespace) {
        (Kind::CiliumClusterwideNetworkPolicy, Some(field)) => {
            let problem = "a clusterwide policy cannot have a namespace".to_owned();
            return Err(field.error(Problem::Conflict(problem)));
        }
        (Kind::NetworkPolicy, None) => Some(DEFAULT_NAMESPACE.to_owned()),
        (_, None) => None,
        (_, Some(field)) => {
            field.check(check_dns_label(field.text()?))?;
            Some(read_metadata_name(&field)?)
        }
    };
    Ok(PolicyName::Object {
        kind,
        namespace,
        name,
    })
}

/// Reads a name, which must be safe in tables and paths.
fn read_metadata_name(field: &Field<'_>) -> Result<String, PolicyError> {
    let text = field.text()?;
    if text.is_empty() {
        return Err(field.error(Problem::Missing));
    }
    check_name(text).map_err(|problem| field.error(problem))?;
    Ok(text.to_owned())
}

fn read_specs(
    fields: &Fields<'_>,
    kind: Kind,
    policy: &Arc<PolicyName>,
) -> Result<Vec<Rule>, PolicyError> {
    let derived = derived_labels(policy);
    let PolicyName::Object { namespace, .. } = &**policy else {
        return Ok(Vec::new());
    };
    let scope = match (kind, namespace) {
        (Kind::NetworkPolicy, namespace) => {
            let spec = fields.required("spec")?;
            let namespace = namespace.as_deref().unwrap_or(DEFAULT_NAMESPACE);
            let rule = kubernetes::read_rule(&spec, namespace, policy, &derived)?;
            return Ok(vec![rule]);
        }
        (Kind::CiliumClusterwideNetworkPolicy, _) => Scope::Cluster,
        (Kind::CiliumNetworkPolicy, Some(namespace)) => Scope::Namespace(namespace),
        (Kind::CiliumNetworkPolicy, None) => Scope::Unlimited,
    };
    let mut specs = fields.items("specs")?;
    specs.extend(fields.get("spec"));
    if specs.is_empty() {
        fields.required("spec")?;
    }
    specs
        .iter()
        .map(|spec| cilium::read_rule(spec, scope, policy, &derived))
        .collect()
}

/// Returns the labels that the rules of an object get, as in Cilium.
fn derived_labels(policy: &PolicyName) -> Vec<Label> {
    let PolicyName::Object {
        kind,
        namespace,
        name,
    } = policy
    else {
        return Vec::new();
    };
    let parts = [
        ("derived-from", Some(kind.name())),
        ("name", Some(name)),
        ("namespace", namespace.as_deref()),
    ];
    // All values were read as names, so none is too long or contains characters that labels must not have.
    let label = |(key, value)| Label::new(K8S, &format!("{POLICY_LABELS}{key}"), value?).ok();
    parts.into_iter().filter_map(label).collect()
}

/// Returns a digest of a string that is the same in every version.
fn digest(text: &str) -> u64 {
    text.as_bytes().chunks(8).fold(0, |before, chunk| {
        let mut word = [0; 8];
        for (to, from) in word.iter_mut().zip(chunk) {
            *to = *from;
        }
        siphash24_words([0, 0], &[before, u64::from_le_bytes(word)])
    })
}

/// Reads a bare list of rules. Rules with the same labels form one policy; a rule without labels gets a name derived
/// from its contents.
fn read_bare(field: &Field<'_>) -> Result<Vec<Policy>, PolicyError> {
    let mut policies: BTreeMap<Arc<PolicyName>, Policy> = BTreeMap::new();
    for rule in field.list()? {
        let fields = rule.any_fields()?;
        let mut labels = cilium::read_labels(&fields)?;
        let mut derived = None;
        if labels.is_empty() {
            let (source, key) = UNLABELLED;
            let value = format!("{:016x}", digest(&rule.value().to_string()));
            derived = Label::new(source, key, &value).ok();
            labels.extend(derived.clone());
        }
        let labels = LabelSet::new(labels).map_err(|error| rule.error(error))?;
        let name = Arc::new(PolicyName::Rules { labels });
        let policy = policies.entry(name.clone()).or_insert_with(|| Policy {
            name: name.clone(),
            document: Value::Array(Vec::new()),
            rules: Vec::new(),
        });
        // The rule's path is relative to the document of its policy, but errors show its path in the imported document.
        let own = rule.at_path(format!("[{}]", policy.rules.len()));
        let rule_read = cilium::read_rule(&own, Scope::Unlimited, &name, derived.as_slice())
            .map_err(|error| error.moved(own.path(), rule.path()))?;
        if let Value::Array(documents) = &mut policy.document {
            documents.push(rule.value().clone());
        }
        policy.rules.push(Arc::new(rule_read));
    }
    Ok(policies.into_values().collect())
}

#[cfg(test)]
mod tests;
