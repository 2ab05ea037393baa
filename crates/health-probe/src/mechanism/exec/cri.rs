//! Runs commands through the container runtime: the CRI's `ExecSync`, on the runtime's socket.

use std::sync::{Arc, Mutex as StdMutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Mutex, OwnedMutexGuard};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{Instant, sleep, timeout};
use tonic::{Code, Status};

use super::tree::{Search, is_in_own_namespace};
use super::wait::{Command, Start, Waited, wait};
use super::{judge, timed_out};
use crate::Outcome;
use crate::mechanism::{Deadline, failure, own_error};
use crate::runtime::{ExecSyncRequest, Executed, Runtime};

/// How long to look for and kill the processes of a command that took too long.
const CLEAN_UP: Duration = Duration::from_secs(10);
/// First pause between two searches: new processes may start while others are being killed. Each pause is twice as long
/// as the one before, since searches would keep a busy machine busy.
const PAUSE: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_millis(640);

/// A command for the runtime to run. Clones count as the same probe.
#[derive(Clone, Debug)]
pub struct CriExec {
    runtime: Runtime,
    container_id: String,
    pid: Option<u32>,
    command: Vec<String>,
    /// Held while any process of a run is left, and until the runtime has answered.
    running: Arc<Mutex<()>>,
    /// What the run that holds the lock is waiting for.
    awaited: Arc<StdMutex<Awaited>>,
}

/// What a run is waiting for, as far as we can tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Awaited {
    /// The command's processes.
    #[default]
    Processes,
    /// The runtime, which has not even started the command.
    Start,
    /// The runtime, which has not reported the end of a command whose processes are gone.
    Answer,
}

impl CriExec {
    /// Creates a command for the container with the runtime's ID `container_id`. `pid` is a process of the container,
    /// if known. With it, all processes of a command that takes too long can be killed, not only the first one, and a
    /// runtime that does not even start the command can be distinguished from a command that hangs.
    pub fn new(
        runtime: Runtime,
        container_id: impl Into<String>,
        pid: Option<u32>,
        command: Vec<String>,
    ) -> Self {
        Self {
            runtime,
            container_id: container_id.into(),
            pid,
            command,
            running: Arc::default(),
            awaited: Arc::default(),
        }
    }

