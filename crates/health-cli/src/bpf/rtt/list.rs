//! `health-agent bpf rtt list`: the round-trip times along each path.

use std::io::{self, Write};

use clap::Args;
use health_api::client::Client;
use health_api::rtt::RttEntry;
use health_datapath::dump::Pinned;

use super::histogram;
use super::listing::{Listing, Look, Query};
use super::names::Names;
use super::order::Sort;
use super::select::{Addresses, Peer, Scope};
use super::table::Columns;
use crate::bpf::parallel::print_rows;
use crate::output::{Format, ListFormat, OutputArgs, print};
use crate::watch::{self, Pace, WatchArgs};

const EXAMPLES: &str = "\
Columns:
  LOSS      share of the probes without an answer
  JITTER    mean deviation between neighbouring round trips
  NETWORK   share of the round trips that was not spent in the peer's host

Output:
  wide adds columns; json, jsonl and yaml contain everything, times in nanoseconds, with the
  non-empty buckets of the histogram as [from, up to, round trips]. The command asks the agent only
  for node names, and works without it

Differences:
  with --watch --delta all figures, including the histogram, cover the probes and round trips since
  the previous update, or since a row was reset. MIN and MAX are read from the histogram, within
  6.25 %, unless they are the row's records. JITTER and SMOOTHED are running figures and show their
  current value

Examples:
  health-agent bpf rtt list
  health-agent bpf rtt list --sort p99 --top 10 --path host
  health-agent bpf rtt list --min-loss 1 --sort loss --watch
  health-agent bpf rtt list --watch=10 --delta --sort p99 --top 10
  health-agent bpf rtt list --histogram host2 --protocol icmp
  health-agent bpf rtt list -o json | jq '.[] | {peer, path, \"p99-ns\"}'";

/// Flags of `bpf rtt list`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct ListArgs {
    /// Only rows of this peer: an address, a prefix or a node name (repeatable)
    #[arg(long = "peer", value_name = "ADDRESS|PREFIX|NODE")]
    peers: Vec<Peer>,
    /// Draw the histograms of this peer: an address, a prefix or a node name
    #[arg(long, value_name = "ADDRESS|PREFIX|NODE", conflicts_with = "peers")]
    histogram: Option<Peer>,
    #[command(flatten)]
    scope: Scope,
    /// Only rows that lost at least this share of their probes
    #[arg(long, value_name = "PERCENT", value_parser = parse_percent)]
    min_loss: Option<f64>,
    /// Sort by this column: names in ascending, figures in descending order
    #[arg(long, value_enum, value_name = "COLUMN", default_value = "peer")]
    sort: Sort,
    /// Reverse the order
    #[arg(long)]
    reverse: bool,
    /// Show only this many rows, from the top
    #[arg(long, value_name = "ROWS")]
    top: Option<usize>,
    /// Omit node names, and do not ask the agent for them
    #[arg(short, long)]
    numeric: bool,
    #[command(flatten)]
    watch: WatchArgs,
    /// Show only what was counted since the previous update, starting after one period
    #[arg(long, requires = "watch")]
    delta: bool,
    #[command(flatten)]
    output: OutputArgs<ListFormat>,
}

impl ListArgs {
    pub(super) async fn execute(self, client: &Client, pinned: &Pinned) -> anyhow::Result<()> {
        let Some(period) = self.watch.period else {
            let listing = self.read(client, pinned, None).await?;
            return print(|out| self.write(out, &listing));
        };
        let mut earlier = None;
        if self.delta {
            let first = self.read(client, pinned, Some(&Look::new())).await?;
            earlier = Some(first.into_look());
        }
        let pace = Pace {
            period,
            is_drawn: Format::from(self.output.output) == Format::Table,
            is_separated: !matches!(self.output.output, ListFormat::Json | ListFormat::Jsonl),
            // With --delta, there is nothing to show before the end of the first period.
            is_first_awaited: self.delta,
        };
        watch::watch(pace, async || {
            let listing = self.read(client, pinned, earlier.as_ref()).await?;
            let mut text = Vec::new();
            self.write(&mut text, &listing)?;
            if self.delta {
                earlier = Some(listing.into_look());
            }
            Ok(text)
        })
        .await
    }

    async fn read(
        &self,
        client: &Client,
        pinned: &Pinned,
        earlier: Option<&Look>,
    ) -> anyhow::Result<Listing> {
        let mut wanted = self.peers.iter().chain(&self.histogram);
        let needs_names = wanted.any(|peer| matches!(peer, Peer::Node(_)));
        let names = if self.numeric && !needs_names {
            Ok(Names::default())
        } else {
            Names::ask(client).await
        };
        let peers: Vec<Addresses> = self
            .peers
            .iter()
            .chain(&self.histogram)
            .map(|peer| Addresses::of(peer, &names))
            .collect::<Result<_, _>>()?;
        let query = Query {
            peers: &peers,
            scope: self.scope,
            min_loss: self.min_loss,
            sort: self.sort,
            is_reversed: self.reverse,
            top: self.top,
            earlier,
        };
        Ok(Listing::read(pinned, &query, names.unwrap_or_default())?)
    }

