//! `health-agent node`: the node registry.

use clap::Subcommand;

use super::output::{OutputArgs, comma_separated, table};
use crate::api::client::Client;
use crate::api::types::{NodeEntry, NodeList};

const EXAMPLES: &str = "\
Examples:
  health-agent node list
  health-agent node list -o json | jq -r '.[].name'";

/// Commands of `node`.
#[derive(Debug, Subcommand)]
#[command(after_help = EXAMPLES)]
pub enum NodeCommand {
    /// List all nodes that the agent knows
    #[command(after_help = EXAMPLES)]
    List(OutputArgs),
}

impl NodeCommand {
    pub(super) async fn execute(self, client: &Client) -> anyhow::Result<()> {
        let Self::List(args) = self;
        let list: NodeList = client.get("/v1/nodes").await?;
        for state in &list.registries {
            if let (Some(reason), Some(since)) = (&state.stale, state.stale_since) {
                eprintln!(
                    "warning: what {} says is as of {since:.0}: {reason}",
                    state.registry
                );
            }
            for entry in &state.rejected {
                eprintln!(
                    "warning: {} of {} is left out: {}",
                    entry.key, state.registry, entry.reason
                );
            }
        }
        args.output.print_rows(&list.nodes, nodes_table)
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
            },
            NodeEntry {
                name: "default/hnode2".into(),
                local: false,
                addresses: vec!["172.30.0.2".parse().unwrap()],
                pod_cidrs: vec!["10.244.2.0/24".parse().unwrap()],
                health_addresses: vec![],
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
