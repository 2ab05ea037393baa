//! The table of policy cases: policy documents, packets, and the expected outcome of each packet. The expectations are
//! derived by hand from the documents.

use health_model::policy::{L4, PolicyMode, Protocol};

/// An endpoint that exists in all scenarios.
#[derive(Clone, Copy, Debug)]
pub struct Endpoint {
    /// The endpoint's name in cases.
    pub name: &'static str,
    /// The endpoint's labels; empty if they are not known yet.
    pub labels: &'static [&'static str],
}

/// The endpoints of all scenarios.
pub const ENDPOINTS: [Endpoint; 9] = [
    Endpoint {
        name: "web",
        labels: &["app=web", "tier=front"],
    },
    Endpoint {
        name: "db",
        labels: &["app=db", "tier=back"],
    },
    Endpoint {
        name: "batch",
        labels: &["app=batch"],
    },
    Endpoint {
        name: "new",
        labels: &[],
    },
    Endpoint {
        name: "shop-web",
        labels: &[
            "k8s:app=web",
            "k8s:io.kubernetes.pod.namespace=shop",
            "k8s:io.cilium.k8s.namespace.labels.stage=prod",
        ],
    },
    Endpoint {
        name: "shop-db",
        labels: &[
            "k8s:app=db",
            "k8s:io.kubernetes.pod.namespace=shop",
            "k8s:io.cilium.k8s.namespace.labels.stage=prod",
        ],
    },
    Endpoint {
        name: "bank-web",
        labels: &[
            "k8s:app=web",
            "k8s:io.kubernetes.pod.namespace=bank",
            "k8s:io.cilium.k8s.namespace.labels.stage=test",
        ],
    },
    Endpoint {
        name: "one-web",
        labels: &[
            "k8s:app=web",
            "k8s:io.kubernetes.pod.namespace=shop",
            "k8s:io.cilium.k8s.policy.cluster=one",
            "k8s:io.cilium.k8s.policy.serviceaccount=web",
        ],
    },
    Endpoint {
        name: "two-db",
        labels: &[
            "k8s:app=db",
            "k8s:io.kubernetes.pod.namespace=shop",
            "k8s:io.cilium.k8s.policy.cluster=two",
            "k8s:io.cilium.k8s.policy.serviceaccount=db",
        ],
    },
];

/// One end of a packet's path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// One of the [`ENDPOINTS`], by name.
    Endpoint(&'static str),
    /// The endpoints' host.
    Host,
    /// Another host of the cluster.
    RemoteNode,
    /// An address outside the cluster.
    World(&'static str),
}

/// The outcome of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The packet arrives.
    Passes,
    /// The source's egress drops it because no rule allows it.
    EgressDrops,
    /// The source's egress drops it because a rule denies it.
    EgressDenies,
    /// The destination's ingress drops it because no rule allows it.
    IngressDrops,
    /// The destination's ingress drops it because a rule denies it.
    IngressDenies,
}

/// A packet and its expected outcome.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// The source of the packet.
    pub from: End,
    /// The destination of the packet.
    pub to: End,
    /// Protocol and destination port, or ICMP type.
    pub l4: L4,
    /// The expected outcome.
    pub outcome: Outcome,
}

/// Policies that apply together, and packets to which they apply.
#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    /// What the scenario shows.
    pub name: &'static str,
    /// When policy is enforced.
    pub mode: PolicyMode,
    /// Whether the host may reach its endpoints without a rule.
    pub allow_localhost: bool,
    /// The policy documents to import.
    pub documents: &'static [&'static str],
    /// The packets.
    pub cases: &'static [Case],
}

use End::{Host, RemoteNode, World};
use Outcome::{EgressDenies, EgressDrops, IngressDenies, IngressDrops, Passes};

pub(super) const WEB: End = End::Endpoint("web");
pub(super) const DB: End = End::Endpoint("db");
pub(super) const BATCH: End = End::Endpoint("batch");
pub(super) const NEW: End = End::Endpoint("new");
pub(super) const SHOP_WEB: End = End::Endpoint("shop-web");
pub(super) const SHOP_DB: End = End::Endpoint("shop-db");
pub(super) const BANK_WEB: End = End::Endpoint("bank-web");
pub(super) const ONE_WEB: End = End::Endpoint("one-web");
pub(super) const TWO_DB: End = End::Endpoint("two-db");

