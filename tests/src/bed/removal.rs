//! Removes a bed from the machine, whether it was created by this process or by one that was killed before it could
//! clean up.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::fabric::{FABRIC, delete_namespace, is_node_name, namespaces};
use super::mounts::{self, BPFFS};
use super::{JOURNAL, NODES_FILE, RUNTIME_ROOT};
use crate::wait_for;

/// Prefix of the namespaces that agents create for their health endpoints.
const ENDPOINT_NETNS_PREFIX: &str = "health-";

/// Removes all traces of beds.
pub(super) fn remove() -> anyhow::Result<()> {
    kill_agents()?;
    for name in namespaces()? {
        let endpoint_of = name.strip_prefix(ENDPOINT_NETNS_PREFIX);
        if name == FABRIC || is_node_name(&name) || endpoint_of.is_some_and(is_node_name) {
            delete_namespace(&name)?;
        }
    }
    let pins = Path::new(BPFFS).join("health");
    remove_nodes_folders(&pins)?;
    remove_if_empty(&pins)?;
    mounts::undo(Path::new(JOURNAL))?;
    remove_file(Path::new(NODES_FILE))?;
    remove_nodes_folders(Path::new(RUNTIME_ROOT))?;
    remove_if_empty(Path::new(RUNTIME_ROOT))
}

/// Kills the agents of all beds' nodes.
pub(super) fn kill_agents() -> anyhow::Result<()> {
    for pid in agents()? {
        let process = Pid::from_raw(pid);
        match kill(process, Signal::SIGKILL) {
            Ok(()) | Err(Errno::ESRCH) => {}
            Err(errno) => return Err(errno).with_context(|| format!("cannot kill agent {pid}")),
        }
        wait_for("a killed agent to exit", Duration::from_secs(5), || {
            Ok((!is_agent(pid)).then_some(()))
        })?;
    }
    Ok(())
}

fn agents() -> anyhow::Result<Vec<i32>> {
    let mut pids: Vec<i32> = fs::read_dir("/proc")
        .context("cannot list /proc")?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    pids.retain(|&pid| is_agent(pid));
    Ok(pids)
}

/// Whether the process is an agent whose runtime folder belongs to a bed on this machine. `/proc` also shows agents
/// that run in other PID namespaces, such as those of machines simulated by namespaces.
fn is_agent(pid: i32) -> bool {
    let processes_of = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
    if processes_of(&pid.to_string()) != processes_of("self") {
        return false;
    }
    // Processes may exit at any time, and zombies have an empty command line.
    let Ok(cmdline) = fs::read(format!("/proc/{pid}/cmdline")) else {
        return false;
    };
    let words: Vec<&[u8]> = cmdline.split(|&byte| byte == 0).collect();
    words.contains(&b"run".as_slice())
        && words.windows(2).any(|pair| {
            pair[0] == b"--runtime-dir"
                && std::str::from_utf8(pair[1])
                    .ok()
                    .and_then(|dir| dir.strip_prefix(RUNTIME_ROOT)?.strip_prefix('/'))
                    .is_some_and(is_node_name)
        })
}

fn remove_nodes_folders(parent: &Path) -> anyhow::Result<()> {
    let entries = match fs::read_dir(parent) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        entries => entries.with_context(|| format!("cannot list {}", parent.display()))?,
    };
    for entry in entries {
        let entry = entry.with_context(|| format!("cannot list {}", parent.display()))?;
        if entry.file_name().to_str().is_some_and(is_node_name) {
            remove_folder(&entry.path())?;
        }
    }
    Ok(())
}

fn remove_folder(path: &Path) -> anyhow::Result<()> {
    ignoring_absence(fs::remove_dir_all(path), path)
}

fn remove_file(path: &Path) -> anyhow::Result<()> {
    ignoring_absence(fs::remove_file(path), path)
}

fn remove_if_empty(path: &Path) -> anyhow::Result<()> {
    match fs::remove_dir(path) {
        Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => Ok(()),
        result => ignoring_absence(result, path),
    }
}

fn ignoring_absence(result: std::io::Result<()>, path: &Path) -> anyhow::Result<()> {
    match result {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        result => result.with_context(|| format!("cannot remove {}", path.display())),
    }
}
