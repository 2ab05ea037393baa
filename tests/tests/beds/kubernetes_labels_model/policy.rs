//! The model: labels of pods, and what policies mean for them.

use std::collections::{BTreeMap, BTreeSet};

use fastrand::Rng;
use serde_json::{Value, json};

/// Name of a namespace.
pub(super) type Name = &'static str;
/// An app of a pod; `None` in a policy that does not name any.
pub(super) type App = Option<&'static str>;
/// Label of a namespace; `None` if it has none or, in a policy, for the policy's own namespace.
pub(super) type Tier = Option<&'static str>;

pub(super) const NAMESPACES: [Name; 3] = ["shop", "bank", "lab"];
pub(super) const TIERS: [Tier; 3] = [Some("gold"), Some("iron"), None];
pub(super) const APPS: [App; 3] = [Some("web"), Some("db"), Some("client")];
pub(super) const DIRECTIONS: [&str; 2] = ["ingress", "egress"];

/// What the labels of an endpoint say about its pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Facts {
    pub(super) namespace: Name,
    pub(super) tier: Tier,
    pub(super) app: App,
}

impl Facts {
    pub(super) fn labels(self) -> BTreeSet<String> {
        const OF_NAMESPACE: &str = "k8s:io.cilium.k8s.namespace.labels";
        let name = self.namespace;
        let mut labels = BTreeSet::from([
            format!("{OF_NAMESPACE}.kubernetes.io/metadata.name={name}"),
            format!("k8s:io.kubernetes.pod.namespace={name}"),
            "k8s:io.cilium.k8s.policy.cluster=default".to_owned(),
            "k8s:io.cilium.k8s.policy.serviceaccount=default".to_owned(),
        ]);
        labels.extend(self.app.map(|app| format!("k8s:app={app}")));
        labels.extend(self.tier.map(|tier| format!("{OF_NAMESPACE}.tier={tier}")));
        labels
    }
}

/// A policy with one rule.
#[derive(Debug)]
pub(super) struct Policy {
    pub(super) name: String,
    pub(super) namespace: Name,
    /// One of [`DIRECTIONS`].
    direction: &'static str,
    denies: bool,
    /// The app of its subjects; `None` for all pods of the namespace.
    subject: App,
    /// The app of the peers; `None` for any.
    peer: App,
    /// The tier of the peers' namespaces.
    tier: Tier,
}

impl Policy {
    pub(super) fn random(random: &mut Rng, name: String) -> Self {
        Self {
            subject: APPS[random.usize(..3)].filter(|_| random.bool()),
            peer: APPS[random.usize(..3)].filter(|_| random.bool()),
            tier: TIERS[random.usize(..3)],
            namespace: NAMESPACES[random.usize(..3)],
            direction: DIRECTIONS[random.usize(..2)],
            denies: random.u8(..3) == 0,
            name,
        }
    }

    /// A NetworkPolicy if it allows, else a CiliumNetworkPolicy.
    pub(super) fn document(&self) -> Value {
        let (api, kind, spec) = match self.denies {
            false => ("networking.k8s.io/v1", "NetworkPolicy", self.network_spec()),
            true => ("cilium.io/v2", "CiliumNetworkPolicy", self.cilium_spec()),
        };
        let metadata = json!({ "name": self.name, "namespace": self.namespace });
        json!({ "apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec })
    }

    fn network_spec(&self) -> Value {
        let (kind, preposition) = match self.direction {
            "ingress" => ("Ingress", "from"),
            _ => ("Egress", "to"),
        };
        let mut peer = json!({ "podSelector": select(&[("app", self.peer)]) });
        if self.tier.is_some() {
            peer["namespaceSelector"] = select(&[("tier", self.tier)]);
        }
        json!({
            "podSelector": select(&[("app", self.subject)]),
            "policyTypes": [kind],
            self.direction: [{ preposition: [peer] }],
        })
    }

    fn cilium_spec(&self) -> Value {
        const TIER: &str = "k8s:io.cilium.k8s.namespace.labels.tier";
        let (section, preposition) = match self.direction {
            "ingress" => ("ingressDeny", "fromEndpoints"),
            _ => ("egressDeny", "toEndpoints"),
        };
        let peer = select(&[("k8s:app", self.peer), (TIER, self.tier)]);
        json!({
            "endpointSelector": select(&[("app", self.subject)]),
            section: [{ preposition: [peer] }],
        })
    }

    pub(super) fn selects(&self, facts: Option<Facts>, direction: &str) -> bool {
        self.direction == direction
            && facts.is_some_and(|one| one.namespace == self.namespace)
            && facts.is_some_and(|one| self.subject.is_none() || one.app == self.subject)
    }

    fn matches(&self, peer: Option<Facts>) -> bool {
        peer.is_some_and(|one| {
            let is_there = match self.tier {
                None => one.namespace == self.namespace,
                tier => one.tier == tier,
            };
            is_there && (self.peer.is_none() || one.app == self.peer)
        })
    }
}

fn select(labels: &[(&str, Option<&str>)]) -> Value {
    let named = labels.iter().filter(|(_, value)| value.is_some());
    json!({ "matchLabels": named.copied().collect::<BTreeMap<_, _>>() })
}

/// Whether policies allow packets of a peer at one side. Policies select no pod that the agent does not know.
pub(super) fn allow(
    policies: &[Policy],
    subject: Option<Facts>,
    direction: &str,
    peer: Option<Facts>,
) -> bool {
    let its_own = || {
        policies
            .iter()
            .filter(|one| one.selects(subject, direction))
    };
    let matches = |denies| its_own().any(|one| one.denies == denies && one.matches(peer));
    its_own().next().is_none() || matches(false) && !matches(true)
}
