//! Converts documents to policies: Kubernetes objects, lists of them, and bare lists of rules.

use std::collections::BTreeMap;
use std::sync::Arc;

use health_common::siphash::siphash24_words;
use health_model::document;
use health_model::labels::{Label, LabelSet};
use health_model::manifest::{
    check_dns_label, check_label_key, check_label_value, check_name, check_subdomain,
};
use serde_json::Value;

use super::cilium::{self, Scope};
use super::error::{PolicyError, Problem};
use super::field::{Field, Fields};
use super::kubernetes;
use super::rule::{Kind, PolicyName, Rule};
use super::selector::K8S;

/// Maximum allow and deny rules of one import, both directions together.
const RULES_MAX: usize = 10_000;

/// Namespace of Kubernetes objects that name none.
const DEFAULT_NAMESPACE: &str = "default";

/// Source and key of the label that a bare rule without labels gets; its value depends on the contents of the rule.
const UNLABELLED: (&str, &str) = ("health-agent", "rule");

/// Maximum number of other objects to list, and maximum characters of each.
const SKIPPED_MAX: usize = 1000;
const NAME_SHOWN: usize = 400;

/// Fields of an object's `metadata`. Only name and namespace matter here.
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
    /// The policy's name.
    pub fn name(&self) -> &PolicyName {
        &self.name
    }

    /// The document that the policy was imported from: an object, or the list of its bare rules.
    pub const fn document(&self) -> &Value {
        &self.document
    }

    /// The labels of the policy's rules, including those that name its object.
    pub fn labels(&self) -> impl Iterator<Item = &LabelSet> {
        self.rules.iter().map(|rule| &rule.labels)
    }

    pub(super) fn rules(&self) -> &[Arc<Rule>] {
        &self.rules
    }
}

/// The contents of a text.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Documents {
    /// The policies, with unique names.
    pub policies: Vec<Policy>,
    /// The objects of other kinds, by kind, namespace and name.
    pub skipped: Vec<String>,
}

/// Reads the policies of a text in JSON, or in YAML, which may hold several documents. Either all are valid or the text
/// is refused. Skips objects of kinds that are not policies.
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
    let rules = policies.values().flat_map(|policy| &policy.rules);
    let count: usize = rules
        .map(|rule| rule.ingress.entries.len() + rule.egress.entries.len())
        .sum();
    if count > RULES_MAX {
        let problem = Problem::Conflict(format!(
            "too many rules in one import: {count}; at most {RULES_MAX} are allowed"
        ));
        return Err(problem.into());
    }
    skipped.truncate(SKIPPED_MAX);
    Ok(Documents {
        policies: policies.into_values().collect(),
        skipped,
    })
}

/// Reads a policy from its own document, as [`Policy::document`] keeps it, whatever earlier versions accepted. Also
/// returns why it could no longer be imported, if so.
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
                // The API omits both in a list of one kind.
                let mut object = given.clone();
                let version = || api_version(kind).into();
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

/// The name to show for an object that is not a policy. `None` for an object that looks like a policy: skipping it
/// might leave open what it should close.
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
        let problem = format!("not a policy kind; expected {a}, {b} or {c}");
        field.error(Problem::value(text, problem))
    })
}

fn api_version(kind: Kind) -> &'static str {
    match kind {
        Kind::NetworkPolicy => "networking.k8s.io/v1",
        Kind::CiliumNetworkPolicy | Kind::CiliumClusterwideNetworkPolicy => "cilium.io/v2",
    }
}

fn read_api_version(fields: &Fields<'_>, kind: Kind) -> Result<(), PolicyError> {
    let expected = api_version(kind);
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

/// Reads a name that is safe in tables and paths.
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

/// The labels that the rules of an object get, as in Cilium.
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
    // No value is too long or holds characters that labels must not have: they were read as names.
    let label = |(key, value)| Label::new(K8S, &format!("io.cilium.k8s.policy.{key}"), value?).ok();
    parts.into_iter().filter_map(label).collect()
}

