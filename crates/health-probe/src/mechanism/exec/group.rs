//! Control groups of commands: a group holds all processes of a run, and kills them at once.
//!
//! A run's group is a child of its container's group, so that the container's limits apply. This needs cgroup version
//! 2, which is also mounted where the controllers still use version 1.

use std::fs::{self, DirBuilder};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::tree::start_of;
use super::wait::Start;

/// Prefix of the names of runs' groups.
const PREFIX: &str = "health-probe-";
/// Pause between two checks whether all processes of a group are gone: initial and longest.
const PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);

/// Why a run has no group.
#[derive(Debug, thiserror::Error)]
pub(super) enum GroupError {
    /// Control groups of version 2 are not mounted.
    #[error("no cgroup2 file system is mounted; mount one, for example at /sys/fs/cgroup/unified")]
    NotMounted,
    /// The process's group is outside of the mounted hierarchy.
    #[error("the control group of process {0} is not visible from here")]
    NotVisible(u32),
    /// The process is gone, or its groups cannot be read.
    #[error("cannot read the control groups of process {0}: {1}")]
    Unreadable(u32, #[source] io::Error),
    /// The kernel refused the operation.
    #[error("cannot {attempt} {}: {source}", path.display())]
    Kernel {
        attempt: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl GroupError {
    fn new(attempt: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Kernel {
            attempt,
            path,
            source,
        }
    }
}

/// The group of a run. Dropping it neither kills nor removes anything.
#[derive(Clone, Debug)]
pub(super) struct Group {
    path: PathBuf,
}

impl Group {
    /// Creates a child group of the group of process `pid`, for a run of the probe called `name`. Also returns the
    /// groups of earlier runs, which must be gone before this run starts.
    pub(super) fn new(pid: u32, name: &str) -> Result<(Self, Vec<Self>), GroupError> {
        static RUNS: AtomicU64 = AtomicU64::new(0);
        let parent = of_process(pid)?;
        let prefix = format!("{PREFIX}{}.", plain(name));
        let earlier = earlier(&parent, &prefix)?;
        loop {
            let run = RUNS.fetch_add(1, Ordering::Relaxed);
            let path = parent.join(format!("{prefix}{}.{run}", std::process::id()));
            match DirBuilder::new().create(&path) {
                Ok(()) => return Ok((Self { path }, earlier)),
                // Left behind by an earlier agent with the same PID.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(GroupError::new("create control group", &path)(error)),
            }
        }
    }

    /// The file through which processes join the group.
    pub(super) fn procs(&self) -> PathBuf {
        self.path.join("cgroup.procs")
    }

    /// Whether the group has a live process.
    pub(super) fn is_populated(&self) -> bool {
        fs::read_to_string(self.path.join("cgroup.events"))
            .is_ok_and(|events| events.lines().any(|line| line == "populated 1"))
    }

    /// When the first of the group's processes started.
    pub(super) fn start(&self) -> Start {
        let procs = fs::read_to_string(self.procs()).unwrap_or_default();
        let pids = procs.lines().filter_map(|pid| pid.parse().ok());
        match start_of(pids) {
            // The processes are in child groups, or not visible from here.
            Start::NotNow if self.is_populated() => Start::Unknown,
            start => start,
        }
    }

    /// Kills all processes of the group, including those that they start meanwhile.
    pub(super) fn kill(&self) -> Result<(), GroupError> {
        let path = self.path.join("cgroup.kill");
        match fs::write(&path, "1") {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(GroupError::new("write to", &path)(error))
            }
            _ => Ok(()),
        }
    }

    /// Kills all processes of the group and removes it. Returns whether that succeeded before `until`.
    pub(super) async fn end(&self, until: Instant) -> bool {
        let mut pause = PAUSE;
        loop {
            if self.is_populated() {
                // Errors are ignored: this is retried while there is time.
                let _ = self.kill();
            }
            match fs::remove_dir(&self.path) {
                Ok(()) => return true,
                Err(error) if error.kind() == io::ErrorKind::NotFound => return true,
                Err(_) if Instant::now() >= until => return false,
                Err(_) => sleep(pause).await,
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }
}

/// Replaces the characters of a name that cannot be in a file name.
fn plain(name: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    let plain = name.chars().map(|c| if is_plain(c) { c } else { '_' });
    plain.collect()
}

fn earlier(parent: &Path, prefix: &str) -> Result<Vec<Group>, GroupError> {
    let entries = fs::read_dir(parent).map_err(GroupError::new("list", parent))?;
    let named = entries.filter_map(Result::ok).filter(|entry| {
        let name = entry.file_name();
        name.to_str().is_some_and(|name| name.starts_with(prefix))
    });
    Ok(named.map(|entry| Group { path: entry.path() }).collect())
}

/// The directory of a process's control group.
fn of_process(pid: u32) -> Result<PathBuf, GroupError> {
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup"))
        .map_err(|error| GroupError::Unreadable(pid, error))?;
    let mounts = fs::read_to_string("/proc/self/mountinfo")
        .map_err(|error| GroupError::Unreadable(pid, error))?;
    let mount = mount(&mounts).ok_or(GroupError::NotMounted)?;
    let group = groups.lines().find_map(|line| line.strip_prefix("0::/"));
    let group = group.ok_or(GroupError::NotMounted)?;
    if group.split('/').any(|step| step == "..") {
        return Err(GroupError::NotVisible(pid));
    }
    Ok(Path::new(mount).join(group))
}

/// The mount point of the whole version 2 hierarchy.
fn mount(mounts: &str) -> Option<&str> {
    mounts.lines().find_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        let mut mount = mount.split(' ').skip(3);
        let (root, point) = (mount.next()?, mount.next()?);
        (kind.starts_with("cgroup2 ") && root == "/").then_some(point)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_made_plain() {
        assert_eq!(plain("web/liveness..é1"), "web_liveness___1");
    }

    #[test]
    fn the_mount_of_version_2_is_found() {
        let mounts = "\
40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd
41 31 0:38 /pod /below rw - cgroup2 cgroup2 rw
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:4 - cgroup2 cgroup2 rw
";
        assert_eq!(mount(mounts), Some("/sys/fs/cgroup/unified"));
        assert_eq!(mount("24 1 0:21 / /proc rw - proc proc rw"), None);
    }

    #[test]
    fn a_process_that_is_gone_has_no_group() {
        assert!(matches!(
            Group::new(u32::MAX, "x"),
            Err(GroupError::Unreadable(..))
        ));
    }
}
