//! `health-agent probe list --watch`: changes, one per line.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use anyhow::bail;
use health_api::client::Client;
use health_model::api::{
    ContainerEvent, ContainerProbe, ContainerProbeEvent, ContainerProbeKey, ProbeVerdict,
};
use jiff::Timestamp;

use super::list::{last_error, run};
use crate::output::{Format, NONE, print_more, printable, write_json_line};

/// Prints changes until the reader goes away or the agent stops.
pub(super) async fn watch(client: &Client, path: &str, format: Format) -> anyhow::Result<()> {
    let is_json = match format {
        Format::Table => false,
        Format::Jsonl => true,
        Format::Json | Format::Yaml => {
            bail!("--watch prints one line per change; use -o jsonl or omit -o")
        }
    };
    let mut printed = Ok(());
    let mut lines = Lines::default();
    // The initial probes are collected, then printed together.
    let mut first = Vec::new();
    let mut is_listed = false;
    let watched = client.watch(path, |event: ContainerProbeEvent| {
        lines.widen_for(&event);
        is_listed |= event == ContainerProbeEvent::Listed;
        first.push(event);
        if !is_listed {
            return ControlFlow::Continue(());
        }
        let wrote = print_more(|out| {
            for event in first.drain(..) {
                if is_json {
                    write_json_line(out, &event)?;
                } else if let Some(line) = lines.line(event, Timestamp::now()) {
                    writeln!(out, "{line}")?;
                }
            }
            out.flush()
        });
        wrote.unwrap_or_else(|error| {
            printed = Err(error);
            ControlFlow::Break(())
        })
    });
    watched.await?;
    printed
}

/// Length of a shortened container ID, in characters.
const SHORT_ID: usize = 12;

/// Turns events into lines.
#[derive(Default)]
struct Lines {
    known: BTreeMap<ContainerProbeKey, ContainerProbe>,
    /// Widths of pod, container and type, in characters.
    widths: [usize; 3],
}

impl Lines {
    /// Widens the columns to fit the event.
    fn widen_for(&mut self, event: &ContainerProbeEvent) {
        let cells = match event {
            ContainerProbeEvent::Updated { probe } => [&probe.pod, &probe.container, &probe.kind],
            ContainerProbeEvent::Deleted {
                pod,
                container,
                kind,
                ..
            } => [pod, container, kind],
            ContainerProbeEvent::Happened { .. } | ContainerProbeEvent::Listed => return,
        };
        for (width, cell) in self.widths.iter_mut().zip(cells) {
            *width = (*width).max(printable(cell).chars().count());
        }
    }

    /// Time, probe and change; `None` if there is nothing to report.
    fn line(&mut self, event: ContainerProbeEvent, now: Timestamp) -> Option<String> {
        match event {
            ContainerProbeEvent::Updated { probe } => {
                let known = ContainerProbe::clone(&probe);
                let before = self.known.insert(probe.key(), known);
                let changes = changes(before.as_ref(), &probe).join(", ");
                if changes.is_empty() {
                    return None;
                }
                let ran = |probe: &ContainerProbe| probe.last_run.as_ref().map(|run| run.at);
                let at = match before.is_some_and(|before| ran(&before) != ran(&probe)) {
                    true => ran(&probe).unwrap_or(now),
                    false => now,
                };
                Some(self.columns(at, [&probe.pod, &probe.container, &probe.kind], &changes))
            }
            ContainerProbeEvent::Deleted {
                pod,
                pod_uid,
                container,
                kind,
            } => {
                let line = self.columns(now, [&pod, &container, &kind], "gone");
                self.known.remove(&(pod, pod_uid, container, kind));
                Some(line)
            }
            // The probe's own line already reports this.
            ContainerProbeEvent::Happened { happened } if happened.reason == "Unhealthy" => None,
            ContainerProbeEvent::Happened { happened } => {
                let at = happened.last;
                let cells = [&*happened.pod, &happened.container, NONE];
                Some(self.columns(at, cells, &what(&happened)))
            }
            ContainerProbeEvent::Listed => None,
        }
    }

    fn columns(&self, at: Timestamp, cells: [&str; 3], what: &str) -> String {
        let [pod, container, kind] = cells.map(printable);
        let [first, second, third] = self.widths;
        let what = printable(what);
        format!("{at:.3}   {pod:first$}   {container:second$}   {kind:third$}   {what}")
    }
}

/// Formats an event, such as `Killing: WHY (2 times)`.
fn what(event: &ContainerEvent) -> String {
    let ContainerEvent {
        reason,
        message,
        count,
        ..
    } = event;
    match count {
        1 => format!("{reason}: {message}"),
        many => format!("{reason}: {message} ({many} times)"),
    }
}

