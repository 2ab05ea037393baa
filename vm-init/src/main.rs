//! First process of a virtual machine: mounts the filesystems that programs expect, runs the plan in a re-executed
//! copy of itself, reaps orphans meanwhile, and powers off.

mod mounts;
mod runner;

use std::env;
use std::process::{Command, ExitCode};

use anyhow::Context as _;
use nix::sys::reboot::{RebootMode, reboot};
use nix::sys::resource::{Resource, setrlimit};
use nix::unistd::{Pid, getpid};
use vm_init::{Frame, ProgramExit, Report, wait_reaping};

use crate::runner::Line;

/// Marks the re-executed copy.
const RUN: &str = "run";

/// Soft and hard limits on open files, the same as systemd sets for services. The kernel's default of 4096 is too low
/// for servers.
const OPEN_FILES: (u64, u64) = (1024, 512 * 1024);

fn main() -> ExitCode {
    if env::args().nth(1).is_some_and(|word| word == RUN) {
        return match Line::open().and_then(|line| runner::run(&line)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                print_error(&error);
                ExitCode::FAILURE
            }
        };
    }
    if getpid() != Pid::from_raw(1) {
        eprintln!("error: vm-init is the first process of a virtual machine");
        return ExitCode::FAILURE;
    }
    if let Err(error) = first_process() {
        print_error(&error);
    }
    match reboot(RebootMode::RB_POWER_OFF) {
        Ok(never) => match never {},
        Err(errno) => eprintln!("vm-init: cannot power off: {errno}"),
    }
    ExitCode::FAILURE
}

/// Reports an error on the line and on the console, which is the only channel if there is no line.
fn print_error(error: &anyhow::Error) {
    eprintln!("vm-init: {error:#}");
    if let Ok(line) = Line::open() {
        let _ = line.send(&Frame::Report(Report::Failed(format!("{error:#}"))));
        let _ = line.drain();
    }
}

fn first_process() -> anyhow::Result<()> {
    mounts::leave_rootfs()?;
    mounts::mount_all()?;
    let (soft, hard) = OPEN_FILES;
    setrlimit(Resource::RLIMIT_NOFILE, soft, hard).context("cannot set the limit on open files")?;
    let runner = Command::new("/proc/self/exe")
        .arg(RUN)
        .spawn()
        .context("cannot start the command runner")?;
    match wait_reaping(&runner).context("cannot wait for processes")? {
        ProgramExit::Code(0) => Ok(()),
        ended => anyhow::bail!("the command runner failed: {ended:?}"),
    }
}
