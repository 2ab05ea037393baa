use health_model::identity::Identity;
use health_model::policy::{Direction, L4, PolicyOrigin};

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

/// Returns a document's verdict on a packet between an endpoint with these labels and a peer.
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

/// A policy for every endpoint, with this one ingress allow rule.
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
fn a_policy_of_a_namespace_reaches_others_only_through_endpoints_without_labels_yet() {
    let web = &["app=web"][..];
    let [shop, bank] =
        ["shop", "bank"].map(|name| format!("k8s:io.kubernetes.pod.namespace={name}"));
    let expression = |operator: &str, values: Value| {
        let expression = json!({"key": "reserved:init", "operator": operator, "values": values});
        json!({"matchExpressions": [expression]})
    };
    for (selector, selects_init, selects_own) in [
        (json!({"matchLabels": {"reserved:init": ""}}), true, false),
        (expression("Exists", json!([])), true, false),
        (expression("In", json!([""])), true, false),
        (expression("In", json!(["x"])), false, false),
        (expression("DoesNotExist", json!([])), false, true),
        (expression("NotIn", json!(["x"])), false, true),
        (json!({}), false, true),
    ] {
        let document = cnp(
            Some("shop"),
            json!({"endpointSelector": selector, "ingress": [{}]}),
        );
        let is_selected = |labels: &[&str]| !ingress(&document, labels, web, "80/TCP").passes();
        assert_eq!(is_selected(&["reserved:init"]), selects_init, "{document}");
        assert_eq!(
            is_selected(&["k8s:app=a", &shop]),
            selects_own,
            "{document}"
        );
        assert!(!is_selected(&["k8s:app=a", &bank]), "{document}");
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
    // The YAML document has two rules, the JSON document one.
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
            json!({"toPorts": [{"ports": [{"port": "http_x"}]}]}),
            "toPorts[0].ports[0].port",
            "\"http_x\" is not a port name, which must contain only lower-case letters, digits and hyphens (-)",
        ),
        (
            json!({"toPorts": [{"ports": [{"port": "a-name-of-16-let"}]}]}),
            "toPorts[0].ports[0].port",
            "\"a-name-of-16-let\" is not a port name, which must be no more than 15 characters",
        ),
        (
            json!({"toPorts": [{"ports": [{"port": "http", "endPort": 81}]}]}),
            "toPorts[0].ports[0].endPort",
            "a named port cannot begin a range",
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
            "\"256\" is not an ICMP type for IPv4",
        ),
        (
            json!({"icmps": [{"fields": [{"type": "PacketTooBig"}]}]}),
            "not an ICMP type for IPv4",
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
    const TO_DB: &str = r#"{"endpointSelector": {"matchLabels": {"app": "db"}}, "ingress": [{}]}"#;
    let mut repository = Repository::default();
    let both = format!("[{TO_WEB}, {TO_DB}]");
    let imported = repository.import(&both).unwrap();
    assert_eq!(imported.added.len(), 2);
    // A second list adds its rules. The same rule with its fields in another order changes nothing.
    let turned = r#"[{"ingress": [{}], "endpointSelector": {"matchLabels": {"app": "web"}}}]"#;
    let imported = repository.import(turned).unwrap();
    assert_eq!(
        (imported.unchanged.len(), repository.iter().count()),
        (1, 2)
    );
    let mut read = Repository::default();
    let saved = repository.saved(PolicyOrigin::Imported);
    read.restore(&saved, PolicyOrigin::Imported).unwrap();
    assert_eq!(read, repository);
    let name = imported.unchanged[0].to_string();
    let label = name.trim_start_matches("rules [").trim_end_matches(']');
    assert_eq!(label, "health-agent:rule=4e671b79d3221308");
    assert_eq!(
        repository.delete_labelled(&[label.parse().unwrap()]).len(),
        1
    );
    assert_eq!(repository.iter().count(), 1);
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
        let spec = json!({"endpointSelector": {}, "ingress": [{"fromEndpoints": [peer_selector]}]});
        let document = cnp(Some("shop"), spec);
        let allows = |peer: &[&str]| ingress(&document, subject, peer, "80/TCP").passes();
        assert_eq!(allows(subject), shop, "{document}");
        assert_eq!(allows(&["k8s:app=a", BANK, GOLD]), bank, "{document}");
        assert_eq!(allows(&["reserved:world"]), world, "{document}");
        // The policy does not apply to endpoints in other namespaces, nor to endpoints without one.
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
        "CiliumNetworkPolicy shop/p: spec.endpointSelector: a policy in namespace \"shop\" \
         cannot select endpoints in namespace \"bank\""
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
    let namespaced = document.replace("\"name\":\"p\"", "\"name\":\"p\",\"namespace\":\"shop\"");
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
        // Rules of a direction that is not listed have no effect.
        (
            json!({"podSelector": {}, "policyTypes": ["Egress"], "ingress": [{"from": [{"podSelector": {}}]}]}),
            true,
            false,
        ),
        (
            json!({"podSelector": {}, "policyTypes": ["Ingress"], "egress": [{}]}),
            false,
            true,
        ),
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
        (
            json!({"ports": [{"port": "80"}]}),
            "must contain at least one letter",
        ),
        (json!({"to": []}), "to: unknown field"),
    ] {
        let error = ingress(entry);
        assert!(error.contains(message), "{error}");
    }
    let no_type = json!({"podSelector": {}, "policyTypes": ["ingress"]});
    assert!(
        error(&network_policy(no_type)).contains(
            "policyTypes[0]: Unsupported value: \"ingress\": supported values: \"Ingress\""
        )
    );
}

