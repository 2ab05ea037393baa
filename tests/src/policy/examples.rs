//! Cilium's published example policies (folder `examples/policies` of its repository), and what becomes of each. The
//! documents have the same fields, kinds and operators as the examples, and the names, labels and addresses of the
//! table of cases. Where Cilium has published several forms of an example, the document follows the latest one known.

use health_model::policy::PolicyMode;

use super::cases::End::{Host, RemoteNode, World};
use super::cases::Outcome::{EgressDenies, EgressDrops, IngressDenies, IngressDrops, Passes};
use super::cases::{
    BANK_WEB, BATCH, Case, DB, DB_FROM_WEB, NEW, ONE_WEB, SHOP_DB, SHOP_WEB, Scenario, TWO_DB, WEB,
    case, icmp, icmpv6, tcp, udp,
};

/// A published example, and what becomes of its policy.
#[derive(Clone, Copy, Debug)]
pub struct Example {
    /// The example's path below `examples/policies`.
    pub published: &'static str,
    /// A document with the same constructs.
    pub document: &'static str,
    /// What becomes of the document.
    pub expected: Expected,
}

/// What becomes of an example's policy when an agent without a Kubernetes cluster imports it.
#[derive(Clone, Copy, Debug)]
pub enum Expected {
    /// The policy is in force: these packets show something that it allows and something that it does not.
    InForce(&'static [Case]),
    /// The import is refused, and the message contains these words, which name the field.
    Refused(&'static str),
}

impl Example {
    /// Returns the example as a scenario, unless it is refused.
    pub fn scenario(&'static self) -> Option<Scenario> {
        let cases = match self.expected {
            Expected::InForce(cases) => cases,
            Expected::Refused(_) => return None,
        };
        Some(Scenario {
            name: self.published,
            mode: PolicyMode::Default,
            allow_localhost: false,
            documents: std::slice::from_ref(&self.document),
            cases,
        })
    }
}

const fn in_force(
    published: &'static str,
    document: &'static str,
    cases: &'static [Case],
) -> Example {
    Example {
        published,
        document,
        expected: Expected::InForce(cases),
    }
}

const fn refused(published: &'static str, document: &'static str, words: &'static str) -> Example {
    Example {
        published,
        document,
        expected: Expected::Refused(words),
    }
}

const HOST_POLICY: &str = "spec.nodeSelector: host policy is not supported";
const INGRESS_L7: &str =
    "spec.ingress[0].toPorts[0].rules: matching inside connections (L7) is not supported";
const EGRESS_L7: &str =
    "spec.egress[0].toPorts[0].rules: matching inside connections (L7) is not supported";
const LISTENER: &str =
    "spec.egress[0].toPorts[0].listener: redirection to a proxy is not supported";
const FQDN_SPECS: &str = "specs[0].egress[0].toFQDNs: matching by DNS name is not supported";
const SERVICES: &str = "spec.egress[0].toServices: matching by service needs a Kubernetes cluster";

const AUTH: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: authenticated}
spec:
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toEndpoints: [{matchLabels: {app: db}}]
    auth: {type: "null"}
"#;

const CIDR_COMBINED: &str = r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: cidr-combined}
spec:
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toCIDR: [192.0.2.1/32]
    toCIDRSet: [{cidr: 198.51.100.0/24, except: [198.51.100.64/26]}]
";

const DNS_MATCH_NAME: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: by-name}
specs:
- endpointSelector: {matchLabels: {app: web, tier: front}}
  egress:
  - toFQDNs: [{matchName: api.example.com}]
- endpointSelector: {matchLabels: {}}
  egress:
  - toEndpoints: [{matchLabels: {"k8s:io.kubernetes.pod.namespace": bank, "k8s:app": web}}]
    toPorts:
    - ports: [{port: "53", protocol: ANY}]
      rules: {dns: [{matchPattern: "*"}]}
"#;

const DNS_MATCH_PATTERN: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: by-pattern}
specs:
- endpointSelector: {matchLabels: {app: web, tier: front}}
  egress:
  - toFQDNs: [{matchPattern: "*.example.com"}]
"#;

const DNS_MATCH_PORT: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: by-pattern-and-port}
specs:
- endpointSelector: {matchLabels: {app: web, tier: front}}
  egress:
  - toFQDNs: [{matchPattern: "*.example.com"}]
    toPorts: [{ports: [{port: "443", protocol: TCP}]}]
"#;

const KAFKA_ROLES: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: kafka-roles}
spec:
  description: The web servers write orders and bills
  endpointSelector: {matchLabels: {app: db}}
  ingress:
  - fromEndpoints: [{matchLabels: {app: web}}]
    toPorts:
    - ports: [{port: "9092", protocol: TCP}]
      rules: {kafka: [{role: produce, topic: orders}, {role: produce, topic: bills}]}
"#;

