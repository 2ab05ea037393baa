//! The outcome of a flow, summarised in one line.

use std::collections::BTreeSet;

use health_datapath::services::Connection;
use health_model::api::{TraceVerdict, TracedBackend, TracedFrontend, TracedPolicy};
use health_model::ipam::Family;
use health_model::policy::Protocol;

use super::hook::TraceHook;

/// Maximum number of backends that the line names.
const NAMED: usize = 3;

/// Why a flow reaches no backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// The programs do not serve flows from this source, for this reason.
    NotServed(&'static str),
    /// The maps lack the frontend.
    Unknown,
    /// The source is outside the frontend's source ranges.
    SourceRange,
    /// There is no backend of the flow's IP version.
    NoBackend,
    /// There are backends, but the flow may use none of them.
    NoLocalBackend,
}

/// The outcome of a flow.
pub(super) struct Outcome {
    pub(super) verdict: TraceVerdict,
    pub(super) answer: String,
}

impl Outcome {
    /// The outcome of a flow that is refused or goes to one of these backends.
    pub(super) fn of(
        hook: TraceHook,
        frontend: &TracedFrontend,
        flow: &Connection,
        refused: Option<Refused>,
        backends: &[TracedBackend],
    ) -> Self {
        let (verdict, what) = match refused {
            Some(refused) => refused.outcome(hook, flow),
            None => chosen(backends),
        };
        let service = frontend.service.clone().unwrap_or_else(|| {
            let protocol = Protocol(flow.protocol);
            format!("{}/{protocol}", flow.destination)
        });
        Self {
            verdict,
            answer: format!("{service} -> {what}"),
        }
    }
}

impl Refused {
    /// Packets are dropped, or rejected if there is no backend. A process gets an error at once.
    fn outcome(self, hook: TraceHook, flow: &Connection) -> (TraceVerdict, String) {
        let none = format!("no {} backend", Family::of(flow.destination.ip()).name());
        let (silent, what, error) = match self {
            Self::NotServed(why) => {
                let what = format!("passed on unchanged: {why}");
                return (TraceVerdict::NotServed, what);
            }
            Self::Unknown => {
                let what = "passed on unchanged: the programs have no such frontend";
                return (TraceVerdict::NotServed, what.to_owned());
            }
            Self::SourceRange => (
                true,
                "the source is outside the allowed source ranges",
                "EPERM",
            ),
            Self::NoBackend => (false, &*none, "ECONNREFUSED"),
            Self::NoLocalBackend => (
                true,
                "there are backends, but this flow may use none of them",
                "EHOSTUNREACH",
            ),
        };
        match (hook.has_packets(), silent) {
            (false, _) => (
                TraceVerdict::Rejected,
                format!("rejected with {error}: {what}"),
            ),
            (true, true) => (TraceVerdict::Dropped, format!("dropped: {what}")),
            (true, false) => (TraceVerdict::Rejected, format!("rejected: {what}")),
        }
    }
}

fn chosen(backends: &[TracedBackend]) -> (TraceVerdict, String) {
    let (reached, missed): (Vec<_>, Vec<_>) =
        backends.iter().partition(|backend| backend.is_reached());
    let is_refused = |backend: &&TracedBackend| backend.problem.is_none();
    let verdict = match (reached.len(), missed.len()) {
        (0, _) if !missed.is_empty() && missed.iter().all(is_refused) => TraceVerdict::Refused,
        (0, _) => TraceVerdict::Dropped,
        (_, 0) => TraceVerdict::Reached,
        _ => TraceVerdict::Partly,
    };
    let to = match backends {
        [] => "no backend".to_owned(),
        [only] => title(only),
        several => format!("one of {} backends", several.len()),
    };
    let mut parts = vec![to];
    parts.extend(agreed("egress", &reached, |backend| {
        backend.egress.as_ref()
    }));
    parts.extend(agreed("ingress", &reached, |backend| {
        backend.ingress.as_ref()
    }));
    let is_only = backends.len() == 1;
    parts.extend(
        missed
            .iter()
            .take(NAMED)
            .map(|backend| missing(backend, is_only)),
    );
    if missed.len() > NAMED {
        parts.push(format!("and {} more are not reached", missed.len() - NAMED));
    }
    (verdict, parts.join("; "))
}

/// Why policy lets flows to these backends pass. Names the reason if all judged backends have the same one.
fn agreed(
    direction: &str,
    backends: &[&TracedBackend],
    side: impl Fn(&TracedBackend) -> Option<&TracedPolicy>,
) -> Option<String> {
    let reasons = backends.iter().filter_map(|backend| side(backend));
    let reasons: BTreeSet<&str> = reasons.map(|policy| &*policy.reason).collect();
    match (reasons.len(), reasons.first()) {
        (0, _) | (_, None) => None,
        (1, Some(reason)) => Some(format!("{direction} allowed: {reason}")),
        _ => Some(format!("{direction} allowed")),
    }
}

