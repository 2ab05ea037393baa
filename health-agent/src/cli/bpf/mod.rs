//! `health-agent bpf`: the pinned maps and programs, read from the kernel. An agent is asked for names
//! alone.

mod address;
mod arrivals;
mod calls;
mod connections;
mod ct;
mod endpoint;
mod entry;
mod event_filter;
pub(super) mod filter;
mod flow;
mod flush;
mod fragments;
mod inflight;
mod ipcache;
mod map;
mod masquerade;
mod metrics;
mod nat;
mod parallel;
mod policy;
mod prog;
mod rtt;
mod settings;
mod stream;

use clap::Subcommand;
use health_datapath::dump::Pinned;
use health_model::settings::Location;

use crate::api::client::Client;

const EXAMPLES: &str = "\
Examples:
  health-agent bpf ct list
  health-agent bpf map list -o json
  health-agent bpf rtt list --instance hnode1";

/// Commands of `bpf`.
#[derive(Debug, Subcommand)]
#[command(after_help = EXAMPLES)]
pub enum BpfCommand {
    /// Look at connection tracking, or clear it
    #[command(subcommand)]
    Ct(ct::CtCommand),
    /// Look at address translation, or clear it
    #[command(subcommand)]
    Nat(nat::NatCommand),
    /// Look at round-trip times
    #[command(subcommand)]
    Rtt(rtt::RttCommand),
    /// Look at the endpoints as the datapath knows them
    #[command(subcommand)]
    Endpoint(endpoint::EndpointCommand),
    /// Look at the verdicts about packets of endpoints
    #[command(subcommand)]
    Policy(policy::PolicyCommand),
    /// Look at the identities behind addresses
    #[command(subcommand)]
    Ipcache(ipcache::IpcacheCommand),
    /// Look at packet counters
    #[command(subcommand)]
    Metrics(metrics::MetricsCommand),
    /// Look at the maps themselves
    #[command(subcommand)]
    Map(map::MapCommand),
    /// Look at the programs
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
            Self::Endpoint(command) => command.execute(&pinned()?),
            Self::Policy(command) => command.execute(&pinned()?),
            Self::Ipcache(command) => command.execute(&pinned()?),
            Self::Metrics(command) => command.execute(&pinned()?),
            // May be about a map of others.
            Self::Map(command) => command.execute(location),
            Self::Prog(command) => command.execute(&pinned()?),
        }
    }
}
