//! `health-agent bpf rtt`: round-trip times by peer.

mod histogram;
mod list;
mod listing;
mod names;
mod order;
mod reset;
mod select;
mod table;

use clap::Subcommand;
use health_api::client::Client;
use health_api::rtt::{RttFigures, RttPath};
use health_common::rtt::{RttKey, RttRow};
use health_datapath::dump::Pinned;
use health_net::clock::ClockState;

use super::entry::Entry;

const EXAMPLES: &str = "\
Examples:
  health-agent bpf rtt list --sort p99 --top 10
  health-agent bpf rtt list --histogram host2 --path endpoint
  health-agent bpf rtt reset 172.30.0.2";

/// Commands of `bpf rtt`.
#[derive(Debug, Subcommand)]
#[command(after_help = EXAMPLES)]
pub enum RttCommand {
    /// List the round-trip times along each path
    List(list::ListArgs),
    /// Reset rows, which start again with the next round trip
    Reset(reset::ResetArgs),
}

impl RttCommand {
    pub(super) async fn execute(self, client: &Client, pinned: &Pinned) -> anyhow::Result<()> {
        match self {
            Self::List(args) => args.execute(client, pinned).await,
            Self::Reset(args) => args.execute(client, pinned).await,
        }
    }
}

/// Converts a row for a dump of the map.
pub(super) fn entry(
    key: &RttKey,
    row: &RttRow,
    clock: Option<ClockState>,
) -> Entry<RttPath, RttFigures> {
    Entry {
        key: RttPath::from(key),
        value: RttFigures::new(row.into(), clock),
    }
}