    fn awaited(&self) -> Awaited {
        *self.awaited.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn await_now(&self, awaited: Awaited) {
        *self.awaited.lock().unwrap_or_else(PoisonError::into_inner) = awaited;
    }
}

/// The runtime's final answer.
type Answer = Result<Executed, Status>;

/// Runs the command once.
pub async fn probe(probe: &CriExec, deadline: Deadline) -> Outcome {
    let Some(alone) = deadline.bound(probe.running.clone().lock_owned()).await else {
        return held_up(probe, deadline);
    };
    probe.await_now(Awaited::Processes);
    let alone = Arc::new(alone);
    // The wait for an earlier run does not count as this run's time.
    let deadline = Deadline::after(deadline.timeout());
    let mut search = Searched(probe.pid.map(|pid| Search::new(pid, &probe.command)));
    // The runtime counts whole seconds from the command's start. Its timeout is only a fallback for ours.
    let seconds = deadline.timeout().as_secs().saturating_mul(2) + 2;
    let request = ExecSyncRequest {
        container_id: probe.container_id.clone(),
        cmd: probe.command.clone(),
        timeout: i64::try_from(seconds).unwrap_or(i64::MAX),
    };
    let runtime = probe.runtime.clone();
    let held = alone.clone();
    // The call continues while the processes are killed: a runtime may ignore the processes of a client that has gone.
    let mut call = tokio::spawn(async move {
        let _held = held;
        runtime.exec_sync(&request).await
    });
    let answer = match wait(deadline, &mut call, &mut search).await {
        Waited::Ended(Ok(answer)) => answer,
        Waited::Ended(Err(panicked)) => return own_error(panicked.to_string()),
        Waited::TooLong | Waited::NotStarted => {
            return late(probe, search.0, call, alone, deadline).await;
        }
    };
    match answer {
        Ok(executed) => judge(executed.exit_code, &executed.output),
        Err(status) if status.code() == Code::DeadlineExceeded => {
            timed_out(&probe.command, deadline.timeout())
        }
        Err(status) => own_error(format!(
            "the runtime at {} did not run the command: {}: {}",
            probe.runtime.socket().display(),
            status.code(),
            status.message()
        )),
    }
}

/// The processes of a command, if they can be found.
struct Searched(Option<Search>);

impl Command for Searched {
    async fn start(&mut self) -> Start {
        let Some(mut search) = self.0.take() else {
            return Start::Unknown;
        };
        let looked = spawn_blocking(move || {
            let start = search.start();
            (search, start)
        });
        match looked.await {
            Ok((search, start)) => {
                self.0 = Some(search);
                start
            }
            Err(_) => Start::Unknown,
        }
    }
}

/// Returns the outcome of a call that got no reply in time, and kills whatever the call started.
async fn late(
    probe: &CriExec,
    search: Option<Search>,
    call: JoinHandle<Answer>,
    alone: Arc<OwnedMutexGuard<()>>,
    deadline: Deadline,
) -> Outcome {
    let (search, was_started) = match search {
        None => (None, true),
        Some(search) => kill(search).await,
    };
    // The command's processes cannot be identified among the host's processes.
    let is_hidden = probe.pid.is_some_and(is_in_own_namespace);
    let was_started = was_started || is_hidden;
    if !was_started {
        probe.await_now(Awaited::Start);
    }
    let search = search.filter(|_| !is_hidden);
    tokio::spawn(clean_up(probe.clone(), search, call, alone));
    if was_started {
        return timed_out(&probe.command, deadline.timeout());
    }
    not_started(probe, deadline)
}

/// Returns the outcome of a probe that could not begin because of an earlier run. Only processes that cannot be killed
/// say something about the container.
fn held_up(probe: &CriExec, deadline: Deadline) -> Outcome {
    let timeout = deadline.timeout();
    match probe.awaited() {
        Awaited::Processes => failure(format!(
            "timeout: an earlier run did not end within {timeout:?}"
        )),
        Awaited::Start => not_started(probe, deadline),
        Awaited::Answer => own_error(format!(
            "the runtime at {} did not report the end of an earlier run within {timeout:?}",
            probe.runtime.socket().display()
        )),
    }
}

fn not_started(probe: &CriExec, deadline: Deadline) -> Outcome {
    own_error(format!(
        "the runtime at {} did not start the command within {:?}",
        probe.runtime.socket().display(),
        deadline.timeout()
    ))
}

/// Kills the processes of a command. Returns whether there were any.
async fn kill(mut search: Search) -> (Option<Search>, bool) {
    let killed = spawn_blocking(move || {
        let killed = search.kill();
        (search, killed)
    });
    match killed.await {
        Ok((search, killed)) => (Some(search), killed > 0),
        Err(_) => (None, false),
    }
}

/// Kills a command's processes until none are left, and waits for the runtime to notice.
async fn clean_up(
    probe: CriExec,
    mut search: Option<Search>,
    mut call: JoinHandle<Answer>,
    _alone: Arc<OwnedMutexGuard<()>>,
) {
    let until = Instant::now() + CLEAN_UP;
    let mut is_answered = false;
    let mut pause = PAUSE;
    loop {
        let mut is_left = false;
        if let Some(running) = search.take() {
            (search, is_left) = kill(running).await;
            match (is_left, probe.awaited()) {
                (true, _) => probe.await_now(Awaited::Processes),
                (false, Awaited::Processes) => probe.await_now(Awaited::Answer),
                (false, Awaited::Start | Awaited::Answer) => {}
            }
        }
        if (is_answered && !is_left) || Instant::now() >= until {
            break;
        }
        if is_answered {
            sleep(pause).await;
        } else {
            is_answered = timeout(pause, &mut call).await.is_ok();
        }
        pause = (pause * 2).min(PAUSE_MAX);
    }
    // The runtime hangs.
    call.abort();
}

#[cfg(test)]
mod tests;
