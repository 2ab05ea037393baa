//! `health-agent probe list`: the probes of this node's containers.

use clap::Args;
use health_api::client::Client;
use health_model::api::{ContainerProbe, ContainerProbeSummary, ProbeVerdict};
use health_model::duration::{go_duration, short_duration};
use jiff::Timestamp;

use super::{Selection, watch};
use crate::output::{Format, ListFormat, NONE, OutputArgs, listing, printable};

const EXAMPLES: &str = "\
Columns:
  RESULT       current result; it changes after a threshold of equal runs in a row. \"was\" marks an
               overdue result
  RUN          outcome of the last runs, their number in a row, and the threshold
  STATE        time until the next run, or why there is none
  LAST ERROR   message of the last run, unless it succeeded

Output:
  wide adds columns and shows messages in full; with --watch, table prints one line per change,
  and jsonl the events of the API

Examples:
  health-agent probe list
  health-agent probe list --failing -o wide
  health-agent probe list --pod shop/web --type liveness --watch
  health-agent probe list -o json | jq -r '.[] | select(.\"on-hold\") | .pod'";

/// Maximum length of a message in the table, in characters.
const LONGEST_MESSAGE: usize = 60;

/// Flags of `probe list`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct ListArgs {
    /// Only probes of this pod, as NAME or NAMESPACE/NAME
    #[arg(long, value_name = "NAME")]
    pod: Option<String>,
    #[command(flatten)]
    selection: Selection,
    /// Only probes that fail, whose last run did not succeed, or that are overdue
    #[arg(long)]
    failing: bool,
    /// Omit the column names
    #[arg(long)]
    no_headers: bool,
    /// Keep showing changes and events of containers, one per line
    #[arg(long, conflicts_with_all = ["no_headers", "failing"])]
    watch: bool,
    #[command(flatten)]
    output: OutputArgs<ListFormat>,
}

impl ListArgs {
    pub(super) async fn execute(self, client: &Client) -> anyhow::Result<()> {
        let path = self.selection.path(self.pod.as_deref(), self.watch);
        let format = Format::from(self.output.output);
        if self.watch {
            return watch::watch(client, &path, format).await;
        }
        let mut probes: Vec<ContainerProbe> = client.get(&path).await?;
        warn(&client.get("/v1/probes/summary").await?);
        if self.failing {
            probes.retain(is_failing);
        }
        let wide = self.output.output.is_wide();
        format.print_rows(&probes, |probes| {
            probes_table(probes, wide, !self.no_headers, Timestamp::now())
        })
    }
}

/// Warns on stderr if a listing of probes is incomplete.
pub(super) fn warn(summary: &ContainerProbeSummary) {
    if !summary.enabled {
        eprintln!(
            "warning: this agent probes no containers; see run --pod-manifests and --pods-from-kubernetes"
        );
    }
    for problem in &summary.problems {
        let text = format!("{}: {}", problem.subject, problem.problem);
        eprintln!("warning: {}", printable(&text));
    }
}

fn is_failing(probe: &ContainerProbe) -> bool {
    probe.result == Some(ProbeVerdict::Failure)
        || last_error(probe).is_some()
        || probe.overdue_ns.is_some()
}

fn probes_table(
    probes: &[ContainerProbe],
    wide: bool,
    has_headers: bool,
    now: Timestamp,
) -> String {
    let mut header = vec![
        "POD",
        "CONTAINER",
        "TYPE",
        "TARGET",
        "RESULT",
        "RUN",
        "STATE",
    ];
    if wide {
        header.extend(["PERIOD", "TIMEOUT", "LAST RUN", "CONTAINER ID"]);
    }
    header.push("LAST ERROR");
    let rows = probes.iter().map(|probe| {
        let mut row = vec![
            probe.pod.clone(),
            probe.container.clone(),
            probe.kind.clone(),
            printable(&probe.target).into_owned(),
            result(probe),
            run(probe).unwrap_or_else(|| NONE.to_owned()),
            state(probe, now),
        ];
        if wide {
            let at = probe.last_run.as_ref().map(|run| format!("{:.0}", run.at));
            row.extend([
                short_duration(probe.period_ns),
                short_duration(probe.timeout_ns),
                at.unwrap_or_else(|| NONE.to_owned()),
                probe.container_id.as_deref().unwrap_or(NONE).to_owned(),
            ]);
        }
        row.push(match last_error(probe) {
            None => NONE.to_owned(),
            Some(message) if wide => message,
            Some(message) => shortened(&message),
        });
        row
    });
    listing(header, rows, has_headers)
}