#[test]
fn a_rule_for_identities_that_policy_does_not_apply_to_is_refused() {
    for name in ["health", "host", "remote-node"] {
        let selector = json!({"matchLabels": {format!("reserved:{name}"): ""}});
        let document = cnp(None, json!({"endpointSelector": selector, "ingress": [{}]}));
        let message = format!(
            "CiliumNetworkPolicy p: spec.endpointSelector: policy does not apply to reserved:{name}, \
             so the rule would do nothing"
        );
        assert_eq!(error(&document), message);
    }
    let others =
        json!({"matchExpressions": [{"key": "reserved:health", "operator": "DoesNotExist"}]});
    let document = cnp(None, json!({"endpointSelector": others, "ingress": [{}]}));
    parse(&document).unwrap();
}

#[test]
fn an_unknown_field_of_an_object_is_reported_with_its_name() {
    let document = json!({
        "apiVersion": "cilium.io/v2", "kind": "CiliumNetworkPolicy", "metadata": {"name": "p"},
        "description": "beside the spec",
        "spec": {"endpointSelector": {}, "ingress": [{}]},
    });
    let message = "CiliumNetworkPolicy p: description: unknown field";
    assert_eq!(error(&document.to_string()), message);
}

/// Two apps that give the name `web` to different ports.
const NAMED: [&[&str]; 2] = [
    &[
        "k8s:app=a",
        "k8s:io.kubernetes.pod.namespace=shop",
        "port:web=80/TCP",
    ],
    &[
        "k8s:app=b",
        "k8s:io.kubernetes.pod.namespace=shop",
        "port:web=81/TCP+53/UDP",
    ],
];

#[test]
fn the_receiver_numbers_a_named_port() {
    let [a, b] = NAMED;
    let client = &[
        "k8s:app=client",
        "k8s:io.kubernetes.pod.namespace=shop",
        "port:web=90/TCP",
    ][..];
    let np = |direction: &str, types: &str| {
        let rules = json!([{"ports": [{"port": "web"}]}]);
        network_policy(json!({"podSelector": {}, "policyTypes": [types], direction: rules}))
    };
    let cilium = |direction: &str| {
        let port = json!([{"ports": [{"port": "WEB", "protocol": "TCP"}]}]);
        cnp(
            Some("shop"),
            json!({"endpointSelector": {}, direction: [{"toPorts": port}]}),
        )
    };
    for (document, direction) in [
        (np("ingress", "Ingress"), Direction::Ingress),
        (np("egress", "Egress"), Direction::Egress),
        (cilium("ingress"), Direction::Ingress),
        (cilium("egress"), Direction::Egress),
    ] {
        for (receiver, l4, passes) in [
            (a, "80/TCP", true),
            (a, "81/TCP", false),
            (a, "80/UDP", false),
            (b, "81/TCP", true),
            (b, "80/TCP", false),
            // The rule is for TCP alone.
            (b, "53/UDP", false),
            (a, "90/TCP", false),
        ] {
            let (subject, peer) = match direction {
                Direction::Ingress => (receiver, client),
                Direction::Egress => (client, receiver),
            };
            let verdict = decide(&document, subject, direction, peer, l4);
            assert_eq!(verdict.passes(), passes, "{document} {receiver:?} {l4}");
        }
    }
}

