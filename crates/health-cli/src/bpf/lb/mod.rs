//! `health-agent bpf lb`: services as stored in the maps.

mod clients;
pub(super) mod entries;
mod flows;
mod frontends;
mod maglev;
mod selection;
mod sockets;
mod translation;

use clap::{ArgGroup, Args, Subcommand};
use health_api::client::Client;
use health_datapath::dump::Pinned;

use crate::output::OutputArgs;

pub(super) use clients::print as print_clients;
pub(super) use flows::entry as flow_entry;
pub(super) use selection::Selection;
pub(super) use sockets::entry as socket_entry;

const EXAMPLES: &str = "\
Examples:
  health-agent bpf lb list
  health-agent bpf lb list --maglev
  health-agent bpf lb list --flows";

const LIST_EXAMPLES: &str = "\
Output:
  New flows from this node and its endpoints go to the backends under INSIDE, all others to those
  under OUTSIDE (= if they are the same). Each backend shows its share of new flows, and its
  approximate number of current flows. NUMBER identifies the service's port, also with --affinity,
  --maglev and --flows. Flows and clients are printed as they are read, unordered. --service asks
  the agent for the service's addresses

Examples:
  health-agent bpf lb list
  health-agent bpf lb list --service shop/web
  health-agent bpf lb list --service shop/web:http --flows
  health-agent bpf lb list -o json | jq '.[] | select(.inside.backends == [])'
  health-agent bpf lb list --maglev
  health-agent bpf lb list --affinity
  health-agent bpf lb list --flows -o jsonl
  health-agent bpf lb list --sockets";

/// Commands of `bpf lb`.
#[derive(Debug, Subcommand)]
#[command(after_help = EXAMPLES)]
pub enum LbCommand {
    /// List the frontends of services with their backends
    #[command(after_help = LIST_EXAMPLES)]
    List(ListArgs),
}

/// Flags of `bpf lb list`.
#[derive(Args, Debug)]
#[command(group = ArgGroup::new("what").args(["affinity", "maglev", "flows", "sockets"]))]
pub struct ListArgs {
    /// List the clients that stay with a backend (session affinity) instead
    #[arg(long)]
    affinity: bool,
    /// List the Maglev tables instead
    #[arg(long)]
    maglev: bool,
    /// List the flows sent to backends instead, two entries per flow
    #[arg(long)]
    flows: bool,
    /// List the backends of host sockets instead, two entries per socket and backend
    #[arg(long)]
    sockets: bool,
    /// Only this service: NAMESPACE/NAME, or NAMESPACE/NAME:PORT with a port number or name
    #[arg(long, value_name = "SERVICE")]
    service: Option<String>,
    #[command(flatten)]
    output: OutputArgs,
}

impl LbCommand {
    pub(super) async fn execute(self, client: &Client, pinned: &Pinned) -> anyhow::Result<()> {
        let Self::List(args) = self;
        let format = args.output.output;
        let selection = match &args.service {
            Some(wanted) => Selection::of(client, pinned, wanted).await?,
            None => Selection::default(),
        };
        if args.flows {
            flows::print(pinned, &selection, format)
        } else if args.sockets {
            sockets::print(pinned, &selection, format)
        } else if args.affinity {
            clients::print(pinned, &selection, format)
        } else if args.maglev {
            maglev::print(pinned, &selection, format)
        } else {
            frontends::print(pinned, &selection, format)
        }
    }
}
