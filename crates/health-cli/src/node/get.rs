//! `health-agent node get`: everything that is known about one node.

use std::collections::BTreeMap;

use health_api::client::Client;
use health_model::api::{
    ContainerProbeSummary, HealthStatus, NodeEntry, NodeList, NodeStatus, RegistryState,
    TargetHistory,
};
use health_model::settings::Location;
use jiff::Timestamp;
use serde::Serialize;

use super::super::output::{comma_separated, printable};
use super::super::status::figures::{Figures, read_history, read_path_mtus, rtt_rows};
use super::super::status::{Detail, node_text, reachability_word};
use super::{GetArgs, find, registries};

/// Number of results per target in the text.
const LAST_RESULTS: usize = 10;

/// Everything that is known about a node.
#[derive(Serialize)]
struct NodeDetails {
    /// `cluster/name`.
    name: String,
    /// The registry's entry; `null` for a node that has just left it.
    entry: Option<NodeEntry>,
    /// The registry of its cluster.
    registry: Option<RegistryState>,
    /// The probe results; `null` for a node that has just joined.
    status: Option<NodeStatus>,
    /// The history windows and last results of the node's targets.
    history: Vec<TargetHistory>,
}

/// Finds and prints the requested node.
pub(super) async fn print(
    args: &GetArgs,
    list: NodeList,
    client: &Client,
    location: &Location,
) -> anyhow::Result<()> {
    let mut status: HealthStatus = client.get("/v1beta/status").await?;
    let known = list.nodes.iter().map(|node| &node.name);
    let probed = status.nodes.iter().map(|node| &node.name);
    let name = find(&args.name, known.chain(probed))?;
    let mut history = read_history(client).await?;
    history.retain(|target| target.node == name);
    let path_mtus = read_path_mtus(client).await?;
    let cluster = name.rsplit_once('/').map_or("", |(cluster, _)| cluster);
    let index = status.nodes.iter().position(|node| node.name == name);
    let details = NodeDetails {
        entry: list.nodes.into_iter().find(|node| node.name == name),
        registry: list
            .registries
            .into_iter()
            .find(|registry| registry.cluster == cluster),
        status: index.map(|index| status.nodes.swap_remove(index)),
        history,
        name,
    };
    args.output.output.print_object(&details, |details| {
        let figures = Figures {
            rtt: rtt_rows(client, location),
            history: BTreeMap::from([(details.name.clone(), details.history.clone())]),
            last_results: LAST_RESULTS,
            path_mtus,
            containers: ContainerProbeSummary::default(),
        };
        text(details, &status, figures, Timestamp::now())
    })
}

/// Formats the entry and the verbose report about the node.
fn text(details: &NodeDetails, report: &HealthStatus, figures: Figures, now: Timestamp) -> String {
    let mut fields = vec![("Node", details.name.clone())];
    if let Some(registry) = &details.registry {
        fields.push(("Registry", registry.registry.clone()));
        fields.extend(registries::stale_warning(registry, now).map(|text| ("Warning", text)));
    }
    match &details.entry {
        Some(entry) => fields.extend([
            ("Addresses", comma_separated(&entry.addresses)),
            ("Pod CIDRs", comma_separated(&entry.pod_cidrs)),
            ("Health addresses", comma_separated(&entry.health_addresses)),
        ]),
        None => fields.push(("Addresses", "no longer in the registry".to_owned())),
    }
    let health = details.status.as_ref().map_or("not probed yet", |status| {
        reachability_word(status.reachability())
    });
    fields.push(("Health", health.to_owned()));
    if let Err(reason) = &figures.rtt {
        fields.push(("RTT statistics", format!("unreadable ({reason})")));
    }
    let fields = fields
        .iter()
        .map(|(label, value)| format!("{label}:   {}\n", printable(value)));
    let mut text: String = fields.collect();
    if let Some(status) = &details.status {
        text += &node_text(report, status, &Detail::Verbose(figures));
    }
    text
}

#[cfg(test)]
mod tests {
    use health_model::api::{
        AddressGroupStatus, ConnectivityStatus, Diagnosis, PathKind, PathStatus, Protocol,
    };

    use super::*;

