//! A process's namespaces, folders and cgroups.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use nix::sched::CloneFlags;

use super::rights::{IdMap, Rights, unreadable};
use super::{Order, variables};
use crate::error::KernelError;

/// The namespaces to enter, except PID and user namespaces. The mount namespace comes last, because `/proc` disappears
/// with it.
const NAMESPACES: [(&str, CloneFlags); 5] = [
    ("net", CloneFlags::CLONE_NEWNET),
    ("ipc", CloneFlags::CLONE_NEWIPC),
    ("uts", CloneFlags::CLONE_NEWUTS),
    ("cgroup", CloneFlags::CLONE_NEWCGROUP),
    ("mnt", CloneFlags::CLONE_NEWNS),
];
/// Index of the start time among the fields after the name in `/proc/PID/stat`.
const STARTED: usize = 19;

/// Everything about a process that must be read or opened before its mount namespace is entered. Only includes
/// namespaces that differ from this process's own.
pub(super) struct Place {
    pub(super) root: File,
    pub(super) folder: File,
    pub(super) pid_namespace: Option<File>,
    pub(super) user_namespace: Option<File>,
    pub(super) namespaces: Vec<(File, CloneFlags)>,
    pub(super) rights: Rights,
    /// The `cgroup.procs` files of the process's cgroups and of the cgroup to join.
    pub(super) groups: Vec<File>,
    environment: Vec<u8>,
    oom_score: Option<String>,
}

impl Place {
    pub(super) fn of(order: &Order) -> Result<Self, KernelError> {
        let path = PathBuf::from(format!("/proc/{}", order.pid));
        let failed = |attempt| {
            move |error: io::Error| {
                KernelError::new(attempt, format!("process {}", order.pid), error)
            }
        };
        // Reads through this folder concern this very process, or fail.
        let process = File::open(&path).map_err(failed("find"))?;
        let process = Process {
            path: PathBuf::from(format!("/proc/self/fd/{}", process.as_raw_fd())),
            _folder: process,
        };
        if let Some(started) = order.started
            && process.started().map_err(failed("inspect"))? != started
        {
            let gone = io::Error::new(io::ErrorKind::NotFound, "another process has its PID now");
            return Err(failed("find")(gone));
        }
        Self::read(&process, &order.group).map_err(failed("inspect"))
    }

    fn read(process: &Process, group: &Path) -> io::Result<Self> {
        let user_namespace = process.namespace("user")?;
        let maps = match &user_namespace {
            None => None,
            Some(_) => {
                let map = |name| IdMap::parse(&process.read(name)?).ok_or_else(unreadable);
                Some((map("uid_map")?, map("gid_map")?))
            }
        };
        let mut namespaces = Vec::new();
        for (name, kind) in NAMESPACES {
            if let Some(namespace) = process.namespace(name)? {
                namespaces.push((namespace, kind));
            }
        }
        let mut groups = process.old_groups()?;
        groups.push(for_writing(group)?);
        let status = process.read("status")?;
        Ok(Self {
            root: process.folder("root")?,
            folder: process.folder("cwd")?,
            pid_namespace: process.namespace("pid")?,
            user_namespace,
            namespaces,
            rights: Rights::parse(&status, maps.as_ref()).ok_or_else(unreadable)?,
            groups,
            environment: fs::read(process.path.join("environ"))?,
            oom_score: process.read("oom_score_adj").ok(),
        })
    }

    /// Returns the environment of the process.
    pub(super) fn environment(&self) -> impl Iterator<Item = (&OsStr, &OsStr)> {
        variables(&self.environment)
    }

    /// Makes the calling process and its children at least as likely to be OOM-killed as that process. If this is not
    /// allowed, the score stays unchanged.
    pub(super) fn take_oom_score(&self) {
        if let Some(score) = &self.oom_score {
            let _ = fs::write("/proc/self/oom_score_adj", score);
        }
    }
}

/// The folder of a process in `/proc`.
struct Process {
    path: PathBuf,
    _folder: File,
}

impl Process {
    fn read(&self, name: &str) -> io::Result<String> {
        fs::read_to_string(self.path.join(name))
    }

    fn folder(&self, name: &str) -> io::Result<File> {
        OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_PATH | libc::O_DIRECTORY)
            .open(self.path.join(name))
    }

    /// Returns the start time in ticks since boot.
    fn started(&self) -> io::Result<u64> {
        let stat = fs::read(self.path.join("stat"))?;
        // The name may contain any character, so the fields are counted from its end.
        let after = stat.iter().rposition(|byte| *byte == b')').unwrap_or(0);
        let fields = String::from_utf8_lossy(&stat[after + 1..]);
        let field = fields.split_whitespace().nth(STARTED);
        field
            .and_then(|ticks| ticks.parse().ok())
            .ok_or_else(unreadable)
    }

    /// Opens a namespace of the process; `None` if it is this process's own.
    fn namespace(&self, name: &str) -> io::Result<Option<File>> {
        let file = File::open(self.path.join("ns").join(name))?;
        let (theirs, own) = (
            file.metadata()?,
            fs::metadata(format!("/proc/self/ns/{name}"))?,
        );
        let is_own = (theirs.dev(), theirs.ino()) == (own.dev(), own.ino());
        Ok((!is_own).then_some(file))
    }

    /// Opens the version 1 cgroups that the process is in and this one is not. Each limits a different resource.
    fn old_groups(&self) -> io::Result<Vec<File>> {
        let theirs = self.read("cgroup")?;
        let own = fs::read_to_string("/proc/self/cgroup")?;
        let mounts = fs::read_to_string("/proc/self/mountinfo")?;
        let differing = theirs
            .lines()
            .filter(|line| !own.lines().any(|other| other == *line));
        let procs = differing.filter_map(|line| {
            let (_, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            let path = path.strip_prefix('/')?;
            let mount = mount_of(&mounts, controllers)?;
            Some(Path::new(mount).join(path).join("cgroup.procs"))
        });
        procs.map(|path| for_writing(&path)).collect()
    }
}

fn for_writing(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).open(path)
}

/// Returns the mount point of the version 1 hierarchy with these controllers; also `None` for the version 2 hierarchy,
/// which lists no controllers.
fn mount_of<'a>(mounts: &'a str, controllers: &str) -> Option<&'a str> {
    mounts.lines().find_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        let (kind, options) = kind.split_once(' ')?;
        let options = options.rsplit(' ').next()?;
        let has_all = !controllers.is_empty()
            && controllers
                .split(',')
                .all(|one| options.split(',').any(|other| other == one));
        let mut mount = mount.split(' ').skip(3);
        let (root, point) = (mount.next()?, mount.next()?);
        (kind == "cgroup" && has_all && root == "/").then_some(point)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
24 1 0:21 / /proc rw,nosuid - proc proc rw
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
33 31 0:30 /below /elsewhere rw - cgroup cgroup rw,memory
34 31 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,xattr,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";

    #[test]
    fn hierarchies_are_found_by_their_controllers() {
        for (controllers, expected) in [
            ("cpu,cpuacct", Some("/sys/fs/cgroup/cpu,cpuacct")),
            ("cpuacct", Some("/sys/fs/cgroup/cpu,cpuacct")),
            ("memory", Some("/sys/fs/cgroup/memory")),
            ("name=systemd", Some("/sys/fs/cgroup/systemd")),
            ("pids", None),
            ("", None),
        ] {
            assert_eq!(mount_of(MOUNTS, controllers), expected, "{controllers}");
        }
    }
}
