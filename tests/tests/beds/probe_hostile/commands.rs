//! Commands that are hard to kill, which this host runs itself.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use health_probe::mechanism::Deadline;
use health_probe::mechanism::exec::direct::{self, DirectExec};
use health_probe::{Outcome, RawResult};
use tests::bed::agent_binary;
use tests::process::Running;
use tests::processes::{Held, control_groups, with_word, zombies};
use tests::{PATIENCE, is_long, wait_for};

use super::runtime;

/// Part of the command lines of all processes that the commands start.
const WORD: &str = "777791";
/// How long after its deadline all but one run in a thousand must have ended.
const LATENESS_MAX: Duration = Duration::from_millis(50);
const AT_ONCE: usize = 4;
const FEW: usize = 4 * COMMANDS.len();
const MANY: usize = 1000;
const FIRST_TIMEOUT: Duration = Duration::from_millis(500);

/// How a command ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// Not on its own: it is killed.
    Killed,
    /// On its own, with this exit code.
    Code(i32),
}

/// Shell commands, in which `$0` is [`WORD`].
const COMMANDS: [(&str, End); 7] = [
    // Ignores signals, and so do its children.
    ("trap '' TERM HUP INT; sleep $0 & sleep $0", End::Killed),
    // Runs children in a separate session that start another process when one is killed.
    (
        "trap '' TERM; setsid sh -c 'trap \"\" TERM; while :; do sleep $0; done' $0 & sleep $0",
        End::Killed,
    ),
    // A chain of processes, each of which starts the next one and exits.
    (
        "export hop='setsid sh -c \"$hop\" $0 & exit'; sh -c \"$hop\" $0; sleep $0",
        End::Killed,
    ),
    // Stops itself.
    ("sleep $0 & kill -STOP $$", End::Killed),
    // Writes output continuously.
    ("trap '' TERM; yes $0", End::Killed),
    // Exits, and leaves a process in another session that keeps its output open.
    (
        "setsid sh -c 'trap \"\" TERM; sleep $0; sleep $0' $0 & exit 0",
        End::Code(0),
    ),
    ("(setsid sleep $0 &); exit 3", End::Code(3)),
];

/// The environment of the probes.
struct Stand {
    /// Stands in for a container's first process.
    process: Running,
    names: String,
}

impl Stand {
    fn new() -> anyhow::Result<Self> {
        Ok(Self {
            process: Running::start(Command::new("sleep").arg("1000001"))?,
            // Unique, because machines share the control groups of their host.
            names: format!("hostile-{:x}-", fastrand::u64(..)),
        })
    }

    fn probe(&self, number: usize) -> anyhow::Result<DirectExec> {
        let (script, _) = COMMANDS[number % COMMANDS.len()];
        Ok(DirectExec {
            pid: self.process.pid().as_raw().cast_unsigned(),
            started: None,
            name: format!("{}{number}", self.names),
            command: ["sh", "-c", script, WORD].map(str::to_owned).to_vec(),
            program: Some(agent_binary()?),
        })
    }

    fn groups(&self) -> usize {
        control_groups(Path::new("/sys/fs/cgroup"), &self.names)
    }
}

/// Runs a command, and returns how long after its deadline it ended if it timed out. On a busy machine, it gets more
/// time to start.
async fn run(stand: &Stand, number: usize) -> anyhow::Result<Option<Duration>> {
    let (script, end) = COMMANDS[number % COMMANDS.len()];
    let probe = stand.probe(number)?;
    let mut timeout = match end {
        End::Killed => FIRST_TIMEOUT,
        End::Code(_) => PATIENCE,
    };
    loop {
        let begin = Instant::now();
        let outcome = direct::probe(&probe, Deadline::after(timeout)).await;
        let late = begin.elapsed().saturating_sub(timeout);
        if is_expected(&outcome, end) {
            return Ok((end == End::Killed).then_some(late));
        }
        let is_slow = outcome.errored && outcome.message.contains("was not started within");
        anyhow::ensure!(is_slow && timeout < PATIENCE, "{script}: {outcome:?}");
        timeout *= 2;
    }
}

fn is_expected(outcome: &Outcome, end: End) -> bool {
    let (result, start) = match end {
        End::Killed => (RawResult::Failure, "timeout: command ".to_owned()),
        End::Code(0) => (RawResult::Success, "exit code 0".to_owned()),
        End::Code(code) => (RawResult::Failure, format!("exit code {code}")),
    };
    outcome.result == result && !outcome.errored && outcome.message.starts_with(&start)
}

/// The long form also checks how late runs end.
#[test]
#[ignore = "needs root"]
fn commands_that_ignore_signals_and_fork_leave_nothing_behind() -> anyhow::Result<()> {
    let stand = Arc::new(Stand::new()?);
    let runtime = runtime()?;
    // A runtime keeps open whatever it has opened for its own child processes.
    runtime.block_on(run(&stand, 0))?;
    let rest = || {
        wait_for("nothing to be left of the commands", PATIENCE, || {
            let (left, groups) = (with_word(WORD), stand.groups());
            anyhow::ensure!(
                left == 0 && groups == 0,
                "{left} processes, {groups} groups"
            );
            Ok(Some(()))
        })
    };
    rest()?;
    let (before, zombies_before) = (Held::now(&[])?, zombies());

    let total = if is_long() { MANY } else { FEW };
    let next = Arc::new(AtomicUsize::new(1));
    let begin = |_| {
        let (stand, next) = (stand.clone(), next.clone());
        runtime.spawn(async move {
            let mut late = Vec::new();
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number > total {
                    return anyhow::Ok(late);
                }
                late.extend(run(&stand, number).await?);
            }
        })
    };
    let tasks: Vec<_> = (0..AT_ONCE).map(begin).collect();
    let mut late = Vec::new();
    for task in tasks {
        late.extend(runtime.block_on(task)??);
    }
    late.sort_unstable();
    let share = |share: f64| late[((late.len() - 1) as f64 * share) as usize];
    println!(
        "{total} commands, {} timed out, late by: p50 {:?}, p99 {:?}, p99.9 {:?}, at most {:?}",
        late.len(),
        share(0.5),
        share(0.99),
        share(0.999),
        share(1.0)
    );
    rest()?;
    wait_for("nothing to be held any more", PATIENCE, || {
        let (held, zombies) = (Held::now(&[])?, zombies());
        anyhow::ensure!(held == before, "{held:?} and not {before:?}");
        anyhow::ensure!(zombies <= zombies_before, "{zombies} zombies");
        Ok(Some(()))
    })?;
    assert!(
        !is_long() || share(0.999) < LATENESS_MAX,
        "{:?} late",
        share(0.999)
    );
    Ok(())
}
