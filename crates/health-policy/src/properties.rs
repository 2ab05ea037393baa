//! With random rules and identities, checks that the compiled policy decides like the plain evaluator.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use health_model::identity::Identity;
use health_model::labels::LabelSet;
use health_model::policy::{Direction, L4, PolicyMode, Protocol};
use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use serde_json::{Value, json};

use super::{CompiledPolicy, Peer, PolicySettings, Repository, Verdict};

/// Ports near which decisions are likely to change, and where prefixes are awkward.
const PORTS: [u16; 10] = [1, 22, 53, 80, 81, 443, 1024, 32_767, 32_768, 65_535];
const CIDRS: [&str; 7] = [
    "0.0.0.0/0",
    "10.0.0.0/8",
    "10.1.0.0/16",
    "10.1.2.3/32",
    "::/0",
    "fd00::/8",
    "fd00:1::/32",
];

fn port() -> impl Strategy<Value = u16> {
    prop_oneof![4 => select(&PORTS[..]), 1 => 1..u16::MAX]
}

/// Names of ports: one that pods number differently, one with several ports, and one that no pod has.
const NAMES: [&str; 3] = ["web", "dns", "none"];

fn ports() -> impl Strategy<Value = Value> {
    let protocol = select(&["TCP", "UDP", "SCTP", "ANY"][..]);
    let one =
        (port(), port(), any::<bool>(), protocol.clone()).prop_map(|(a, b, is_range, protocol)| {
            if is_range {
                json!({"port": a.min(b).to_string(), "endPort": a.max(b), "protocol": protocol})
            } else {
                json!({"port": a.to_string(), "protocol": protocol})
            }
        });
    let named = (select(&NAMES[..]), protocol)
        .prop_map(|(name, protocol)| json!({"port": name, "protocol": protocol}));
    let all = Just(json!({"port": "0", "protocol": "TCP"}));
    let list = prop::collection::vec(prop_oneof![8 => one, 4 => named, 1 => all], 1..4);
    list.prop_map(|list| json!([{"ports": list}]))
}

fn icmps() -> impl Strategy<Value = Value> {
    let field = (select(&["IPv4", "IPv6"][..]), any::<u8>())
        .prop_map(|(family, number)| json!({"family": family, "type": number}));
    prop::collection::vec(field, 1..3).prop_map(|fields| json!([{"fields": fields}]))
}

fn selector() -> impl Strategy<Value = Value> {
    let value = select(&["a", "b", "c"][..]);
    let operator = select(&["In", "NotIn", "Exists", "DoesNotExist"][..]);
    prop_oneof![
        1 => Just(json!({})),
        3 => value.clone().prop_map(|value| json!({"matchLabels": {"app": value}})),
        1 => value.clone().prop_map(|value| json!({"matchLabels": {"k8s:tier": value}})),
        2 => (operator, value).prop_map(|(operator, value)| {
            let values = if operator.ends_with("In") { json!([value]) } else { json!([]) };
            json!({"matchExpressions": [{"key": "tier", "operator": operator, "values": values}]})
        }),
    ]
}

/// A field's name without `from` or `to`, and the field's value.
fn peers() -> impl Strategy<Value = Option<(&'static str, Value)>> {
    let entities = [
        "all",
        "world",
        "host",
        "cluster",
        "init",
        "health",
        "remote-node",
        "none",
    ];
    let entities = prop::collection::vec(select(entities.to_vec()), 0..3);
    let cidrs = prop::collection::vec(select(&CIDRS[..]), 1..3);
    let cidr_set = prop_oneof![
        Just(json!([{"cidr": "0.0.0.0/0", "except": ["10.1.0.0/16"]}])),
        Just(json!([{"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16", "10.1.2.3/32"]}])),
        Just(json!([{"cidr": "::/0", "except": ["fd00::/8"]}, {"cidr": "fd00:1::/32"}])),
    ];
    prop_oneof![
        2 => Just(None),
        4 => prop::collection::vec(selector(), 0..3).prop_map(|l| Some(("Endpoints", json!(l)))),
        2 => entities.prop_map(|list| Some(("Entities", json!(list)))),
        2 => cidrs.prop_map(|list| Some(("CIDR", json!(list)))),
        1 => cidr_set.prop_map(|list| Some(("CIDRSet", list))),
    ]
}

