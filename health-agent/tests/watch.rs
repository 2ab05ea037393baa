//! The real program's continuous output: reports on a terminal and on a pipe, and probe results as they arrive.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail their test")]

#[allow(dead_code, reason = "other tests use the rest")]
mod common;

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::num::NonZero;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use common::Agent;
use health_model::api::{HealthStatus, NodeStatus, ProbeEvent};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::pty::{Winsize, openpty};
use tempfile::TempDir;

/// Longer than anything here takes, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
const COLUMNS: u16 = 100;
const ROWS: u16 = 14;
/// Escape sequences that start and end a synchronized update.
const BEGIN_OF_DRAWING: &[u8] = b"\x1b[?2026h";
const END_OF_DRAWING: &[u8] = b"\x1b[?2026l";

/// A program with its own terminal.
struct OnTerminal {
    child: Child,
    keyboard: File,
    output: Receiver<Vec<u8>>,
    terminal: vt100::Parser,
    /// Output that was received but is not on the screen yet.
    unseen: Vec<u8>,
    /// All output that has been on the screen.
    written: Vec<u8>,
}

impl OnTerminal {
    /// Starts the program with `arguments` for the agent in `dir`.
    fn start(dir: &Path, arguments: &str) -> Self {
        let size = Winsize {
            ws_row: ROWS,
            ws_col: COLUMNS,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        let pty = openpty(&size, None).unwrap();
        // The program must not inherit both ends, or closing the terminal would not hang it up.
        for side in [&pty.master, &pty.slave] {
            fcntl(side, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)).unwrap();
        }
        let slave = File::from(pty.slave);
        // With a controlling terminal, Ctrl-C causes a SIGINT.
        let child = Command::new("setsid")
            .args(["--ctty", "--wait", env!("CARGO_BIN_EXE_health-agent")])
            .args(arguments.split_ascii_whitespace())
            .arg("--runtime-dir")
            .arg(dir)
            .stdin(slave.try_clone().unwrap())
            .stdout(slave.try_clone().unwrap())
            .stderr(slave)
            .spawn()
            .unwrap();
        let keyboard = File::from(pty.master);
        let mut screen = keyboard.try_clone().unwrap();
        let (sender, output) = channel();
        thread::spawn(move || {
            let mut buffer = [0; 4096];
            // Reading fails once the program has closed the terminal.
            while let Ok(n @ 1..) = screen.read(&mut buffer) {
                if sender.send(buffer[..n].to_vec()).is_err() {
                    break;
                }
            }
        });
        let [rows, columns] = [ROWS, COLUMNS].map(|n| NonZero::new(n).unwrap());
        Self {
            child,
            keyboard,
            output,
            terminal: vt100::Parser::new(rows, columns, 1000),
            unseen: Vec::new(),
            written: Vec::new(),
        }
    }

    /// Waits until the screen meets a condition, and returns its contents. Checks every complete drawing, even if
    /// several have arrived at once; incomplete drawings are skipped, since a terminal's output arrives in pieces.
    fn wait_for(&mut self, is_wanted: impl Fn(&str) -> bool) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let contents = self.terminal.screen().contents();
            if !self.is_drawing() && is_wanted(&contents) {
                return contents;
            }
            if self.unseen.is_empty() {
                let left = deadline.saturating_duration_since(Instant::now());
                match self.output.recv_timeout(left) {
                    Ok(bytes) => self.unseen = bytes,
                    Err(e) => panic!("{e}; on the screen is:\n{contents}"),
                }
            }
            let end = self.unseen.windows(END_OF_DRAWING.len());
            let end = end.enumerate().find(|(_, w)| *w == END_OF_DRAWING);
            let length = end.map_or(self.unseen.len(), |(at, w)| at + w.len());
            let rest = self.unseen.split_off(length);
            let seen = std::mem::replace(&mut self.unseen, rest);
            self.take(&seen);
        }
    }

    fn take(&mut self, bytes: &[u8]) {
        self.terminal.process(bytes);
        self.written.extend_from_slice(bytes);
    }

    /// Processes output that arrived after the awaited drawing.
    fn take_unseen(&mut self) {
        let bytes = std::mem::take(&mut self.unseen);
        self.take(&bytes);
    }

    /// Waits until the output contains `count` more redraws.
    fn wait_for_redrawings(&mut self, count: usize) {
        self.take_unseen();
        let wanted = self.redrawings() + count;
        while self.redrawings() < wanted {
            let bytes = self.output.recv_timeout(PATIENCE).unwrap();
            self.take(&bytes);
        }
    }

    /// Number of completed synchronized updates.
    fn redrawings(&self) -> usize {
        self.count_written(END_OF_DRAWING)
    }

    /// Whether a synchronized update has started but not ended.
    fn is_drawing(&self) -> bool {
        self.count_written(BEGIN_OF_DRAWING) > self.redrawings()
    }

    fn count_written(&self, mark: &[u8]) -> usize {
        let places = self.written.windows(mark.len());
        places.filter(|w| *w == mark).count()
    }

    /// Presses Ctrl-C, and waits until the program exits.
    fn interrupt(mut self) -> (ExitStatus, vt100::Screen) {
        self.keyboard.write_all(b"\x03").unwrap();
        let status = self.child.wait().unwrap();
        self.take_unseen();
        while let Ok(bytes) = self.output.recv_timeout(PATIENCE) {
            self.take(&bytes);
        }
        (status, self.terminal.screen().clone())
    }
}

