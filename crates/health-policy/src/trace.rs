//! Explains, rule by rule, why a packet would pass or be dropped at each end of its path.

use std::fmt;

use health_model::identity::Identity;
use health_model::labels::LabelSet;
use health_model::policy::{Direction, L4};
use serde::Serialize;

use super::peer::Peer;
use super::repository::Repository;
use super::resolve::{Decision, Enforcement, PolicySettings, Verdict};
use super::rule::{Action, RuleRef};

/// A packet to explain.
#[derive(Clone, Copy, Debug)]
pub struct TraceRequest<'a> {
    /// The sender.
    pub source: Peer<'a>,
    /// The receiver.
    pub destination: Peer<'a>,
    /// The packet's protocol and destination port.
    pub l4: L4,
    /// The only side to check: egress of the source, or ingress of the destination. `None` means both.
    pub only: Option<Direction>,
}

/// The policy decision on a packet, and the reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Trace {
    /// The sender.
    pub source: TraceEnd,
    /// The receiver.
    pub destination: TraceEnd,
    /// The packet's protocol and destination port.
    pub l4: L4,
    /// The requested sides, in the packet's order: egress of the source, ingress of the destination.
    pub sides: Vec<TraceSide>,
    /// Whether the packet passes all of these sides.
    pub passes: bool,
}

/// One end of a packet's path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct TraceEnd {
    /// The identity of this end.
    pub identity: Identity,
    /// The labels of this end.
    pub labels: LabelSet,
}

impl From<Peer<'_>> for TraceEnd {
    fn from(peer: Peer<'_>) -> Self {
        Self {
            identity: peer.identity(),
            labels: peer.labels().clone(),
        }
    }
}

/// The policy of one end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct TraceSide {
    /// Direction of the packet, seen from this end.
    pub direction: Direction,
    /// Whether policy is enforced, and why.
    pub enforcement: Enforcement,
    /// The rules that select this end and have a part for this direction.
    pub selecting: Vec<RuleRef>,
    /// The entries of these rules that match the packet.
    pub matching: Vec<TraceMatch>,
    /// The decision on the packet at this end.
    #[serde(flatten)]
    pub decision: Decision,
}

/// An entry that matches the packet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct TraceMatch {
    /// The entry.
    pub rule: RuleRef,
    /// What the entry does.
    pub action: Action,
}

impl Repository {
    /// Explains what happens to a packet. The settings are those of the source and the destination.
    pub fn trace(
        &self,
        request: &TraceRequest<'_>,
        [of_source, of_destination]: [PolicySettings; 2],
    ) -> Trace {
        let sides = [
            (
                Direction::Egress,
                &request.source,
                &request.destination,
                of_source,
            ),
            (
                Direction::Ingress,
                &request.destination,
                &request.source,
                of_destination,
            ),
        ];
        let sides: Vec<_> = sides
            .into_iter()
            .filter(|(direction, ..)| request.only.is_none_or(|only| only == *direction))
            .map(|(direction, subject, peer, settings)| {
                self.trace_side(direction, subject.labels(), peer, request.l4, settings)
            })
            .collect();
        Trace {
            source: request.source.into(),
            destination: request.destination.into(),
            l4: request.l4,
            passes: sides.iter().all(|side| side.decision.verdict.passes()),
            sides,
        }
    }

    fn trace_side(
        &self,
        direction: Direction,
        subject: &LabelSet,
        peer: &Peer<'_>,
        l4: L4,
        settings: PolicySettings,
    ) -> TraceSide {
        let resolved = self.resolve(subject, settings);
        let resolved = resolved.direction(direction);
        let matching = resolved.holding(peer, l4);
        TraceSide {
            direction,
            enforcement: resolved.enforcement(),
            selecting: resolved.rules().cloned().collect(),
            matching: matching
                .map(|entry| TraceMatch {
                    rule: entry.place.clone(),
                    action: entry.action,
                })
                .collect(),
            decision: resolved.decide(peer, l4),
        }
    }
}

impl fmt::Display for TraceEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Peer::new(self.identity, &self.labels).fmt(f)
    }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} -> {}, {}", self.source, self.destination, self.l4)?;
        for side in &self.sides {
            writeln!(f)?;
            side.fmt(f)?;
        }
        let verdict = if self.passes { "allowed" } else { "dropped" };
        write!(f, "\nFinal verdict: {verdict}")
    }
}

