//! `health-agent service trace`: what happens to a new flow to a service, and why.

use std::fmt::{self, Write};
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use health_api::client::Client;
use health_model::api::{ServiceTrace, SourceKind, TracedBackend, TracedPolicy, TracedStay};
use health_model::duration::short_duration;

use super::query;
use crate::exit::UNREACHABLE;
use crate::output::{NONE, OutputArgs, comma_separated, indent, printable, table};

const EXAMPLES: &str = "\
Ends:
  SOURCE is an endpoint of this node by id, name or address, host for the node's own sockets, or
  any other address. With a port (SOURCE:PORT), the command finds a known flow and Maglev's
  choice, except for sockets of the node. Write an IPv6 address with a port as [ADDRESS]:PORT
  DESTINATION is ADDRESS:PORT, or a service as NAMESPACE/NAME:PORT with the port's number or name.
  The port may be left out if there is only one, the namespace if NAME is unique

Columns:
  SHARE             probability that the flow goes there
  FLOWS             flows that were sent there and are still open, as far as is known
  EGRESS, INGRESS   policy verdict for the source and for the backend; - if another node decides

Exit codes:
  0 if the flow may reach a backend, 3 if it is dropped, rejected, refused or not served,
  1 on an error

Examples:
  health-agent service trace 10.244.1.7 10.96.0.80:80
  health-agent service trace web-client shop/web:http
  health-agent service trace 17:40000 10.96.0.53:53 --protocol udp
  health-agent service trace host shop/web:80 -o json | jq .answer";

/// Flags of `service trace`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct TraceArgs {
    /// Source of the flow
    source: String,
    /// Destination of the flow
    destination: String,
    /// Protocol of the flow [default: that of the service's port, or TCP]
    #[arg(long, value_enum, ignore_case = true, value_name = "PROTOCOL")]
    protocol: Option<ServiceProtocol>,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ServiceProtocol {
    Tcp,
    Udp,
    Sctp,
}

impl ServiceProtocol {
    const fn name(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
            Self::Sctp => "SCTP",
        }
    }
}

impl TraceArgs {
    pub(super) async fn execute(self, client: &Client) -> anyhow::Result<ExitCode> {
        let path = query(
            "/v1/services/trace",
            &[
                ("source", Some(&self.source)),
                ("destination", Some(&self.destination)),
                ("protocol", self.protocol.map(ServiceProtocol::name)),
            ],
        );
        let trace: ServiceTrace = client.get(&path).await?;
        self.output.output.print_object(&trace, text)?;
        Ok(match trace.verdict.may_reach() {
            true => ExitCode::SUCCESS,
            false => ExitCode::from(UNREACHABLE),
        })
    }
}

fn text(trace: &ServiceTrace) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write(&mut text, trace);
    text
}

fn write(out: &mut String, trace: &ServiceTrace) -> fmt::Result {
    let ServiceTrace {
        frontend,
        pool,
        source_ranges,
        ..
    } = trace;
    let service = frontend.service.as_deref().unwrap_or("unknown service");
    let affinity = frontend.affinity_ns.map_or(NONE.to_owned(), short_duration);
    let side = match pool.inside {
        true => "from this node and its endpoints",
        false => "from outside the node",
    };
    let mut lines = vec![
        ("Source", source(trace)),
        (
            "Destination",
            format!("{}/{}", trace.destination, trace.protocol),
        ),
        ("Frontend", format!("{service}, {}", frontend.kind)),
        (
            "Pool",
            match &pool.policy {
                Some(policy) => format!("{side}, policy {policy}"),
                None => side.to_owned(),
            },
        ),
    ];
    lines.extend(pool.reasons.iter().map(|reason| ("Reason", reason.clone())));
    if let Some(ranges) = source_ranges {
        let admitted = if ranges.admitted {
            "admitted"
        } else {
            "not admitted"
        };
        let ranges = comma_separated(&ranges.ranges);
        lines.push(("Source ranges", format!("{ranges}: {admitted}")));
    }
    lines.extend(
        trace
            .flow
            .as_ref()
            .map(|stay| ("Known flow", stay_text(stay))),
    );
    lines.push((
        "Affinity",
        match &trace.affinity {
            Some(stay) => format!("{affinity}: {}", stay_text(stay)),
            None => affinity,
        },
    ));
    lines.push(("Algorithm", frontend.algorithm.clone()));
    let forwarding = frontend.forwarding.iter();
    lines.extend(forwarding.map(|forwarding| ("Forwarding", forwarding.clone())));
    for (label, value) in lines {
        writeln!(out, "{label}:   {}", printable(&value))?;
    }
    if trace.backends.is_empty() {
        writeln!(out, "Backends:   none")?;
    } else {
        writeln!(out, "Backends:")?;
        out.push_str(&indent(2, &backends(&trace.backends)));
    }
    for difference in &trace.differences {
        writeln!(out, "Difference:   {}", printable(difference))?;
    }
    writeln!(out, "Answer:   {}", printable(&trace.answer))
}