const KAFKA_KEYS: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: kafka-keys}
spec:
  endpointSelector: {matchLabels: {app: db}}
  ingress:
  - fromEndpoints: [{matchLabels: {app: web}}]
    toPorts:
    - ports: [{port: "9092", protocol: TCP}]
      rules: {kafka: [{apiKey: metadata}, {apiKey: produce, topic: orders}]}
"#;

const HTTP_FROM_WEB: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: http-from-web}
spec:
  description: The web servers read
  endpointSelector: {matchLabels: {app: db}}
  ingress:
  - fromEndpoints: [{matchLabels: {app: web}}]
    toPorts:
    - ports: [{port: "80", protocol: TCP}]
      rules: {http: [{method: GET, path: /rows}]}
"#;

const HTTP_HEADERS: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: http-headers}
spec:
  endpointSelector: {matchLabels: {app: db}}
  ingress:
  - toPorts:
    - ports: [{port: "80", protocol: TCP}]
      rules:
        http:
        - {method: GET, path: "/rows$"}
        - {method: PUT, path: "/row$", headers: ["X-Row: new"]}
"#;

const HTTP_SPECS: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: http-both-ways}
specs:
- endpointSelector: {matchLabels: {app: db}}
  ingress:
  - fromEndpoints: [{matchLabels: {app: web}}]
    toPorts:
    - ports: [{port: "80", protocol: TCP}]
      rules: {http: [{method: GET, path: /rows}]}
- endpointSelector: {matchLabels: {app: web}}
  egress:
  - toPorts:
    - ports: [{port: "80", protocol: TCP}]
      rules: {http: [{method: POST, host: "^api.example.com$"}]}
"#;

const HOST_PROTOCOLS: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumClusterwideNetworkPolicy
metadata: {name: host-protocols}
spec:
  nodeSelector: {matchLabels: {role: worker}}
  egress:
  - toPorts:
    - ports:
      - {port: "6443", protocol: TCP}
      - {port: "8472", protocol: UDP}
      - {protocol: VRRP}
"#;

const HOST_DEMO: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumClusterwideNetworkPolicy
metadata: {name: host-ssh}
spec:
  description: ""
  nodeSelector: {matchLabels: {ssh: allowed}}
  ingress:
  - fromEntities: [cluster]
  - toPorts: [{ports: [{port: "22", protocol: TCP}]}]
  - icmps: [{fields: [{type: EchoRequest, family: IPv4}]}]
"#;

const HOST_LOCK_DOWN: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumClusterwideNetworkPolicy
metadata: {name: host-lock-down}
spec:
  description: Every host
  nodeSelector: {}
  ingress:
  - fromEntities: [remote-node, health]
  - fromCIDR: [192.0.2.0/24]
    toPorts: [{ports: [{port: "6443", protocol: TCP}, {port: "8472", protocol: UDP}]}]
  - fromEndpoints: [{matchLabels: {"k8s:io.kubernetes.pod.namespace": shop, app: web}}]
    toPorts: [{ports: [{port: "6443", protocol: TCP}]}]
  egress:
  - toEntities: [remote-node, health]
  - toEntities: [world]
    toPorts: [{ports: [{port: "123", protocol: UDP}]}]
  - toCIDR: [203.0.113.9/32]
    toPorts: [{ports: [{port: "53", protocol: UDP}]}]
"#;

const HOST_LABELLED: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumClusterwideNetworkPolicy
metadata: {name: host-worker}
spec:
  description: The workers
  nodeSelector: {matchLabels: {role: worker}}
  ingress:
  - fromEntities: [remote-node, health]
  - toPorts: [{ports: [{port: "22", protocol: TCP}, {port: "8472", protocol: UDP}]}]
"#;

/// The field `description` is beside `spec`, as in the published example.
const HOST_DESCRIBED: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumClusterwideNetworkPolicy
description: Names are asked at one network only
metadata: {name: host-names}
spec:
  nodeSelector: {matchLabels: {}}
  ingress:
  - toPorts: [{ports: [{port: "22", protocol: TCP}]}]
  egress:
  - toCIDR: ["192.0.2.0/24"]
    toPorts: [{ports: [{port: "53", protocol: UDP}]}]
"#;

const CLUSTER_TO_CLUSTER: &str = r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: cluster-to-cluster}
spec:
  description: The web servers of one cluster reach the databases of the other
  endpointSelector: {matchLabels: {app: web, io.cilium.k8s.policy.cluster: one}}
  egress:
  - toEndpoints:
    - matchLabels:
        app: db
        io.kubernetes.pod.namespace: shop
        io.cilium.k8s.policy.cluster: two
";

const CLUSTER_ANY_NAMESPACE: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: cluster-any-namespace, namespace: shop}
spec:
  endpointSelector: {matchLabels: {app: web, io.cilium.k8s.policy.cluster: one}}
  egress:
  - toEndpoints:
    - matchExpressions:
      - {key: "k8s:io.kubernetes.pod.namespace", operator: Exists}
      - {key: "k8s:io.cilium.k8s.policy.cluster", operator: In, values: [two]}
      - {key: "k8s:app", operator: In, values: [db]}
