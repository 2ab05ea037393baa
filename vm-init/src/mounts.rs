//! The filesystems of a guest.

use std::fs;
use std::path::Path;

use anyhow::Context as _;
use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::unistd::{chdir, chroot};

/// Filesystem type, mount point, and whether every kernel has it. No mount may cover files of the initramfs, which
/// holds the workspace at the same path as on the host, possibly below `/tmp`.
const FILESYSTEMS: &[(&str, &str, bool)] = &[
    ("proc", "/proc", true),
    ("sysfs", "/sys", true),
    ("devtmpfs", "/dev", true),
    ("devpts", "/dev/pts", true),
    ("tmpfs", "/dev/shm", true),
    ("tmpfs", "/run", true),
    ("tracefs", "/sys/kernel/tracing", false),
    ("debugfs", "/sys/kernel/debug", false),
    ("cgroup2", "/sys/fs/cgroup", false),
    ("bpf", "/sys/fs/bpf", false),
];

/// Makes the root a separate mount. Container runtimes call `pivot_root`, which fails on the initial rootfs
/// (`pivot_root(2)`, EINVAL).
pub(crate) fn leave_rootfs() -> anyhow::Result<()> {
    const ROOT: &str = "/root-mount";
    fs::create_dir_all(ROOT).with_context(|| format!("cannot create {ROOT}"))?;
    move_root(ROOT).context("cannot make the root a separate mount")?;
    fs::remove_dir(ROOT).with_context(|| format!("cannot remove {ROOT}"))
}

fn move_root(place: &str) -> nix::Result<()> {
    let nothing = None::<&str>;
    mount(Some("/"), place, nothing, MsFlags::MS_BIND, nothing)?;
    chdir(place)?;
    mount(Some("."), "/", nothing, MsFlags::MS_MOVE, nothing)?;
    chroot(".")?;
    chdir("/")
}

/// Mounts all filesystems that the kernel supports.
pub(crate) fn mount_all() -> anyhow::Result<()> {
    for &(kind, place, required) in FILESYSTEMS {
        let made = fs::create_dir_all(Path::new(place));
        let mounted = mount(
            Some(kind),
            place,
            Some(kind),
            MsFlags::empty(),
            None::<&str>,
        );
        match mounted {
            // If a filesystem is missing, so is its folder below /sys.
            Err(Errno::ENODEV | Errno::ENOENT) if !required => {}
            mounted => {
                made.with_context(|| format!("cannot create {place}"))?;
                mounted.with_context(|| format!("cannot mount {kind} at {place}"))?;
            }
        }
    }
    Ok(())
}
