//! Documents become policies: objects of Kubernetes, lists of them, and bare lists of rules.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;

use crate::labels::{Label, LabelSet};

use super::cilium::{self, Scope};
use super::error::{PolicyError, Problem};
use super::field::{Field, Fields};
use super::rule::{Kind, PolicyName, Rule};
use super::selector::K8S;
use super::{kubernetes, tree};

/// Most allow and deny rules of one import, of both directions together.
const RULES_MAX: usize = 10_000;

/// Namespace of the objects of Kubernetes that name none.
const DEFAULT_NAMESPACE: &str = "default";

/// Fields of an object's `metadata`. Beside name and namespace they change nothing here.
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

/// A policy: rules that came together, are known by one name and go together.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    name: Arc<PolicyName>,
    document: Value,
    rules: Vec<Arc<Rule>>,
}

impl Policy {
    /// What it is known by.
    pub fn name(&self) -> &PolicyName {
        &self.name
    }

    /// The document that it was imported as: an object, or of bare rules their list.
    pub const fn document(&self) -> &Value {
        &self.document
    }

    /// The labels of its rules, to which those that name its object belong.
    pub fn labels(&self) -> impl Iterator<Item = &LabelSet> {
        self.rules.iter().map(|rule| &rule.labels)
    }

    pub(super) fn rules(&self) -> &[Arc<Rule>] {
        &self.rules
    }
}

/// Reads the policies of a text in YAML, which may hold several documents, or JSON. All are good or
/// the text is refused. No two have one name.
pub fn parse(text: &str) -> Result<Vec<Policy>, PolicyError> {
    let mut policies = BTreeMap::new();
    for document in tree::parse(text)? {
        for policy in read_document(&Field::root(&document))? {
            let name = policy.name.clone();
            if policies.insert(name.clone(), policy).is_some() {
                let problem = Problem::Conflict("it is there twice".to_owned());
                return Err(PolicyError::from(problem).of_policy(&name));
            }
        }
    }
    if policies.is_empty() {
        return Err(Problem::Empty.into());
    }
    let rules = policies.values().flat_map(|policy| &policy.rules);
    let count: usize = rules
        .map(|rule| rule.ingress.entries.len() + rule.egress.entries.len())
        .sum();
    if count > RULES_MAX {
        let problem = Problem::Conflict(format!(
            "{count} rules in one import are too many: {RULES_MAX} at most"
        ));
        return Err(problem.into());
    }
    Ok(policies.into_values().collect())
}

/// Reads a policy from its own document, as [`Policy::document`] keeps it.
pub(super) fn read_stored(document: &Value) -> Result<Policy, PolicyError> {
    let mut policies = read_document(&Field::root(document))?;
    match (policies.pop(), policies.is_empty()) {
        (Some(policy), true) => Ok(policy),
        _ => Err(Problem::Conflict("not one policy".to_owned()).into()),
    }
}

fn read_document(field: &Field<'_>) -> Result<Vec<Policy>, PolicyError> {
    if field.value().is_array() {
        return read_bare(field);
    }
    let fields = field.any_fields()?;
    let kind = fields.required("kind")?;
    match kind.text()? {
        "List"
        | "CiliumNetworkPolicyList"
        | "CiliumClusterwideNetworkPolicyList"
        | "NetworkPolicyList" => {
            let fields = field.fields(&["apiVersion", "kind", "metadata", "items"])?;
            let items = fields.items("items")?;
            items.iter().map(read_object).collect()
        }
        _ => Ok(vec![read_object(field)?]),
    }
}

