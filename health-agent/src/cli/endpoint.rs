//! `health-agent endpoint`: the endpoints of this node, as the agent manages them.

use clap::{Args, Subcommand};

use super::output::{Format, OutputArgs, table};
use crate::api::client::Client;
use crate::api::types::Endpoint;

const EXAMPLES: &str = "\
Examples:
  health-agent endpoint list
  health-agent endpoint get 1017";

const LIST_EXAMPLES: &str = "\
Examples:
  health-agent endpoint list
  health-agent endpoint list -o json";

const GET_EXAMPLES: &str = "\
Examples:
  health-agent endpoint get 1017
  health-agent endpoint get 1017 | jq .repairs";

/// Commands of `endpoint`.
#[derive(Debug, Subcommand)]
#[command(after_help = EXAMPLES)]
pub enum EndpointCommand {
    /// List all endpoints
    #[command(after_help = LIST_EXAMPLES)]
    List(OutputArgs),
    /// Show all that is known about one endpoint
    #[command(after_help = GET_EXAMPLES)]
    Get(GetArgs),
}

/// Flags of `endpoint get`.
#[derive(Args, Debug)]
pub struct GetArgs {
    /// Endpoint id
    #[arg(value_parser = clap::value_parser!(u16).range(1..=4095))]
    id: u16,
    /// Form of the output
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value = "json")]
    output: Format,
}

impl EndpointCommand {
    pub(super) async fn execute(self, client: &Client) -> anyhow::Result<()> {
        match self {
            Self::List(args) => {
                let mut endpoints: Vec<Endpoint> = client.get("/v1/endpoints").await?;
                endpoints.sort_by_key(|endpoint| endpoint.id);
                args.output.print_rows(&endpoints, endpoints_table)
            }
            Self::Get(args) => {
                let endpoint: Endpoint = client.get(&format!("/v1/endpoints/{}", args.id)).await?;
                args.output
                    .print_object(&endpoint, |one| endpoints_table(std::slice::from_ref(one)))
            }
        }
    }
}

/// The table of `cilium endpoint list`, a label a line.
fn endpoints_table(endpoints: &[Endpoint]) -> String {
    // The datapath enforces no policy on any endpoint.
    const ENFORCEMENT: &str = "Disabled";
    let address = |ip: Option<std::net::IpAddr>| ip.map(|ip| ip.to_string()).unwrap_or_default();
    let rows = endpoints.iter().map(|endpoint| {
        [
            endpoint.id.to_string(),
            ENFORCEMENT.to_owned(),
            ENFORCEMENT.to_owned(),
            endpoint.identity.to_string(),
            endpoint.labels.join("\n"),
            address(endpoint.ipv6),
            address(endpoint.ipv4),
            endpoint.state.clone(),
        ]
    });
    table(
        [
            "ENDPOINT",
            "POLICY (ingress)\nENFORCEMENT",
            "POLICY (egress)\nENFORCEMENT",
            "IDENTITY",
            "LABELS",
            "IPv6",
            "IPv4",
            "STATUS",
        ],
        rows,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn an_endpoint_takes_a_line_a_label() {
        let endpoint = Endpoint {
            id: 1017,
            identity: 4,
            labels: vec!["reserved:health".into(), "node:zone=a".into()],
            ipv4: Some("10.244.1.7".parse().unwrap()),
            ipv6: None,
            state: "ready".into(),
            interface: "lxc_health".into(),
            ifindex: 5,
            mac: "0a:00:00:00:00:01".into(),
            host_mac: "0a:00:00:00:00:02".into(),
            netns: "/run/netns/health".into(),
            repairs: BTreeMap::new(),
        };
        assert_eq!(
            endpoints_table(&[endpoint]),
            "\
ENDPOINT   POLICY (ingress)   POLICY (egress)   IDENTITY   LABELS            IPv6   IPv4         STATUS
           ENFORCEMENT        ENFORCEMENT
1017       Disabled           Disabled          4          reserved:health          10.244.1.7   ready
                                                           node:zone=a
"
        );
    }
}