"#;

const CLUSTERWIDE: &str = r"
apiVersion: cilium.io/v2
kind: CiliumClusterwideNetworkPolicy
metadata: {name: clusterwide}
spec:
  description: Databases take packets of web servers
  endpointSelector: {matchLabels: {app: db}}
  ingress:
  - fromEndpoints: [{matchLabels: {app: web}}]
";

const CLUSTERWIDE_HEALTH: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumClusterwideNetworkPolicy
metadata: {name: health}
spec:
  endpointSelector: {matchLabels: {"reserved:health": ""}}
  ingress:
  - fromEntities: [remote-node]
  egress:
  - toEntities: [remote-node]
"#;

const CLUSTERWIDE_WILDCARD: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumClusterwideNetworkPolicy
metadata: {name: questions-of-all-pods}
spec:
  description: Pods of every namespace ask for names
  endpointSelector: {matchLabels: {"k8s:io.kubernetes.pod.namespace": shop, app: db}}
  ingress:
  - fromEndpoints: [{}]
    toPorts: [{ports: [{port: "53", protocol: UDP}]}]
"#;

const NAMESPACES_APART: &str = r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: apart, namespace: shop}
spec:
  endpointSelector: {matchLabels: {}}
  ingress:
  - fromEndpoints: [{matchLabels: {}}]
---
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: apart, namespace: bank}
spec:
  endpointSelector: {matchLabels: {}}
  ingress:
  - fromEndpoints: [{matchLabels: {}}]
";

const QUESTIONS: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: questions}
spec:
  endpointSelector: {}
  egress:
  - toEndpoints: [{matchLabels: {"k8s:io.kubernetes.pod.namespace": bank, app: web}}]
    toPorts: [{ports: [{port: '53', protocol: UDP}]}]
"#;

const NAMESPACE_LABELS: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: namespace-labels}
spec:
  endpointSelector: {matchLabels: {app: db}}
  ingress:
  - fromEndpoints: [{matchLabels: {io.cilium.k8s.namespace.labels.stage: "prod"}}]
  egress:
  - toEndpoints: [{matchLabels: {io.cilium.k8s.namespace.labels.stage: "prod"}}]
"#;

const OTHER_NAMESPACE: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: from-bank, namespace: shop}
spec:
  endpointSelector: {matchLabels: {app: db}}
  ingress:
  - fromEndpoints: [{matchLabels: {"k8s:io.kubernetes.pod.namespace": bank, app: web}}]
"#;

const SERVICE_ACCOUNT: &str = r#"[{
    "labels": [{"key": "name", "value": "service-account"}],
    "endpointSelector": {"matchLabels": {"io.cilium.k8s.policy.serviceaccount": "db"}},
    "ingress": [{
        "fromEndpoints": [{"matchLabels": {"io.cilium.k8s.policy.serviceaccount": "web"}}]
    }]
}]"#;

const SERVICE_ACCOUNT_HTTP: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: service-account}
spec:
  endpointSelector: {matchLabels: {io.cilium.k8s.policy.serviceaccount: db}}
  ingress:
  - fromEndpoints: [{matchLabels: {io.cilium.k8s.policy.serviceaccount: web}}]
    toPorts:
    - ports: [{port: '80', protocol: TCP}]
      rules: {http: [{method: GET, path: "/rows$"}]}
"#;

const CIDRS: &str = r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: cidrs}
spec:
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toCIDR: [192.0.2.1/32]
  - toCIDRSet: [{cidr: 198.51.100.0/24, except: [198.51.100.64/26]}]
";

/// In a namespace, to which the Kubernetes API server adds every such policy.
const EGRESS_ALL: &str = r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: egress-all, namespace: shop}
spec:
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toEndpoints: [{}]
";

const INGRESS_ALL: &str = r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: ingress-all, namespace: shop}
spec:
  endpointSelector: {matchLabels: {app: db}}
  ingress:
  - fromEndpoints: [{}]
";

const EGRESS_NONE: &str = r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: egress-none}
spec:
  endpointSelector: {matchLabels: {app: db}}
  egress: [{}]
";

const EGRESS_DENY: &str = r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: egress-deny}
spec:
  endpointSelector: {matchLabels: {tier: front}}
  egress:
  - toEntities: [all]
  egressDeny:
  - toEndpoints: [{matchLabels: {tier: back}}]
";

const TO_API_SERVERS: &str = r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: to-api-servers}
spec:
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toEntities: [kube-apiserver]
";

const FROM_CONTROL_PLANE: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: from-control-plane}
spec:
  endpointSelector: {matchLabels: {app: db}}
  ingress:
  - fromNodes: [{matchLabels: {node-role.kubernetes.io/control-plane: ""}}]
"#;

/// The field `apiVersion` is misspelt, as in the published example.
const FROM_WORKERS: &str = r"
apiversion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: from-workers}
spec:
  endpointSelector: {matchLabels: {app: db}}
  ingress:
  - fromNodes: [{matchLabels: {role: worker}}]