impl fmt::Display for TraceSide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = match self.direction {
            Direction::Egress => "Egress of the source",
            Direction::Ingress => "Ingress of the destination",
        };
        writeln!(f, "{end}: {}", self.enforcement)?;
        for rule in &self.selecting {
            writeln!(f, "  selected by {rule}")?;
        }
        for entry in &self.matching {
            let action = match entry.action {
                Action::Allow => "allowed",
                Action::Deny => "denied",
            };
            writeln!(f, "  {action} by {}", entry.rule)?;
        }
        match &self.decision {
            Decision {
                verdict: Verdict::None,
                reason,
            } => writeln!(f, "  verdict: dropped: {reason}"),
            Decision { verdict, reason } => writeln!(f, "  verdict: {verdict}: {reason}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use health_model::policy::PolicyMode;

    use super::*;

    const RULES: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: db}
spec:
  endpointSelector: {matchLabels: {app: db}}
  ingress:
  - fromEndpoints: [{matchLabels: {app: web}}]
  ingressDeny:
  - toPorts: [{ports: [{port: "22", protocol: TCP}]}]
"#;

    fn trace(l4: &str, only: Option<Direction>, mode: PolicyMode) -> Trace {
        let mut repository = Repository::default();
        repository.import(RULES).unwrap();
        let set = |label: &str| LabelSet::new([label.parse().unwrap()]).unwrap();
        let (web, db) = (set("app=web"), set("app=db"));
        let request = TraceRequest {
            source: Peer::new(Identity(300), &web),
            destination: Peer::new(Identity(301), &db),
            l4: l4.parse().unwrap(),
            only,
        };
        let settings = PolicySettings {
            mode,
            allow_localhost: false,
        };
        repository.trace(&request, [settings; 2])
    }

    #[test]
    fn a_trace_shows_which_rules_select_and_which_decide() {
        let text = trace("22/TCP", None, PolicyMode::Default).to_string();
        assert_eq!(
            text,
            "\
300 [unspec:app=web] -> 301 [unspec:app=db], 22/TCP

Egress of the source: not enforced: no rule selects it
  verdict: allowed: not enforced

Ingress of the destination: enforced: rules select it
  selected by CiliumNetworkPolicy db: spec
  allowed by CiliumNetworkPolicy db: spec.ingress[0]
  denied by CiliumNetworkPolicy db: spec.ingressDeny[0]
  verdict: dropped (denied): CiliumNetworkPolicy db: spec.ingressDeny[0]

Final verdict: dropped"
        );
    }

    #[test]
    fn both_sides_must_let_a_packet_pass() {
        assert!(trace("80/TCP", None, PolicyMode::Default).passes);
        assert!(!trace("80/TCP", None, PolicyMode::Always).passes);
        assert!(trace("22/TCP", None, PolicyMode::Never).passes);
        let side = trace("80/TCP", Some(Direction::Ingress), PolicyMode::Always);
        assert_eq!((side.sides.len(), side.passes), (1, true));
    }

    #[test]
    fn labels_without_an_identity_are_traced_with_their_named_ports() {
        let rules = r#"[{"labels": ["r"], "endpointSelector": {"matchLabels": {"app": "web"}}, "egress": [
            {"toEndpoints": [{"matchLabels": {"app": "db"}}], "toPorts": [{"ports": [{"port": "sql"}]}]}
        ]}]"#;
        let mut repository = Repository::default();
        repository.import(rules).unwrap();
        let set = |labels: &[&str]| {
            LabelSet::new(labels.iter().map(|label| label.parse().unwrap())).unwrap()
        };
        let passes = |destination: &[&str]| {
            let (source, destination) = (set(&["k8s:app=web"]), set(destination));
            let request = TraceRequest {
                source: Peer::new(Identity::UNKNOWN, &source),
                destination: Peer::new(Identity::UNKNOWN, &destination),
                l4: "5432/TCP".parse().unwrap(),
                only: Some(Direction::Egress),
            };
            repository
                .trace(&request, [PolicySettings::default(); 2])
                .passes
        };
        assert!(passes(&["k8s:app=db", "port:sql=5432/TCP"]));
        assert!(!passes(&["k8s:app=db", "port:sql=5433/TCP"]));
        assert!(!passes(&["k8s:app=db"]));
        assert!(!passes(&["k8s:app=web", "port:sql=5432/TCP"]));
        assert!(!passes(&["reserved:unknown"]));
    }

    #[test]
    fn a_trace_is_reported_in_json_by_the_names_of_rules() {
        let trace = serde_json::to_value(trace("80/TCP", None, PolicyMode::Default)).unwrap();
        assert_eq!(trace["passes"], true);
        assert_eq!(trace["l4"]["protocol"], "TCP");
        let ingress = &trace["sides"][1];
        assert_eq!(ingress["direction"], "ingress");
        assert_eq!(ingress["verdict"], "allow");
        assert_eq!(ingress["reason"]["rule"]["field"], "spec.ingress[0]");
        assert_eq!(ingress["matching"][0]["action"], "allow");
    }
}
