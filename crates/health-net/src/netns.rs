//! Named network namespaces, kept alive by a bind mount under `/run/netns` as by `ip netns`.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::statfs::{NSFS_MAGIC, fstatfs, statfs};
use serde::{Deserialize, Serialize};
use tracing::warn;

use super::netlink;

/// The folder of named network namespaces, shared with `ip netns`.
pub const NETNS_DIR: &str = "/run/netns";

/// `NS_GET_NSTYPE` of linux/nsfs.h, which returns the kind of a namespace file.
const NS_GET_NSTYPE: libc::Ioctl = 0xb703;

/// Maximum wait for another process to release the lock on [`NETNS_DIR`], and the pause between attempts.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);
const LOCK_PAUSE: Duration = Duration::from_millis(5);

/// The calling thread's own namespace. `/proc/self` would refer to the namespace of the process's first thread.
const OWN_NETNS: &str = "/proc/thread-self/ns/net";

/// `SO_NETNS_COOKIE` (asm-generic/socket.h), from Linux 5.14 on.
const SO_NETNS_COOKIE: libc::c_int = 71;

/// Returns the kernel's cookie for the calling thread's network namespace, which is never reused.
pub fn cookie() -> io::Result<u64> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    let mut cookie = 0_u64;
    let mut length = size_of_val(&cookie) as libc::socklen_t;
    // SAFETY: the kernel writes no more than the length says, which is the size of `cookie`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut length,
        )
    };
    Errno::result(result)?;
    Ok(cookie)
}

/// Why a network namespace could not be created, entered or removed.
#[derive(Debug, thiserror::Error)]
pub enum NetNsError {
    /// The file is not a network namespace.
    #[error("{} is not a network namespace; give a file such as /run/netns/NAME or /proc/PID/ns/net", .0.display())]
    NotANamespace(PathBuf),
    /// The name is not a valid file name.
    #[error("{0:?} is not a valid name for a network namespace")]
    BadName(String),
    /// A system call failed.
    #[error("cannot {attempt} {}: {source}", path.display())]
    System {
        /// The attempted operation.
        attempt: &'static str,
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
}

impl NetNsError {
    /// Whether the error means that the namespace does not exist, rather than that it cannot be inspected.
    pub fn is_gone(&self) -> bool {
        match self {
            Self::NotANamespace(_) => true,
            Self::System { source, .. } => matches!(
                source.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
            ),
            Self::BadName(_) => false,
        }
    }

    fn new(attempt: &'static str, path: &Path, source: impl Into<io::Error>) -> Self {
        Self::System {
            attempt,
            path: path.to_owned(),
            source: source.into(),
        }
    }
}

/// Identifies a namespace, whatever its name. An id may be reused after its namespace is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetNsId {
    /// The device of its file.
    pub dev: u64,
    /// The inode of its file.
    pub ino: u64,
}

/// An open network namespace, which exists at least as long as this value.
#[derive(Debug)]
pub struct NetNs {
    path: PathBuf,
    file: File,
}

impl NetNs {
    /// Creates a named namespace. Fails if the name is in use. Any failure leaves nothing behind.
    pub fn create(name: &str) -> Result<Self, NetNsError> {
        let path = path_of(name)?;
        let dir = Path::new(NETNS_DIR);
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(dir)
            .map_err(|e| NetNsError::new("create folder", dir, e))?;
        share_mounts(dir)?;
        OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o444)
            .open(&path)
            .map_err(|e| NetNsError::new("create", &path, e))?;
        let made = on_own_thread(|| {
            unshare(CloneFlags::CLONE_NEWNET)
                .map_err(|e| NetNsError::new("create a network namespace for", &path, e))?;
            mount(
                Some(OWN_NETNS),
                &path,
                None::<&str>,
                MsFlags::MS_BIND,
                None::<&str>,
            )
            .map_err(|e| NetNsError::new("mount a network namespace at", &path, e))
        });
        made.and_then(|()| Self::open(name)).inspect_err(|_| {
            if let Err(error) = remove(name) {
                warn!(%error, "cannot undo the creation of a network namespace");
            }
        })
    }

    /// Opens a namespace by name.
    pub fn open(name: &str) -> Result<Self, NetNsError> {
        let path = path_of(name)?;
        let file =
            File::open(&path).map_err(|e| NetNsError::new("open network namespace", &path, e))?;
        Ok(Self { path, file })
    }

    /// Opens the namespace behind a file, either a named namespace or a process's.
    pub fn at(path: &Path) -> Result<Self, NetNsError> {
        let file = OpenOptions::new()
            .read(true)
            // If the file is a pipe, do not wait for a writer.
            .custom_flags(libc::O_NONBLOCK)
            .open(path)
            .map_err(|e| NetNsError::new("open network namespace", path, e))?;
        let fs = fstatfs(&file).map_err(|e| NetNsError::new("inspect", path, e))?;
        // SAFETY: a request without an argument, on an open file.
        let kind = || unsafe { libc::ioctl(file.as_raw_fd(), NS_GET_NSTYPE) };
        if fs.filesystem_type() != NSFS_MAGIC || kind() != libc::CLONE_NEWNET {
            return Err(NetNsError::NotANamespace(path.to_owned()));
        }
        Ok(Self {
            path: path.to_owned(),
            file,
        })
    }

    /// Identifies the namespace.
    pub fn id(&self) -> Result<NetNsId, NetNsError> {
        id_of(&self.file).map_err(|e| NetNsError::new("inspect", &self.path, e))
    }

    /// Returns the file that names the namespace.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the open namespace, for requests that take a descriptor.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Whether two handles refer to the same namespace.
    pub fn is_same(&self, other: &Self) -> bool {
        let identity = |file: &File| file.metadata().map(|meta| (meta.dev(), meta.ino())).ok();
        identity(&self.file).is_some_and(|own| Some(own) == identity(&other.file))
    }

    /// Whether the name still refers to the same namespace.
    pub fn is_named(&self) -> bool {
        let identity = |meta: fs::Metadata| (meta.dev(), meta.ino());
        match (self.file.metadata(), fs::metadata(&self.path)) {
            (Ok(open), Ok(named)) => identity(open) == identity(named),
            _ => false,
        }
    }

    /// Runs `work` on a separate thread in the namespace. The thread ends with `work`. Sockets opened there stay in the
    /// namespace, wherever they are used later.
    pub fn run_in<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, NetNsError> {
        on_own_thread(|| {
            setns(&self.file, CloneFlags::CLONE_NEWNET)
                .map_err(|e| NetNsError::new("enter network namespace", &self.path, e))?;
            Ok(work())
        })
    }
}