";

const WORLD_DENIED: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumClusterwideNetworkPolicy
metadata: {name: world-denied}
spec:
  endpointSelector: {}
  ingressDeny:
  - fromEntities: ["world"]
  ingress:
  - fromEntities: ["all"]
"#;

const TO_HOST: &str = r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: to-host}
spec:
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toEntities: [host]
";

const FROM_HOSTS: &str = r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: from-hosts}
spec:
  endpointSelector: {matchLabels: {app: db}}
  ingress:
  - fromEntities: [host, remote-node]
";

const FROM_WORLD: &str = r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: from-world}
spec:
  endpointSelector: {matchLabels: {app: db}}
  ingress:
  - fromEntities: [world]
";

const FQDN: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: fqdn}
spec:
  endpointSelector: {matchLabels: {"any:app": web}}
  egress:
  - toEndpoints: [{matchLabels: {"k8s:io.kubernetes.pod.namespace": bank, "k8s:app": web}}]
    toPorts:
    - ports: [{port: "53", protocol: ANY}]
      rules: {dns: [{matchName: example.com}, {matchPattern: "*.example.com"}]}
  - toFQDNs: [{matchName: example.com}, {matchPattern: "a*b.example.com"}]
    toPorts: [{ports: [{port: "80", protocol: TCP}]}]
"#;

const FQDN_SHORT: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: fqdn-short}
spec:
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toEndpoints: [{matchLabels: {"k8s:io.kubernetes.pod.namespace": bank, "k8s:app": web}}]
    toPorts:
    - ports: [{port: "53", protocol: ANY}]
      rules: {dns: [{matchPattern: "**.cluster.local"}]}
  - toFQDNs: [{matchPattern: "**.example.com"}]
"#;

const AND: &str = r#"[{
    "labels": [{"key": "name", "value": "and"}],
    "endpointSelector": {},
    "ingress": [{
        "fromEndpoints": [{"matchExpressions": [
            {"key": "k8s:io.kubernetes.pod.namespace", "operator": "In", "values": ["shop"]},
            {"key": "k8s:app", "operator": "In", "values": ["db"]}
        ]}]
    }]
}]"#;

const OR: &str = r#"[{
    "labels": [{"key": "name", "value": "or"}],
    "endpointSelector": {},
    "ingress": [{
        "fromEndpoints": [
            {"matchExpressions": [
                {"key": "k8s:io.kubernetes.pod.namespace", "operator": "In", "values": ["shop"]}
            ]},
            {"matchExpressions": [{"key": "k8s:app", "operator": "In", "values": ["web"]}]}
        ]
    }]
}]"#;

/// The operator is in lower case, as in the published examples, which Kubernetes refuses too.
const OPERATOR_IN_LOWER_CASE: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: lower-case}
spec:
  endpointSelector: {}
  ingress:
  - fromEndpoints:
    - matchExpressions:
      - {key: "k8s:io.kubernetes.pod.namespace", operator: "in", values: [shop]}
      - {key: "k8s:app", operator: "in", values: [db]}
"#;

const OPERATOR_WORDS: &str = "spec.ingress[0].fromEndpoints[0].matchExpressions[0].operator: \
    Invalid value: \"in\": not a valid selector operator";

const SPECS: &str = r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: several-specs}
specs:
- description: Databases take packets of what is in front
  endpointSelector: {matchLabels: {app: db}}
  ingress:
  - fromEndpoints: [{matchLabels: {tier: front}}]
";

const REQUIRES: &str = r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: requires}
specs:
- endpointSelector: {matchLabels: {app: db}}
  ingress:
  - fromRequires: [{matchLabels: {tier: front}}]
";

const SERVICE_NAMED: &str = r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: service-named}
spec:
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toServices: [{k8sService: {serviceName: db, namespace: shop}}]
";

const SERVICE_LABELLED: &str = r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: service-labelled}
spec:
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toServices: [{k8sServiceSelector: {selector: {matchLabels: {tier: back}}}}]
";

const SERVICE_EMPTY: &str = r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: service-empty}
spec:
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toServices: []
  - toServices: [{}]
";

const TO_DB: &str = r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: to-db}
spec:
  endpointSelector: {matchLabels: {tier: front}}
  egress:
  - toEndpoints: [{matchLabels: {app: db}}]
";

const CIDR_PORT: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: cidr-port}
spec:
  endpointSelector: {matchLabels: {app: batch}}
  egress:
  - toCIDR: [192.0.2.0/24]
    toPorts: [{ports: [{port: "80", protocol: TCP}]}]
"#;

const FORWARD_PROXY: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: forward-proxy}
spec:
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toCIDRSet: [{cidr: 0.0.0.0/0, except: [192.0.2.0/24, 198.51.100.0/24]}]
    toPorts:
    - ports: [{port: "80", protocol: TCP}]
      listener:
        envoyConfig: {kind: CiliumClusterwideEnvoyConfig, name: proxy}
        name: out
"#;

