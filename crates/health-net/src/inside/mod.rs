//! Runs a command where a process is: in its namespaces, below its root, in its cgroups, as its user, and with no more
//! capabilities than that process may have. Does not adopt the process's system call filters (seccomp) and labels
//! (AppArmor, SELinux); a container runtime can do that.
//!
//! For this, the program starts itself again, so that no container can reach the agent's memory. This helper is two
//! processes: one outside, which is in none of the namespaces, and one inside, which starts the command, adopts any
//! processes that the command leaves behind, and exits after all of them.

mod place;
mod program;
mod rights;

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use nix::errno::Errno;
use nix::sched::{CloneFlags, setns};
use nix::sys::prctl;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, chroot, dup2_stdout, fchdir, fork, setsid, write};

use place::Place;
pub use program::own_program;

use super::error::KernelError;

/// The first argument on the helper's command line.
const WORD: &str = "exec-inside";
/// Placeholder for an unknown value.
const NONE: &str = "-";

/// What to run, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// The process to join.
    pub pid: u32,
    /// When that process was started, in ticks since boot (field 22 of `/proc/PID/stat`), so that a different process
    /// that has reused the pid is not joined.
    pub started: Option<u64>,
    /// The `cgroup.procs` file of the version 2 cgroup for the command.
    pub group: PathBuf,
    /// The command and its arguments.
    pub command: Vec<OsString>,
}

/// The helper's one-line report on its standard error, sent before the command's leftover processes exit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Report {
    /// The command exited with this code; if a signal killed it, 128 plus the signal's number.
    Ended(i32),
    /// The command was not run.
    Error(String),
}

impl Order {
    /// Returns the helper's command line. `program` must call [`serve`] before anything else. The command's output
    /// appears on the helper's standard output, a [`Report`] on its standard error.
    pub fn helper(&self, program: &Path) -> Command {
        let started = self
            .started
            .map_or(NONE.to_owned(), |ticks| ticks.to_string());
        let mut helper = Command::new(program);
        helper
            .arg0("health-agent")
            .arg(WORD)
            .arg(self.pid.to_string())
            .arg(started)
            .arg(&self.group)
            .args(&self.command)
            .env_clear()
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        helper
    }

    fn parse(mut words: impl Iterator<Item = OsString>) -> Option<Self> {
        let pid = words.next()?.to_str()?.parse().ok()?;
        let started = words.next()?;
        let started = match started.to_str()? {
            NONE => None,
            ticks => Some(ticks.parse().ok()?),
        };
        let group = words.next()?.into();
        let command: Vec<_> = words.collect();
        (!command.is_empty()).then_some(Self {
            pid,
            started,
            group,
            command,
        })
    }
}

impl Report {
    /// Parses the line of a report.
    pub fn parse(line: &str) -> Option<Self> {
        match line.trim_end().split_once(' ')? {
            ("ended", code) => Some(Self::Ended(code.parse().ok()?)),
            ("error", text) => Some(Self::Error(text.to_owned())),
            _ => None,
        }
    }

    fn send(&self) {
        match self {
            Self::Ended(code) => eprintln!("ended {code}"),
            Self::Error(text) => eprintln!("error {}", text.replace('\n', " ")),
        }
    }
}

/// Acts as the helper if the program was started as one, and returns the exit code. Must be called before the program
/// starts any other thread.
pub fn serve() -> Option<ExitCode> {
    let mut words = env::args_os().skip(1);
    if words.next()? != WORD {
        return None;
    }
    let outcome = match Order::parse(words) {
        Some(order) => outside(order),
        None => Err(KernelError::new(
            "parse",
            "the helper's arguments",
            Errno::EINVAL.into(),
        )),
    };
    Some(match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            Report::Error(error.to_string()).send();
            ExitCode::FAILURE
        }
    })
}

/// The outside process: prepares everything that is only visible from here, and waits for the inside process.
fn outside(order: Order) -> Result<(), KernelError> {
    // No process in the container may inspect this one, not even one that may trace others.
    hide()?;
    keep_files()?;
    let place = Place::of(&order)?;
    if let Some(namespace) = &place.pid_namespace {
        setns(namespace, CloneFlags::CLONE_NEWPID)
            .map_err(|e| failed("enter the PID namespace of", &order, e))?;
    }
    // SAFETY: the process has one thread, so the child may call any function.
    let forked = unsafe { fork() }.map_err(|e| failed("fork for", &order, e))?;
    let ForkResult::Parent { child } = forked else {
        let ended = inside(place, &order);
        if let Err(error) = &ended {
            Report::Error(error.to_string()).send();
        }
        std::process::exit(i32::from(ended.is_err()));
    };
    // Closes this copy of the output, so that the output ends with the command.
    let _ = dup2_stdout(io::stdin());
    loop {
        match waitpid(child, None) {
            Err(Errno::EINTR) => {}
            Ok(WaitStatus::Signaled(..)) => {
                Report::Error("the helper was killed".to_owned()).send();
                return Ok(());
            }
            Ok(_) | Err(_) => return Ok(()),
        }
    }
}

