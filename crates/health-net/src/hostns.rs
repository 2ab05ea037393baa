//! Moves the whole process between namespaces of the host, before it starts any other thread.

use std::fs::{self, File};
use std::io;
use std::iter;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::sched::{CloneFlags, setns};
use nix::sys::statfs::{BPF_FS_MAGIC, statfs};
use nix::unistd::{Pid, getppid};

/// The calling thread's mount namespace.
const OWN_MOUNTS: &str = "/proc/thread-self/ns/mnt";

/// Why the process could not move.
#[derive(Debug, thiserror::Error)]
pub enum HostNsError {
    /// The file cannot be opened.
    #[error("cannot open namespace {}: {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The kernel denies entry to the namespace.
    #[error(
        "cannot enter {kind} namespace {}: {source}; this needs root and the file of a {kind} namespace",
        path.display()
    )]
    Enter {
        /// `network` or `mount`.
        kind: &'static str,
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
}

/// Moves the process into the network namespace of a file such as `/run/netns/NAME`. Must be called while the process
/// has only one thread, because other threads would stay behind.
pub fn enter(path: &Path) -> Result<(), HostNsError> {
    move_to(path, "network", CloneFlags::CLONE_NEWNET)
}

/// Moves the process into another mount namespace if `bpf_root` is a bpffs there but not here: that of process 1, or of
/// the nearest ancestor with such a bpffs. Returns whether it moved. Must be called while the process has only one
/// thread. From then on, only absolute paths may be used, because the working folder becomes the root.
///
/// `ip netns exec` gives its command a separate mount namespace, with a fresh `/sys` that hides the host's bpffs;
/// mounts made there disappear with the process.
pub fn leave_hidden_mounts(bpf_root: &Path) -> Result<bool, HostNsError> {
    if is_bpffs(bpf_root) {
        return Ok(false);
    }
    let below_root = bpf_root.strip_prefix("/").unwrap_or(bpf_root);
    // If process 1 has more capabilities than this process, it cannot be inspected.
    for process in iter::once(Pid::from_raw(1)).chain(ancestors()) {
        let process = PathBuf::from(format!("/proc/{process}"));
        let mounts = process.join("ns/mnt");
        if !same_file(&mounts, Path::new(OWN_MOUNTS))
            && is_bpffs(&process.join("root").join(below_root))
        {
            return move_to(&mounts, "mount", CloneFlags::CLONE_NEWNS).map(|()| true);
        }
    }
    Ok(false)
}

/// Returns the process's parent, that process's parent, and so on.
fn ancestors() -> impl Iterator<Item = Pid> {
    iter::successors(Some(getppid()), |child| {
        let status = fs::read_to_string(format!("/proc/{child}/status")).ok()?;
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
        parent.trim().parse().ok().map(Pid::from_raw)
    })
    .take_while(|process| process.as_raw() > 1)
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

/// Whether two paths refer to the same file. A file that cannot be read counts as the same, so that only namespaces
/// that can be inspected are entered.
fn same_file(a: &Path, b: &Path) -> bool {
    match (fs::metadata(a), fs::metadata(b)) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use nix::mount::{MntFlags, MsFlags, mount, umount2};
    use nix::sched::unshare;

    use super::*;

    /// Runs a test on a thread of its own. A thread that has left its process's mount namespace may change its
    /// namespace, like a process with only one thread.
    fn on_a_thread_apart(test: impl FnOnce() + Send) {
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: needs root");
            return;
        }
        let apart = || {
            unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET).unwrap();
            let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
            mount(None::<&str>, "/", None::<&str>, private, None::<&str>).unwrap();
            test();
        };
        let outcome = thread::scope(|scope| scope.spawn(apart).join());
        if let Err(panic) = outcome {
            std::panic::resume_unwind(panic);
        }
    }

    struct Bpffs(tempfile::TempDir);

    impl Bpffs {
        fn mount() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let none = None::<&str>;
            mount(
                Some("none"),
                dir.path(),
                Some("bpf"),
                MsFlags::empty(),
                none,
            )
            .unwrap();
            Self(dir)
        }
    }

    impl Drop for Bpffs {
        fn drop(&mut self) {
            umount2(self.0.path(), MntFlags::MNT_DETACH).unwrap();
        }
    }

    #[test]
    fn a_process_enters_another_network_namespace() {
        let theirs = Path::new("/proc/self/ns/net");
        let ours = Path::new("/proc/thread-self/ns/net");
        on_a_thread_apart(|| {
            assert!(!same_file(ours, theirs));
            enter(theirs).unwrap();
            assert!(same_file(ours, theirs));
            let error = enter(Path::new("/run/netns/no such")).unwrap_err();
            assert_eq!(
                error.to_string(),
                "cannot open namespace /run/netns/no such: No such file or directory (os error 2)"
            );
            let error = enter(Path::new("/dev/null")).unwrap_err().to_string();
            assert!(
                error.starts_with("cannot enter network namespace /dev/null: "),
                "{error}"
            );
        });
    }

    #[test]
    fn mounts_are_left_only_where_they_hide_the_bpffs() {
        let process = Path::new("/proc/self/ns/mnt");
        let parent = PathBuf::from(format!("/proc/{}/ns/mnt", getppid()));
        let root = nix::unistd::geteuid().is_root();
        if root && !same_file(&parent, process) {
            println!("skipped: needs a parent in the same mount namespace");
            return;
        }
        let bpffs = root.then(Bpffs::mount);
        on_a_thread_apart(|| {
            let bpf_root = bpffs.as_ref().unwrap().0.path();
            let ours = Path::new(OWN_MOUNTS);
            assert!(!leave_hidden_mounts(bpf_root).unwrap());
            assert!(!leave_hidden_mounts(Path::new("/nowhere")).unwrap());
            assert!(!same_file(ours, process));

            umount2(bpf_root, MntFlags::MNT_DETACH).unwrap();
            assert!(leave_hidden_mounts(bpf_root).unwrap());
            assert!(same_file(ours, process));
            assert!(is_bpffs(bpf_root));
            assert!(!leave_hidden_mounts(bpf_root).unwrap());
        });
    }
}
