//! Mounts that a bed adds if the machine lacks them, and removes afterwards.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

use super::fabric::NETNS_DIR;
use crate::wait_for;

/// Mount point of the bpffs.
pub const BPFFS: &str = "/sys/fs/bpf";

/// How long to wait for the kernel to release a mount.
const SETTLING: Duration = Duration::from_secs(30);

/// Files that the kernel itself creates in a fresh bpffs.
const MADE_BY_KERNEL: [&str; 2] = ["maps.debug", "progs.debug"];

/// Mounts a bpffs unless one is mounted already. First writes the mounts to undo to the file `journal`, so that the
/// next bed can clean up after a killed one.
pub(super) fn ensure(journal: &Path) -> anyhow::Result<()> {
    let mut ours = Vec::new();
    // The first `ip netns add` bind-mounts this folder on itself.
    if !is_mount_point(NETNS_DIR)? {
        ours.push(NETNS_DIR);
    }
    let bpffs_is_missing = !is_mount_point(BPFFS)?;
    if bpffs_is_missing {
        ours.push(BPFFS);
    }
    fs::write(journal, ours.join("\n"))
        .with_context(|| format!("cannot write {}", journal.display()))?;
    if bpffs_is_missing {
        mount(
            Some("bpf"),
            BPFFS,
            Some("bpf"),
            MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC,
            Some("mode=0700"),
        )
        .with_context(|| format!("cannot mount a bpffs at {BPFFS}"))?;
    }
    Ok(())
}

/// Undoes the mounts listed in the file `journal`, if it exists.
pub(super) fn undo(journal: &Path) -> anyhow::Result<()> {
    let ours = match fs::read_to_string(journal) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        ours => ours.with_context(|| format!("cannot read {}", journal.display()))?,
    };
    ours.lines().try_for_each(unmount_if_empty)?;
    fs::remove_file(journal).with_context(|| format!("cannot remove {}", journal.display()))
}

/// Unmounts `path` unless something else has started to use it.
fn unmount_if_empty(path: &str) -> anyhow::Result<()> {
    if !is_mount_point(path)? {
        return Ok(());
    }
    let entries = fs::read_dir(path).with_context(|| format!("cannot list {path}"))?;
    for entry in entries {
        let entry = entry.with_context(|| format!("cannot list {path}"))?;
        if !MADE_BY_KERNEL.iter().any(|name| entry.file_name() == *name) {
            return Ok(());
        }
    }
    // The kernel may still be cleaning up namespaces that were just deleted.
    wait_for("an unused mount", SETTLING, || {
        match umount2(path, MntFlags::empty()) {
            Ok(()) => Ok(Some(())),
            Err(errno) => Err(errno).with_context(|| format!("cannot unmount {path}")),
        }
    })?;
    if path == NETNS_DIR {
        match fs::remove_dir(path) {
            Err(error) if error.raw_os_error() != Some(Errno::ENOTEMPTY as i32) => {
                return Err(error).with_context(|| format!("cannot remove {path}"));
            }
            _ => {}
        }
    }
    Ok(())
}

fn is_mount_point(path: &str) -> anyhow::Result<bool> {
    let mounts =
        fs::read_to_string("/proc/self/mounts").context("cannot read /proc/self/mounts")?;
    Ok(mounts
        .lines()
        .filter_map(|line| line.split(' ').nth(1))
        .any(|mounted| Path::new(mounted) == Path::new(path)))
}
