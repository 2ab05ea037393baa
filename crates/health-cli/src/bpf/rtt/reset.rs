//! `health-agent bpf rtt reset`: resets rows.

use anyhow::bail;
use clap::Args;
use health_api::client::Client;
use health_common::rtt::RttKey;
use health_datapath::dump::Pinned;

use super::names::Names;
use super::select::{Addresses, Peer, Scope};
use crate::output::print;

const EXAMPLES: &str = "\
Examples:
  health-agent bpf rtt reset 172.30.0.2
  health-agent bpf rtt reset host2 10.244.3.0/24 --protocol icmp
  health-agent bpf rtt reset --all";

/// Flags of `bpf rtt reset`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct ResetArgs {
    /// Peers to reset: addresses, prefixes or node names
    #[arg(
        value_name = "ADDRESS|PREFIX|NODE",
        required_unless_present = "all",
        conflicts_with = "all"
    )]
    peers: Vec<Peer>,
    /// Reset the rows of all peers
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    scope: Scope,
}

impl ResetArgs {
    pub(super) async fn execute(self, client: &Client, pinned: &Pinned) -> anyhow::Result<()> {
        let names = Names::ask(client).await;
        let mut keys = Vec::new();
        pinned.each_rtt(&mut |key, _| keys.extend(self.scope.has(key).then_some(*key)))?;
        if !self.all {
            let mut wanted = Vec::new();
            for peer in &self.peers {
                let addresses = Addresses::of(peer, &names)?;
                if !keys.iter().any(|key| addresses.has(key)) {
                    bail!(
                        "no such row for {peer}; nothing was reset; \
                         `health-agent bpf rtt list` lists the existing ones"
                    );
                }
                wanted.push(addresses);
            }
            let is_wanted = |key: &RttKey| wanted.iter().any(|addresses| addresses.has(key));
            keys.retain(is_wanted);
        }
        let count = pinned.reset_rtt(&keys)?;
        let rows = if count == 1 { "row" } else { "rows" };
        print(|out| writeln!(out, "{count} {rows} reset"))
    }
}
