//! The running program, for starting another copy.

use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

const OWN: &std::ffi::CStr = c"/proc/self/exe";
/// From linux/mount.h.
const OPEN_TREE_CLONE: libc::c_long = 1;
const MOUNT_ATTR_RDONLY: u64 = 1;

/// `struct mount_attr`.
#[repr(C)]
struct MountAttr {
    set: u64,
    clear: u64,
    propagation: u64,
    user_namespace: u64,
}

/// Returns the path of the running program, through a read-only mount. Otherwise, a process in a container that can
/// inspect the helper there could overwrite the program on the host.
pub fn own_program() -> &'static Path {
    static PROGRAM: LazyLock<(PathBuf, Option<OwnedFd>)> = LazyLock::new(|| match read_only() {
        Ok(mount) => (
            PathBuf::from(format!("/proc/self/fd/{}", mount.as_raw_fd())),
            Some(mount),
        ),
        // Before Linux 5.12, or without the right to mount.
        Err(_) => (PathBuf::from("/proc/self/exe"), None),
    });
    &PROGRAM.0
}

fn read_only() -> io::Result<OwnedFd> {
    let flags = OPEN_TREE_CLONE | libc::c_long::from(libc::O_CLOEXEC);
    // SAFETY: the path is terminated, and nobody else owns the returned descriptor.
    let mount = unsafe {
        let mount = libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, OWN.as_ptr(), flags);
        if mount < 0 {
            return Err(io::Error::last_os_error());
        }
        OwnedFd::from_raw_fd(mount as i32)
    };
    let attr = MountAttr {
        set: MOUNT_ATTR_RDONLY,
        clear: 0,
        propagation: 0,
        user_namespace: 0,
    };
    // SAFETY: the empty path is terminated, and the kernel reads no more of `attr` than the length says.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attr,
            size_of::<MountAttr>(),
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(mount)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use nix::errno::Errno;
    use nix::unistd::{AccessFlags, access};

    use super::*;

    #[test]
    fn the_program_can_be_started_and_not_be_written_to() {
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: needs root");
            return;
        }
        let program = own_program();
        assert!(program.starts_with("/proc/self/fd"), "{program:?}");
        // This program lists its tests.
        let listed = Command::new(program).arg("--list").output().unwrap();
        assert!(listed.status.success() && !listed.stdout.is_empty());
        // Opening the program for writing would fail anyway, because it is running.
        assert_eq!(access(program, AccessFlags::W_OK), Err(Errno::EROFS));
    }
}