/// A digest of a text, the same in every version.
fn digest(text: &str) -> u64 {
    text.as_bytes().chunks(8).fold(0, |before, chunk| {
        let mut word = [0; 8];
        for (to, from) in word.iter_mut().zip(chunk) {
            *to = *from;
        }
        siphash24_words([0, 0], &[before, u64::from_le_bytes(word)])
    })
}

/// Reads a bare list of rules. Rules with the same labels form one policy; a rule without labels is named after its
/// contents.
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
        // The rule's path is relative to the document of its policy, but errors show the path in the imported text.
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
mod tests {
    use health_model::identity::Identity;
    use health_model::policy::{Direction, L4};

    use serde_json::json;

    use super::*;
    use crate::{Peer, PolicySettings, Repository, Verdict};

    const INIT_YAML: &str = r#"
apiVersion: "cilium.io/v2"
kind: CiliumNetworkPolicy
metadata:
  name: init
specs:
- endpointSelector:
    matchLabels:
      "reserved:init": ""
  ingress:
  - fromEntities:
    - host
  egress:
  - toEntities:
    - all
    toPorts:
    - ports:
      - port: "53"
        protocol: UDP
"#;
    const INIT_JSON: &str = r#"[{
    "labels": [{"key": "name", "value": "init"}],
    "endpointSelector": {"matchLabels":{"reserved:init":""}},
    "ingress": [{
        "fromEntities": ["host"]
    }],
    "egress": [{
        "toEntities": ["all"],
        "toPorts": [
            {"ports":[ {"port": "53", "protocol": "UDP"}]}
        ]
    }]
}]"#;
    const FROM_INIT_YAML: &str = r#"
apiVersion: "cilium.io/v2"
kind: CiliumNetworkPolicy
metadata:
  name: "from-init"
spec:
  endpointSelector:
    matchLabels:
      app: myService
  ingress:
  - fromEntities:
    - init
  - toPorts:
    - ports:
      - port: "53"
        protocol: UDP