impl Drop for OnTerminal {
    /// Kills the program, so that a failed test leaves no process behind.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The first lines of a report on two nodes, of which the second is in trouble.
const TROUBLE: &str = "\
Cluster health:   1/2 reachable   (2026-11-21T03:00:00Z)
  Name                         IP           Node          Endpoints
  default/hnode1 (localhost)   172.30.0.1   reachable     reachable";

#[test]
fn a_watched_report_is_redrawn_in_place_and_gives_the_cursor_back() {
    let well = Agent::start(|_| {});
    let mut watch = OnTerminal::start(well.dir(), "status --succinct --watch=0.1");
    let first = watch.wait_for(|screen| screen.contains("hnode2"));
    assert!(
        first.starts_with("Cluster health:   2/2 reachable"),
        "{first}"
    );
    watch.wait_for_redrawings(3);
    assert_eq!(watch.terminal.screen().contents(), first);
    assert!(watch.terminal.screen().hide_cursor());

    let (status, screen) = watch.interrupt();
    assert_eq!(status.code(), Some(0));
    assert!(!screen.hide_cursor());
    assert!(screen.contents().starts_with(&first));
    assert!(screen.cursor_position().0 >= 4, "below the report");
}

#[test]
fn watching_outlasts_the_agent_and_marks_what_changed() {
    let ill = Agent::start(|fixture| fixture.peer = Some("Connection timed out"));
    let well = Agent::start(|_| {});
    // The watched agent is the one to which this link points.
    let dir = tempfile::tempdir().unwrap();
    let watched = dir.path().join("agent");
    let turn_to = |agent: &Agent| {
        let next = dir.path().join("next");
        std::os::unix::fs::symlink(agent.dir(), &next).unwrap();
        fs::rename(&next, &watched).unwrap();
    };
    turn_to(&well);
    let mut watch = OnTerminal::start(&watched, "status --succinct --watch=0.5");
    watch.wait_for(|screen| screen.contains("2/2 reachable"));

    fs::remove_file(&watched).unwrap();
    let without = watch.wait_for(|screen| screen.starts_with("no agent at "));
    assert!(without.contains("Retrying every 500ms. Last report:\nCluster health:   2/2"));

    turn_to(&ill);
    let marked = watch.wait_for(|screen| screen.starts_with(TROUBLE));
    assert_eq!(
        marked.lines().nth(3),
        Some("* default/hnode2               172.30.0.2   unreachable   reachable")
    );
    // The next report marks no changes.
    watch.wait_for(|screen| screen.contains("\n  default/hnode2 "));
    assert_eq!(watch.interrupt().0.code(), Some(0));
}

#[test]
fn a_watched_report_is_clipped_to_the_terminal() {
    let agent = Agent::start(|_| {});
    let mut watch = OnTerminal::start(agent.dir(), "status --watch=0.1");
    let screen = watch.wait_for(|screen| screen.contains("... "));
    let lines: Vec<&str> = screen.lines().collect();
    assert_eq!(lines.len(), usize::from(ROWS) - 1);
    assert!(lines[0].starts_with("Probe time:"), "{screen}");
    assert_eq!(lines[12], "... 11 more lines");
    watch.interrupt();
}

#[test]
fn on_a_pipe_reports_follow_one_another() {
    let agent = Agent::start(|_| {});
    let lines = |flags: &str, count| {
        let mut child = Command::new(env!("CARGO_BIN_EXE_health-agent"))
            .args(["status", "--watch=0.1"])
            .args(flags.split_ascii_whitespace())
            .arg("--runtime-dir")
            .arg(agent.dir())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let lines: Vec<String> = output.lines().take(count).map(Result::unwrap).collect();
        // The reader has closed the pipe by now.
        assert_eq!(child.wait().unwrap().code(), Some(0), "{flags}");
        lines
    };
    let text = lines("--succinct", 9);
    assert!(text[0].starts_with("Cluster health:"), "{text:?}");
    assert_eq!(text[4], "---");
    assert_eq!(text[..4], text[5..]);
    for line in lines("-o jsonl", 3) {
        let report: HealthStatus = serde_json::from_str(&line).unwrap();
        assert_eq!(report.nodes.len(), 2);
    }
}

/// An agent that answers one probe request line by line.
struct Prober {
    dir: TempDir,
    lines: UnixListener,
}

impl Prober {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let lines = UnixListener::bind(dir.path().join("health.sock")).unwrap();
        Self { dir, lines }
    }