/// The inside process: enters the command's namespaces and adopts its rights, starts the command, and waits for it and
/// for all processes that it leaves behind.
fn inside(place: Place, order: &Order) -> Result<(), KernelError> {
    // When the outside process exits, the inside process must end too.
    die_with_parent()?;
    prctl::set_child_subreaper(true).map_err(|e| failed("become the subreaper for", order, e))?;
    place.take_oom_score();
    for (namespace, kind) in &place.namespaces {
        setns(namespace, *kind).map_err(|e| failed("enter a namespace of", order, e))?;
    }
    let enter = || {
        fchdir(&place.root)?;
        chroot(".")?;
        fchdir(&place.folder)
    };
    enter().map_err(|e| failed("change to the root folder of", order, e))?;
    place
        .rights
        .take(place.user_namespace.as_ref())
        .map_err(|e| failed("switch to the user of", order, e))?;
    hide()?;
    // Changing the user clears the parent-death signal.
    die_with_parent()?;
    let child = spawn(place, order)?;
    // Closes this copy of the output, so that the output ends with the command.
    let _ = dup2_stdout(io::stdin());
    loop {
        match waitpid(None::<Pid>, None) {
            Ok(WaitStatus::Exited(pid, code)) if pid == child => Report::Ended(code).send(),
            Ok(WaitStatus::Signaled(pid, signal, _)) if pid == child => {
                Report::Ended(128 + signal as i32).send();
            }
            Ok(_) | Err(Errno::EINTR) => {}
            Err(_) => return Ok(()),
        }
    }
}

fn spawn(place: Place, order: &Order) -> Result<Pid, KernelError> {
    let on = || order.command[0].display().to_string();
    let to_output = || io::stdout().as_fd().try_clone_to_owned();
    let output = to_output().map_err(|e| KernelError::new("start", on(), e))?;
    let mut command = Command::new(&order.command[0]);
    command
        .args(&order.command[1..])
        .env_clear()
        .envs(place.environment())
        .stderr(Stdio::from(output));
    let groups = place.groups;
    let join = move || {
        // Keeps signals to the command's process group from reaching the helper.
        setsid()?;
        groups.iter().try_for_each(join_group)
    };
    // SAFETY: only makes system calls, on open files.
    unsafe { command.pre_exec(join) };
    let child = command
        .spawn()
        .map_err(|e| KernelError::new("start", on(), e))?;
    // The loop that waits for all children also waits for this one.
    Ok(Pid::from_raw(child.id() as i32))
}

/// Moves the calling process into a cgroup through its file `cgroup.procs`.
fn join_group(procs: &File) -> io::Result<()> {
    write(procs, b"0")?;
    Ok(())
}

fn hide() -> Result<(), KernelError> {
    prctl::set_dumpable(false)
        .map_err(|e| KernelError::new("clear the dumpable flag of", "the helper", e.into()))
}

/// Keeps the command from inheriting files that the helper's parent left open.
fn keep_files() -> Result<(), KernelError> {
    let first = libc::STDERR_FILENO.cast_unsigned() + 1;
    // SAFETY: takes only numbers, and closes nothing now.
    let result = unsafe {
        libc::syscall(
            libc::SYS_close_range,
            first,
            u32::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        )
    };
    Errno::result(result)
        .map(drop)
        .map_err(|e| KernelError::new("set close-on-exec on the files of", "the helper", e.into()))
}

fn die_with_parent() -> Result<(), KernelError> {
    prctl::set_pdeathsig(Signal::SIGKILL)
        .map_err(|e| KernelError::new("set the parent-death signal of", "the helper", e.into()))
}

fn failed(attempt: &'static str, order: &Order, error: Errno) -> KernelError {
    KernelError::new(attempt, format!("process {}", order.pid), error.into())
}

/// Splits an environment, in the kernel's format, into names and values.
fn variables(environment: &[u8]) -> impl Iterator<Item = (&OsStr, &OsStr)> {
    environment.split(|byte| *byte == 0).filter_map(|variable| {
        let at = variable.iter().position(|byte| *byte == b'=')?;
        let (name, value) = (&variable[..at], &variable[at + 1..]);
        (!name.is_empty()).then(|| (OsStr::from_bytes(name), OsStr::from_bytes(value)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_come_through_the_command_line() {
        for started in [None, Some(7)] {
            let order = Order {
                pid: 12,
                started,
                group: "/sys/fs/cgroup/a/cgroup.procs".into(),
                command: vec![
                    "sh".into(),
                    "-c".into(),
                    OsStr::from_bytes(b"\xff -").into(),
                ],
            };
            let helper = order.helper(Path::new("/proc/self/exe"));
            let mut words = helper.get_args().map(OsStr::to_owned);
            assert_eq!(words.next().unwrap(), WORD);
            assert_eq!(Order::parse(words), Some(order));
        }
        let words = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
        for bad in [
            "",
            "1",
            "1 -",
            "1 - /group",
            "x - /group true",
            "1 x /group true",
        ] {
            assert_eq!(Order::parse(words(bad).into_iter()), None, "{bad}");
        }
    }

    #[test]
    fn reports_are_read() {
        assert_eq!(Report::parse("ended 137\n"), Some(Report::Ended(137)));
        let error = Report::Error("cannot start x: no".to_owned());
        assert_eq!(Report::parse("error cannot start x: no\n"), Some(error));
        for bad in ["", "ended", "ended x", "thread main panicked"] {
            assert_eq!(Report::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn environments_are_read() {
        let read: Vec<_> = variables(b"A=1\0B==\0C\0=x\0D=\0").collect();
        let expected = [("A", "1"), ("B", "="), ("D", "")];
        assert_eq!(read, expected.map(|(a, b)| (OsStr::new(a), OsStr::new(b))));
    }
}