/// The current result; for an overdue probe, the last known one.
pub(super) fn result(probe: &ContainerProbe) -> String {
    let result = probe.result.map_or(NONE, ProbeVerdict::text);
    match (probe.result, probe.overdue_ns) {
        (Some(_), Some(_)) => format!("was {result}"),
        _ => result.to_owned(),
    }
}

/// The outcome of the last runs, such as `failure 2/3`.
pub(super) fn run(probe: &ContainerProbe) -> Option<String> {
    let last = probe.last?;
    let threshold = probe.threshold;
    let run = match probe.run {
        // A probe that goes on hold has reached the threshold, and its count restarts.
        0 if probe.result == probe.last => threshold,
        run => run.min(threshold),
    };
    Some(format!("{} {run}/{threshold}", last.text()))
}

/// Whether and when the probe runs.
pub(super) fn state(probe: &ContainerProbe, now: Timestamp) -> String {
    if probe.on_hold {
        return "on hold".to_owned();
    }
    if let Some(waiting) = &probe.waiting {
        return waiting.clone();
    }
    if probe.in_flight {
        return "probing".to_owned();
    }
    probe.next.map_or_else(
        || NONE.to_owned(),
        |next| {
            let milliseconds = next.duration_since(now).as_millis().max(0);
            let tenths = i64::try_from(milliseconds / 100).unwrap_or(i64::MAX);
            format!(
                "next in {}",
                go_duration(tenths.saturating_mul(100_000_000))
            )
        },
    )
}

/// The last run's message on one line, unless the run succeeded.
pub(super) fn last_error(probe: &ContainerProbe) -> Option<String> {
    let run = probe.last_run.as_ref()?;
    match (&*run.counted, run.message.trim()) {
        ("successful", _) => None,
        (counted, "") => Some(counted.replace('_', " ")),
        (_, message) => Some(printable(message).into_owned()),
    }
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(LONGEST_MESSAGE) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}...", &text[..end]),
    }
}

#[cfg(test)]
mod tests {
    use health_model::api::ProbeRun;

    use super::super::fixture::{now, probe};
    use super::*;

    #[test]
    fn each_probe_says_what_holds_and_what_comes_next() {
        let held = ContainerProbe {
            result: Some(ProbeVerdict::Failure),
            run: 0,
            on_hold: true,
            last_run: probe().last_run.map(|run| ProbeRun {
                message: format!("exit code 1: \u{1b}[31m{}\nsecond line", "x".repeat(60)),
                ..run
            }),
            ..probe()
        };
        let unknown = ContainerProbe {
            kind: "readiness".into(),
            target: "tcp://10.244.1.7:8080".into(),
            result: None,
            last: None,
            last_run: None,
            waiting: Some("initial delay".into()),
            ..probe()
        };
        let well = ContainerProbe {
            last: Some(ProbeVerdict::Success),
            run: 9,
            threshold: 1,
            in_flight: true,
            last_run: probe().last_run.map(|run| ProbeRun {
                counted: "successful".into(),
                ..run
            }),
            ..probe()
        };
        let all = [probe(), held, unknown, well];
        assert_eq!(
            probes_table(&all, false, true, now()),
            "\
POD        CONTAINER   TYPE        TARGET                         RESULT    RUN           STATE           LAST ERROR
shop/web   app         liveness    http://10.244.1.7:8080/alive   success   failure 1/3   next in 3.2s    HTTP status 503
shop/web   app         liveness    http://10.244.1.7:8080/alive   failure   failure 3/3   on hold         exit code 1: \\u{1b}[31mxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...
shop/web   app         readiness   tcp://10.244.1.7:8080          -         -             initial delay   -
shop/web   app         liveness    http://10.244.1.7:8080/alive   success   success 1/1   probing         -
"
        );
        let without = probes_table(&all[2..], false, false, now());
        assert!(without.starts_with("shop/web "), "{without}");
        let failing: Vec<bool> = all.iter().map(is_failing).collect();
        assert_eq!(failing, [true, true, false, false]);
    }

    #[test]
    fn wide_has_more_columns_and_whole_messages() {
        let not_sent = ContainerProbe {
            next: None,
            last_run: probe().last_run.map(|run| ProbeRun {
                counted: "not_sent".into(),
                message: String::new(),
                ..run
            }),
            ..probe()
        };
        let text = probes_table(&[not_sent], true, true, now());
        let row = text.lines().nth(1).unwrap();
        assert!(
            row.ends_with("failure 1/3   -       10s      1s        2026-11-21T02:59:53Z   3f2a           not sent"),
            "{text}"
        );
    }

    #[test]
    fn a_run_that_is_due_is_next_at_once() {
        let late = "2026-11-21T03:00:09Z".parse().unwrap();
        assert_eq!(state(&probe(), late), "next in 0s");
    }
}
