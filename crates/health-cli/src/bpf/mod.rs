//! `health-agent bpf`: the pinned maps and programs, read from the kernel. The agent is only asked for names.

mod address;
mod arrivals;
mod calls;
mod connections;
mod ct;
mod direct;
mod dump;
mod endpoint;
mod entry;
mod event_filter;
pub(super) mod filter;
mod flow;
mod flush;
mod fragments;
mod inflight;
mod ipcache;
mod lb;
mod map;
mod masquerade;
mod metrics;
mod nat;
mod parallel;
mod policy;
mod prog;
mod ring;
mod rtt;
mod settings;
mod stream;
mod xdp;

use clap::Subcommand;
use health_api::client::Client;
use health_datapath::dump::Pinned;
use health_model::settings::Location;

const EXAMPLES: &str = "\
Examples:
  health-agent bpf ct list
  health-agent bpf map list -o json
  health-agent bpf rtt list --instance hnode1";

/// Commands of `bpf`.
#[derive(Debug, Subcommand)]
#[command(after_help = EXAMPLES)]
pub enum BpfCommand {
    /// Show or flush connection tracking
    #[command(subcommand)]
    Ct(ct::CtCommand),
    /// Show or flush address translation
    #[command(subcommand)]
    Nat(nat::NatCommand),
    /// Show or reset round-trip times
    #[command(subcommand)]
    Rtt(rtt::RttCommand),
    /// Show services in the datapath
    #[command(subcommand)]
    Lb(lb::LbCommand),
    /// Show the endpoints in the datapath
    #[command(subcommand)]
    Endpoint(endpoint::EndpointCommand),
    /// Show the policy verdicts for packets of endpoints
    #[command(subcommand)]
    Policy(policy::PolicyCommand),
    /// Show the identities of addresses
    #[command(subcommand)]
    Ipcache(ipcache::IpcacheCommand),
    /// Show packet counters
    #[command(subcommand)]
    Metrics(metrics::MetricsCommand),
    /// Show the maps
    #[command(subcommand)]
    Map(map::MapCommand),
    /// Show the programs
    #[command(subcommand)]
    Prog(prog::ProgCommand),
}

impl BpfCommand {
    pub(super) async fn execute(self, client: &Client, location: &Location) -> anyhow::Result<()> {
        let pinned = || Pinned::open(location);
        match self {
            Self::Ct(command) => command.execute(&pinned()?),
            Self::Nat(command) => command.execute(&pinned()?),
            Self::Rtt(command) => command.execute(client, &pinned()?).await,
            Self::Lb(command) => command.execute(client, &pinned()?).await,
            Self::Endpoint(command) => command.execute(&pinned()?),
            Self::Policy(command) => command.execute(&pinned()?),
            Self::Ipcache(command) => command.execute(&pinned()?),
            Self::Metrics(command) => command.execute(&pinned()?),
            // The map may be one that is not the agent's.
            Self::Map(command) => command.execute(location),
            Self::Prog(command) => command.execute(&pinned()?),
        }
    }
}
