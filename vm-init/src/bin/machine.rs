//! Runs a command on its own machine, made of namespaces: no other machine sees its devices, mounts, processes, `/run`
//! and bpffs. Several beds can therefore use the same names side by side.
//!
//! `machine [--until-eof] COMMAND [ARG ...]` exits with the command's exit code, or with 128 plus the number of the
//! signal that killed it; 127 if it could not be started, 143 if standard input closed first. In each case, everything
//! that the command started ends too, and everything that it created disappears, because the kernel removes namespaces
//! with their last process.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::io::{Read as _, stdin};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio, exit};
use std::thread;

use anyhow::{Context as _, ensure};
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use vm_init::{ProgramExit, wait_reaping};

/// Stops the command when standard input closes, that is, when the process that holds its other end is gone.
const UNTIL_EOF: &str = "--until-eof";

/// Marks the re-executed program as the machine's first process.
const INIT: &str = "--init";

/// Exit code for a command that could not be started, as in shells.
const NOT_STARTED: u8 = 127;

/// Exit code if standard input closed first, as for a command killed by SIGTERM.
const INTERRUPTED: i32 = 128 + Signal::SIGTERM as i32;

fn main() -> ExitCode {
    let mut words: Vec<_> = env::args_os().skip(1).collect();
    let init = words.first().is_some_and(|word| word == INIT);
    if init {
        words.remove(0);
    }
    let result = if init {
        first_process(words)
    } else {
        outside(&words)
    };
    result.unwrap_or_else(|error| {
        eprintln!("machine: {error:#}");
        ExitCode::from(NOT_STARTED)
    })
}

/// Enters new namespaces, and re-executes this program there.
fn outside(words: &[OsString]) -> anyhow::Result<ExitCode> {
    ensure!(!words.is_empty(), "no command given");
    unshare(
        CloneFlags::CLONE_NEWNS
            | CloneFlags::CLONE_NEWPID
            | CloneFlags::CLONE_NEWNET
            | CloneFlags::CLONE_NEWIPC
            | CloneFlags::CLONE_NEWUTS,
    )
    .context("cannot create namespaces (are you root?)")?;
    let status = Command::new("/proc/self/exe")
        .arg(INIT)
        .args(words)
        .status()
        .context("cannot start the machine's first process")?;
    Ok(ExitCode::from(ProgramExit::from(status).exit_code()))
}

/// Mounts the machine's own filesystems, runs the command, and reaps orphans meanwhile.
fn first_process(mut words: Vec<OsString>) -> anyhow::Result<ExitCode> {
    set_pdeathsig(Signal::SIGKILL).context("cannot set the parent-death signal")?;
    if words.first().is_some_and(|word| word == UNTIL_EOF) {
        words.remove(0);
        thread::spawn(|| {
            // No data ever arrives; an error counts as the end too.
            let _ = stdin().read_to_end(&mut Vec::new());
            exit(INTERRUPTED);
        });
    }
    mount_own()?;
    let (program, arguments) = words.split_first().context("no command given")?;
    let loopback = Command::new("ip")
        .args(["link", "set", "lo", "up"])
        .status();
    ensure!(
        loopback.context("cannot run ip")?.success(),
        "cannot bring up the loopback device"
    );
    let child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .spawn()
        .with_context(|| format!("cannot run {}", program.to_string_lossy()))?;
    let ended = wait_reaping(&child).context("cannot wait for processes")?;
    Ok(ExitCode::from(ended.exit_code()))
}

/// Mounts filesystems that only this machine sees and that disappear with it.
fn mount_own() -> anyhow::Result<()> {
    let nothing = None::<&str>;
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(nothing, "/", nothing, private, nothing).context("cannot make mounts private")?;
    // Otherwise, the old mounts would still be listed below the mounts that cover them.
    detach("/run")?;
    detach("/sys/fs/bpf")?;
    for (kind, place, data) in [
        ("proc", "/proc", None),
        ("tmpfs", "/run", Some("mode=0755")),
    ] {
        mount(Some(kind), place, Some(kind), MsFlags::empty(), data)
            .with_context(|| format!("cannot mount {place}"))?;
    }
    Ok(())
}

/// Unmounts everything on a folder and below it, last mount first.
fn detach(folder: &str) -> anyhow::Result<()> {
    let mounts =
        fs::read_to_string("/proc/self/mounts").context("cannot read /proc/self/mounts")?;
    let places = mounts.lines().filter_map(|line| line.split(' ').nth(1));
    for place in places
        .rev()
        .filter(|place| Path::new(place).starts_with(folder))
    {
        match umount2(place, MntFlags::MNT_DETACH) {
            // This mount disappeared with the one below it.
            Ok(()) | Err(Errno::EINVAL) => {}
            Err(errno) => return Err(errno).with_context(|| format!("cannot unmount {place}")),
        }
    }
    Ok(())
}