    fn write(&self, out: &mut dyn Write, listing: &Listing) -> io::Result<()> {
        match self.output.output {
            ListFormat::Table if self.histogram.is_some() => {
                let size = watch::terminal_size();
                listing
                    .entries()
                    .try_for_each(|entry| out.write_all(histogram::plot(&entry, size).as_bytes()))
            }
            ListFormat::Table | ListFormat::Wide => {
                let columns = Columns {
                    names: !self.numeric,
                    wide: self.output.output.is_wide(),
                    delta: self.delta,
                };
                out.write_all(columns.table(listing.entries()).as_bytes())
            }
            ListFormat::Json => {
                let row = |place| (place, listing.row(place));
                out.write_all(b"[")?;
                print_rows(out, listing.len(), row, |text, (place, row)| {
                    text.extend_from_slice(if place == 0 { b"\n" } else { b",\n" });
                    Ok(serde_json::to_writer(text, &listing.entry(row))?)
                })?;
                out.write_all(b"\n]\n")
            }
            ListFormat::Jsonl => {
                let row = |place| listing.row(place);
                print_rows(out, listing.len(), row, |text, row| {
                    serde_json::to_writer(&mut *text, &listing.entry(row))?;
                    text.push(b'\n');
                    Ok(())
                })
            }
            ListFormat::Yaml => {
                let entries: Vec<RttEntry> = listing.entries().collect();
                Format::Yaml.write_object(out, &entries, |_| String::new())
            }
        }
    }
}

fn parse_percent(text: &str) -> Result<f64, &'static str> {
    text.parse()
        .ok()
        .filter(|percent| (0.0..=100.0).contains(percent))
        .ok_or("expected a percentage from 0 to 100")
}

#[cfg(test)]
mod tests {
    use health_common::probe::Path;
    use health_common::rtt::{PROTOCOL_ICMP, RttRow, SOURCE_KERNEL};

    use super::super::listing::tests::listing;
    use super::super::select::tests::{key, names};
    use super::*;

    fn two_rows() -> Listing {
        let mut row = RttRow::EMPTY;
        row.record(20_000, 1, 1, SOURCE_KERNEL);
        row.record(100_000_000_000, 1, 1, SOURCE_KERNEL);
        let mut silent = RttRow::EMPTY;
        silent.lost = 3;
        let rows = [
            (key("172.30.0.10", Path::Host, PROTOCOL_ICMP), silent),
            (key("172.30.0.2", Path::Host, PROTOCOL_ICMP), row),
        ];
        listing(&rows, names())
    }

    #[derive(Debug, clap::Parser)]
    struct Command {
        #[command(flatten)]
        list: ListArgs,
    }

    fn written(flags: &[&str], listing: &Listing) -> String {
        let command: Command = clap::Parser::try_parse_from([&["list"], flags].concat()).unwrap();
        let mut text = Vec::new();
        command.list.write(&mut text, listing).unwrap();
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn json_has_units_in_names_and_buckets_as_triples() {
        let json: serde_json::Value =
            serde_json::from_str(&written(&["-o", "json"], &two_rows())).unwrap();
        let [measured, silent] = &json.as_array().unwrap()[..] else {
            panic!("{json}");
        };
        assert_eq!(measured["node"], "default/hnode2");
        assert_eq!(measured["peer"], "172.30.0.2");
        assert_eq!(measured["mean-ns"], 50_000_010_000_u64);
        let buckets = serde_json::json!([[18_432, 20_480, 1], [14_u64 << 32, null, 1]]);
        assert_eq!(measured["histogram-ns"], buckets);
        assert_eq!(silent["node"], serde_json::Value::Null);
        assert_eq!(silent["p50-ns"], serde_json::Value::Null);
        assert_eq!(silent["lost"], 3);
        assert_eq!(silent["loss-ratio"], 1.0);
        assert_eq!(silent["histogram-ns"], serde_json::json!([]));

        let lines = written(&["-o", "jsonl"], &two_rows());
        let lines: Vec<serde_json::Value> = lines
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(lines, *json.as_array().unwrap());
        let yaml = written(&["-o", "yaml"], &two_rows());
        let yaml: serde_json::Value = serde_saphyr::from_str(&yaml).unwrap();
        assert_eq!(yaml, json);
    }

    #[test]
    fn a_listing_without_rows_is_an_empty_array() {
        let none = listing(&[], names());
        let json: serde_json::Value =
            serde_json::from_str(&written(&["-o", "json"], &none)).unwrap();
        assert_eq!(json, serde_json::json!([]));
        assert_eq!(written(&["-o", "jsonl"], &none), "");
    }
}
