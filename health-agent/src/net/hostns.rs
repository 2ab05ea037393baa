//! Moving the whole process between namespaces of the host, before it has any other thread.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::sched::{CloneFlags, setns};
use nix::sys::statfs::{BPF_FS_MAGIC, statfs};

/// Why the process could not move.
#[derive(Debug, thiserror::Error)]
pub enum HostNsError {
    /// The file cannot be opened.
    #[error("cannot open namespace {}: {source}", path.display())]
    Open {
        /// Which file.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The kernel does not let the process in.
    #[error(
        "cannot enter {kind} namespace {}: {source}; it takes root and a {kind} namespace's file",
        path.display()
    )]
    Enter {
        /// `network` or `mount`.
        kind: &'static str,
        /// Which file.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
}

/// Moves the process into the network namespace of a file such as `/run/netns/NAME`. Must be called
/// while the process has one thread, as others would stay behind.
pub fn enter(path: &Path) -> Result<(), HostNsError> {
    move_to(path, "network", CloneFlags::CLONE_NEWNET)
}

/// Moves the process into process 1's mount namespace if `bpf_root` is a bpffs only there. Returns
/// whether it moved. Must be called while the process has one thread, and with absolute paths in
/// use from then on: the working folder becomes the root.
///
/// `ip netns exec` gives its command a mount namespace of its own, with a fresh `/sys` that hides
/// the host's bpffs; what is mounted there ends with the process.
pub fn leave_hidden_mounts(bpf_root: &Path) -> Result<bool, HostNsError> {
    let theirs = Path::new("/proc/1/ns/mnt");
    let in_view_of_init =
        Path::new("/proc/1/root").join(bpf_root.strip_prefix("/").unwrap_or(bpf_root));
    if is_bpffs(bpf_root)
        || same_file(theirs, Path::new("/proc/self/ns/mnt"))
        || !is_bpffs(&in_view_of_init)
    {
        return Ok(false);
    }
    move_to(theirs, "mount", CloneFlags::CLONE_NEWNS).map(|()| true)
}

fn move_to(path: &Path, kind: &'static str, flags: CloneFlags) -> Result<(), HostNsError> {
    let file = File::open(path).map_err(|source| HostNsError::Open {
        path: path.to_owned(),
        source,
    })?;
    setns(file, flags).map_err(|e| HostNsError::Enter {
        kind,
        path: path.to_owned(),
        source: e.into(),
    })
}

/// Whether a bpffs is mounted at `path`.
pub fn is_bpffs(path: &Path) -> bool {
    statfs(path).is_ok_and(|fs| fs.filesystem_type() == BPF_FS_MAGIC)
}

/// Whether two paths lead to one file. A file that cannot be read counts as the same, so that
/// nothing is entered that cannot be looked at.
fn same_file(a: &Path, b: &Path) -> bool {
    match (fs::metadata(a), fs::metadata(b)) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => true,
    }
}
