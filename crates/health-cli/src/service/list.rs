//! `health-agent service list`: the services of this node.

use clap::Args;
use health_api::client::Client;
use health_model::api::{ServiceEntry, ServicePortEntry, ServiceSummary};
use health_model::duration::short_duration;

use super::{conflicts_of, path, policy, port_change, refusal, warn};
use crate::output::{Cell, Format, ListFormat, NONE, OutputArgs, listing};

const EXAMPLES: &str = "\
Columns:
  FRONTENDS   where traffic of the port arrives
  BACKENDS    number of ready endpoints, and of all endpoints
  POLICY      which endpoints traffic may use: all of the cluster (Cluster) or those on this node
              (Local); two values, for ClusterIPs and for all other addresses, if they differ
  AFFINITY    how long a client stays with its backend after it last opened a flow
  ALGORITHM   how a backend is chosen; - for the default
  PROBLEM     why new flows get no backend, where SCTP packets are dropped, whether an address
              belongs to another service or to this node, and whether the port is not in force

Output:
  wide adds columns and shows problems in full

Examples:
  health-agent service list
  health-agent service list --namespace shop -o wide
  health-agent service list -o json | jq -r '.[] | select(.type == \"NodePort\") | .name'";

/// Flags of `service list`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct ListArgs {
    /// Only services of this namespace
    #[arg(long, value_name = "NAME")]
    namespace: Option<String>,
    /// Omit the column names
    #[arg(long)]
    no_headers: bool,
    #[command(flatten)]
    output: OutputArgs<ListFormat>,
}

impl ListArgs {
    pub(super) async fn execute(self, client: &Client) -> anyhow::Result<()> {
        let path = path(None, self.namespace.as_deref());
        let services: Vec<ServiceEntry> = client.get(&path).await?;
        let summary: ServiceSummary = client.get("/v1/services/summary").await?;
        warn(&summary);
        let format = Format::from(self.output.output);
        let wide = self.output.output.is_wide();
        format.print_rows(&services, |services| {
            services_table(services, &summary, wide, !self.no_headers)
        })
    }
}

fn services_table(
    services: &[ServiceEntry],
    summary: &ServiceSummary,
    wide: bool,
    has_headers: bool,
) -> String {
    let mut header = vec![
        "SERVICE",
        "PORT",
        "TYPE",
        "FRONTENDS",
        "BACKENDS",
        "POLICY",
        "AFFINITY",
        "ALGORITHM",
    ];
    if wide {
        header.extend(["HEALTH CHECK PORT", "SOURCE"]);
    }
    header.push("PROBLEM");
    let ports = services
        .iter()
        .flat_map(|service| service.ports.iter().map(move |port| (service, port)));
    let rows = ports.map(|(service, port)| {
        let frontends: Vec<_> = port.frontends.iter().map(|one| &*one.listen).collect();
        let ready = port.backends.iter().filter(|one| one.ready).count();
        let mut row = vec![
            Cell::from(service.full_name()),
            port.title().into(),
            service.kind.as_str().into(),
            Cell::lines_or_none(frontends),
            format!("{ready}/{}", port.backends.len()).into(),
            policy(service).into(),
            service
                .affinity_ns
                .map_or(NONE.to_owned(), short_duration)
                .into(),
            service.algorithm.as_deref().unwrap_or(NONE).into(),
        ];
        if wide {
            let check = service.health_check_node_port;
            row.push(
                check
                    .map_or(NONE.to_owned(), |port| port.to_string())
                    .into(),
            );
            row.push(service.source.as_str().into());
        }
        row.push(problems(service, port, summary, wide));
        row
    });
    listing(header, rows, has_headers)
}

fn problems(
    service: &ServiceEntry,
    port: &ServicePortEntry,
    summary: &ServiceSummary,
    wide: bool,
) -> Cell {
    let conflicts: Vec<_> = conflicts_of(service, port, &summary.conflicts).collect();
    let mut problems: Vec<String> = refusal(port).into_iter().collect();
    problems.extend(port_change(port, &summary.mode));
    match (conflicts.len(), wide) {
        (0, _) => {}
        (_, true) => problems.extend(conflicts.iter().map(|one| one.problem.clone())),
        (1, false) => problems.push("address conflict".to_owned()),
        (many, false) => problems.push(format!("{many} address conflicts")),
    }
    match wide {
        true => problems.extend(
            port.failures
                .iter()
                .map(|one| format!("not in force: {one}")),
        ),
        false if port.failures.is_empty() => {}
        false => problems.push("not in force".to_owned()),
    }
    Cell::lines_or_none(problems)
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{conflict, web};
    use super::*;

    fn summary() -> ServiceSummary {
        ServiceSummary {
            mode: "ebpf".to_owned(),
            conflicts: vec![conflict()],
            ..ServiceSummary::default()
        }
    }

    #[test]
    fn sctp_at_another_port_is_a_problem_of_ebpf() {
        let mut service = web();
        service.ports[0].protocol = "SCTP".to_owned();
        let problem = "SCTP to another port: drops at 10.96.0.1:80, node port 30080";
        let text = services_table(std::slice::from_ref(&service), &summary(), false, true);
        assert!(text.contains(problem), "{text}");
        let of_ipvs = ServiceSummary {
            mode: "ipvs".to_owned(),
            ..summary()
        };
        let text = services_table(std::slice::from_ref(&service), &of_ipvs, false, true);
        assert!(!text.contains("another port"), "{text}");
        for backend in &mut service.ports[0].backends {
            backend.address.set_port(80);
        }
        let text = services_table(&[service], &summary(), false, true);
        assert!(text.contains("drops at node port 30080"), "{text}");
    }

    #[test]
    fn each_port_has_a_row_with_its_frontends_below_each_other() {
        let text = services_table(&[web()], &summary(), false, true);
        assert_eq!(
            text,
            "\
SERVICE    PORT          TYPE           FRONTENDS         BACKENDS   POLICY          AFFINITY   ALGORITHM   PROBLEM
shop/web   http 80/TCP   LoadBalancer   10.96.0.1:80      1/3        Cluster/Local   3h0m0s     maglev      no local backends: drops
                                        node port 30080
shop/web   dns 53/UDP    LoadBalancer   -                 0/0        Cluster/Local   3h0m0s     maglev      address conflict
                                                                                                            not in force
"
        );
        let without = services_table(&[web()], &ServiceSummary::default(), false, false);
        assert!(without.starts_with("shop/web "), "{without}");
    }

    #[test]
    fn wide_has_more_columns_and_whole_problems() {
        let text = services_table(&[web()], &summary(), true, false);
        let [.., first, last] = &text.lines().collect::<Vec<_>>()[..] else {
            panic!("{text}")
        };
        assert!(
            first.contains("   31000               services/web.yaml   service shop/web: "),
            "{text}"
        );
        assert!(first.ends_with(&conflict().problem), "{text}");
        assert!(
            last.ends_with("not in force: IPv4: HEALTH_BACKENDS has no room"),
            "{text}"
        );
    }
}
