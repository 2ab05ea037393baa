//! `health-agent status`: the connectivity to all nodes.

pub(super) mod figures;
#[cfg(test)]
mod fixture;
mod local;
mod probe;
mod render;
mod view;
mod watch;

use std::process::ExitCode;

use clap::Args;
use health_api::client::{Client, ClientError};
use health_model::api::HealthStatus;
use health_model::settings::Location;

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

Output:
  json and yaml contain the whole report; jsonl has one line per node, or with --watch per report.
  With --watch, the table marks changes with *

Examples:
  health-agent status
  health-agent status --succinct --failing
  health-agent status --node host2 --verbose
  health-agent status --watch --failing
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
        match format {
            Format::Jsonl if self.probe => {}
            Format::Jsonl => print(|out| {
                let mut nodes = view.nodes.iter();
                nodes.try_for_each(|node| write_json_line(out, node))
            })?,
            _ => {
                let detail = self.detail(client, location).await?;
                let text = |_: &HealthStatus| self.text(&view, &detail, None);
                format.print_object(view.report().as_ref(), text)?;
            }
        }
        Ok(if view.has_unreachable() {
            ExitCode::from(UNREACHABLE)
        } else {
            ExitCode::SUCCESS
        })
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

    fn text(&self, view: &View, detail: &Detail, changes: Option<&Changes>) -> String {
        if self.succinct {
            render::succinct(view, self.verbose, changes)
        } else {
            render::full(view, detail, changes)
        }
    }
}