fn read_object(field: &Field<'_>) -> Result<Policy, PolicyError> {
    let kind_field = field.any_fields()?.required("kind")?;
    let kind = read_kind(&kind_field)?;
    let spec_names: &[&str] = match kind {
        Kind::NetworkPolicy => &["apiVersion", "kind", "metadata", "status", "spec"],
        _ => &["apiVersion", "kind", "metadata", "status", "spec", "specs"],
    };
    let fields = field.fields(spec_names)?;
    read_api_version(&fields, kind)?;
    let name = Arc::new(read_name(&fields, kind)?);
    let rules = read_specs(&fields, kind, &name).map_err(|error| error.of_policy(&name))?;
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
        let problem = format!("no kind of policy: there are {a}, {b} and {c}");
        field.error(Problem::value(text, problem))
    })
}

fn read_api_version(fields: &Fields<'_>, kind: Kind) -> Result<(), PolicyError> {
    let expected = match kind {
        Kind::NetworkPolicy => "networking.k8s.io/v1",
        Kind::CiliumNetworkPolicy | Kind::CiliumClusterwideNetworkPolicy => "cilium.io/v2",
    };
    let field = fields.required("apiVersion")?;
    let text = field.text()?;
    if text != expected {
        let problem = format!("no version of {kind} that can be read: {expected} can");
        return Err(field.error(Problem::value(text, problem)));
    }
    Ok(())
}

fn read_name(fields: &Fields<'_>, kind: Kind) -> Result<PolicyName, PolicyError> {
    let metadata = fields.required("metadata")?;
    let metadata = metadata.fields(&METADATA)?;
    let name = read_metadata_name(&metadata.required("name")?)?;
    let namespace = metadata.get("namespace");
    let namespace = match (kind, namespace) {
        (Kind::CiliumClusterwideNetworkPolicy, Some(field)) => {
            let problem = "a clusterwide policy is of no namespace".to_owned();
            return Err(field.error(Problem::Conflict(problem)));
        }
        (Kind::NetworkPolicy, None) => Some(DEFAULT_NAMESPACE.to_owned()),
        (_, None) => None,
        (_, Some(field)) => Some(read_metadata_name(&field)?),
    };
    Ok(PolicyName::Object {
        kind,
        namespace,
        name,
    })
}

/// A name of Kubernetes (a DNS subdomain, RFC 1123), which may stand in tables and paths.
fn read_metadata_name(field: &Field<'_>) -> Result<String, PolicyError> {
    const LENGTH_MAX: usize = 253;
    let text = field.text()?;
    let fits =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte);
    if text.is_empty() || text.len() > LENGTH_MAX || !text.bytes().all(fits) {
        let problem = "no name: lower-case letters, digits, '-' and '.', 253 at most";
        return Err(field.error(Problem::value(text, problem)));
    }
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

/// The labels that Cilium, too, gives the rules of an object.
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
    // No value is too long or holds what no label may: they were read as names.
    let label = |(key, value)| Label::new(K8S, &format!("io.cilium.k8s.policy.{key}"), value?).ok();
    parts.into_iter().filter_map(label).collect()
}

/// Reads a bare list of rules. Those of the same labels are one policy.
fn read_bare(field: &Field<'_>) -> Result<Vec<Policy>, PolicyError> {
    let mut policies: BTreeMap<Arc<PolicyName>, Policy> = BTreeMap::new();
    for rule in field.list()? {
        let fields = rule.any_fields()?;
        let labels = cilium::read_labels(&fields)?;
        if labels.is_empty() {
            let problem = "a rule of a bare list is known by its `labels`: give it one".to_owned();
            return Err(rule.error(Problem::Conflict(problem)));
        }
        let labels = LabelSet::new(labels).map_err(|error| rule.error(error))?;
        let name = Arc::new(PolicyName::Rules { labels });
        let rule_read = cilium::read_rule(&rule, Scope::Unlimited, &name, &[])?;
        let policy = policies.entry(name.clone()).or_insert_with(|| Policy {
            name,
            document: Value::Array(Vec::new()),
            rules: Vec::new(),
        });
        if let Value::Array(documents) = &mut policy.document {
            documents.push(rule.value().clone());
        }
        policy.rules.push(Arc::new(rule_read));
    }
    Ok(policies.into_values().collect())
}
