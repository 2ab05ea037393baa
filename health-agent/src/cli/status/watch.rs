//! `status --watch`: the report again and again, with marks at what changed.

use std::io::{self, IsTerminal, Write};
use std::ops::ControlFlow;
use std::time::Duration;

use anyhow::Context;
use crossterm::terminal;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Interval, MissedTickBehavior, interval};

use super::view::Changes;
use super::{Detail, StatusArgs};
use crate::api::client::{Client, ClientError};
use crate::api::types::HealthStatus;
use crate::cli::exit::Failure;
use crate::cli::output::{Format, print_more};
use crate::cli::screen::Screen;
use crate::config::{Location, duration_text};

/// Between two reports in one stream; in YAML, between two documents.
const SEPARATOR: &str = "---";
/// Columns and rows of a terminal that does not tell them.
const USUAL_SIZE: (u16, u16) = (80, 24);

/// Reads the seconds from one look to the next.
pub(super) fn parse_period(text: &str) -> Result<Duration, &'static str> {
    text.parse()
        .ok()
        .filter(|seconds| (0.1..=3600.0).contains(seconds))
        .map(Duration::from_secs_f64)
        .ok_or("give seconds from 0.1 to 3600")
}

/// Shows the report every `period`, until SIGINT, SIGTERM or SIGHUP, or until nobody reads it. An
/// agent that does not answer is asked again.
pub(super) async fn watch(
    args: &StatusArgs,
    client: &Client,
    location: &Location,
    period: Duration,
) -> anyhow::Result<()> {
    let mut interrupted = signal(SignalKind::interrupt()).context("cannot wait for SIGINT")?;
    let mut terminated = signal(SignalKind::terminate()).context("cannot wait for SIGTERM")?;
    let mut hung_up = signal(SignalKind::hangup()).context("cannot wait for SIGHUP")?;
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let looks = Looks {
        args,
        client,
        location,
        ticks,
        before: None,
        now: None,
    };
    let shown = async {
        if args.output.output == Format::Table && io::stdout().is_terminal() {
            redraw(looks, period).await
        } else {
            print_again(looks).await
        }
    };
    tokio::select! {
        result = shown => result,
        _ = interrupted.recv() => Ok(()),
        _ = terminated.recv() => Ok(()),
        _ = hung_up.recv() => Ok(()),
    }
}

/// Looks at the agent, one every period.
struct Looks<'a> {
    args: &'a StatusArgs,
    client: &'a Client,
    location: &'a Location,
    ticks: Interval,
    /// The last report but one.
    before: Option<HealthStatus>,
    /// The last report.
    now: Option<HealthStatus>,
}

impl Looks<'_> {
    /// Waits until it is time, and asks for the next report.
    async fn next(&mut self) -> Result<Detail, ClientError> {
        self.ticks.tick().await;
        let status = self.client.get("/v1beta/status").await?;
        let detail = self.args.detail(self.client, self.location).await?;
        self.before = self.now.replace(status);
        Ok(detail)
    }

    /// Writes the last report.
    fn write(&self, out: &mut dyn Write, detail: &Detail) -> anyhow::Result<()> {
        let Some(now) = &self.now else { return Ok(()) };
        let view = self.args.filter.apply(now)?;
        let text = |_: &HealthStatus| {
            let changes = self
                .before
                .as_ref()
                .map(|before| Changes::between(before, now));
            self.args.text(&view, detail, changes.as_ref())
        };
        let format = self.args.output.output;
        Ok(format.write_object(out, view.report().as_ref(), text)?)
    }
}

/// Draws reports over one another on the terminal.
async fn redraw(mut looks: Looks<'_>, period: Duration) -> anyhow::Result<()> {
    const UNWRITABLE: &str = "cannot write to the terminal";
    let mut resized = signal(SignalKind::window_change()).context("cannot wait for SIGWINCH")?;
    let mut screen = Screen::new(io::stdout()).context(UNWRITABLE)?;
    let mut last = String::new();
    let mut text = String::new();
    loop {
        tokio::select! {
            look = looks.next() => {
                let written = look.map_err(anyhow::Error::from).and_then(|detail| {
                    let mut report = Vec::new();
                    looks.write(&mut report, &detail)?;
                    Ok(String::from_utf8(report)?)
                });
                match written {
                    Ok(report) => {
                        last.clone_from(&report);
                        text = report;
                    }
                    Err(error) => {
                        let period = duration_text(period);
                        let error = Failure::from(error);
                        text = format!("{error}\nAsked again every {period}. Last report:\n{last}");
                    }
                }
            }
            _ = resized.recv() => {}
        }
        let size = terminal::size().unwrap_or(USUAL_SIZE);
        screen.draw(&text, size).context(UNWRITABLE)?;
    }
}

/// Prints reports below one another. What goes wrong is said on stderr, once.
async fn print_again(mut looks: Looks<'_>) -> anyhow::Result<()> {
    let format = looks.args.output.output;
    let is_separated = matches!(format, Format::Table | Format::Yaml);
    let mut is_first = true;
    let mut last_error = String::new();
    loop {
        let mut report = Vec::new();
        let look = looks.next().await.map_err(anyhow::Error::from);
        if let Err(error) = look.and_then(|detail| looks.write(&mut report, &detail)) {
            let error = Failure::from(error).to_string();
            if error != last_error {
                eprintln!("warning: {error}");
                last_error = error;
            }
            continue;
        }
        last_error.clear();
        let printed = print_more(|out| {
            if is_separated && !is_first {
                writeln!(out, "{SEPARATOR}")?;
            }
            out.write_all(&report)
        })?;
        is_first = false;
        if printed == ControlFlow::Break(()) {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn periods_are_seconds() {
        assert_eq!(parse_period("5"), Ok(Duration::from_secs(5)));
        assert_eq!(parse_period("0.5"), Ok(Duration::from_millis(500)));
        for bad in ["", "0", "-1", "nan", "1e9", "5s"] {
            assert!(parse_period(bad).is_err(), "{bad}");
        }
    }
}
