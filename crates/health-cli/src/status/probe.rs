//! `status --probe`: progress, and results as they arrive.

use std::collections::BTreeSet;
use std::io::{self, IsTerminal, Stderr};
use std::ops::ControlFlow;

use crossterm::cursor::MoveToColumn;
use crossterm::execute;
use crossterm::style::Print;
use crossterm::terminal::{Clear, ClearType};
use health_api::client::{Client, ClientError};
use health_model::api::{HealthStatus, NodeStatus, ProbeEvent};
use tokio::sync::Notify;

use super::view::Filter;
use crate::output::{print_more, write_json_line};

/// Probes all nodes, and shows progress on a terminal. Returns the final report.
pub(super) async fn with_progress(client: &Client) -> Result<HealthStatus, ClientError> {
    let mut progress = Progress::new();
    let mut report = HealthStatus::default();
    client
        .stream_probe(|event| match event {
            ProbeEvent::Progress { done, total } => progress.show(done, total),
            ProbeEvent::Done(status) => report = *status,
            ProbeEvent::Node(_) => {}
        })
        .await?;
    Ok(report)
}

/// Probes all nodes, and prints each node that passes `filter` as a line of JSON as soon as it is known; unknown nodes
/// follow at the end. `None` if the reader has gone.
pub(super) async fn print_as_they_come(
    client: &Client,
    filter: &Filter,
) -> anyhow::Result<Option<HealthStatus>> {
    let mut printed = BTreeSet::new();
    let mut print_node = |node: &NodeStatus| {
        if !filter.lets_through(node) || !printed.insert(node.name.clone()) {
            return Ok(ControlFlow::Continue(()));
        }
        print_more(|out| write_json_line(out, node))
    };
    let stop = Notify::new();
    let mut outcome = Ok(ControlFlow::Continue(()));
    let mut report = None;
    let each = |event| {
        outcome = match event {
            ProbeEvent::Node(node) => print_node(&node),
            ProbeEvent::Progress { .. } => return,
            ProbeEvent::Done(status) => {
                let rest = status.nodes.iter().map(&mut print_node);
                let rest = first_stop(rest);
                report = Some(*status);
                rest
            }
        };
        if !matches!(outcome, Ok(ControlFlow::Continue(()))) {
            stop.notify_one();
        }
    };
    tokio::select! {
        biased;
        () = stop.notified() => {}
        result = client.stream_probe(each) => result?,
    }
    Ok(match outcome? {
        ControlFlow::Continue(()) => report,
        ControlFlow::Break(()) => None,
    })
}

/// The first item that breaks or fails; continues if there is none.
fn first_stop(
    all: impl IntoIterator<Item = anyhow::Result<ControlFlow<()>>>,
) -> anyhow::Result<ControlFlow<()>> {
    all.into_iter()
        .find(|one| !matches!(one, Ok(ControlFlow::Continue(()))))
        .unwrap_or(Ok(ControlFlow::Continue(())))
}

/// A progress line on stderr, erased at the end. Not shown if stderr is not a terminal.
struct Progress {
    terminal: Option<Stderr>,
}

impl Progress {
    fn new() -> Self {
        let terminal = io::stderr();
        Self {
            terminal: terminal.is_terminal().then_some(terminal),
        }
    }

    fn show(&mut self, done: usize, total: usize) {
        self.draw(&format!("probed {done} of {total} targets"));
    }

    fn draw(&mut self, text: &str) {
        if let Some(terminal) = &mut self.terminal {
            // If progress cannot be shown, no result is lost.
            let _ = execute!(
                terminal,
                MoveToColumn(0),
                Clear(ClearType::CurrentLine),
                Print(text)
            );
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.draw("");
    }
}
