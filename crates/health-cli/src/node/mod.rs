//! `health-agent node`: the node registries, and everything that is known about one node.

mod get;
pub(super) mod registries;

use anyhow::bail;
use clap::{Args, Subcommand};
use health_api::client::Client;
use health_model::api::{NodeEntry, NodeList};
use health_model::settings::Location;
use jiff::Timestamp;

use super::output::{OutputArgs, comma_separated, table};
use super::status::{UnknownNode, is_named};

const EXAMPLES: &str = "\
Examples:
  health-agent node list
  health-agent node get host2
  health-agent node registries";

const LIST_EXAMPLES: &str = "\
Examples:
  health-agent node list
  health-agent node list -o json | jq -r '.[].name'";

const GET_EXAMPLES: &str = "\
Examples:
  health-agent node get host2
  health-agent node get west/host2 -o yaml
  health-agent node get host2 -o json | jq .status.diagnosis";

const REGISTRIES_EXAMPLES: &str = "\
Examples:
  health-agent node registries
  health-agent node registries -o json | jq '.[] | select(.stale)'";

/// Commands of `node`.
#[derive(Debug, Subcommand)]
#[command(after_help = EXAMPLES)]
pub enum NodeCommand {
    /// List all known nodes
    #[command(after_help = LIST_EXAMPLES)]
    List(OutputArgs),
    /// Show everything about one node: its entry, diagnosis, results and windows
    #[command(after_help = GET_EXAMPLES)]
    Get(GetArgs),
    /// List the node registries, the age of their data, and rejected entries
    #[command(after_help = REGISTRIES_EXAMPLES)]
    Registries(OutputArgs),
}

/// Flags of `node get`.
#[derive(Args, Debug)]
pub struct GetArgs {
    /// Node as `cluster/name`, or a name that only one cluster has
    name: String,
    #[command(flatten)]
    output: OutputArgs,
}

impl NodeCommand {
    pub(super) async fn execute(self, client: &Client, location: &Location) -> anyhow::Result<()> {
        let list: NodeList = client.get("/v1/nodes").await?;
        match self {
            Self::List(args) => {
                registries::warn(&list.registries, Timestamp::now());
                args.output.print_rows(&list.nodes, nodes_table)
            }
            Self::Get(args) => get::print(&args, list, client, location).await,
            Self::Registries(args) => args.output.print_rows(&list.registries, |registries| {
                registries::text(registries, Timestamp::now())
            }),
        }
    }
}

/// The full name of the single node that matches `wanted`.
pub(super) fn find<'a>(
    wanted: &str,
    names: impl Iterator<Item = &'a String>,
) -> anyhow::Result<String> {
    let mut found: Vec<&str> = names
        .map(String::as_str)
        .filter(|name| is_named(name, wanted))
        .collect();
    found.sort_unstable();
    found.dedup();
    match found[..] {
        [] => Err(UnknownNode(wanted.to_owned()).into()),
        [one] => Ok(one.to_owned()),
        _ => bail!(
            "node {wanted:?} is in several clusters: give one of {}",
            found.join(", ")
        ),
    }
}

fn nodes_table(nodes: &[NodeEntry]) -> String {
    let rows = nodes.iter().map(|node| {
        let local = if node.local { " (localhost)" } else { "" };
        [
            format!("{}{local}", node.name),
            comma_separated(&node.addresses),
            comma_separated(&node.pod_cidrs),
            comma_separated(&node.health_addresses),
        ]
    });
    table(["NAME", "ADDRESSES", "POD CIDRS", "HEALTH ADDRESSES"], rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_addresses_are_listed() {
        let nodes = [
            NodeEntry {
                name: "default/hnode1".into(),
                local: true,
                addresses: vec!["172.30.0.1".parse().unwrap(), "fd00:30::1".parse().unwrap()],
                pod_cidrs: vec!["10.244.1.0/24".parse().unwrap()],
                health_addresses: vec!["10.244.1.7".parse().unwrap()],
                not_probed: Vec::new(),
            },
            NodeEntry {
                name: "default/hnode2".into(),
                local: false,
                addresses: vec!["172.30.0.2".parse().unwrap()],
                pod_cidrs: vec!["10.244.2.0/24".parse().unwrap()],
                health_addresses: vec![],
                not_probed: Vec::new(),
            },
        ];
        assert_eq!(
            nodes_table(&nodes),
            "NAME                         ADDRESSES               POD CIDRS       HEALTH ADDRESSES\n\
             default/hnode1 (localhost)   172.30.0.1,fd00:30::1   10.244.1.0/24   10.244.1.7\n\
             default/hnode2               172.30.0.2              10.244.2.0/24   -\n"
        );
    }
}
