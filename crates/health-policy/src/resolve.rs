//! The policy of one endpoint, and a plain way to decide packets by it.

use std::fmt;
use std::sync::Arc;

use health_common::policy::{VERDICT_ALLOW, VERDICT_DENY, VERDICT_NONE};
use health_model::labels::{LabelSet, RESERVED};
use health_model::policy::{Direction, L4, PolicyMode};
use serde::{Deserialize, Serialize};

use super::peer::Peer;
use super::rule::{Action, Entry, Rule, RuleRef};

/// Policy settings besides the rules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PolicySettings {
    /// When policy is enforced.
    pub mode: PolicyMode,
    /// Whether the local host may reach its endpoints unless a rule denies it.
    pub allow_localhost: bool,
}

/// The verdict on a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Nothing allows the packet, so it is dropped.
    None,
    /// The packet may pass.
    Allow,
    /// A rule denies the packet, so it is dropped.
    Deny,
}

impl Verdict {
    /// Returns the number in [`health_common::policy::PolicyEntry::verdict`].
    pub const fn number(self) -> u8 {
        match self {
            Self::None => VERDICT_NONE,
            Self::Allow => VERDICT_ALLOW,
            Self::Deny => VERDICT_DENY,
        }
    }

    /// Whether the packet passes.
    pub const fn passes(self) -> bool {
        matches!(self, Self::Allow)
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "dropped (nothing allows it)",
            Self::Allow => "allowed",
            Self::Deny => "dropped (denied)",
        })
    }
}

/// Whether policy is enforced in one direction of an endpoint, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Enforcement {
    /// Off: policy does not apply to an endpoint with these labels, such as the host.
    Exempt,
    /// Off because of the mode.
    NeverMode,
    /// Off: no rule selects the endpoint.
    Unselected,
    /// On: a rule selects the endpoint, and packets that no rule allows are dropped.
    DefaultDeny,
    /// On: rules select the endpoint, but none turns on the default deny. Packets that no rule denies pass.
    DefaultAllow,
    /// On because of the mode; packets that no rule allows are dropped.
    AlwaysMode,
}

impl Enforcement {
    /// Whether packets are looked up.
    pub const fn is_on(self) -> bool {
        matches!(
            self,
            Self::DefaultDeny | Self::DefaultAllow | Self::AlwaysMode
        )
    }
}

impl fmt::Display for Enforcement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Exempt => "not enforced: policy does not apply to it",
            Self::NeverMode => "not enforced: the mode is never",
            Self::Unselected => "not enforced: no rule selects it",
            Self::DefaultDeny => "enforced: rules select it",
            Self::DefaultAllow => "enforced: rules without a default deny select it",
            Self::AlwaysMode => "enforced: the mode is always",
        })
    }
}

/// The reason for a verdict.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    /// The direction is not enforced.
    NotEnforced,
    /// This rule decides.
    Rule(RuleRef),
    /// The packet is from the local host, which may reach its endpoints.
    LocalHost,
    /// No rule denies the packet, and none that selects the endpoint turns on the default deny.
    DefaultAllow,
    /// No rule allows the packet.
    NoRule,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotEnforced => f.write_str("not enforced"),
            Self::Rule(rule) => rule.fmt(f),
            Self::LocalHost => f.write_str("the local host may reach its endpoints"),
            Self::DefaultAllow => f.write_str("no rule denies it, and there is no default deny"),
            Self::NoRule => f.write_str("no rule allows it"),
        }
    }
}

/// A verdict and its reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Decision {
    /// The verdict on the packet.
    pub verdict: Verdict,
    /// The reason for the verdict.
    pub reason: Reason,
}

/// The policy of an endpoint.
#[derive(Clone, Debug)]
pub struct ResolvedPolicy {
    ingress: ResolvedDirection,
    egress: ResolvedDirection,
}

impl ResolvedPolicy {
    /// Builds the policy from the rules that select the subject.
    pub(super) fn new(subject: &LabelSet, settings: PolicySettings, rules: Vec<Arc<Rule>>) -> Self {
        let labels = Arc::new(subject.clone());
        let of = |direction| {
            let says = |rule: &&Arc<Rule>| rule.section(direction).is_there;
            let rules: Vec<_> = rules.iter().filter(says).cloned().collect();
            ResolvedDirection {
                direction,
                subject: labels.clone(),
                enforcement: enforcement(subject, settings.mode, direction, &rules),
                allow_localhost: settings.allow_localhost && direction == Direction::Ingress,
                rules,
            }
        };
        Self {
            ingress: of(Direction::Ingress),
            egress: of(Direction::Egress),
        }
    }

