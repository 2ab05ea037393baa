//! `health-agent service get`: everything about one service.

use std::fmt::{self, Write};

use anyhow::bail;
use clap::Args;
use health_api::client::Client;
use health_model::api::{
    ServiceBackend, ServiceConflict, ServiceEntry, ServicePortEntry, ServiceProblem, ServiceSummary,
};
use health_model::duration::short_duration;
use serde::Serialize;

use super::{conflicts_of, path, port_change, refusal, the_one, warn};
use crate::output::{NONE, OutputArgs, indent, printable, table};

const EXAMPLES: &str = "\
Columns:
  INSIDE, OUTSIDE   where new flows from this node and its pods go, and where all others go: to a
                    backend of the whole cluster, to one on this node (local), or nowhere (drop,
                    reject)
  READINESS FROM    source of its readiness: a probe of this node, or the endpoint slice
  NEW FLOWS         new flows that it gets: those that may use the whole cluster (cluster), or only
                    this node (local); a lingering backend keeps its flows, but gets no new ones

Examples:
  health-agent service get web
  health-agent service get shop/web -o yaml
  health-agent service get shop/web -o json | jq '.service.ports[].backends[] | select(.ready)'";

/// Flags of `service get`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct GetArgs {
    /// NAMESPACE/NAME, or a NAME that only one service has
    #[arg(value_name = "SERVICE")]
    service: String,
    #[command(flatten)]
    output: OutputArgs,
}

/// A service with its conflicts and problems.
#[derive(Debug, Serialize)]
struct ServiceDetails {
    service: ServiceEntry,
    conflicts: Vec<ServiceConflict>,
    problems: Vec<ServiceProblem>,
    /// The mode in which the service is served, `ebpf` or `ipvs`.
    mode: String,
}

impl GetArgs {
    pub(super) async fn execute(self, client: &Client) -> anyhow::Result<()> {
        let path = path(Some(&self.service), None);
        let services: Vec<ServiceEntry> = client.get(&path).await?;
        let summary: ServiceSummary = client.get("/v1/services/summary").await?;
        if !summary.enabled {
            bail!(
                "no service {:?}: this agent serves no services",
                self.service
            );
        }
        if services.is_empty() {
            warn(&summary);
        }
        let service = the_one(&self.service, services)?;
        let name = service.full_name();
        let ServiceSummary {
            mut conflicts,
            mut problems,
            mode,
            ..
        } = summary;
        conflicts.retain(|conflict| conflict.service == name);
        problems.retain(|problem| is_about(problem, &service));
        let details = ServiceDetails {
            service,
            conflicts,
            problems,
            mode,
        };
        self.output.output.print_object(&details, text)
    }
}

/// Whether a problem is about the service: its subject is the service or the service's source, or its text names it.
fn is_about(problem: &ServiceProblem, service: &ServiceEntry) -> bool {
    let name = service.full_name();
    let is_end = |rest: &str| {
        let next = rest.chars().next();
        next.is_none_or(|c| !(c.is_ascii_alphanumeric() || c == '-'))
    };
    let named = |text: &str| text.split(&*name).skip(1).any(is_end);
    problem.subject == service.source || named(&problem.subject) || named(&problem.problem)
}

fn text(details: &ServiceDetails) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write(&mut text, details);
    text
}