#[test]
fn a_named_port_without_a_protocol_is_each_protocol_in_a_policy_of_cilium() {
    let [_, b] = NAMED;
    for protocol in [json!(null), json!("ANY")] {
        let ports = json!([{"ports": [{"port": "web", "protocol": protocol}]}]);
        let document = cnp_ingress(json!({"toPorts": ports}));
        let allows = |l4: &str| ingress(&document, b, &["app=x"], l4).passes();
        assert!(allows("81/TCP") && allows("53/UDP"));
        assert!(!allows("53/TCP") && !allows("81/UDP") && !allows("81/SCTP"));
    }
}

#[test]
fn a_named_port_can_be_denied() {
    let [a, b] = NAMED;
    let ports = json!([{"ports": [{"port": "web"}]}]);
    let spec = json!({"endpointSelector": {}, "egress": [{"toEntities": ["all"]}],
        "egressDeny": [{"toPorts": ports}]});
    let document = cnp(None, spec);
    let to = |peer: &[&str], l4: &str| decide(&document, &["app=x"], Direction::Egress, peer, l4);
    assert_eq!(to(a, "80/TCP"), Verdict::Deny);
    assert_eq!(to(a, "81/TCP"), Verdict::Allow);
    assert_eq!(to(b, "81/TCP"), Verdict::Deny);
    assert_eq!(to(b, "80/TCP"), Verdict::Allow);
}

#[test]
fn a_port_name_that_the_receiver_lacks_matches_nothing_and_enables_the_default_deny() {
    let egress = json!([{"toPorts": [{"ports": [{"port": "web"}]}]}]);
    let document = cnp(None, json!({"endpointSelector": {}, "egress": egress}));
    for peer in [
        &["k8s:app=a", "port:db=80/TCP"][..],
        &["k8s:app=a", "k8s:web=80/TCP"],
        &["reserved:world"],
        &["reserved:host"],
        &["cidr:192.0.2.0/24", "reserved:world"],
    ] {
        let verdict = decide(&document, &["app=x"], Direction::Egress, peer, "80/TCP");
        assert_eq!(verdict, Verdict::None, "{peer:?}");
    }
}

#[test]
fn a_stored_policy_that_selects_by_the_source_of_ports_keeps_its_meaning() {
    let spec = json!({"endpointSelector": {"matchLabels": {"port:http": "a"}}, "ingress": [{}]});
    let document: Value = serde_json::from_str(&cnp(None, spec)).unwrap();
    let (policy, refused) = read_stored(&document).unwrap();
    assert_eq!(policy.rules().len(), 1);
    let refused = refused.unwrap().to_string();
    assert!(
        refused.contains("\"port:http\" is not an endpoint label"),
        "{refused}"
    );
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

#[test]
fn an_object_may_have_as_many_rules_as_an_import() {
    let of = |rules: usize| -> Value {
        let rules = vec![json!({"toPorts": [{"ports": [{"port": "80"}]}]}); rules / 2];
        let spec = json!({"endpointSelector": {}, "ingress": rules, "egress": rules});
        serde_json::from_str(&cnp(Some("shop"), spec)).unwrap()
    };
    read_policy(&of(RULES_MAX)).unwrap();
    let error = read_policy(&of(RULES_MAX + 2)).unwrap_err().to_string();
    let expected = "too many rules in one object: 10002; at most 10000 are allowed";
    assert!(error.ends_with(expected), "{error}");
    assert!(error.starts_with("CiliumNetworkPolicy shop/"), "{error}");
}