/// Why the flow does not reach a backend.
fn missing(backend: &TracedBackend, is_only: bool) -> String {
    let why = if let Some(problem) = &backend.problem {
        problem.clone()
    } else {
        let sides = [("egress", &backend.egress), ("ingress", &backend.ingress)];
        let refusing = sides
            .into_iter()
            .filter_map(|(direction, side)| Some((direction, side.as_ref()?)))
            .find(|(_, side)| !side.allowed);
        match refusing {
            Some(("egress", side)) => {
                format!("refused by the source's egress policy: {}", side.reason)
            }
            Some((_, side)) => format!("refused by its ingress policy: {}", side.reason),
            None => "not reached".to_owned(),
        }
    };
    match is_only {
        true => why,
        false => format!("{} {why}", title(backend)),
    }
}

fn title(backend: &TracedBackend) -> String {
    match &backend.name {
        Some(name) => format!("{} ({name})", backend.address),
        None => backend.address.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn backend(last: u8, egress: bool, ingress: Option<bool>) -> TracedBackend {
        let policy = |allowed| TracedPolicy {
            allowed,
            reason: if allowed {
                "NetworkPolicy a: spec"
            } else {
                "no rule allows it"
            }
            .to_owned(),
        };
        TracedBackend {
            address: ([10, 1, 0, last], 8080).into(),
            share: 0.5,
            weight: Some(1),
            state: "ready".to_owned(),
            flows: 0,
            node: None,
            endpoint: ingress.map(|_| last.into()),
            name: ingress.map(|_| format!("web-{last}")),
            egress: Some(policy(egress)),
            ingress: ingress.map(policy),
            problem: None,
        }
    }

    fn outcome(refused: Option<Refused>, backends: &[TracedBackend]) -> (TraceVerdict, String) {
        let frontend = TracedFrontend {
            service: Some("shop/web:http".to_owned()),
            kind: "ClusterIP".to_owned(),
            number: Some(3),
            algorithm: "random".to_owned(),
            forwarding: None,
            affinity_ns: None,
        };
        let flow = flow("10.96.0.1:80");
        let outcome = Outcome::of(TraceHook::Endpoint, &frontend, &flow, refused, backends);
        (outcome.verdict, outcome.answer)
    }

    fn flow(destination: &str) -> Connection {
        Connection {
            protocol: 6,
            source: "10.1.0.9:0".parse().unwrap(),
            destination: destination.parse().unwrap(),
        }
    }

    #[test]
    fn a_flow_that_reaches_all_says_what_lets_it() {
        assert_eq!(
            outcome(None, &[backend(1, true, Some(true))]),
            (
                TraceVerdict::Reached,
                "shop/web:http -> 10.1.0.1:8080 (web-1); egress allowed: NetworkPolicy a: spec; \
                 ingress allowed: NetworkPolicy a: spec"
                    .to_owned()
            )
        );
        let (verdict, answer) = outcome(None, &[backend(1, true, None), backend(2, true, None)]);
        assert_eq!(verdict, TraceVerdict::Reached);
        assert_eq!(
            answer,
            "shop/web:http -> one of 2 backends; egress allowed: NetworkPolicy a: spec"
        );
    }

    #[test]
    fn a_flow_that_reaches_some_names_the_others() {
        let backends = [backend(1, true, Some(true)), backend(2, true, Some(false))];
        let (verdict, answer) = outcome(None, &backends);
        assert_eq!(verdict, TraceVerdict::Partly);
        assert!(
            answer.ends_with(
                "; 10.1.0.2:8080 (web-2) refused by its ingress policy: no rule allows it"
            ),
            "{answer}"
        );
    }

    #[test]
    fn a_flow_that_reaches_none_is_refused_by_policy_or_dropped() {
        let refused = [1, 2, 3, 4, 5].map(|last| backend(last, false, None));
        let (verdict, answer) = outcome(None, &refused);
        assert_eq!(verdict, TraceVerdict::Refused);
        assert!(answer.ends_with("; and 2 more are not reached"), "{answer}");
        let broken = TracedBackend {
            problem: Some("the programs have no backend 7".to_owned()),
            ..backend(1, true, None)
        };
        assert_eq!(
            outcome(None, &[broken]),
            (
                TraceVerdict::Dropped,
                "shop/web:http -> 10.1.0.1:8080; the programs have no backend 7".to_owned()
            )
        );
    }

    #[test]
    fn what_keeps_a_flow_from_all_backends_decides() {
        for (refused, verdict) in [
            (Refused::NotServed("it is not"), TraceVerdict::NotServed),
            (Refused::Unknown, TraceVerdict::NotServed),
            (Refused::SourceRange, TraceVerdict::Dropped),
            (Refused::NoLocalBackend, TraceVerdict::Dropped),
            (Refused::NoBackend, TraceVerdict::Rejected),
        ] {
            assert_eq!(outcome(Some(refused), &[]).0, verdict);
        }
        assert_eq!(
            Refused::NoLocalBackend.outcome(TraceHook::Socket, &flow("10.96.0.1:80")),
            (
                TraceVerdict::Rejected,
                "rejected with EHOSTUNREACH: there are backends, but this flow may use none of them"
                    .to_owned()
            )
        );
        for (destination, reported) in [
            ("10.96.0.1:80", "rejected: no IPv4 backend"),
            ("[fd00::1]:80", "rejected: no IPv6 backend"),
        ] {
            let (_, answer) = Refused::NoBackend.outcome(TraceHook::Endpoint, &flow(destination));
            assert_eq!(answer, reported);
        }
    }
}