fn write(out: &mut String, details: &ServiceDetails) -> fmt::Result {
    let ServiceDetails {
        service, problems, ..
    } = details;
    let number = |port: Option<u16>| port.map_or(NONE.to_owned(), |port| port.to_string());
    for (label, value) in [
        ("Service", service.full_name()),
        ("Type", service.kind.clone()),
        ("Source", service.source.clone()),
        ("Internal traffic", service.internal_policy.clone()),
        ("External traffic", service.external_policy.clone()),
        (
            "Affinity",
            service.affinity_ns.map_or(NONE.to_owned(), short_duration),
        ),
        (
            "Algorithm",
            service.algorithm.as_deref().unwrap_or("default").to_owned(),
        ),
        ("Forwarding", service.forwarding.clone()),
        ("Health check port", number(service.health_check_node_port)),
    ] {
        writeln!(out, "{label}:   {}", printable(&value))?;
    }
    if let Some(problem) = &service.forwarding_problem {
        writeln!(out, "Problem:   {}", printable(problem))?;
    }
    writeln!(out, "Ports:")?;
    for port in &service.ports {
        write_port(out, details, port)?;
    }
    if problems.is_empty() {
        return writeln!(out, "Problems:   none");
    }
    writeln!(out, "Problems:")?;
    for problem in problems {
        let text = format!("{}: {}", problem.subject, problem.problem);
        writeln!(out, "  {}", printable(&text))?;
    }
    Ok(())
}

fn write_port(out: &mut String, details: &ServiceDetails, port: &ServicePortEntry) -> fmt::Result {
    writeln!(out, "  {}:", printable(&port.title()))?;
    if port.frontends.is_empty() {
        writeln!(out, "    Frontends:   none")?;
    } else {
        writeln!(out, "    Frontends:")?;
        out.push_str(&indent(6, &frontends(port)));
    }
    for conflict in conflicts_of(&details.service, port, &details.conflicts) {
        writeln!(out, "    Conflict:   {}", printable(&conflict.problem))?;
    }
    for topology in &port.topology {
        let text = format!("{}: {}", topology.family, topology.reason);
        writeln!(out, "    Topology:   {}", printable(&text))?;
    }
    for failure in &port.failures {
        writeln!(out, "    Not in force:   {}", printable(failure))?;
    }
    if let Some(refusal) = refusal(port) {
        writeln!(out, "    Problem:   {refusal}")?;
    }
    if let Some(problem) = port_change(port, &details.mode) {
        writeln!(out, "    Problem:   {problem}")?;
    }
    if port.backends.is_empty() {
        return writeln!(out, "    Backends:   none");
    }
    writeln!(out, "    Backends:")?;
    out.push_str(&indent(6, &backends(port)));
    Ok(())
}

fn frontends(port: &ServicePortEntry) -> String {
    let rows = port.frontends.iter().map(|one| {
        [
            &*one.kind,
            &*one.listen,
            &*one.family,
            &*one.inside,
            &*one.outside,
        ]
    });
    table(["TYPE", "LISTEN", "FAMILY", "INSIDE", "OUTSIDE"], rows)
}

fn backends(port: &ServicePortEntry) -> String {
    let rows = port.backends.iter().map(|one| {
        let text = |text: &Option<String>| text.as_deref().unwrap_or(NONE).to_owned();
        [
            one.address.to_string(),
            one.state().to_owned(),
            readiness_from(one).to_owned(),
            new_flows(one).to_owned(),
            one.weight.to_string(),
            text(&one.node),
            text(&one.zone),
        ]
    });
    let header = [
        "ADDRESS",
        "STATE",
        "READINESS FROM",
        "NEW FLOWS",
        "WEIGHT",
        "NODE",
        "ZONE",
    ];
    table(header, rows)
}

/// Whether the probe or the slice determines readiness: a successful probe does not override a slice that excludes the
/// endpoint.
fn readiness_from(backend: &ServiceBackend) -> &'static str {
    match backend.probed {
        Some(false) => "probe",
        Some(true) if backend.ready => "probe",
        _ => "slice",
    }
}

