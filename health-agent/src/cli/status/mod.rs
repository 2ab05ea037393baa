//! `health-agent status`: the connectivity to all nodes.

mod render;

use std::process::ExitCode;

use clap::Args;

use self::render::{Detail, RttRows};
use super::exit::UNREACHABLE;
use super::output::OutputArgs;
use crate::api::client::Client;
use crate::api::types::{HealthStatus, NodeStatus, Reachability};
use crate::config::Location;
use crate::datapath::dump::Pinned;

const EXAMPLES: &str = "\
Exit codes:
  0   nothing is unreachable
  1   there is no agent, or it does not answer
  3   something is unreachable

Examples:
  health-agent status
  health-agent status --succinct
  health-agent status --probe --verbose
  health-agent status -o json | jq '.nodes[].name'";

/// Flags of `status`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct StatusArgs {
    /// Probe all nodes now instead of showing the last results
    #[arg(long)]
    probe: bool,
    /// Show a line a node
    #[arg(long)]
    succinct: bool,
    /// Show all addresses, times and round-trip statistics; with --succinct, counts of addresses
    #[arg(long)]
    verbose: bool,
    #[command(flatten)]
    output: OutputArgs,
}

impl StatusArgs {
    pub(super) async fn execute(
        self,
        client: &Client,
        location: &Location,
    ) -> anyhow::Result<ExitCode> {
        let status: HealthStatus = if self.probe {
            client.put("/v1beta/status/probe").await?
        } else {
            client.get("/v1beta/status").await?
        };
        self.output
            .output
            .print_object(&status, |status| self.text(status, location))?;
        let unreachable = status
            .nodes
            .iter()
            .map(NodeStatus::reachability)
            .any(|node| node == Reachability::Unreachable);
        Ok(if unreachable {
            ExitCode::from(UNREACHABLE)
        } else {
            ExitCode::SUCCESS
        })
    }

    fn text(&self, status: &HealthStatus, location: &Location) -> String {
        match (self.succinct, self.verbose) {
            (true, verbose) => render::succinct(status, verbose),
            (false, false) => render::full(status, &Detail::Normal),
            (false, true) => render::full(status, &Detail::Verbose(rtt_rows(location))),
        }
    }
}

/// Statistics need the pinned map, which only root may read: without it, the reason.
fn rtt_rows(location: &Location) -> Result<RttRows, String> {
    Pinned::open(location)
        .and_then(|pinned| pinned.rtt())
        .map(|rows| rows.into_iter().collect())
        .map_err(|error| error.to_string())
}