fn entry(preposition: &'static str) -> impl Strategy<Value = Value> {
    let traffic = prop_oneof![
        2 => Just(None),
        4 => ports().prop_map(|ports| Some(("toPorts", ports))),
        1 => icmps().prop_map(|icmps| Some(("icmps", icmps))),
    ];
    (peers(), traffic).prop_map(move |(peers, traffic)| {
        let mut entry = json!({});
        if let Some((field, value)) = peers {
            entry[format!("{preposition}{field}")] = value;
        }
        if let Some((field, value)) = traffic {
            entry[field] = value;
        }
        entry
    })
}

fn rule() -> impl Strategy<Value = Value> {
    let list = |preposition, most| prop::collection::vec(entry(preposition), 0..most);
    let default_deny = prop_oneof![3 => Just(None), 1 => any::<bool>().prop_map(Some)];
    (
        list("from", 4),
        list("from", 2),
        list("to", 4),
        list("to", 2),
        default_deny,
    )
        .prop_map(
            |(ingress, ingress_deny, egress, egress_deny, default_deny)| {
                let mut rule = json!({
                    "endpointSelector": {},
                    "ingress": ingress,
                    "ingressDeny": ingress_deny,
                    "egress": egress,
                    "egressDeny": egress_deny,
                });
                if let Some(set) = default_deny {
                    rule["enableDefaultDeny"] = json!({"ingress": set, "egress": set});
                }
                rule
            },
        )
        .prop_filter("says nothing", |rule| {
            let lists = ["ingress", "ingressDeny", "egress", "egressDeny"];
            lists
                .iter()
                .any(|list| rule[list].as_array().is_some_and(|list| !list.is_empty()))
        })
}

fn rules() -> impl Strategy<Value = Vec<Value>> {
    prop::collection::vec(rule(), 0..5).prop_map(|mut rules| {
        for (i, rule) in rules.iter_mut().enumerate() {
            rule["labels"] = json!([format!("rule{i}")]);
        }
        rules
    })
}

fn set(labels: &[&str]) -> Arc<LabelSet> {
    Arc::new(LabelSet::new(labels.iter().map(|label| label.parse().unwrap())).unwrap())
}

fn identities() -> impl Strategy<Value = BTreeMap<Identity, Arc<LabelSet>>> {
    let mut all: Vec<(Identity, Arc<LabelSet>)> = Identity::all_reserved()
        .filter_map(|identity| Some((identity, Arc::new(identity.reserved_labels()?))))
        .collect();
    for (number, labels) in [
        (300, &["k8s:app=a"][..]),
        (301, &["app=b", "k8s:tier=a"]),
        (302, &["container:app=c", "container:tier=b"]),
        (303, &["k8s:app=a", "container:app=b"]),
        (304, &["k8s:tier=c"]),
        (305, &["k8s:app=a", "port:web=80/TCP"]),
        (306, &["k8s:app=a", "port:web=443/TCP+81/UDP"]),
        (
            307,
            &[
                "k8s:tier=a",
                "port:dns=53/TCP+53/UDP",
                "port:web=65535/SCTP",
            ],
        ),
    ] {
        all.push((Identity(number), set(labels)));
    }
    for (i, cidr) in (1 << 24..).zip(CIDRS) {
        let label = format!("cidr:{cidr}");
        all.push((Identity(i), set(&[&label, "reserved:world"])));
    }
    let count = all.len();
    subsequence(all, 0..=count.min(10)).prop_map(|some| some.into_iter().collect())
}