const FORWARD_PROXY_ALL_PORTS: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: forward-proxy-all-ports}
spec:
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toCIDRSet: [{cidr: 0.0.0.0/0, except: [192.0.2.0/24]}]
    toPorts:
    - ports: [{port: "0", protocol: TCP}]
      listener:
        envoyConfig: {kind: CiliumClusterwideEnvoyConfig, name: proxy}
        name: out
"#;

const LISTENER_BY_NAME: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: listener-by-name}
spec:
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toFQDNs: [{matchName: example.com}]
    toPorts:
    - ports: [{port: "80", protocol: TCP}]
      listener:
        envoyConfig: {kind: CiliumClusterwideEnvoyConfig, name: proxy}
        name: out
"#;

const FROM_INIT_OR_PORT: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: from-init}
spec:
  endpointSelector: {matchLabels: {app: db}}
  ingress:
  - fromEntities: [init]
  - toPorts: [{ports: [{port: "53", protocol: UDP}]}]
"#;

const ECHO: &str = r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: echo}
spec:
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - icmps: [{fields: [{type: 8, family: IPv4}, {type: EchoRequest, family: IPv6}]}]
";

const CLUSTERWIDE_INIT: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumClusterwideNetworkPolicy
metadata: {name: init}
specs:
- endpointSelector: {matchLabels: {"reserved:init": ""}}
  ingress:
  - fromEntities: [host]
  egress:
  - toEntities: [all]
    toPorts: [{ports: [{port: "53", protocol: UDP}]}]
"#;

const DB_PORT: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: db-port}
spec:
  endpointSelector: {matchLabels: {app: db}}
  ingress:
  - fromEndpoints: [{matchLabels: {app: web}}]
    toPorts: [{ports: [{port: "80", protocol: TCP}]}]
"#;

const DB_PORT_CASES: &[Case] = &[
    case(WEB, DB, tcp(80), Passes),
    case(WEB, DB, udp(80), IngressDrops),
    case(WEB, DB, tcp(81), IngressDrops),
    case(BATCH, DB, tcp(80), IngressDrops),
];

const WEB_PORT: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: web-port}
spec:
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toPorts: [{ports: [{port: "80", protocol: TCP}]}]
"#;

const PORT_RANGE: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: port-range}
spec:
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toPorts: [{ports: [{port: "80", endPort: 444, protocol: TCP}]}]
"#;

const SERVER_NAME: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: server-name}
spec:
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toPorts:
    - ports: [{port: "443", protocol: TCP}]
      serverNames: [api.example.com]
"#;

const SEVERAL_RULES: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: several-rules}
spec:
  endpointSelector: {matchLabels: {app: db}}
  ingress:
  - fromEndpoints: [{matchLabels: {app: web}}]
  - toPorts: [{ports: [{port: "80", protocol: TCP}]}]
"#;