    /// Returns the policy of one direction.
    pub const fn direction(&self, direction: Direction) -> &ResolvedDirection {
        match direction {
            Direction::Ingress => &self.ingress,
            Direction::Egress => &self.egress,
        }
    }
}

fn enforcement(
    subject: &LabelSet,
    mode: PolicyMode,
    direction: Direction,
    rules: &[Arc<Rule>],
) -> Enforcement {
    let is_init = subject.has_reserved("init");
    if !is_init && subject.iter().any(|label| label.source() == RESERVED) {
        return Enforcement::Exempt;
    }
    match mode {
        PolicyMode::Never if !is_init => Enforcement::NeverMode,
        PolicyMode::Always => Enforcement::AlwaysMode,
        PolicyMode::Never if rules.is_empty() => Enforcement::NeverMode,
        _ if rules.is_empty() => Enforcement::Unselected,
        _ if rules
            .iter()
            .any(|rule| rule.section(direction).default_deny) =>
        {
            Enforcement::DefaultDeny
        }
        _ => Enforcement::DefaultAllow,
    }
}

/// The policy of one direction of an endpoint.
#[derive(Clone, Debug)]
pub struct ResolvedDirection {
    direction: Direction,
    subject: Arc<LabelSet>,
    enforcement: Enforcement,
    allow_localhost: bool,
    rules: Vec<Arc<Rule>>,
}

impl ResolvedDirection {
    /// Returns whether policy is enforced, and why.
    pub const fn enforcement(&self) -> Enforcement {
        self.enforcement
    }

    /// Returns the rules that select the endpoint, whether or not they are enforced.
    pub fn rules(&self) -> impl Iterator<Item = &RuleRef> {
        self.rules.iter().map(|rule| &rule.place)
    }

    /// Decides a packet from or to this peer in the plain way, rule by rule.
    pub fn decide(&self, peer: &Peer<'_>, l4: L4) -> Decision {
        if !self.enforcement.is_on() {
            return Decision {
                verdict: Verdict::Allow,
                reason: Reason::NotEnforced,
            };
        }
        let holding = |action: Action| {
            let mut entries = self.holding(peer, l4);
            entries.find(|entry| entry.action == action)
        };
        let by_rule = |entry: &Entry| Reason::Rule(entry.place.clone());
        let (verdict, reason) = if let Some(entry) = holding(Action::Deny) {
            (Verdict::Deny, by_rule(entry))
        } else if let Some(entry) = holding(Action::Allow) {
            (Verdict::Allow, by_rule(entry))
        } else if self.allows_as_localhost(peer) {
            (Verdict::Allow, Reason::LocalHost)
        } else if self.allows_by_default() {
            (Verdict::Allow, Reason::DefaultAllow)
        } else {
            (Verdict::None, Reason::NoRule)
        };
        Decision { verdict, reason }
    }

    pub(super) fn allows_as_localhost(&self, peer: &Peer<'_>) -> bool {
        self.allow_localhost && peer.is_host()
    }

    pub(super) fn allows_by_default(&self) -> bool {
        self.enforcement == Enforcement::DefaultAllow
    }

    /// Returns the entries that apply to a packet from or to this peer.
    pub(super) fn holding<'a>(
        &'a self,
        peer: &'a Peer<'a>,
        l4: L4,
    ) -> impl Iterator<Item = &'a Entry> {
        let destination = self.destination(peer);
        self.entries()
            .filter(move |entry| entry.holds(peer, destination, l4))
    }

    /// Returns the labels of the side that receives the packets from or to this peer.
    pub(super) fn destination<'a>(&'a self, peer: &Peer<'a>) -> &'a LabelSet {
        match self.direction {
            Direction::Ingress => &self.subject,
            Direction::Egress => peer.labels(),
        }
    }

    pub(super) fn entries(&self) -> impl Iterator<Item = &Entry> {
        let direction = self.direction;
        self.rules
            .iter()
            .flat_map(move |rule| &rule.section(direction).entries)
    }
}