/// Resolves the symbolic links in the path of a namespace's file, as far as possible. Another mount namespace may lack
/// these links, such as the one from `/var/run` to `/run`.
pub fn resolved(path: &Path) -> PathBuf {
    let folder = || Some(path.parent()?.canonicalize().ok()?.join(path.file_name()?));
    // The target of a process's namespace link has no path; the folder of a removed file still exists.
    path.canonicalize()
        .ok()
        .or_else(folder)
        .unwrap_or_else(|| path.to_owned())
}

/// Opens a netlink connection in a namespace. Must be called inside a tokio runtime.
pub fn netlink_in(netns: &NetNs) -> Result<netlink::Handle, NetNsError> {
    let runtime = tokio::runtime::Handle::current();
    netns
        .run_in(|| {
            let _entered = runtime.enter();
            netlink::connect()
        })?
        .map_err(|e| NetNsError::new("open netlink in", netns.path(), e))
}

/// Opens the calling thread's own namespace.
pub fn own() -> Result<File, NetNsError> {
    let path = Path::new(OWN_NETNS);
    File::open(path).map_err(|e| NetNsError::new("open network namespace", path, e))
}

/// Identifies the calling thread's own namespace.
pub fn own_id() -> Result<NetNsId, NetNsError> {
    id_of(&own()?).map_err(|e| NetNsError::new("inspect", Path::new(OWN_NETNS), e))
}

fn id_of(file: &File) -> io::Result<NetNsId> {
    let meta = file.metadata()?;
    Ok(NetNsId {
        dev: meta.dev(),
        ino: meta.ino(),
    })
}

/// The path where a namespace of this name is, or would be, mounted.
pub fn path_of(name: &str) -> Result<PathBuf, NetNsError> {
    if name.is_empty() || name == "." || name == ".." || name.contains(['/', '\0']) {
        return Err(NetNsError::BadName(name.to_owned()));
    }
    Ok(Path::new(NETNS_DIR).join(name))
}

/// Whether a namespace is mounted under this name. A leftover file does not count.
pub fn is_alive(name: &str) -> bool {
    path_of(name).is_ok_and(|path| statfs(&path).is_ok_and(|fs| fs.filesystem_type() == NSFS_MAGIC))
}

/// Removes a namespace's name, and thereby the namespace unless something else holds it. Returns whether the name
/// existed.
pub fn remove(name: &str) -> Result<bool, NetNsError> {
    let path = path_of(name)?;
    match umount2(&path, MntFlags::MNT_DETACH) {
        // Not mounted: a leftover file.
        Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => {}
        Err(e) => return Err(NetNsError::new("unmount", &path, e)),
    }
    match fs::remove_file(&path) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(NetNsError::new("remove", &path, e)),
    }
}

/// Makes the folder a shared mount point, so that names appear and disappear in all mount namespaces.
fn share_mounts(dir: &Path) -> Result<(), NetNsError> {
    let failed = |e: Errno| NetNsError::new("share the mounts of", dir, e);
    let share = || {
        let flags = MsFlags::MS_SHARED | MsFlags::MS_REC;
        mount(None::<&str>, dir, None::<&str>, flags, None::<&str>)
    };
    match share() {
        // Not a mount point yet.
        Err(Errno::EINVAL) => {}
        other => return other.map_err(failed),
    }
    // Two concurrent processes would mount the folder twice; `ip netns` takes the same lock.
    let _lock = lock_folder(dir)?;
    match share() {
        Err(Errno::EINVAL) => {
            let flags = MsFlags::MS_BIND | MsFlags::MS_REC;
            mount(Some(dir), dir, None::<&str>, flags, None::<&str>).map_err(failed)?;
            share().map_err(failed)
        }
        other => other.map_err(failed),
    }
}