const fn new_flows(backend: &ServiceBackend) -> &'static str {
    match (
        backend.in_cluster_list,
        backend.in_local_list,
        backend.lingering,
    ) {
        (true, true, _) => "cluster, local",
        (true, false, _) => "cluster",
        (false, true, _) => "local",
        (false, false, true) => "none, lingering",
        (false, false, false) => "none",
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{conflict, web};
    use super::*;

    fn problem(subject: &str, problem: &str) -> ServiceProblem {
        ServiceProblem {
            subject: subject.into(),
            problem: problem.into(),
        }
    }

    #[test]
    fn everything_about_the_service_is_said() {
        let details = ServiceDetails {
            service: web(),
            conflicts: vec![conflict()],
            problems: vec![problem("service shop/web", "nobody \u{1b}[1m hears of it")],
            mode: "ebpf".to_owned(),
        };
        assert_eq!(
            text(&details),
            "\
Service:   shop/web
Type:   LoadBalancer
Source:   services/web.yaml
Internal traffic:   Cluster
External traffic:   Local
Affinity:   3h0m0s
Algorithm:   maglev
Forwarding:   hybrid
Health check port:   31000
Ports:
  http 80/TCP:
    Frontends:
      TYPE        LISTEN            FAMILY   INSIDE    OUTSIDE
      ClusterIP   10.96.0.1:80      IPv4     cluster   cluster
      NodePort    node port 30080   IPv4     cluster   drop
    Problem:   no local backends: drops
    Backends:
      ADDRESS           STATE                  READINESS FROM   NEW FLOWS         WEIGHT   NODE     ZONE
      10.244.1.7:8080   ready                  probe            cluster, local    1        hnode1   -
      10.244.1.8:8080   not ready              probe            none              1        hnode1   -
      10.244.2.9:8080   terminating, serving   slice            none, lingering   20       hnode2   -
  dns 53/UDP:
    Frontends:   none
    Conflict:   service shop/web: spec.clusterIPs of shop/web:dns/UDP IPv4 belongs to shop/old:dns/UDP, which comes first: it is not served at 10.96.0.1:53/UDP
    Not in force:   IPv4: HEALTH_BACKENDS has no room
    Backends:   none
Problems:
  service shop/web: nobody \\u{1b}[1m hears of it
"
        );
    }

    #[test]
    fn line_breaks_from_outside_make_no_rows() {
        let mut service = web();
        let before = text(&ServiceDetails {
            service: service.clone(),
            conflicts: Vec::new(),
            problems: Vec::new(),
            mode: "ebpf".to_owned(),
        });
        let hostile = "z1\nProblems:   none\r\n  x\u{2028}y\u{85}z";
        service.source = hostile.to_owned();
        service.kind = hostile.to_owned();
        for port in &mut service.ports {
            for backend in &mut port.backends {
                backend.node = Some(hostile.to_owned());
                backend.zone = Some(hostile.to_owned());
            }
        }
        let shown = text(&ServiceDetails {
            service,
            conflicts: Vec::new(),
            problems: vec![problem(hostile, hostile)],
            mode: "ebpf".to_owned(),
        });
        // A problem has its own line.
        assert_eq!(shown.lines().count(), before.lines().count() + 1, "{shown}");
        assert!(!shown.contains(['\r', '\u{2028}', '\u{85}']), "{shown}");
    }

    #[test]
    fn a_name_means_one_service() {
        let named = |namespace: &str| ServiceEntry {
            namespace: namespace.into(),
            ..web()
        };
        let find = |services| {
            let found = the_one("web", services);
            found
                .map(|service| service.full_name())
                .map_err(|error| error.to_string())
        };
        assert_eq!(find(vec![named("a")]).as_deref(), Ok("a/web"));
        assert_eq!(
            find(vec![named("a"), named("b")]).unwrap_err(),
            "several services match \"web\": give one of a/web, b/web"
        );
        let unknown = find(Vec::new()).unwrap_err();
        assert!(
            unknown.starts_with("no service \"web\"; `health-agent service list`"),
            "{unknown}"
        );
    }

    #[test]
    fn problems_of_a_service_are_those_that_name_it() {
        for (subject, text, is_ours) in [
            ("services/web.yaml", "no object", true),
            ("services/b.yaml", "endpoint slice shop/web: ports", true),
            ("services/b.yaml", "endpoint slice shop/web-2: ports", false),
            ("service shop/web", "nobody listens", true),
            ("service shop/website", "nobody listens", false),
        ] {
            let problem = problem(subject, text);
            assert_eq!(is_about(&problem, &web()), is_ours, "{problem:?}");
        }
    }
}
