//! Rules in the form in which they are enforced, independent of the document format.

use std::fmt;
use std::sync::Arc;

use health_model::labels::LabelSet;
use health_model::policy::{Direction, L4};
use serde::{Deserialize, Serialize, Serializer};

use super::peer::{Peer, Peers};
use super::selector::Selector;
use super::services::{ClusterServices, ServicePeers};
use crate::ports::Traffic;

/// What a rule does with matching packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Action {
    /// Lets the packets pass, unless another rule denies them.
    Allow,
    /// Drops the packets.
    Deny,
}

/// Kinds of policy that are Kubernetes objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Kind {
    /// A Cilium policy of a namespace.
    CiliumNetworkPolicy,
    /// A Cilium policy of the cluster.
    CiliumClusterwideNetworkPolicy,
    /// Kubernetes' own policy.
    NetworkPolicy,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 3] = [
        Self::CiliumNetworkPolicy,
        Self::CiliumClusterwideNetworkPolicy,
        Self::NetworkPolicy,
    ];

    /// Returns the name in a document's `kind`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::CiliumNetworkPolicy => "CiliumNetworkPolicy",
            Self::CiliumClusterwideNetworkPolicy => "CiliumClusterwideNetworkPolicy",
            Self::NetworkPolicy => "NetworkPolicy",
        }
    }

    /// Returns the supported `apiVersion` of the kind.
    pub const fn api_version(self) -> &'static str {
        match self {
            Self::NetworkPolicy => "networking.k8s.io/v1",
            Self::CiliumNetworkPolicy | Self::CiliumClusterwideNetworkPolicy => "cilium.io/v2",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The name of a policy.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", untagged)]
pub enum PolicyName {
    /// A Kubernetes object.
    Object {
        /// The object's kind.
        kind: Kind,
        /// The object's namespace.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        namespace: Option<String>,
        /// The object's name.
        name: String,
    },
    /// The rules in bare lists that have these labels.
    Rules {
        /// The labels of the rules.
        labels: LabelSet,
    },
}

impl PolicyName {
    /// Returns the kind, if the policy is an object.
    pub const fn kind(&self) -> Option<Kind> {
        match self {
            Self::Object { kind, .. } => Some(*kind),
            Self::Rules { .. } => None,
        }
    }
}

impl fmt::Display for PolicyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Object {
                kind,
                namespace: Some(namespace),
                name,
            } => write!(f, "{kind} {namespace}/{name}"),
            Self::Object { kind, name, .. } => write!(f, "{kind} {name}"),
            Self::Rules { labels } => {
                f.write_str("rules [")?;
                for (i, label) in labels.iter().enumerate() {
                    write!(f, "{}{label}", if i > 0 { ", " } else { "" })?;
                }
                f.write_str("]")
            }
        }
    }
}

/// A reference to a rule or one of its entries.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RuleRef {
    /// The policy to which the rule belongs.
    #[serde(serialize_with = "shared")]
    pub policy: Arc<PolicyName>,
    /// The field in the policy's document, such as `spec.ingress[0]`.
    #[serde(serialize_with = "shared")]
    pub field: Arc<str>,
}

fn shared<T: Serialize + ?Sized, S: Serializer>(
    value: &Arc<T>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    (**value).serialize(serializer)
}

impl fmt::Display for RuleRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.policy, self.field)
    }
}

/// A rule: the endpoints that it selects, and the entries that apply to them in each direction.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Rule {
    pub(super) place: RuleRef,
    pub(super) labels: LabelSet,
    pub(super) subject: Selector,
    pub(super) ingress: Section,
    pub(super) egress: Section,
}

impl Rule {
    pub(super) fn section(&self, direction: Direction) -> &Section {
        match direction {
            Direction::Ingress => &self.ingress,
            Direction::Egress => &self.egress,
        }
    }

    /// Returns the entries of both directions.
    pub(super) fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.ingress.entries.iter().chain(&self.egress.entries)
    }

    /// Returns the peers that are named by service.
    pub(super) fn services(&self) -> impl Iterator<Item = &ServicePeers> {
        self.entries().flat_map(|entry| entry.peers.services())
    }

    /// Returns the rule with the peers behind these services.
    pub(super) fn bound(self: &Arc<Self>, services: &ClusterServices) -> Arc<Self> {
        if self.services().next().is_none() {
            return self.clone();
        }
        let mut bound = Self::clone(self);
        for section in [&mut bound.ingress, &mut bound.egress] {
            for entry in &mut section.entries {
                entry.peers.bind(services);
            }
        }
        Arc::new(bound)
    }
}

/// The part of a rule for one direction.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Section {
    /// Whether the rule has this part.
    pub(super) is_there: bool,
    /// Whether the rule turns on the default deny, which drops packets that no rule allows.
    pub(super) default_deny: bool,
    pub(super) entries: Vec<Entry>,
}

/// Allows or denies some traffic with some peers.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Entry {
    pub(super) place: RuleRef,
    pub(super) action: Action,
    pub(super) peers: Peers,
    pub(super) traffic: Traffic,
}

impl Entry {
    /// Whether the entry applies to a packet from or to this peer. `destination` is the receiver's labels.
    pub(super) fn holds(&self, peer: &Peer<'_>, destination: &LabelSet, l4: L4) -> bool {
        self.traffic.contains(destination, l4) && self.peers.contains(peer)
    }
}