fn subject() -> impl Strategy<Value = Arc<LabelSet>> {
    prop_oneof![
        2 => Just(set(&["reserved:init"])),
        1 => Just(set(&["k8s:app=a"])),
        1 => Just(set(&["k8s:app=a", "port:web=80/TCP+1024/TCP"])),
        1 => Just(set(&["k8s:app=a", "port:dns=53/UDP+22/SCTP", "port:web=81/TCP"])),
    ]
}

/// Returns every packet for which the decision could change. The ports with names are among [`PORTS`].
fn packets(rules: &[Value]) -> BTreeSet<L4> {
    let mut ports: BTreeSet<u16> = PORTS.into();
    let mut add = |value: &Value| {
        let text = value.as_str().map(str::to_owned);
        let text = text.unwrap_or_else(|| value.to_string());
        ports.extend(text.parse::<u16>());
    };
    let entries = rules.iter().flat_map(|rule| {
        let lists = ["ingress", "ingressDeny", "egress", "egressDeny"];
        lists
            .into_iter()
            .filter_map(|list| rule[list].as_array())
            .flatten()
    });
    for entry in entries {
        for port in entry["toPorts"][0]["ports"]
            .as_array()
            .into_iter()
            .flatten()
        {
            add(&port["port"]);
            add(&port["endPort"]);
        }
        for field in entry["icmps"][0]["fields"].as_array().into_iter().flatten() {
            add(&field["type"]);
        }
    }
    let near = |port: u16| [port.saturating_sub(1), port, port.saturating_add(1)];
    let protocols = [1, 6, 17, 47, 58, 132].map(Protocol);
    protocols
        .into_iter()
        .flat_map(|protocol| {
            let ports = ports.iter().copied().chain([0]).flat_map(near);
            ports.map(move |port| L4::new(protocol, port))
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn a_compiled_policy_decides_as_the_rules_do(
        rules in rules(),
        identities in identities(),
        mode in select(vec![PolicyMode::Default, PolicyMode::Always, PolicyMode::Never]),
        allow_localhost in any::<bool>(),
        subject in subject(),
    ) {
        let mut repository = Repository::default();
        if !rules.is_empty() {
            repository.import(&json!(rules).to_string()).unwrap();
        }
        let resolved = repository.resolve(&subject, PolicySettings { mode, allow_localhost });
        let compiled = resolved.compile(&identities);

        let unlisted = LabelSet::default();
        let unlisted = (4_000, Peer::new(Identity::UNKNOWN, &unlisted));
        let listed = identities.iter().map(|(identity, labels)| (identity.0, Peer::new(*identity, labels)));
        let packets = packets(&rules);
        for (number, peer) in listed.chain([unlisted]) {
            for direction in Direction::ALL {
                for &l4 in &packets {
                    let decision = resolved.direction(direction).decide(&peer, l4);
                    let found = compiled.direction(direction).lookup(Identity(number), l4);
                    prop_assert_eq!(found, decision.verdict, "{} {} {} {:?}", peer, direction, l4, decision);
                }
            }
        }
    }

    #[test]
    fn a_difference_turns_one_compiled_policy_into_the_other(
        old in rules(),
        new in rules(),
        identities in identities(),
    ) {
        let compile = |rules: &[Value]| {
            let mut repository = Repository::default();
            if !rules.is_empty() {
                repository.import(&json!(rules).to_string()).unwrap();
            }
            repository.resolve(&set(&["k8s:app=a"]), PolicySettings::default()).compile(&identities)
        };
        let (old, new) = (compile(&old), compile(&new));
        let entries = |policy: &CompiledPolicy| -> BTreeMap<_, Verdict> {
            Direction::ALL
                .into_iter()
                .flat_map(|direction| {
                    let entries = policy.direction(direction).entries();
                    entries.iter().map(move |(key, verdict)| ((direction, *key), *verdict))
                })
                .collect()
        };
        let diff = new.diff(&old);
        prop_assert_eq!(diff.is_empty(), old == new);
        let mut turned = entries(&old);
        turned.retain(|key, _| !diff.removed.contains(key));
        turned.extend(diff.set);
        prop_assert_eq!(turned, entries(&new));
    }
}
