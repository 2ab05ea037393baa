//! `health-agent status`: the connectivity to all nodes.

mod agent;
pub(super) mod figures;
#[cfg(test)]
mod fixture;
mod local;
mod probe;
mod ready;
mod render;
mod view;
mod watch;

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use health_api::client::{Client, ClientError};
use health_model::api::TakenAddress;
use health_model::duration::parse_duration;
use health_model::settings::Location;
use jiff::Timestamp;

use self::agent::{OwnReport, WholeReport};
use self::figures::Figures;
use self::view::{Changes, Filter, View};
use super::exit::UNREACHABLE;
use super::output::{Format, OutputArgs, print, write_json_line};
use super::watch::WatchArgs;

pub(super) use self::render::{Detail, node as node_text, word as reachability_word};
pub(super) use self::view::{UnknownNode, is_named};

const EXAMPLES: &str = "\
Exit codes:
  0   nothing shown is unreachable; it may be degraded or unknown, see the line \"Cluster health\".
      Also after --watch was stopped
  1   no agent is running, it does not answer, or it has no such node
  3   something shown is unreachable
Exit codes with --brief:
  0   all is well: the agent has no problem, and every node shown is reachable, if there are any
  1   something is wrong: no agent is running, it has a problem, or a node shown is unreachable
  3   nothing is known to be wrong, but the agent starts, or has not probed every node
A --wait that ends before the agent is ready exits with 1.

Output:
  json and yaml contain the whole report, with all controllers; jsonl has one line per node,
  or with --watch per report.
  With --watch, the table marks changes with *

Examples:
  health-agent status
  health-agent status --succinct --failing
  health-agent status --node host2 --verbose
  health-agent status --watch --failing
  health-agent status --brief
  health-agent status --wait=30s --brief
  health-agent status --all-controllers
  health-agent status --all-addresses
  health-agent status --watch=5 -o jsonl
  health-agent status --probe -o jsonl | jq -r .name
  health-agent status -o json | jq '.nodes[].name'";

/// Flags of `status`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct StatusArgs {
    /// Probe all nodes now instead of showing the last results; with -o jsonl, print each node when done
    #[arg(long, conflicts_with = "watch")]
    probe: bool,
    #[command(flatten)]
    watch: WatchArgs,
    /// Show one line per node
    #[arg(long)]
    succinct: bool,
    /// Show all addresses, times, evidence, loss and round-trip statistics; with --succinct, address counts
    #[arg(long)]
    verbose: bool,
    /// Show one line on whether all is well
    #[arg(
        long,
        conflicts_with_all = [
            "watch", "succinct", "verbose", "failing", "all_controllers", "all_addresses",
        ]
    )]
    brief: bool,
    /// Wait until the agent is ready, by default for 5m: it has started, has no failing check, reads its registries,
    /// and has probed every node
    #[arg(
        long,
        value_name = "DURATION",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "5m",
        value_parser = parse_duration
    )]
    wait: Option<Duration>,
    /// Show all controllers of the agent, not only failing ones
    #[arg(long, conflicts_with = "succinct")]
    all_controllers: bool,
    /// Show the addresses of this node's pod CIDRs that are in use, and their endpoints
    #[arg(long, conflicts_with = "succinct")]
    all_addresses: bool,
    #[command(flatten)]
    filter: Filter,
    #[command(flatten)]
    output: OutputArgs,
}

impl StatusArgs {
    pub(super) async fn execute(
        self,
        client: &Client,
        location: &Location,
    ) -> anyhow::Result<ExitCode> {
        if let Some(limit) = self.wait {
            ready::wait(client, limit).await?;
        }
        if let Some(period) = self.watch.period {
            watch::watch(&self, client, location, period).await?;
            return Ok(ExitCode::SUCCESS);
        }
        let format = self.output.output;
        let status = match (self.probe, format) {
            (false, _) => client.get("/v1beta/status").await?,
            (true, Format::Jsonl) => {
                let Some(status) = probe::print_as_they_come(client, &self.filter).await? else {
                    // The reader has gone.
                    return Ok(ExitCode::SUCCESS);
                };
                status
            }
            (true, _) => probe::with_progress(client).await?,
        };
        let view = self.filter.apply(&status)?;
        let own = self.own_report(client).await?;
        let own = own.as_ref();
        let verdict = own.filter(|_| self.brief);
        let verdict = verdict.map(|own| ready::brief(&view, &own.agent));
        match format {
            Format::Jsonl if self.probe => {}
            Format::Jsonl => print(|out| {
                let mut nodes = view.nodes.iter();
                nodes.try_for_each(|node| write_json_line(out, node))
            })?,
            _ => {
                let detail = self.detail(client, location).await?;
                let text = |_: &WholeReport| match &verdict {
                    Some((_, line)) => line.clone(),
                    None => self.text(&view, &detail, own, None),
                };
                format.print_object(&WholeReport::new(&view.report(), own), text)?;
            }
        }
        Ok(match verdict {
            Some((verdict, _)) => verdict.into(),
            None if view.has_unreachable() => ExitCode::from(UNREACHABLE),
            None => ExitCode::SUCCESS,
        })
    }

    /// Reads what concerns only the agent; `None` if the output does not have it.
    async fn own_report(&self, client: &Client) -> Result<Option<OwnReport>, ClientError> {
        let is_shown = match self.output.output {
            Format::Table => !self.succinct,
            Format::Jsonl => self.watch.period.is_some(),
            Format::Json | Format::Yaml => true,
        };
        if !is_shown && !self.brief {
            return Ok(None);
        }
        let addresses = match self.all_addresses {
            true => {
                let taken = client.get::<Vec<TakenAddress>>("/v1/ipam").await;
                Some(taken.map_err(|error| error.to_string()))
            }
            false => None,
        };
        Ok(Some(OwnReport {
            agent: client.get("/v1/agent").await?,
            addresses,
            has_all_controllers: self.all_controllers,
        }))
    }

    /// The additional data that the text needs.
    async fn detail(&self, client: &Client, location: &Location) -> Result<Detail, ClientError> {
        let needs_figures = self.verbose && !self.succinct && self.output.output == Format::Table;
        Ok(if needs_figures {
            Detail::Verbose(Figures::read(client, location).await?)
        } else {
            Detail::Normal
        })
    }

    fn text(
        &self,
        view: &View,
        detail: &Detail,
        own: Option<&OwnReport>,
        changes: Option<&Changes>,
    ) -> String {
        if self.succinct {
            render::succinct(view, self.verbose, changes)
        } else {
            let nodes = render::full(view, detail, changes);
            let now = Timestamp::now();
            nodes + &own.map_or_else(String::new, |own| own.text(self.verbose, now))
        }
    }
}
