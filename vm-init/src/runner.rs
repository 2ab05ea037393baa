//! Runs the plan's commands one after the other, and sends their output and exit codes.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, killpg};
use nix::sys::termios::{SetArg, cfmakeraw, tcdrain, tcgetattr, tcsetattr};
use nix::unistd::Pid;
use vm_init::{Frame, LINE, Order, PLAN, Plan, PlannedCommand, ProgramExit, Report};

/// Time between two heartbeats.
const HEARTBEAT: Duration = Duration::from_secs(2);

/// Longest wait for output before checking the command again, in milliseconds.
const LOOK_MS: u8 = 50;

/// The complete environment of the programs.
const ENVIRONMENT: &[(&str, &str)] = &[
    (
        "PATH",
        "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    ),
    ("HOME", "/root"),
    ("USER", "root"),
    ("LANG", "C.UTF-8"),
    ("RUST_BACKTRACE", "1"),
    // Software emulation is about ten times slower, but tests mostly wait, so tripled deadlines are enough.
    ("HEALTH_AGENT_SLOWNESS", "3"),
];

/// The guest's end of the serial line. Frames of different threads never interleave.
#[derive(Clone)]
pub(crate) struct Line(Arc<Mutex<File>>);

impl Line {
    /// Opens the line in raw mode.
    pub(crate) fn open() -> anyhow::Result<Self> {
        let open = || {
            let line = OpenOptions::new().read(true).write(true).open(LINE)?;
            let mut settings = tcgetattr(&line)?;
            cfmakeraw(&mut settings);
            tcsetattr(&line, SetArg::TCSANOW, &settings)?;
            io::Result::Ok(line)
        };
        let line = open().with_context(|| format!("cannot open {LINE}"))?;
        Ok(Self(Arc::new(Mutex::new(line))))
    }

    pub(crate) fn send(&self, frame: &Frame) -> anyhow::Result<()> {
        frame
            .write_to(&mut *self.lock())
            .with_context(|| format!("cannot write to {LINE}"))
    }

    /// Waits until everything has been transmitted.
    pub(crate) fn drain(&self) -> anyhow::Result<()> {
        tcdrain(&*self.lock()).with_context(|| format!("cannot drain {LINE}"))
    }

    /// A handle for reading, which does not block on writers.
    fn reader(&self) -> anyhow::Result<File> {
        let reader = self.lock().try_clone();
        reader.with_context(|| format!("cannot open {LINE} again"))
    }

    fn lock(&self) -> MutexGuard<'_, File> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// State changed by orders from the other side.
#[derive(Default)]
struct State {
    running: Option<Pid>,
    interrupted: bool,
}

type SharedState = Arc<Mutex<State>>;

fn locked(state: &SharedState) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs the plan to completion.
pub(crate) fn run(line: &Line) -> anyhow::Result<()> {
    line.send(&Frame::Report(Report::Booted))?;
    let plan = fs::read(PLAN).with_context(|| format!("cannot read {PLAN}"))?;
    let plan: Plan = serde_json::from_slice(&plan).with_context(|| format!("invalid {PLAN}"))?;

    let state = SharedState::default();
    let mut reader = line.reader()?;
    let obeying = Arc::clone(&state);
    thread::spawn(move || {
        while let Ok(Some(frame)) = Frame::read_from(&mut reader) {
            obey(&frame, &obeying);
        }
    });
    let alive = line.clone();
    thread::spawn(move || {
        while alive.send(&Frame::Report(Report::Alive)).is_ok() {
            thread::sleep(HEARTBEAT);
        }
    });

    for (index, command) in plan.commands.iter().enumerate() {
        if locked(&state).interrupted {
            break;
        }
        let ended = run_one(command, line, &state)?;
        line.send(&Frame::Report(Report::Ended(index, ended)))?;
    }
    line.send(&Frame::Report(Report::Done))?;
    line.drain()
}

fn obey(frame: &Frame, state: &SharedState) {
    if let Frame::Order(Order::Interrupt) = frame {
        let mut state = locked(state);
        state.interrupted = true;
        if let Some(running) = state.running {
            // The command may have just exited.
            let _ = killpg(running, Signal::SIGINT);
        }
    }
}

fn run_one(
    command: &PlannedCommand,
    line: &Line,
    state: &SharedState,
) -> anyhow::Result<ProgramExit> {
    let (program, arguments) = command.words.split_first().context("empty command")?;
    let child = Command::new(program)
        .args(arguments)
        .current_dir(&command.folder)
        .env_clear()
        .envs(ENVIRONMENT.iter().copied())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn();
    let mut child = match child {
        Ok(child) => child,
        Err(error) => {
            let message = format!("cannot run {program}: {error}\n");
            line.send(&Frame::Stderr(message.into_bytes()))?;
            // The code that shells use for this.
            return Ok(ProgramExit::Code(127));
        }
    };
    locked(state).running = Some(Pid::from_raw(child.id().cast_signed()));
    let status = relay(&mut child, line);
    locked(state).running = None;
    let status = status.with_context(|| format!("cannot relay the output of {program}"))?;
    Ok(status.into())
}

/// Forwards output until the command has exited and all of its own output has been read. Processes that the command
/// left running may keep the pipes open.
fn relay(child: &mut Child, line: &Line) -> anyhow::Result<ExitStatus> {
    let mut stdout = child.stdout.take().context("no standard output")?;
    let mut stderr = child.stderr.take().context("no standard error")?;
    let mut buffer = vec![0; 64 * 1024];
    let mut open = (true, true);
    let mut ended = None;
    loop {
        let timeout = if ended.is_some() { 0 } else { LOOK_MS };
        let pipes = [(stdout.as_fd(), open.0), (stderr.as_fd(), open.1)];
        let [out, err] = readable(pipes, timeout)?;
        if out {
            let length = stdout.read(&mut buffer)?;
            open.0 = length > 0;
            line.send(&Frame::Stdout(buffer[..length].to_vec()))?;
        }
        if err {
            let length = stderr.read(&mut buffer)?;
            open.1 = length > 0;
            line.send(&Frame::Stderr(buffer[..length].to_vec()))?;
        }
        if let (Some(status), false, false) = (ended, out, err) {
            return Ok(status);
        }
        if ended.is_none() {
            ended = match open {
                (false, false) => Some(child.wait()?),
                _ => child.try_wait()?,
            };
        }
    }
}

/// Which of the open pipes can be read or have been closed.
fn readable(pipes: [(BorrowedFd, bool); 2], timeout_ms: u8) -> anyhow::Result<[bool; 2]> {
    let open = pipes.iter().filter(|(_, open)| *open);
    let mut polled: Vec<_> = open
        .map(|(pipe, _)| PollFd::new(*pipe, PollFlags::POLLIN))
        .collect();
    poll(&mut polled, PollTimeout::from(timeout_ms)).context("cannot wait for output")?;
    let mut polled = polled.iter();
    Ok(pipes.map(|(_, open)| open && polled.next().is_some_and(|fd| fd.any() == Some(true))))
}
