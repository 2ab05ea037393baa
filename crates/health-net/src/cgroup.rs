//! Version 2 cgroups.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// Inode of the root cgroup's folder (kernfs assigns it to the first folder that it creates). The root of a cgroup
/// namespace has another inode.
const ROOT_INODE: u64 = 1;

/// Returns the mount point of the root cgroup in this process's mount namespace; `None` if it is not mounted.
pub fn root() -> io::Result<Option<PathBuf>> {
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let is_root = |path: &&Path| fs::metadata(path).is_ok_and(|found| found.ino() == ROOT_INODE);
    Ok(mounted(&mounts).find(is_root).map(Path::to_owned))
}

/// The mount points of version 2 cgroups (proc_pid_mountinfo(5)).
fn mounted(mounts: &str) -> impl Iterator<Item = &Path> {
    mounts.lines().filter_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        let point = mount.split(' ').nth(4)?;
        kind.starts_with("cgroup2 ").then_some(Path::new(point))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,xattr,name=systemd
41 31 0:38 /../.. /elsewhere rw - cgroup2 cgroup2 rw
42 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";

    #[test]
    fn the_hierarchy_of_version_2_is_found_among_others() {
        let found: Vec<&Path> = mounted(MOUNTS).collect();
        let points = ["/elsewhere", "/sys/fs/cgroup/unified"];
        assert_eq!(found, points.map(Path::new));
        assert_eq!(mounted("").count(), 0);
    }
}