    /// Accepts the request, and sends the head of the answer.
    fn accept(&self) -> UnixStream {
        let (stream, _) = self.lines.accept().unwrap();
        let mut request = BufReader::new(stream.try_clone().unwrap());
        let mut line = String::new();
        request.read_line(&mut line).unwrap();
        assert_eq!(line, "PUT /v1beta/status/probe?stream=true HTTP/1.1\r\n");
        while line != "\r\n" {
            line.clear();
            request.read_line(&mut line).unwrap();
        }
        let mut answer = stream;
        let head =
            "HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\nconnection: close\r\n\r\n";
        answer.write_all(head.as_bytes()).unwrap();
        answer
    }
}

fn send(to: &mut UnixStream, event: &ProbeEvent) {
    let mut line = serde_json::to_vec(event).unwrap();
    line.push(b'\n');
    to.write_all(&line).unwrap();
}

/// The report of an agent with an unreachable peer.
fn report() -> HealthStatus {
    let agent = Agent::start(|fixture| fixture.peer = Some("Connection timed out"));
    let output = Command::new(env!("CARGO_BIN_EXE_health-agent"))
        .args(["status", "-o", "json", "--runtime-dir"])
        .arg(agent.dir())
        .output()
        .unwrap();
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn probed_nodes_are_printed_as_they_come_and_the_others_in_the_end() {
    let report = report();
    let agent = Prober::new();
    let mut child = Command::new(env!("CARGO_BIN_EXE_health-agent"))
        .args(["status", "--probe", "-o", "jsonl", "--runtime-dir"])
        .arg(agent.dir.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut answer = agent.accept();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut next =
        || -> NodeStatus { serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap() };

    send(&mut answer, &ProbeEvent::Progress { done: 4, total: 8 });
    let node = Box::new(report.nodes[1].clone());
    send(&mut answer, &ProbeEvent::Node(node));
    // The node is printed before the answer ends.
    assert_eq!(next(), report.nodes[1]);
    send(&mut answer, &ProbeEvent::Done(Box::new(report.clone())));
    assert_eq!(next(), report.nodes[0]);
    assert!(lines.next().is_none());
    assert_eq!(child.wait().unwrap().code(), Some(3));
}

#[test]
fn probing_that_is_cut_off_is_a_failure() {
    let agent = Prober::new();
    let mut child = Command::new(env!("CARGO_BIN_EXE_health-agent"))
        .args(["status", "--probe", "--runtime-dir"])
        .arg(agent.dir.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(agent.accept());
    let mut error = String::new();
    child
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut error)
        .unwrap();
    assert!(
        error.starts_with("error: PUT /v1beta/status/probe"),
        "{error}"
    );
    assert_eq!(child.wait().unwrap().code(), Some(1));
}

#[test]
fn a_terminal_shows_how_far_probing_is() {
    let agent = Prober::new();
    let mut program = OnTerminal::start(agent.dir.path(), "status --probe --succinct");
    let mut answer = agent.accept();
    send(
        &mut answer,
        &ProbeEvent::Progress {
            done: 3500,
            total: 10_000,
        },
    );
    program.wait_for(|screen| screen == "probed 3500 of 10000 targets");
    send(&mut answer, &ProbeEvent::Done(Box::new(report())));
    let screen = program.wait_for(|screen| screen.contains("hnode2"));
    assert!(screen.starts_with(TROUBLE), "{screen}");
    assert_eq!(program.child.wait().unwrap().code(), Some(3));
}
