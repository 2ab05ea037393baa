//! Rules as they are enforced, whatever document they came in.

use std::fmt;
use std::sync::Arc;

use health_model::labels::LabelSet;
use health_model::policy::{Direction, L4};
use serde::{Deserialize, Serialize, Serializer};

use super::peer::{Peer, Peers};
use super::selector::Selector;
use crate::ports::Traffic;

/// What a rule does with the packets that it holds for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Action {
    /// Lets them pass, unless another rule denies them.
    Allow,
    /// Drops them.
    Deny,
}

/// Kinds of policy that are objects of Kubernetes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Kind {
    /// Cilium's, of a namespace.
    CiliumNetworkPolicy,
    /// Cilium's, of the cluster.
    CiliumClusterwideNetworkPolicy,
    /// Kubernetes' own.
    NetworkPolicy,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 3] = [
        Self::CiliumNetworkPolicy,
        Self::CiliumClusterwideNetworkPolicy,
        Self::NetworkPolicy,
    ];

    /// As a document's `kind` says it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::CiliumNetworkPolicy => "CiliumNetworkPolicy",
            Self::CiliumClusterwideNetworkPolicy => "CiliumClusterwideNetworkPolicy",
            Self::NetworkPolicy => "NetworkPolicy",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a policy is known by.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", untagged)]
pub enum PolicyName {
    /// An object of Kubernetes.
    Object {
        /// Its kind.
        kind: Kind,
        /// Its namespace.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        namespace: Option<String>,
        /// Its name.
        name: String,
    },
    /// The rules of a bare list that have these labels.
    Rules {
        /// Their labels.
        labels: LabelSet,
    },
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

/// A rule, or one of its entries, to refer to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RuleRef {
    /// Its policy.
    #[serde(serialize_with = "shared")]
    pub policy: Arc<PolicyName>,
    /// Its field in the policy's document, such as `spec.ingress[0]`.
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

/// A rule: which endpoints it is for, and what holds for them each way.
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
}

/// What a rule says of one direction.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Section {
    /// Whether it says anything at all.
    pub(super) is_there: bool,
    /// Whether what no rule allows is dropped from now on.
    pub(super) default_deny: bool,
    pub(super) entries: Vec<Entry>,
}

/// Allows or denies some traffic of some peers.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Entry {
    pub(super) place: RuleRef,
    pub(super) action: Action,
    pub(super) peers: Peers,
    pub(super) traffic: Traffic,
}

impl Entry {
    pub(super) fn holds(&self, peer: &Peer<'_>, l4: L4) -> bool {
        self.traffic.contains(l4) && self.peers.contains(peer)
    }
}