pub(super) const fn case(from: End, to: End, l4: L4, outcome: Outcome) -> Case {
    Case {
        from,
        to,
        l4,
        outcome,
    }
}

pub(super) const fn tcp(port: u16) -> L4 {
    L4::new(Protocol::TCP, port)
}

pub(super) const fn udp(port: u16) -> L4 {
    L4::new(Protocol::UDP, port)
}

const fn sctp(port: u16) -> L4 {
    L4::new(Protocol::SCTP, port)
}

pub(super) const fn icmp(kind: u16) -> L4 {
    L4::new(Protocol::ICMP, kind)
}

pub(super) const fn icmpv6(kind: u16) -> L4 {
    L4::new(Protocol::ICMPV6, kind)
}

const INIT: &str = r#"
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

const FROM_INIT: &str = r#"[{
    "labels": [{"key": "name", "value": "from-init"}],
    "endpointSelector": {"matchLabels": {"app": "db"}},
    "ingress": [{
        "fromEntities": ["init"],
        "toPorts": [{"ports": [{"port": "53", "protocol": "UDP"}]}]
    }]
}]"#;

pub(super) const DB_FROM_WEB: &str = r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: db-from-web}
spec:
  endpointSelector: {matchLabels: {app: db}}
  ingress:
  - fromEndpoints: [{matchLabels: {app: web}}]
";

const DB_PORTS: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: db-ports}
spec:
  endpointSelector: {matchLabels: {app: db}}
  ingress:
  - fromEndpoints: [{matchLabels: {app: web}}]
    toPorts:
    - ports:
      - {port: "5432", protocol: TCP}
      - {port: "8000", endPort: 8010, protocol: TCP}
      - {port: "53", protocol: ANY}
  - fromEndpoints: [{matchLabels: {app: web}}]
    icmps: [{fields: [{type: EchoRequest}, {type: 128, family: IPv6}]}]
  - toPorts: [{ports: [{port: "9100", protocol: TCP}]}]
"#;

const DB_DENY: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: db-deny}
spec:
  endpointSelector: {matchLabels: {app: db}}
  ingressDeny:
  - toPorts: [{ports: [{port: "22", protocol: TCP}]}]
  - fromEndpoints: [{matchLabels: {app: batch}}]
  ingress:
  - fromEntities: [all]
  - fromEndpoints: [{matchLabels: {app: web}}]
    toPorts: [{ports: [{port: "22", protocol: TCP}]}]
  - fromEndpoints: [{matchLabels: {app: batch}}]
    toPorts: [{ports: [{port: "5432", protocol: TCP}]}]
"#;

const WEB_EGRESS: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: web-egress}
spec:
  endpointSelector: {matchExpressions: [{key: tier, operator: In, values: [front]}]}
  egress:
  - toEndpoints: [{matchLabels: {app: db}}]
    toPorts: [{ports: [{port: "5432", protocol: TCP}]}]
  - toCIDRSet: [{cidr: 192.0.2.0/24, except: [192.0.2.128/25]}]
  - toCIDR: ["2001:db8::/32"]
    toPorts: [{ports: [{port: "443", protocol: TCP}]}]
  egressDeny:
  - toCIDR: [192.0.2.66/32]
"#;

const DB_ALL_OF_IPV4: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: db-v4}
spec:
  endpointSelector: {matchLabels: {app: db}}
  ingress:
  - fromCIDR: [0.0.0.0/0]
"#;

const DB_ENTITIES: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: db-entities}
spec:
  endpointSelector: {matchLabels: {app: db}}
  ingress:
  - fromEntities: [cluster]
    toPorts: [{ports: [{port: "80"}]}]
  - fromEntities: [world]
    toPorts: [{ports: [{port: "443"}]}]
  - fromEntities: [remote-node]
    toPorts: [{ports: [{port: "4240"}]}]
"#;

const NO_SSH: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: no-ssh}
spec:
  enableDefaultDeny: {ingress: false}
  endpointSelector: {matchLabels: {app: db}}
  ingressDeny:
  - fromEndpoints: [{matchExpressions: [{key: tier, operator: Exists}]}]
    toPorts: [{ports: [{port: "22", protocol: TCP}]}]