fn source(trace: &ServiceTrace) -> String {
    let source = &trace.source;
    let port = source
        .port
        .map_or(String::new(), |port| format!(", port {port}"));
    let name = source.name.as_deref();
    let what = match (source.kind, source.endpoint) {
        (SourceKind::Endpoint, id) => {
            let id = id.map_or(String::new(), |id| format!(" {id}"));
            let name = name.map_or(String::new(), |name| format!(" ({name})"));
            format!("endpoint{id}{name}")
        }
        (SourceKind::Host, _) => "this node".to_owned(),
        (SourceKind::Node, _) => format!("node {}", name.unwrap_or(NONE)),
        (SourceKind::RemoteEndpoint, _) => format!("endpoint of {}", name.unwrap_or(NONE)),
        (SourceKind::Outside, _) => "outside".to_owned(),
    };
    let labels = match source.labels.is_empty() {
        true => String::new(),
        false => format!(" [{}]", source.labels.join(", ")),
    };
    let (address, identity) = (source.address, source.identity);
    format!("{address}{port}, {what}, identity {identity}{labels}")
}

fn stay_text(stay: &TracedStay) -> String {
    let backend = match stay.backend {
        Some(backend) => backend.to_string(),
        None => "its backend".to_owned(),
    };
    let stays = if stay.stays { "stays with" } else { "leaves" };
    format!("{stays} {backend}, {}", stay.reason)
}

fn backends(backends: &[TracedBackend]) -> String {
    let header = [
        "ADDRESS", "NAME", "STATE", "SHARE", "WEIGHT", "FLOWS", "NODE", "EGRESS", "INGRESS",
        "PROBLEM",
    ];
    let rows = backends.iter().map(|one| {
        let text = |text: &Option<String>| text.as_deref().unwrap_or(NONE).to_owned();
        [
            one.address.to_string(),
            text(&one.name),
            one.state.clone(),
            format!("{:.1}%", one.share * 100.0),
            one.weight
                .map_or(NONE.to_owned(), |weight| weight.to_string()),
            one.flows.to_string(),
            text(&one.node),
            policy(one.egress.as_ref()),
            policy(one.ingress.as_ref()),
            text(&one.problem),
        ]
    });
    table(header, rows)
}

fn policy(policy: Option<&TracedPolicy>) -> String {
    policy.map_or(NONE.to_owned(), |policy| {
        let allowed = if policy.allowed { "allowed" } else { "refused" };
        format!("{allowed}: {}", policy.reason)
    })
}

#[cfg(test)]
mod tests {
    use health_model::api::{TraceVerdict, TracedFrontend, TracedPool, TracedRanges, TracedSource};

    use super::*;

    #[test]
    fn a_trace_is_reported_in_the_order_in_which_things_happen() {
        let policy = |allowed: bool, reason: &str| TracedPolicy {
            allowed,
            reason: reason.to_owned(),
        };
        let stay = |stays| TracedStay {
            backend: Some("10.244.1.8:8080".parse().unwrap()),
            stays,
            reason: "its connection is closed".to_owned(),
        };
        let trace = ServiceTrace {
            source: TracedSource {
                address: "10.244.1.7".parse().unwrap(),
                port: Some(40_000),
                kind: SourceKind::Endpoint,
                endpoint: Some(17),
                name: Some("client".to_owned()),
                identity: 30_217,
                labels: vec!["k8s:role=friend".to_owned()],
            },
            destination: "10.96.0.80:80".parse().unwrap(),
            protocol: "TCP".to_owned(),
            frontend: TracedFrontend {
                service: Some("shop/web:http".to_owned()),
                kind: "LoadBalancer".to_owned(),
                number: Some(3),
                algorithm: "random".to_owned(),
                forwarding: Some("dsr".to_owned()),
                affinity_ns: None,
            },
            pool: TracedPool {
                inside: true,
                policy: Some("Cluster".to_owned()),
                reasons: vec!["10.244.1.9:8080 gets nothing: not ready".to_owned()],
            },
            source_ranges: Some(TracedRanges {
                ranges: vec!["10.244.0.0/16".parse().unwrap()],
                admitted: true,
            }),
            flow: Some(stay(false)),
            affinity: None,
            backends: vec![TracedBackend {
                address: "10.244.1.8:8080".parse().unwrap(),
                share: 1.0,
                weight: Some(1),
                state: "ready".to_owned(),
                flows: 2,
                node: Some("hnode1".to_owned()),
                endpoint: Some(18),
                name: Some("web-1".to_owned()),
                egress: Some(policy(true, "not enforced: no rule selects it")),
                ingress: Some(policy(false, "no rule allows it\u{1b}")),
                problem: None,
            }],
            differences: vec!["the programs use no backend".to_owned()],
            verdict: TraceVerdict::Refused,
            answer: "shop/web:http -> 10.244.1.8:8080 (web-1)".to_owned(),
        };
        assert_eq!(
            text(&trace),
            "\
Source:   10.244.1.7, port 40000, endpoint 17 (client), identity 30217 [k8s:role=friend]
Destination:   10.96.0.80:80/TCP
Frontend:   shop/web:http, LoadBalancer
Pool:   from this node and its endpoints, policy Cluster
Reason:   10.244.1.9:8080 gets nothing: not ready
Source ranges:   10.244.0.0/16: admitted
Known flow:   leaves 10.244.1.8:8080, its connection is closed
Affinity:   -
Algorithm:   random
Forwarding:   dsr
Backends:
  ADDRESS           NAME    STATE   SHARE    WEIGHT   FLOWS   NODE     EGRESS                                      INGRESS                            PROBLEM
  10.244.1.8:8080   web-1   ready   100.0%   1        2       hnode1   allowed: not enforced: no rule selects it   refused: no rule allows it\\u{1b}   -
Difference:   the programs use no backend
Answer:   shop/web:http -> 10.244.1.8:8080 (web-1)
"
        );
    }
}