/// Locks a folder, but waits at most [`LOCK_PATIENCE`]: any process may open and lock this folder, which must not keep
/// an agent from starting.
fn lock_folder(dir: &Path) -> Result<Option<Flock<File>>, NetNsError> {
    let mut folder = File::open(dir).map_err(|e| NetNsError::new("open folder", dir, e))?;
    let deadline = Instant::now() + LOCK_PATIENCE;
    loop {
        folder = match Flock::lock(folder, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(Some(lock)),
            Err((folder, Errno::EWOULDBLOCK)) if Instant::now() < deadline => folder,
            Err((_, Errno::EWOULDBLOCK)) => {
                warn!(
                    folder = %dir.display(),
                    "another process holds this folder's lock; sharing its mounts without the lock"
                );
                return Ok(None);
            }
            Err((_, e)) => return Err(NetNsError::new("lock folder", dir, e)),
        };
        thread::sleep(LOCK_PAUSE);
    }
}

/// Runs `work` on a separate thread, so that the thread's end leaves any namespaces that `work` enters.
fn on_own_thread<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| scope.spawn(work).join())
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_in_their_folder() {
        for bad in ["", ".", "..", "a/b", "/etc", "a\0b"] {
            assert!(
                matches!(path_of(bad), Err(NetNsError::BadName(_))),
                "{bad:?}"
            );
        }
        assert_eq!(path_of("a.b").unwrap(), Path::new("/run/netns/a.b"));
    }

    #[test]
    fn links_on_the_way_to_a_namespace_are_resolved() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        fs::create_dir(dir.join("run")).unwrap();
        fs::write(dir.join("run/a"), "").unwrap();
        std::os::unix::fs::symlink("run", dir.join("var")).unwrap();
        std::os::unix::fs::symlink("a", dir.join("run/b")).unwrap();
        for (path, expected) in [
            ("var/a", "run/a"),
            ("var/b", "run/a"),
            ("var/gone", "run/gone"),
            ("run/a", "run/a"),
            ("none/a", "none/a"),
        ] {
            assert_eq!(resolved(&dir.join(path)), dir.join(expected), "{path}");
        }
        let of_process = format!("/proc/{}/ns/net", std::process::id());
        assert_eq!(resolved(Path::new(&of_process)), Path::new(&of_process));
    }

    #[test]
    fn only_network_namespaces_are_taken_for_some() {
        let own = NetNs::at(Path::new("/proc/self/ns/net")).unwrap();
        assert_eq!(own.id().unwrap(), own_id().unwrap());
        for other in [
            "/proc/self/ns/mnt",
            "/dev/null",
            "/proc/self/status",
            "/tmp",
        ] {
            let error = NetNs::at(Path::new(other)).unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("{other} is not a network namespace")),
                "{error}"
            );
        }
        let error = NetNs::at(Path::new("/no/such/file"))
            .unwrap_err()
            .to_string();
        assert!(error.contains("/no/such/file: No such file"), "{error}");
    }

    #[test]
    fn a_namespace_lives_from_create_to_remove() {
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: needs root");
            return;
        }
        let inode = |file: &File| file.metadata().unwrap().ino();
        let mounts = || {
            let text = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
            text.lines().count()
        };
        on_own_thread(|| {
            // A separate mount namespace and `/run` protect those of the machine.
            unshare(CloneFlags::CLONE_NEWNS).unwrap();
            let none = None::<&str>;
            let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
            mount(none, "/", none, private, none).unwrap();
            mount(Some("none"), "/run", Some("tmpfs"), MsFlags::empty(), none).unwrap();

            let before = mounts();
            let first = NetNs::create("first").unwrap();
            let second = NetNs::create("second").unwrap();
            assert!(is_alive("first") && is_alive("second"));
            assert!(first.is_named() && second.is_named());
            assert_ne!(inode(first.file()), inode(second.file()));
            assert_ne!(inode(first.file()), inode(&own().unwrap()));
            let inside = first.run_in(|| own().unwrap()).unwrap();
            assert_eq!(inode(&inside), inode(first.file()));

            let error = NetNs::create("first").unwrap_err().to_string();
            assert_eq!(
                error,
                "cannot create /run/netns/first: File exists (os error 17)"
            );
            assert!(first.is_named());

            assert!(remove("first").unwrap());
            assert!(!first.is_named() && !is_alive("first") && second.is_named());
            assert!(!remove("first").unwrap());
            assert!(NetNs::open("first").is_err());
            let again = NetNs::create("first").unwrap();
            assert!(again.is_named() && !first.is_named());

            fs::write("/run/netns/leftover", "").unwrap();
            assert!(!is_alive("leftover"));
            assert!(remove("leftover").unwrap());

            // One mount for the folder, whichever call came first, and one for each name.
            assert_eq!(mounts(), before + 3);
            assert!(remove("first").unwrap() && remove("second").unwrap());
            assert_eq!(mounts(), before + 1);
        });
    }
}