"#;

const DENY_ALL: &str = r#"[{
    "labels": ["name=deny-all"],
    "endpointSelector": {"matchLabels": {"app": "db"}},
    "ingress": [{}],
    "egress": [{}]
}]"#;

const SHOP: &str = r"
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: db, namespace: shop}
spec:
  podSelector: {matchLabels: {app: db}}
  policyTypes: [Ingress, Egress]
  ingress:
  - from:
    - podSelector: {matchLabels: {app: web}}
    ports: [{port: 5432}]
  - from:
    - namespaceSelector: {matchLabels: {stage: test}}
    - ipBlock: {cidr: 198.51.100.0/24, except: [198.51.100.64/26]}
    ports: [{port: 9000, endPort: 9009, protocol: UDP}]
";

const SHOP_CNP: &str = r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: web, namespace: shop}
spec:
  endpointSelector: {matchLabels: {app: web}}
  ingress:
  - fromEndpoints: [{}]
";

/// The table of scenarios.
pub const SCENARIOS: [Scenario; 18] = [
    Scenario {
        name: "without rules everything passes",
        mode: PolicyMode::Default,
        allow_localhost: false,
        documents: &[],
        cases: &[
            case(WEB, DB, tcp(80), Passes),
            case(World("203.0.113.9"), DB, udp(53), Passes),
            case(DB, World("203.0.113.9"), icmp(8), Passes),
            case(NEW, DB, tcp(80), Passes),
            case(Host, NEW, tcp(80), Passes),
        ],
    },
    Scenario {
        name: "with enforcement always nothing passes without a rule",
        mode: PolicyMode::Always,
        allow_localhost: false,
        documents: &[],
        cases: &[
            case(WEB, DB, tcp(80), EgressDrops),
            case(Host, DB, tcp(80), IngressDrops),
            case(World("203.0.113.9"), DB, icmp(8), IngressDrops),
            case(DB, Host, udp(53), EgressDrops),
            case(NEW, World("203.0.113.9"), udp(53), EgressDrops),
            case(Host, NEW, tcp(80), IngressDrops),
        ],
    },
    Scenario {
        name: "the local host may reach its endpoints if that is set",
        mode: PolicyMode::Always,
        allow_localhost: true,
        documents: &[DB_DENY],
        cases: &[
            case(Host, WEB, tcp(80), Passes),
            case(RemoteNode, WEB, tcp(80), IngressDrops),
            case(WEB, Host, tcp(80), EgressDrops),
            case(Host, DB, tcp(22), IngressDenies),
        ],
    },
    Scenario {
        name: "with enforcement never rules do nothing",
        mode: PolicyMode::Never,
        allow_localhost: false,
        documents: &[DB_FROM_WEB, DB_DENY, WEB_EGRESS],
        cases: &[
            case(BATCH, DB, tcp(22), Passes),
            case(WEB, BATCH, tcp(80), Passes),
            case(World("203.0.113.9"), DB, tcp(22), Passes),
        ],
    },
    Scenario {
        name: "a rule of endpoints alone holds for every protocol",
        mode: PolicyMode::Default,
        allow_localhost: false,
        documents: &[DB_FROM_WEB],
        cases: &[
            case(WEB, DB, tcp(80), Passes),
            case(WEB, DB, udp(65_535), Passes),
            case(WEB, DB, sctp(7), Passes),
            case(WEB, DB, icmp(8), Passes),
            case(BATCH, DB, tcp(80), IngressDrops),
            case(NEW, DB, tcp(80), IngressDrops),
            case(Host, DB, tcp(80), IngressDrops),
            case(World("203.0.113.9"), DB, icmp(8), IngressDrops),
            case(DB, BATCH, tcp(80), Passes),
            case(BATCH, WEB, tcp(80), Passes),
        ],
    },
    Scenario {
        name: "rules with ports hold for those alone",
        mode: PolicyMode::Default,
        allow_localhost: false,
        documents: &[DB_PORTS],
        cases: &[
            case(WEB, DB, tcp(5432), Passes),
            case(WEB, DB, udp(5432), IngressDrops),
            case(WEB, DB, tcp(5433), IngressDrops),
            case(WEB, DB, tcp(7999), IngressDrops),
            case(WEB, DB, tcp(8000), Passes),
            case(WEB, DB, tcp(8010), Passes),
            case(WEB, DB, tcp(8011), IngressDrops),
            case(WEB, DB, tcp(53), Passes),
            case(WEB, DB, udp(53), Passes),
            case(WEB, DB, sctp(53), Passes),
            case(WEB, DB, icmp(8), Passes),
            case(WEB, DB, icmp(13), IngressDrops),
            case(WEB, DB, icmpv6(128), Passes),
            case(BATCH, DB, tcp(5432), IngressDrops),
            case(BATCH, DB, tcp(9100), Passes),
            case(World("203.0.113.9"), DB, tcp(9100), Passes),
            case(World("203.0.113.9"), DB, udp(9100), IngressDrops),
        ],
    },
    Scenario {
        name: "what one rule denies no other allows, however exactly it says so",
        mode: PolicyMode::Default,
        allow_localhost: false,
        documents: &[DB_DENY],
        cases: &[
            case(WEB, DB, tcp(80), Passes),
            case(WEB, DB, tcp(22), IngressDenies),
            case(WEB, DB, udp(22), Passes),
            case(BATCH, DB, tcp(5432), IngressDenies),
            case(BATCH, DB, icmp(8), IngressDenies),
            case(World("203.0.113.9"), DB, tcp(22), IngressDenies),
            case(World("203.0.113.9"), DB, tcp(23), Passes),
        ],
    },
    Scenario {
        name: "egress goes to the endpoints and addresses that are listed",
        mode: PolicyMode::Default,
        allow_localhost: false,
        documents: &[WEB_EGRESS],
        cases: &[
            case(WEB, DB, tcp(5432), Passes),
            case(WEB, DB, tcp(80), EgressDrops),
            case(WEB, BATCH, tcp(5432), EgressDrops),
            case(WEB, World("192.0.2.1"), udp(123), Passes),
            case(WEB, World("192.0.2.127"), tcp(80), Passes),
            case(WEB, World("192.0.2.128"), tcp(80), EgressDrops),
            case(WEB, World("192.0.2.66"), tcp(80), EgressDenies),
            case(WEB, World("192.0.3.1"), tcp(80), EgressDrops),
            case(WEB, World("2001:db8::1"), tcp(443), Passes),
            case(WEB, World("2001:db8::1"), tcp(80), EgressDrops),
            case(WEB, World("2001:db9::1"), tcp(443), EgressDrops),
            case(BATCH, World("192.0.3.1"), tcp(80), Passes),
            case(World("192.0.3.1"), WEB, tcp(80), Passes),
        ],
    },
    Scenario {
        name: "all addresses of one family are not those of the other",
        mode: PolicyMode::Default,
        allow_localhost: false,
        documents: &[DB_ALL_OF_IPV4],
        cases: &[
            case(World("203.0.113.9"), DB, tcp(80), Passes),
            case(World("2001:db8::1"), DB, tcp(80), IngressDrops),
            case(WEB, DB, tcp(80), IngressDrops),
            case(Host, DB, tcp(80), IngressDrops),
        ],
    },
    Scenario {
        name: "entities are the world, the cluster and its hosts",
        mode: PolicyMode::Default,
        allow_localhost: false,
        documents: &[DB_ENTITIES],
        cases: &[
            case(WEB, DB, tcp(80), Passes),
            case(NEW, DB, tcp(80), Passes),
            case(Host, DB, tcp(80), Passes),
            case(World("203.0.113.9"), DB, tcp(80), IngressDrops),
            case(World("2001:db8::1"), DB, tcp(443), Passes),
            case(WEB, DB, tcp(443), IngressDrops),
            case(RemoteNode, DB, tcp(4240), Passes),
            case(Host, DB, tcp(4240), IngressDrops),
        ],
    },
    Scenario {
        name: "without the default deny only what is denied is dropped",
        mode: PolicyMode::Default,
        allow_localhost: false,
        documents: &[NO_SSH],
        cases: &[
            case(WEB, DB, tcp(22), IngressDenies),
            case(WEB, DB, tcp(80), Passes),
            case(BATCH, DB, tcp(22), Passes),
            case(World("203.0.113.9"), DB, tcp(22), Passes),
        ],
    },
    Scenario {
        name: "one rule with the default deny is enough to have it",
        mode: PolicyMode::Default,
        allow_localhost: false,
        documents: &[NO_SSH, DB_FROM_WEB],
        cases: &[
            case(WEB, DB, tcp(22), IngressDenies),
            case(WEB, DB, tcp(80), Passes),
            case(BATCH, DB, tcp(80), IngressDrops),
        ],
    },
    Scenario {
        name: "empty rules deny all by default",
        mode: PolicyMode::Default,
        allow_localhost: false,
        documents: &[DENY_ALL],
        cases: &[
            case(WEB, DB, tcp(80), IngressDrops),
            case(DB, WEB, tcp(80), EgressDrops),
            case(DB, World("203.0.113.9"), icmp(8), EgressDrops),
            case(WEB, BATCH, tcp(80), Passes),
        ],
    },
    Scenario {
        name: "endpoints without labels yet are reached by the host and ask for names",
        mode: PolicyMode::Default,
        allow_localhost: false,
        documents: &[INIT],
        cases: &[
            case(Host, NEW, tcp(80), Passes),
            case(WEB, NEW, tcp(80), IngressDrops),
            case(World("203.0.113.9"), NEW, icmp(8), IngressDrops),
            case(NEW, World("203.0.113.9"), udp(53), Passes),
            case(NEW, DB, udp(53), Passes),
            case(NEW, DB, tcp(53), EgressDrops),
            case(WEB, DB, tcp(80), Passes),
        ],
    },
    Scenario {
        name: "rules of endpoints without labels yet hold with enforcement never, too",
        mode: PolicyMode::Never,
        allow_localhost: false,
        documents: &[INIT, DB_FROM_WEB],
        cases: &[
            case(Host, NEW, tcp(80), Passes),
            case(WEB, NEW, tcp(80), IngressDrops),
            case(NEW, DB, tcp(53), EgressDrops),
            case(NEW, DB, udp(53), Passes),
        ],
    },
    Scenario {
        name: "a service takes questions of endpoints without labels yet",
        mode: PolicyMode::Always,
        allow_localhost: false,
        documents: &[INIT, FROM_INIT],
        cases: &[
            case(NEW, DB, udp(53), Passes),
            case(NEW, WEB, udp(53), IngressDrops),
            case(Host, DB, udp(53), IngressDrops),
            case(Host, NEW, tcp(80), Passes),
        ],
    },
    Scenario {
        name: "a NetworkPolicy is of its namespace",
        mode: PolicyMode::Default,
        allow_localhost: false,
        documents: &[SHOP],
        cases: &[
            case(SHOP_WEB, SHOP_DB, tcp(5432), Passes),
            case(SHOP_WEB, SHOP_DB, udp(5432), IngressDrops),
            case(BANK_WEB, SHOP_DB, tcp(5432), IngressDrops),
            case(BANK_WEB, SHOP_DB, udp(9009), Passes),
            case(BANK_WEB, SHOP_DB, udp(9010), IngressDrops),
            case(SHOP_WEB, SHOP_DB, udp(9000), IngressDrops),
            case(World("198.51.100.63"), SHOP_DB, udp(9000), Passes),
            case(World("198.51.100.64"), SHOP_DB, udp(9000), IngressDrops),
            case(SHOP_DB, World("198.51.100.63"), udp(9000), EgressDrops),
            case(WEB, DB, tcp(80), Passes),
        ],
    },
    Scenario {
        name: "a namespaced policy of Cilium selects peers of its namespace",
        mode: PolicyMode::Default,
        allow_localhost: false,
        documents: &[SHOP_CNP],
        cases: &[
            case(SHOP_DB, SHOP_WEB, tcp(80), Passes),
            case(BANK_WEB, SHOP_WEB, tcp(80), IngressDrops),
            case(WEB, SHOP_WEB, tcp(80), IngressDrops),
            case(World("203.0.113.9"), SHOP_WEB, tcp(80), IngressDrops),
            case(SHOP_WEB, BANK_WEB, tcp(80), Passes),
            case(BANK_WEB, WEB, tcp(80), Passes),
        ],
    },
];