/// The published examples, in the order of their paths.
pub const EXAMPLES: &[Example] = &[
    refused(
        "auth/auth.yaml",
        AUTH,
        "spec.egress[0].auth: mutual authentication is not supported",
    ),
    refused(
        "cidr.yaml",
        CIDR_COMBINED,
        "spec.egress[0]: toCIDR and toCIDRSet cannot be combined",
    ),
    in_force(
        "getting-started/cilium_dkr_demo_l3-l4-policy-170817.yaml",
        DB_PORT,
        DB_PORT_CASES,
    ),
    refused(
        "getting-started/cilium_dkr_demo_l7-policy-230817.yaml",
        HTTP_FROM_WEB,
        INGRESS_L7,
    ),
    refused(
        "getting-started/dns-matchname.yaml",
        DNS_MATCH_NAME,
        FQDN_SPECS,
    ),
    refused(
        "getting-started/dns-pattern.yaml",
        DNS_MATCH_PATTERN,
        FQDN_SPECS,
    ),
    refused("getting-started/dns-port.yaml", DNS_MATCH_PORT, FQDN_SPECS),
    refused("getting-started/kafka.yaml", KAFKA_ROLES, INGRESS_L7),
    in_force("getting-started/l3-l4-policy.yaml", DB_PORT, DB_PORT_CASES),
    refused("getting-started/l7-policy.yaml", HTTP_FROM_WEB, INGRESS_L7),
    refused(
        "host/allow-extended-protocols.yaml",
        HOST_PROTOCOLS,
        HOST_POLICY,
    ),
    refused("host/demo-host-policy.yaml", HOST_DEMO, HOST_POLICY),
    refused(
        "host/lock-down-dev-vms-cidr-node.yaml",
        HOST_LOCK_DOWN,
        HOST_POLICY,
    ),
    refused(
        "host/lock-down-dev-vms-remote-node.yaml",
        HOST_LOCK_DOWN,
        HOST_POLICY,
    ),
    refused("host/lock-down-dev-vms.yaml", HOST_LOCK_DOWN, HOST_POLICY),
    refused("host/lock-down-gke.yaml", HOST_LABELLED, HOST_POLICY),
    refused("host/lock-down-ingress.yaml", HOST_LABELLED, HOST_POLICY),
    in_force(
        "kubernetes/clustermesh/cross-cluster-any-namespace-policy.yaml",
        CLUSTER_ANY_NAMESPACE,
        &[
            case(ONE_WEB, TWO_DB, tcp(80), Passes),
            case(ONE_WEB, SHOP_DB, tcp(80), EgressDrops),
            case(ONE_WEB, World("203.0.113.9"), tcp(80), EgressDrops),
            case(SHOP_WEB, SHOP_DB, tcp(80), Passes),
        ],
    ),
    in_force(
        "kubernetes/clustermesh/cross-cluster-policy.yaml",
        CLUSTER_TO_CLUSTER,
        &[
            case(ONE_WEB, TWO_DB, tcp(80), Passes),
            case(ONE_WEB, SHOP_DB, tcp(80), EgressDrops),
            case(SHOP_WEB, SHOP_DB, tcp(80), Passes),
        ],
    ),
    in_force(
        "kubernetes/clusterwide/clusterscope-policy.yaml",
        CLUSTERWIDE,
        &[
            case(SHOP_WEB, SHOP_DB, tcp(80), Passes),
            case(BANK_WEB, SHOP_DB, udp(53), Passes),
            case(SHOP_DB, TWO_DB, tcp(80), IngressDrops),
            // Peers of a clusterwide policy are in a namespace.
            case(WEB, DB, tcp(80), IngressDrops),
        ],
    ),
    refused(
        "kubernetes/clusterwide/health.yaml",
        CLUSTERWIDE_HEALTH,
        "spec.endpointSelector: policy does not apply to reserved:health",
    ),
    in_force(
        "kubernetes/clusterwide/wildcard-from-endpoints.yaml",
        CLUSTERWIDE_WILDCARD,
        &[
            case(SHOP_WEB, SHOP_DB, udp(53), Passes),
            case(BANK_WEB, SHOP_DB, udp(53), Passes),
            case(BANK_WEB, SHOP_DB, tcp(53), IngressDrops),
            case(WEB, SHOP_DB, udp(53), IngressDrops),
            case(World("203.0.113.9"), SHOP_DB, udp(53), IngressDrops),
        ],
    ),
    in_force(
        "kubernetes/namespace/isolate-namespaces.yaml",
        NAMESPACES_APART,
        &[
            case(SHOP_WEB, SHOP_DB, tcp(80), Passes),
            case(BANK_WEB, SHOP_DB, tcp(80), IngressDrops),
            case(SHOP_WEB, BANK_WEB, tcp(80), IngressDrops),
            case(Host, SHOP_WEB, tcp(80), IngressDrops),
        ],
    ),
    in_force(
        "kubernetes/namespace/kubedns-policy.yaml",
        QUESTIONS,
        &[
            case(SHOP_WEB, BANK_WEB, udp(53), Passes),
            case(SHOP_WEB, BANK_WEB, tcp(53), EgressDrops),
            case(SHOP_WEB, SHOP_DB, udp(53), EgressDrops),
        ],
    ),
    in_force(
        "kubernetes/namespace/namespace-labels-policy.yaml",
        NAMESPACE_LABELS,
        &[
            case(SHOP_WEB, SHOP_DB, tcp(80), Passes),
            case(BANK_WEB, SHOP_DB, tcp(80), IngressDrops),
            case(SHOP_DB, SHOP_WEB, tcp(80), Passes),
            case(SHOP_DB, BANK_WEB, tcp(80), EgressDrops),
        ],
    ),
    in_force(
        "kubernetes/namespace/namespace-policy.yaml",
        OTHER_NAMESPACE,
        &[
            case(BANK_WEB, SHOP_DB, tcp(80), Passes),
            case(SHOP_WEB, SHOP_DB, tcp(80), IngressDrops),
        ],
    ),
    in_force(
        "kubernetes/serviceaccount/serviceaccount-policy.json",
        SERVICE_ACCOUNT,
        &[
            case(ONE_WEB, TWO_DB, tcp(80), Passes),
            case(SHOP_WEB, TWO_DB, tcp(80), IngressDrops),
            case(SHOP_WEB, SHOP_DB, tcp(80), Passes),
        ],
    ),
    refused(
        "kubernetes/serviceaccount/serviceaccount-policy.yaml",
        SERVICE_ACCOUNT_HTTP,
        INGRESS_L7,
    ),
    in_force(
        "l3/cidr/cidr.yaml",
        CIDRS,
        &[
            case(WEB, World("192.0.2.1"), tcp(80), Passes),
            case(WEB, World("198.51.100.63"), udp(53), Passes),
            case(WEB, World("198.51.100.64"), udp(53), EgressDrops),
            case(WEB, World("203.0.113.9"), tcp(80), EgressDrops),
            case(WEB, DB, tcp(80), EgressDrops),
        ],
    ),
    in_force(
        "l3/egress-allow-all/egress-allow-all.yaml",
        EGRESS_ALL,
        &[
            case(SHOP_WEB, SHOP_DB, tcp(80), Passes),
            case(SHOP_WEB, BANK_WEB, tcp(80), EgressDrops),
            case(SHOP_WEB, World("203.0.113.9"), tcp(80), EgressDrops),
        ],
    ),
    in_force(
        "l3/egress-default-deny/egress-default-deny.yaml",
        EGRESS_NONE,
        &[
            case(WEB, DB, tcp(80), Passes),
            case(DB, WEB, tcp(80), EgressDrops),
            case(DB, World("203.0.113.9"), udp(53), EgressDrops),
        ],
    ),
    in_force(
        "l3/egress-deny/egress-deny.yaml",
        EGRESS_DENY,
        &[
            case(WEB, BATCH, tcp(80), Passes),
            case(WEB, World("203.0.113.9"), tcp(80), Passes),
            case(WEB, DB, tcp(80), EgressDenies),
        ],
    ),
    in_force(
        "l3/entities/apiserver.yaml",
        TO_API_SERVERS,
        &[
            // Without a cluster there are no API servers.
            case(WEB, World("203.0.113.9"), tcp(443), EgressDrops),
            case(WEB, RemoteNode, tcp(6443), EgressDrops),
            case(DB, WEB, tcp(80), Passes),
        ],
    ),
    refused(
        "l3/entities/customnodes.yaml",
        FROM_CONTROL_PLANE,
        "spec.ingress[0].fromNodes: matching by node labels needs a Kubernetes cluster",
    ),
    refused(
        "l3/entities/from_nodes.yaml",
        FROM_WORKERS,
        "apiVersion: missing",
    ),
    in_force(
        "l3/entities/from_world_deny.yaml",
        WORLD_DENIED,
        &[
            case(WEB, DB, tcp(80), Passes),
            case(Host, DB, tcp(80), Passes),
            case(World("203.0.113.9"), DB, tcp(80), IngressDenies),
            case(World("2001:db8::1"), WEB, tcp(80), IngressDenies),
        ],
    ),
    in_force(
        "l3/entities/host.yaml",
        TO_HOST,
        &[
            case(WEB, Host, tcp(80), Passes),
            case(WEB, RemoteNode, tcp(80), EgressDrops),
            case(WEB, DB, tcp(80), EgressDrops),
        ],
    ),
    in_force(
        "l3/entities/nodes.yaml",
        FROM_HOSTS,
        &[
            case(Host, DB, tcp(80), Passes),
            case(RemoteNode, DB, tcp(80), Passes),
            case(WEB, DB, tcp(80), IngressDrops),
            case(World("203.0.113.9"), DB, tcp(80), IngressDrops),
        ],
    ),
    in_force(
        "l3/entities/world.yaml",
        FROM_WORLD,
        &[
            case(World("203.0.113.9"), DB, tcp(80), Passes),
            case(WEB, DB, tcp(80), IngressDrops),
            case(RemoteNode, DB, tcp(80), IngressDrops),
        ],
    ),
    refused("l3/fqdn/fqdn-cascade.yaml", FQDN, EGRESS_L7),
    refused("l3/fqdn/fqdn-short.yaml", FQDN_SHORT, EGRESS_L7),
    refused("l3/fqdn/fqdn.yaml", FQDN, EGRESS_L7),
    refused(
        "l3/host/host-policy.yaml",
        HOST_DESCRIBED,
        ": description: unknown field",
    ),
    in_force(
        "l3/ingress-allow-all/ingress-allow-all.yaml",
        INGRESS_ALL,
        &[
            case(SHOP_WEB, SHOP_DB, tcp(80), Passes),
            case(BANK_WEB, SHOP_DB, tcp(80), IngressDrops),
            case(World("203.0.113.9"), SHOP_DB, tcp(80), IngressDrops),
        ],
    ),
    in_force(
        "l3/match-expressions/and-statement.json",
        AND,
        &[
            case(SHOP_DB, WEB, tcp(80), Passes),
            case(SHOP_WEB, WEB, tcp(80), IngressDrops),
            case(DB, WEB, tcp(80), IngressDrops),
        ],
    ),
    refused(
        "l3/match-expressions/and-statement.yaml",
        OPERATOR_IN_LOWER_CASE,
        OPERATOR_WORDS,
    ),
    in_force(
        "l3/match-expressions/or-statement.json",
        OR,
        &[
            case(SHOP_DB, WEB, tcp(80), Passes),
            case(BANK_WEB, WEB, tcp(80), Passes),
            case(BATCH, WEB, tcp(80), IngressDrops),
            // Its label does not come from Kubernetes.
            case(WEB, DB, tcp(80), IngressDrops),
        ],
    ),
    refused(
        "l3/match-expressions/or-statement.yaml",
        OPERATOR_IN_LOWER_CASE,
        OPERATOR_WORDS,
    ),
    in_force(
        "l3/requires/endpoints.yaml",
        SPECS,
        &[
            case(WEB, DB, tcp(80), Passes),
            case(BATCH, DB, tcp(80), IngressDrops),
        ],
    ),
    refused(
        "l3/requires/requires.yaml",
        REQUIRES,
        "specs[0].ingress[0].fromRequires: a requirement on top of other rules is not supported",
    ),
    refused("l3/service/service-labels.yaml", SERVICE_LABELLED, SERVICES),
    refused("l3/service/service.yaml", SERVICE_NAMED, SERVICES),
    in_force(
        "l3/simple/l3.yaml",
        DB_FROM_WEB,
        &[
            case(WEB, DB, tcp(80), Passes),
            case(BATCH, DB, tcp(80), IngressDrops),
        ],
    ),
    in_force(
        "l3/simple/l3_egress.yaml",
        TO_DB,
        &[
            case(WEB, DB, tcp(80), Passes),
            case(WEB, BATCH, tcp(80), EgressDrops),
        ],
    ),
    in_force(
        "l4/cidr_l4_combined.yaml",
        CIDR_PORT,
        &[
            case(BATCH, World("192.0.2.1"), tcp(80), Passes),
            case(BATCH, World("192.0.2.1"), tcp(443), EgressDrops),
            case(BATCH, World("192.0.3.1"), tcp(80), EgressDrops),
        ],
    ),
    refused("l4/envoy_forward_proxy.yaml", FORWARD_PROXY, LISTENER),
    refused(
        "l4/envoy_listener_redirect.yaml",
        LISTENER_BY_NAME,
        "spec.egress[0].toFQDNs: matching by DNS name is not supported",
    ),
    in_force(
        "l4/from_init.yaml",
        FROM_INIT_OR_PORT,
        &[
            case(NEW, DB, tcp(80), Passes),
            case(WEB, DB, udp(53), Passes),
            case(WEB, DB, tcp(80), IngressDrops),
        ],
    ),
    in_force(
        "l4/icmp.yaml",
        ECHO,
        &[
            case(WEB, DB, icmp(8), Passes),
            case(WEB, DB, icmpv6(128), Passes),
            case(WEB, DB, icmp(13), EgressDrops),
            case(WEB, DB, tcp(8), EgressDrops),
        ],
    ),
    in_force(
        "l4/init.yaml",
        CLUSTERWIDE_INIT,
        &[
            case(Host, NEW, tcp(80), Passes),
            case(WEB, NEW, tcp(80), IngressDrops),
            case(NEW, DB, udp(53), Passes),
            case(NEW, DB, tcp(53), EgressDrops),
        ],
    ),
    in_force("l4/l3_l4_combined.yaml", DB_PORT, DB_PORT_CASES),
    in_force(
        "l4/l4.yaml",
        WEB_PORT,
        &[
            case(WEB, DB, tcp(80), Passes),
            case(WEB, World("203.0.113.9"), tcp(80), Passes),
            case(WEB, DB, udp(80), EgressDrops),
            case(WEB, DB, tcp(443), EgressDrops),
        ],
    ),
    in_force(
        "l4/l4_port_range.yaml",
        PORT_RANGE,
        &[
            case(WEB, DB, tcp(79), EgressDrops),
            case(WEB, DB, tcp(80), Passes),
            case(WEB, DB, tcp(444), Passes),
            case(WEB, DB, tcp(445), EgressDrops),
        ],
    ),
    refused(
        "l4/l4_sni.yaml",
        SERVER_NAME,
        "spec.egress[0].toPorts[0].serverNames: matching by TLS server name is not supported",
    ),
    in_force(
        "l4/multi_rule.yaml",
        SEVERAL_RULES,
        &[
            case(WEB, DB, udp(53), Passes),
            case(BATCH, DB, tcp(80), Passes),
            case(BATCH, DB, tcp(81), IngressDrops),
        ],
    ),
    refused(
        "l4/wildcard_port_listener.yaml",
        FORWARD_PROXY_ALL_PORTS,
        LISTENER,
    ),
    refused("l7/dns/dns-upgrade.yaml", FQDN, EGRESS_L7),
    refused("l7/dns/dns-visibility.yaml", FQDN, EGRESS_L7),
    refused("l7/dns/dns.yaml", FQDN, EGRESS_L7),
    refused("l7/http/http.yaml", HTTP_HEADERS, INGRESS_L7),
    refused(
        "l7/http/l7_multi.yaml",
        HTTP_SPECS,
        "specs[0].ingress[0].toPorts[0].rules: matching inside connections (L7) is not supported",
    ),
    refused("l7/http/simple/l7.yaml", HTTP_FROM_WEB, INGRESS_L7),
    refused("l7/kafka/kafka-role.yaml", KAFKA_ROLES, INGRESS_L7),
    refused("l7/kafka/kafka.yaml", KAFKA_KEYS, INGRESS_L7),
    refused(
        "service-empty.yaml",
        SERVICE_EMPTY,
        "spec.egress[1].toServices[0]: expected one of k8sService and k8sServiceSelector",
    ),
];
