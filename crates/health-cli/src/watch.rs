//! Repeated output: redrawn in place on a terminal, otherwise printed one below the other.

use std::io::{self, IsTerminal};
use std::ops::ControlFlow;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use crossterm::terminal;
use health_model::duration::duration_text;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Instant, Interval, MissedTickBehavior, interval, interval_at};

use super::exit::Failure;
use super::output::print_more;
use super::screen::Screen;

/// Separates two texts in one stream; in YAML, two documents.
const SEPARATOR: &str = "---";
/// Columns and rows of a terminal that does not report them.
const USUAL_SIZE: (u16, u16) = (80, 24);

/// The `--watch` flag of commands that can repeat their output.
#[derive(Args, Debug)]
pub(super) struct WatchArgs {
    /// Update the output continuously, by default every second
    #[arg(
        id = "watch",
        long,
        value_name = "SECONDS",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "1",
        value_parser = parse_period
    )]
    pub(super) period: Option<Duration>,
}

/// How often and how updates are shown.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// Time from one update to the next.
    pub(super) period: Duration,
    /// Whether to redraw in place on a terminal.
    pub(super) is_drawn: bool,
    /// Whether successive texts need a separator line.
    pub(super) is_separated: bool,
    /// Whether to wait for one period before the first update.
    pub(super) is_first_awaited: bool,
}

impl Pace {
    fn ticks(self) -> Interval {
        let mut ticks = if self.is_first_awaited {
            interval_at(Instant::now() + self.period, self.period)
        } else {
            interval(self.period)
        };
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks
    }
}

/// Parses the seconds from one update to the next.
fn parse_period(text: &str) -> Result<Duration, &'static str> {
    text.parse()
        .ok()
        .filter(|seconds| (0.1..=3600.0).contains(seconds))
        .map(Duration::from_secs_f64)
        .ok_or("expected seconds from 0.1 to 3600")
}

/// Columns and rows of the terminal; [`USUAL_SIZE`] without a terminal.
pub(super) fn terminal_size() -> (u16, u16) {
    if io::stdout().is_terminal() {
        terminal::size().unwrap_or(USUAL_SIZE)
    } else {
        USUAL_SIZE
    }
}

/// Shows the results of `look` at the given pace, until SIGINT, SIGTERM or SIGHUP, or until the reader has gone.
/// Retries a failed `look`.
pub(super) async fn watch(
    pace: Pace,
    look: impl AsyncFnMut() -> anyhow::Result<Vec<u8>>,
) -> anyhow::Result<()> {
    let mut interrupted =
        signal(SignalKind::interrupt()).context("cannot install the SIGINT handler")?;
    let mut terminated =
        signal(SignalKind::terminate()).context("cannot install the SIGTERM handler")?;
    let mut hung_up = signal(SignalKind::hangup()).context("cannot install the SIGHUP handler")?;
    let shown = async {
        if pace.is_drawn && io::stdout().is_terminal() {
            redraw(pace, look).await
        } else {
            print_again(pace, look).await
        }
    };
    tokio::select! {
        result = shown => result,
        _ = interrupted.recv() => Ok(()),
        _ = terminated.recv() => Ok(()),
        _ = hung_up.recv() => Ok(()),
    }
}

/// Redraws texts in place on the terminal.
async fn redraw(
    pace: Pace,
    mut look: impl AsyncFnMut() -> anyhow::Result<Vec<u8>>,
) -> anyhow::Result<()> {
    const UNWRITABLE: &str = "cannot write to the terminal";
    let mut resized =
        signal(SignalKind::window_change()).context("cannot install the SIGWINCH handler")?;
    let mut screen = Screen::new(io::stdout()).context(UNWRITABLE)?;
    let mut ticks = pace.ticks();
    let mut last = String::new();
    let mut text = String::new();
    loop {
        let next = async {
            ticks.tick().await;
            look().await
        };
        tokio::select! {
            next = next => {
                match next.and_then(|text| Ok(String::from_utf8(text)?)) {
                    Ok(next) => {
                        last.clone_from(&next);
                        text = next;
                    }
                    Err(error) => {
                        let period = duration_text(pace.period);
                        let error = Failure::from(error);
                        text = format!("{error}\nRetrying every {period}. Last report:\n{last}");
                    }
                }
            }
            _ = resized.recv() => {}
        }
        screen.draw(&text, terminal_size()).context(UNWRITABLE)?;
    }
}

/// Prints texts one below the other. Reports an error on stderr, once.
async fn print_again(
    pace: Pace,
    mut look: impl AsyncFnMut() -> anyhow::Result<Vec<u8>>,
) -> anyhow::Result<()> {
    let mut ticks = pace.ticks();
    let mut is_first = true;
    let mut last_error = String::new();
    loop {
        ticks.tick().await;
        let text = match look().await {
            Ok(text) => text,
            Err(error) => {
                let error = Failure::from(error).to_string();
                if error != last_error {
                    eprintln!("warning: {error}");
                    last_error = error;
                }
                continue;
            }
        };
        last_error.clear();
        let printed = print_more(|out| {
            if pace.is_separated && !is_first {
                writeln!(out, "{SEPARATOR}")?;
            }
            out.write_all(&text)
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