/// How a probe has changed since `before`, or its current state.
fn changes(before: Option<&ContainerProbe>, now: &ContainerProbe) -> Vec<String> {
    let mut changes = Vec::new();
    if let Some(before) = before {
        if before.container_id != now.container_id {
            let id = now.container_id.as_deref().unwrap_or("none");
            let id: String = id.chars().take(SHORT_ID).collect();
            changes.push(format!("container {id}"));
        }
        if before.target != now.target {
            changes.push(format!("target {}", now.target));
        }
        let settings = |probe: &ContainerProbe| (probe.period_ns, probe.timeout_ns);
        if settings(before) != settings(now) {
            changes.push("settings changed".to_owned());
        }
    }
    let result = |probe: &ContainerProbe| probe.result.map_or("unknown", ProbeVerdict::text);
    let before_text = before.map(run_text).unwrap_or_default();
    let text = run_text(now);
    if text != before_text
        && let Some(text) = text
    {
        changes.push(text);
    }
    if before.is_none_or(|before| result(before) != result(now)) {
        changes.push(format!("result {}", result(now)));
    }
    let was_overdue = before.is_some_and(|before| before.overdue_ns.is_some());
    match (was_overdue, now.overdue_ns) {
        (false, Some(_)) => changes.push("overdue".to_owned()),
        (true, None) => changes.push("no longer overdue".to_owned()),
        _ => {}
    }
    match (before.is_some_and(|before| before.on_hold), now.on_hold) {
        (false, true) => changes.push("on hold".to_owned()),
        (true, false) => changes.push("no longer on hold".to_owned()),
        _ => {}
    }
    let waited = before.and_then(|before| before.waiting.as_ref());
    if waited != now.waiting.as_ref() && !now.on_hold {
        changes.push(match &now.waiting {
            Some(why) => format!("waiting: {why}"),
            None => "no longer waiting".to_owned(),
        });
    }
    changes
}

/// Formats the last run, such as `failure 1/3: HTTP status 503`.
fn run_text(probe: &ContainerProbe) -> Option<String> {
    let ran = probe.last_run.as_ref()?;
    match (&*ran.counted, last_error(probe), run(probe)) {
        ("failed", Some(error), Some(run)) => Some(format!("{run}: {error}")),
        (_, None, run) => run,
        (counted, Some(error), _) => match counted.replace('_', " ") {
            counted if counted == error => Some(counted),
            counted => Some(format!("{counted}: {error}")),
        },
    }
}

#[cfg(test)]
mod tests {
    use health_model::api::ProbeRun;

    use super::super::fixture::{killing, now, probe};
    use super::*;

    fn updated(probe: ContainerProbe) -> ContainerProbeEvent {
        ContainerProbeEvent::Updated {
            probe: Box::new(probe),
        }
    }

    #[test]
    fn each_line_says_when_of_which_probe_and_what() {
        let well = ContainerProbe {
            last: Some(ProbeVerdict::Success),
            threshold: 1,
            last_run: Some(ProbeRun {
                at: "2026-11-21T02:59:43.2Z".parse().unwrap(),
                counted: "successful".into(),
                message: "HTTP status 200".into(),
            }),
            ..probe()
        };
        let held = ContainerProbe {
            result: Some(ProbeVerdict::Failure),
            run: 0,
            on_hold: true,
            ..probe()
        };
        let new = ContainerProbe {
            container_id: Some("4711".into()),
            last_run: None,
            last: None,
            waiting: Some("initial delay".into()),
            ..probe()
        };
        let errored = ContainerProbe {
            last_run: probe().last_run.map(|run| ProbeRun {
                counted: "errored".into(),
                message: "no such port \u{1b}]0;x\u{7}".into(),
                ..run
            }),
            ..new.clone()
        };
        let events = [
            updated(well),
            ContainerProbeEvent::Listed,
            updated(probe()),
            updated(held),
            ContainerProbeEvent::Happened {
                happened: Box::new(killing()),
            },
            updated(new),
            updated(errored),
            ContainerProbeEvent::Deleted {
                pod: "shop/web".into(),
                pod_uid: "u-1".into(),
                container: "app".into(),
                kind: "liveness".into(),
            },
        ];
        let mut lines = Lines::default();
        let mut text = String::new();
        for event in events {
            lines.widen_for(&event);
            if let Some(line) = lines.line(event, now()) {
                text += &format!("{line}\n");
            }
        }
        assert_eq!(
            text,
            "\
2026-11-21T03:00:00.000Z   shop/web   app   liveness   success 1/1, result success
2026-11-21T02:59:53.200Z   shop/web   app   liveness   failure 1/3: HTTP status 503
2026-11-21T03:00:00.000Z   shop/web   app   liveness   failure 3/3: HTTP status 503, result failure, on hold
2026-11-21T02:59:53.500Z   shop/web   app   -          Killing: Container app failed liveness probe, will be restarted (2 times)
2026-11-21T03:00:00.000Z   shop/web   app   liveness   container 4711, result success, no longer on hold, waiting: initial delay
2026-11-21T02:59:53.200Z   shop/web   app   liveness   errored: no such port \\u{1b}]0;x\\u{7}
2026-11-21T03:00:00.000Z   shop/web   app   liveness   gone
"
        );
    }

    #[test]
    fn a_change_that_has_no_words_is_not_reported() {
        assert_eq!(changes(Some(&probe()), &probe()), [""; 0]);
        let slower = ContainerProbe {
            period_ns: 1,
            ..probe()
        };
        assert_eq!(changes(Some(&probe()), &slower), ["settings changed"]);
    }
}