"#;
    const FROM_INIT_JSON: &str = r#"[{
    "labels": [{"key": "name", "value": "from-init"}],
    "endpointSelector": {"matchLabels":{"app":"myService"}},
    "ingress": [{
        "fromEntities": ["init"],
        "toPorts": [
            {"ports":[ {"port": "53", "protocol": "UDP"}]}
        ]
    }]
}]"#;

    fn labels(texts: &[&str]) -> LabelSet {
        LabelSet::new(texts.iter().map(|text| text.parse().unwrap())).unwrap()
    }

    /// The verdict of a document on a packet between an endpoint with these labels and a peer.
    fn decide(
        document: &str,
        subject: &[&str],
        direction: Direction,
        peer: &[&str],
        l4: &str,
    ) -> Verdict {
        let mut repository = Repository::default();
        repository.import(document).unwrap();
        let resolved = repository.resolve(&labels(subject), PolicySettings::default());
        let peer = labels(peer);
        let peer = Peer::new(Identity(300), &peer);
        let resolved = resolved.direction(direction);
        resolved.decide(&peer, l4.parse().unwrap()).verdict
    }

    fn ingress(document: &str, subject: &[&str], peer: &[&str], l4: &str) -> Verdict {
        decide(document, subject, Direction::Ingress, peer, l4)
    }

    fn error(document: &str) -> String {
        parse(document).unwrap_err().to_string()
    }

    /// A policy with this rule.
    fn cnp(namespace: Option<&str>, spec: Value) -> String {
        let mut metadata = json!({"name": "p"});
        if let Some(namespace) = namespace {
            metadata["namespace"] = namespace.into();
        }
        let kind = "CiliumNetworkPolicy";
        json!({"apiVersion": "cilium.io/v2", "kind": kind, "metadata": metadata, "spec": spec})
            .to_string()
    }

    /// A policy for every endpoint with this one allow rule of ingress.
    fn cnp_ingress(entry: Value) -> String {
        cnp(None, json!({"endpointSelector": {}, "ingress": [entry]}))
    }

    fn network_policy(spec: Value) -> String {
        json!({
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": "p", "namespace": "shop"},
            "spec": spec,
        })
        .to_string()
    }

    #[test]
    fn endpoints_without_labels_yet_are_reached_by_the_host_and_ask_for_names() {
        for document in [INIT_YAML, INIT_JSON] {
            let init = &["reserved:init"][..];
            let host = &["reserved:host"][..];
            let web = &["app=web"][..];
            assert_eq!(ingress(document, init, host, "80/TCP"), Verdict::Allow);
            assert_eq!(ingress(document, init, web, "80/TCP"), Verdict::None);
            let egress = |l4| decide(document, init, Direction::Egress, web, l4);
            assert_eq!(egress("53/UDP"), Verdict::Allow);
            assert_eq!(egress("53/TCP"), Verdict::None);
            assert_eq!(ingress(document, web, web, "80/TCP"), Verdict::Allow);
        }
    }

    #[test]
    fn a_service_takes_questions_of_endpoints_without_labels_yet() {
        let service = &["app=myService"][..];
        let init = &["reserved:init"][..];
        let web = &["app=web"][..];
        for document in [FROM_INIT_YAML, FROM_INIT_JSON] {
            assert_eq!(ingress(document, service, init, "53/UDP"), Verdict::Allow);
            assert_eq!(ingress(document, service, web, "53/TCP"), Verdict::None);
            assert_eq!(ingress(document, web, web, "80/TCP"), Verdict::Allow);
        }
        // There are two rules in the YAML document, and one in the JSON document.
        assert_eq!(
            ingress(FROM_INIT_YAML, service, init, "80/TCP"),
            Verdict::Allow
        );
        assert_eq!(
            ingress(FROM_INIT_JSON, service, init, "80/TCP"),
            Verdict::None
        );
        assert_eq!(
            ingress(FROM_INIT_YAML, service, web, "53/UDP"),
            Verdict::Allow
        );
        assert_eq!(
            ingress(FROM_INIT_JSON, service, web, "53/UDP"),
            Verdict::None
        );
    }

    #[test]
    fn several_documents_and_lists_hold_a_policy_each() {
        let list = json!({"apiVersion": "v1", "kind": "List", "items": [
            serde_json::from_str::<Value>(&cnp_ingress(json!({}))).unwrap(),
            serde_json::from_str::<Value>(&network_policy(json!({"podSelector": {}}))).unwrap(),
        ]});
        let names = |text: &str| -> Vec<String> {
            let policies = parse(text).unwrap().policies;
            policies
                .iter()
                .map(|policy| policy.name().to_string())
                .collect()
        };
        assert_eq!(
            names(&list.to_string()),
            ["CiliumNetworkPolicy p", "NetworkPolicy shop/p"]
        );
        assert_eq!(
            names(&format!("---\n{INIT_YAML}---\n{FROM_INIT_YAML}---\n")),
            ["CiliumNetworkPolicy from-init", "CiliumNetworkPolicy init"]
        );
    }

    #[test]
    fn what_is_not_supported_is_refused_by_its_name() {
        for (entry, field, message) in [
            (
                json!({"toFQDNs": []}),
                "toFQDNs",
                "matching by DNS name is not supported",
            ),
            (
                json!({"toServices": []}),
                "toServices",
                "matching by service is not supported",
            ),
            (
                json!({"toGroups": []}),
                "toGroups",
                "matching by a cloud provider's groups is not supported",
            ),
            (
                json!({"toRequires": []}),
                "toRequires",
                "a requirement on top of other rules is not supported",
            ),
            (
                json!({"toNodes": []}),
                "toNodes",
                "matching by node labels is not supported",
            ),
            (
                json!({"authentication": {}}),
                "authentication",
                "mutual authentication is not supported",
            ),
            (
                json!({"toPorts": [{"rules": {}}]}),
                "toPorts[0].rules",
                "matching inside connections (L7) is not supported",
            ),
            (
                json!({"toPorts": [{"serverNames": []}]}),
                "toPorts[0].serverNames",
                "matching by TLS server name is not supported",
            ),
            (
                json!({"toPorts": [{"listener": {}}]}),
                "toPorts[0].listener",
                "redirection to a proxy is not supported",
            ),
            (
                json!({"toPorts": [{"terminatingTLS": {}}]}),
                "toPorts[0].terminatingTLS",
                "TLS termination is not supported",
            ),
            (
                json!({"toCIDRSet": [{"cidrGroupRef": "g"}]}),
                "toCIDRSet[0].cidrGroupRef",
                "a CIDR group is not supported",
            ),
            (
                json!({"fromEndpoints": []}),
                "fromEndpoints",
                "unknown field",
            ),
            (json!({"toports": []}), "toports", "unknown field"),
            (
                json!({"toPorts": [{"ports": [{"port": "http"}]}]}),
                "toPorts[0].ports[0].port",
                "\"http\" is a named port, which is not supported: give its number",
            ),
        ] {
            let document = cnp(None, json!({"endpointSelector": {}, "egress": [entry]}));
            assert_eq!(
                error(&document),
                format!("CiliumNetworkPolicy p: spec.egress[0].{field}: {message}")
            );
        }
        let document = cnp(None, json!({"nodeSelector": {}, "ingress": [{}]}));
        assert!(error(&document).ends_with("spec.nodeSelector: host policy is not supported"));
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_its_place() {
        let ports = |ports| json!({"toPorts": [{"ports": ports}]});
        for (entry, message) in [
            (
                json!({"fromEndpoints": [], "fromCIDR": []}),
                "fromEndpoints and fromCIDR cannot be combined",
            ),
            (
                json!({"fromEntities": ["moon"]}),
                "fromEntities[0]: \"moon\" is not an entity",
            ),
            (
                json!({"fromEntities": ["unknown"]}),
                "\"unknown\" is not an entity",
            ),
            (
                json!({"fromCIDR": ["10.0.0.0/33"]}),
                "fromCIDR[0]: \"10.0.0.0/33\" is not a CIDR",
            ),
            (
                json!({"fromCIDRSet": [{"cidr": "10.0.0.0/8", "except": ["11.0.0.0/16"]}]}),
                "except[0]: \"11.0.0.0/16\" is not within 10.0.0.0/8",
            ),
            (
                json!({"fromCIDRSet": [{"cidr": "10.0.0.0/8", "except": ["fd00::/8"]}]}),
                "not within",
            ),
            (
                json!({"fromCIDRSet": [{"cidr": "10.0.0.0/16", "except": ["10.0.0.0/8"]}]}),
                "not within",
            ),
            (json!({"toPorts": [{}]}), "toPorts[0].ports: missing"),
            (ports(json!([])), "expected at least one port"),
            (ports(json!([{}])), "ports[0].port: missing"),
            (ports(json!([{"port": "65536"}])), "\"65536\" is not a port"),
            (ports(json!([{"port": "+1"}])), "\"+1\" is not a port"),
            (
                ports(json!([{"port": "1", "protocol": "GRE"}])),
                "\"GRE\" is not a protocol",
            ),
            (
                ports(json!([{"port": "9", "endPort": 8}])),
                "endPort: \"8\" is not a valid end of a range that begins at port 9",
            ),
            (
                ports(json!([{"port": "0", "endPort": 8}])),
                "begins at port 0",
            ),
            (
                json!({"icmps": [{"fields": [{"type": 256}]}]}),
                "\"256\" is not an ICMP type of IPv4",
            ),
            (
                json!({"icmps": [{"fields": [{"type": "PacketTooBig"}]}]}),
                "not an ICMP type of IPv4",
            ),
            (
                json!({"icmps": [{"fields": [{"type": 8, "family": "IPv5"}]}]}),
                "not an address family",
            ),
            (
                json!({"icmps": [{"fields": [{"type": 8}]}], "toPorts": [{"ports": [{"port": "1"}]}]}),
                "toPorts and icmps cannot be combined",
            ),
        ] {
            let error = error(&cnp_ingress(entry));
            assert!(
                error.starts_with("CiliumNetworkPolicy p: spec.ingress[0]"),
                "{error}"
            );
            assert!(error.contains(message), "{error}");
        }
        for (document, message) in [
            ("", "it contains no policy"),
            ("# nothing\n", "it contains no policy"),
            ("[]", "it contains no policy"),
            ("hello", "must be a map, not text"),
            ("{", "not JSON: EOF while parsing"),
            ("a: [", "line "),
            ("kind: Pod", "kind: \"Pod\" is not a policy kind"),
            (
                "kind: NetworkPolcy\napiVersion: networking.k8s.io/v1",
                "kind: \"NetworkPolcy\" is not a policy kind",
            ),
            (
                "kind: AdminNetworkPolicy\napiVersion: policy.networking.k8s.io/v1alpha1",
                "kind: \"AdminNetworkPolicy\" is not a policy kind",
            ),
            (
                "kind: NetworkPolicy\nkind: NetworkPolicy",
                "duplicate mapping key",
            ),
            (
                r#"{"kind": "NetworkPolicy", "kind": "NetworkPolicy"}"#,
                "key \"kind\" appears twice",
            ),
            ("kind: NetworkPolicy", "apiVersion: missing"),
            (
                "kind: NetworkPolicy\napiVersion: v1",
                "\"v1\" is not a supported version of NetworkPolicy",
            ),
            (
                "kind: NetworkPolicy\napiVersion: networking.k8s.io/v1",
                "metadata: missing",
            ),
            (
                "kind: NetworkPolicy\napiVersion: networking.k8s.io/v1\nmetadata: {name: ../x}",
                "metadata.name: Invalid value: \"../x\": a lowercase RFC 1123 subdomain must",
            ),
            (
                "kind: List\nitems: [{kind: List}]",
                "items[0].kind: \"List\" is not a policy kind",
            ),
        ] {
            let error = error(document);
            assert!(error.contains(message), "{document}: {error}");
        }
        let nothing = cnp(None, json!({"endpointSelector": {}, "ingress": []}));
        assert!(error(&nothing).contains("it has neither ingress nor egress rules"));
    }

    #[test]
    fn lists_of_one_kind_leave_out_kind_and_version() {
        let list = json!({
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicyList",
            "metadata": {"resourceVersion": "1"},
            "items": [{"metadata": {"name": "p"}, "spec": {"podSelector": {}}}],
        });
        let [policy] = &parse(&list.to_string()).unwrap().policies[..] else {
            panic!("not one policy");
        };
        assert_eq!(policy.name().to_string(), "NetworkPolicy default/p");
        let (stored, refused) = read_stored(policy.document()).unwrap();
        assert_eq!((stored.name(), refused), (policy.name(), None));
    }

    #[test]
    fn objects_of_other_kinds_are_skipped_and_named() {
        let text = "\
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
---
---
apiVersion: v1
kind: List
items:
- {apiVersion: apps/v1, kind: Deployment, metadata: {name: web}}
- {apiVersion: networking.k8s.io/v1, kind: Ingress, metadata: {generateName: in-}}
- {apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: p}, spec: {podSelector: {}}}
---
apiVersion: v1
kind: \"Config\\nMap\"
";
        let found = parse(text).unwrap();
        assert_eq!(found.policies.len(), 1);
        assert_eq!(
            found.skipped,
            [
                "Service shop/web",
                "Deployment web",
                "Ingress in-",
                "Config\\nMap without a name"
            ]
        );
        let rest = text.replace("kind: NetworkPolicy", "kind: Secret");
        assert_eq!(
            error(&rest),
            "it contains no policy, only Service shop/web and 4 more of other kinds"
        );
    }

    #[test]
    fn bare_rules_without_labels_are_known_by_what_they_say() {
        const TO_WEB: &str =
            r#"{"endpointSelector": {"matchLabels": {"app": "web"}}, "ingress": [{}]}"#;
        const TO_DB: &str =
            r#"{"endpointSelector": {"matchLabels": {"app": "db"}}, "ingress": [{}]}"#;
        let mut repository = Repository::default();
        let both = format!("[{TO_WEB}, {TO_DB}]");
        let imported = repository.import(&both).unwrap();
        assert_eq!(imported.added.len(), 2);
        // Another list adds its rules. The same rule with its fields in another order changes nothing.
        let turned = r#"[{"ingress": [{}], "endpointSelector": {"matchLabels": {"app": "web"}}}]"#;
        let imported = repository.import(turned).unwrap();
        assert_eq!((imported.unchanged.len(), repository.iter().len()), (1, 2));
        let stored = serde_json::to_string(&repository).unwrap();
        let read: Repository = serde_json::from_str(&stored).unwrap();
        assert_eq!(read, repository);
        let name = imported.unchanged[0].to_string();
        let label = name.trim_start_matches("rules [").trim_end_matches(']');
        assert_eq!(label, "health-agent:rule=4e671b79d3221308");
        assert_eq!(
            repository.delete_labelled(&[label.parse().unwrap()]).len(),
            1
        );
        assert_eq!(repository.iter().len(), 1);
    }

    #[test]
    fn empty_rules_lists_and_selectors_mean_what_they_do_in_cilium() {
        let subject = &["app=a"][..];
        let world = &["reserved:world"][..];
        for (entry, verdict) in [
            (json!({}), Verdict::None),
            (json!({"fromEndpoints": []}), Verdict::None),
            (json!({"fromEntities": []}), Verdict::None),
            (json!({"fromEndpoints": [{}]}), Verdict::Allow),
            (
                json!({"fromEndpoints": [{}], "toPorts": []}),
                Verdict::Allow,
            ),
            (
                json!({"fromEndpoints": [], "toPorts": [{"ports": [{"port": "80"}]}]}),
                Verdict::None,
            ),
            (
                json!({"toPorts": [{"ports": [{"port": "80"}]}]}),
                Verdict::Allow,
            ),
            (
                json!({"toPorts": [{"ports": [{"port": "0"}]}]}),
                Verdict::Allow,
            ),
            (
                json!({"icmps": [{"fields": [{"type": "EchoRequest"}]}]}),
                Verdict::None,
            ),
            (json!({"fromEntities": ["all"]}), Verdict::Allow),
            (json!({"fromEntities": ["none"]}), Verdict::None),
        ] {
            let document = cnp_ingress(entry);
            assert_eq!(
                ingress(&document, subject, world, "80/TCP"),
                verdict,
                "{document}"
            );
        }
    }

    #[test]
    fn a_namespaced_policy_stays_in_its_namespace_unless_its_peers_name_another() {
        const SHOP: &str = "k8s:io.kubernetes.pod.namespace=shop";
        const BANK: &str = "k8s:io.kubernetes.pod.namespace=bank";
        const GOLD: &str = "k8s:io.cilium.k8s.namespace.labels.tier=gold";
        let subject = &["k8s:app=a", SHOP][..];
        for (peer_selector, shop, bank, world) in [
            (json!({}), true, false, false),
            (json!({"matchLabels": {"app": "a"}}), true, false, false),
            (
                json!({"matchLabels": {"k8s:io.kubernetes.pod.namespace": "bank"}}),
                false,
                true,
                false,
            ),
            (
                json!({"matchLabels": {"io.kubernetes.pod.namespace": "bank"}}),
                false,
                true,
                false,
            ),
            (
                json!({"matchLabels": {"k8s:io.cilium.k8s.namespace.labels.tier": "gold"}}),
                false,
                true,
                false,
            ),
            (
                json!({"matchExpressions": [{"key": "k8s:io.kubernetes.pod.namespace", "operator": "Exists"}]}),
                true,
                true,
                false,
            ),
            (
                json!({"matchLabels": {"reserved:world": ""}}),
                false,
                false,
                true,
            ),
        ] {
            let spec =
                json!({"endpointSelector": {}, "ingress": [{"fromEndpoints": [peer_selector]}]});
            let document = cnp(Some("shop"), spec);
            let allows = |peer: &[&str]| ingress(&document, subject, peer, "80/TCP").passes();
            assert_eq!(allows(subject), shop, "{document}");
            assert_eq!(allows(&["k8s:app=a", BANK, GOLD]), bank, "{document}");
            assert_eq!(allows(&["reserved:world"]), world, "{document}");
            // It does not apply to endpoints of other namespaces, nor to endpoints without one.
            assert!(ingress(&document, &[BANK], &["reserved:world"], "80/TCP").passes());
            assert!(ingress(&document, &["app=a"], &["reserved:world"], "80/TCP").passes());
        }
        let foreign = json!({"matchLabels": {"k8s:io.kubernetes.pod.namespace": "bank"}});
        let document = cnp(
            Some("shop"),
            json!({"endpointSelector": foreign, "ingress": [{}]}),
        );
        assert_eq!(
            error(&document),
            "CiliumNetworkPolicy shop/p: spec.endpointSelector: a policy of namespace \"shop\" \
             cannot select endpoints of namespace \"bank\""
        );
    }

    #[test]
    fn a_clusterwide_policy_knows_all_namespaces_and_nothing_outside_them() {
        let document = cnp(
            None,
            json!({"endpointSelector": {}, "ingress": [{"fromEndpoints": [{}]}]}),
        )
        .replace("CiliumNetworkPolicy", "CiliumClusterwideNetworkPolicy");
        let bank = &["k8s:io.kubernetes.pod.namespace=bank"][..];
        assert!(ingress(&document, &["app=a"], bank, "80/TCP").passes());
        assert!(!ingress(&document, &["app=a"], &["reserved:world"], "80/TCP").passes());
        let namespaced =
            document.replace("\"name\":\"p\"", "\"name\":\"p\",\"namespace\":\"shop\"");
        assert!(error(&namespaced).contains("metadata.namespace: a clusterwide policy"));
    }

    #[test]
    fn a_network_policy_has_kubernetes_defaults() {
        const SHOP: &str = "k8s:io.kubernetes.pod.namespace=shop";
        let pod = &["k8s:app=a", SHOP][..];
        let both = |spec: Value| {
            let document = network_policy(spec);
            let to = |direction| decide(&document, pod, direction, &["k8s:app=b", SHOP], "80/TCP");
            (
                to(Direction::Ingress).passes(),
                to(Direction::Egress).passes(),
            )
        };
        for (spec, ingress, egress) in [
            (json!({"podSelector": {}}), false, true),
            (
                json!({"podSelector": {}, "policyTypes": ["Egress"]}),
                true,
                false,
            ),
            (
                json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}),
                false,
                false,
            ),
            (json!({"podSelector": {}, "ingress": []}), false, true),
            (json!({"podSelector": {}, "egress": []}), false, true),
            (
                json!({"podSelector": {}, "egress": [{"ports": [{"port": 53}]}]}),
                false,
                false,
            ),
            (json!({"podSelector": {}, "ingress": [{}]}), true, true),
            (
                json!({"podSelector": {}, "ingress": [{"from": [], "ports": []}]}),
                true,
                true,
            ),
            (
                json!({"podSelector": {}, "ingress": [{"ports": [{}]}]}),
                true,
                true,
            ),
            (
                json!({"podSelector": {}, "ingress": [{"ports": [{"protocol": "UDP"}]}]}),
                false,
                true,
            ),
            (
                json!({"podSelector": {}, "ingress": [{"ports": [{"port": 79, "endPort": 81}]}]}),
                true,
                true,
            ),
            (
                json!({"podSelector": {}, "ingress": [{"ports": [{"port": 81}]}]}),
                false,
                true,
            ),
            (
                json!({"podSelector": {"matchLabels": {"app": "b"}}}),
                true,
                true,
            ),
        ] {
            assert_eq!(both(spec.clone()), (ingress, egress), "{spec}");
        }
    }

    #[test]
    fn peers_of_a_network_policy_are_pods_of_namespaces_or_addresses() {
        const SHOP: &str = "k8s:io.kubernetes.pod.namespace=shop";
        const BANK: &str = "k8s:io.kubernetes.pod.namespace=bank";
        const GOLD: &str = "k8s:io.cilium.k8s.namespace.labels.tier=gold";
        let web = json!({"matchLabels": {"app": "web"}});
        let gold = json!({"matchLabels": {"tier": "gold"}});
        for (peer, shop_web, bank_web, bank_db, address) in [
            (json!({"podSelector": {}}), true, false, false, false),
            (json!({"podSelector": web}), true, false, false, false),
            (json!({"namespaceSelector": {}}), true, true, true, false),
            (json!({"namespaceSelector": gold}), false, true, true, false),
            (
                json!({"namespaceSelector": gold, "podSelector": web}),
                false,
                true,
                false,
                false,
            ),
            (
                json!({"ipBlock": {"cidr": "192.0.2.0/24"}}),
                false,
                false,
                false,
                true,
            ),
            (
                json!({"ipBlock": {"cidr": "192.0.2.0/24", "except": ["192.0.2.7/32"]}}),
                false,
                false,
                false,
                false,
            ),
        ] {
            let spec = json!({"podSelector": {}, "ingress": [{"from": [peer]}]});
            let document = network_policy(spec);
            let allows = |peer: &[&str]| ingress(&document, &[SHOP], peer, "80/TCP").passes();
            assert_eq!(allows(&["k8s:app=web", SHOP]), shop_web, "{peer}");
            assert_eq!(allows(&["k8s:app=web", BANK, GOLD]), bank_web, "{peer}");
            assert_eq!(allows(&["k8s:app=db", BANK, GOLD]), bank_db, "{peer}");
            assert_eq!(
                allows(&["cidr:192.0.2.7/32", "reserved:world"]),
                address,
                "{peer}"
            );
        }
        let ingress = |entry: Value| {
            error(&network_policy(
                json!({"podSelector": {}, "ingress": [entry]}),
            ))
        };
        for (entry, message) in [
            (
                json!({"from": [{}]}),
                "from[0]: Required value: must specify a peer",
            ),
            (
                json!({"from": [{"ipBlock": {"cidr": "::/0"}, "podSelector": {}}]}),
                "Forbidden: may not specify both ipBlock and another peer",
            ),
            (json!({"ports": [{"endPort": 8}]}), "ports[0].endPort"),
            (json!({"ports": [{"port": "http"}]}), "named port"),
            (json!({"to": []}), "to: unknown field"),
        ] {
            let error = ingress(entry);
            assert!(error.contains(message), "{error}");
        }
        let unlisted = json!({"podSelector": {}, "policyTypes": ["Egress"], "ingress": [{}]});
        assert!(
            error(&network_policy(unlisted)).contains("policyTypes does not list this direction")
        );
        let no_type = json!({"podSelector": {}, "policyTypes": ["ingress"]});
        assert!(error(&network_policy(no_type)).contains(
            "policyTypes[0]: Unsupported value: \"ingress\": supported values: \"Ingress\""
        ));
    }

    #[test]
    fn overlapping_cidrs_select_by_each_of_them() {
        let cidrs = ["10.0.0.0/8", "10.0.0.0/8", "10.1.0.0/16", "10.1.2.3/8"];
        let document = cnp_ingress(json!({"fromCIDR": cidrs}));
        let from = |prefix: &str| {
            let label = format!("cidr:{prefix}");
            ingress(&document, &["app=a"], &[&label, "reserved:world"], "80/TCP")
        };
        assert_eq!(from("10.1.0.0/16"), Verdict::Allow);
        assert_eq!(from("10.9.0.0/16"), Verdict::Allow);
        assert_eq!(from("11.0.0.0/16"), Verdict::None);
    }

    #[test]
    fn types_of_icmp_are_read_by_number_and_by_name() {
        for (field, allowed, other) in [
            (json!({"type": 8}), "8/ICMP", "8/ICMPv6"),
            (json!({"type": "EchoRequest"}), "8/ICMP", "0/ICMP"),
            (
                json!({"type": "EchoRequest", "family": "IPv6"}),
                "128/ICMPv6",
                "8/ICMP",
            ),
            (json!({"type": "0"}), "0/ICMP", "8/ICMP"),
        ] {
            let document = cnp_ingress(json!({"icmps": [{"fields": [field]}]}));
            let subject = &["app=a"][..];
            let world = &["reserved:world"][..];
            assert_eq!(ingress(&document, subject, world, allowed), Verdict::Allow);
            assert_eq!(ingress(&document, subject, world, other), Verdict::None);
        }
        let types: L4 = "8/ICMP".parse().unwrap();
        assert_eq!(types.port, 8);
    }
}