    fn details() -> NodeDetails {
        let ip = "172.30.0.2".parse().unwrap();
        let result = |status: &str| ConnectivityStatus {
            latency: 21_300,
            status: status.to_owned(),
            last_probed: "2026-11-21T03:00:00Z".parse().unwrap(),
            rtt_source: None,
            connect_latency: None,
            total_latency: None,
            consecutive_failures: 0,
            last_change: None,
            degraded: None,
        };
        NodeDetails {
            name: "default/hnode2".into(),
            entry: Some(NodeEntry {
                name: "default/hnode2".into(),
                local: false,
                addresses: vec![ip],
                pod_cidrs: vec!["10.244.2.0/24".parse().unwrap()],
                health_addresses: vec![],
                not_probed: Vec::new(),
            }),
            registry: Some(RegistryState {
                registry: "file:/etc/nodes.yaml".into(),
                cluster: "default".into(),
                last_read: "2026-11-21T03:00:00Z".parse().unwrap(),
                stale: Some("nodes.yaml:3:5: unknown field".into()),
                stale_since: Some("2026-11-21T03:00:00Z".parse().unwrap()),
                rejected: vec![],
            }),
            status: Some(NodeStatus {
                name: "default/hnode2".into(),
                host: AddressGroupStatus {
                    primary_address: PathStatus {
                        ip,
                        icmp: Some(result("")),
                        http: Some(result("Connection refused")),
                        off: vec![],
                        path_mtu: None,
                    },
                    secondary_addresses: vec![],
                },
                health_endpoint: None,
                hosts_only: false,
                diagnosis: Some(Diagnosis {
                    cause: "agent-down".into(),
                    message: "the agent does not answer".into(),
                    evidence: vec!["ICMP is answered".into()],
                }),
            }),
            history: vec![TargetHistory {
                node: "default/hnode2".into(),
                ip,
                path: PathKind::Host,
                protocol: Protocol::Http,
                windows: vec![],
                last_results_ns: vec![None, Some(21_300)],
            }],
        }
    }

    fn shown(details: &NodeDetails) -> String {
        let figures = Figures {
            rtt: Err("no maps are pinned".into()),
            history: BTreeMap::from([(details.name.clone(), details.history.clone())]),
            last_results: LAST_RESULTS,
            path_mtus: BTreeMap::new(),
            containers: ContainerProbeSummary::default(),
        };
        let now = "2026-11-21T03:00:10Z".parse().unwrap();
        text(details, &HealthStatus::default(), figures, now)
    }

    #[test]
    fn everything_about_the_node_is_said() {
        assert_eq!(
            shown(&details()),
            "\
Node:   default/hnode2
Registry:   file:/etc/nodes.yaml
Warning:   the data of file:/etc/nodes.yaml is 10s old: nodes.yaml:3:5: unknown field
Addresses:   172.30.0.2
Pod CIDRs:   10.244.2.0/24
Health addresses:   -
Health:   unreachable
RTT statistics:   unreadable (no maps are pinned)
  default/hnode2:
    Diagnosis:   the agent does not answer
      - ICMP is answered
    Host connectivity to 172.30.0.2:
      ICMP to stack:   OK, RTT=21.3µs   (Last probed: 2026-11-21T03:00:00Z)
      HTTP to agent:   Connection refused   (Last probed: 2026-11-21T03:00:00Z)
        newest first: lost 21.3µs
    Endpoint connectivity:   Unknown (address not known yet)
"
        );
    }

    #[test]
    fn a_node_that_comes_or_goes_is_shown_as_far_as_it_is_known() {
        let coming = NodeDetails {
            status: None,
            ..details()
        };
        assert!(shown(&coming).contains("\nHealth:   not probed yet\n"));
        let going = NodeDetails {
            entry: None,
            ..details()
        };
        assert!(shown(&going).contains("\nAddresses:   no longer in the registry\n"));
    }

    #[test]
    fn a_name_means_one_node() {
        let names = ["default/a", "west/a", "west/b", "west/b"].map(str::to_owned);
        let find = |wanted| find(wanted, names.iter()).map_err(|error| error.to_string());
        assert_eq!(find("b"), Ok("west/b".to_owned()));
        assert_eq!(find("west/a"), Ok("west/a".to_owned()));
        let several = find("a").expect_err("it is in two clusters");
        assert!(
            several.ends_with(": give one of default/a, west/a"),
            "{several}"
        );
        let unknown = find("c").expect_err("there is none");
        assert!(unknown.contains("no node \"c\""), "{unknown}");
    }
}
