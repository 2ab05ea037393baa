//! The agent's files, folders and locks, which no other user may open, lock or replace.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions, TryLockError};
use std::io;
use std::os::unix::fs::{
    DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _,
};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// Mode of files: read and write for the owner.
pub(crate) const FILE_MODE: u32 = 0o600;
/// Mode of folders: owner only.
pub const FOLDER_MODE: u32 = 0o700;
/// Permission bits of group and others.
const OTHERS: u32 = 0o077;

/// Pause between two attempts to lock a file.
const LOCK_PAUSE: Duration = Duration::from_millis(5);

/// Why a lock could not be acquired.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process held the lock all the time.
    #[error("cannot lock {} within {patience:?}: it is held by {holder}", path.display())]
    Held {
        /// The locked file.
        path: PathBuf,
        /// How long this process tried to lock it.
        patience: Duration,
        /// The holder, in words.
        holder: String,
    },
    /// The file cannot be used.
    #[error("cannot lock {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// Creates a folder and its missing parents. Existing folders stay unchanged.
pub fn make_folder(folder: &Path) -> io::Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(FOLDER_MODE)
        .create(folder)
}

/// Creates a file, which must not exist.
pub fn create(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(FILE_MODE)
        .open(path)
}

/// Opens a file for reading and writing. Creates it if it is missing, and removes the permissions of group and others.
/// Fails on a symbolic link.
pub fn open(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(FILE_MODE)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path)?;
    let metadata = file.metadata()?;
    let (mode, owner) = (metadata.mode(), metadata.uid());
    if !is_own(owner) {
        let problem = format!("it belongs to user {owner}; remove it");
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, problem));
    }
    if mode & OTHERS != 0 {
        file.set_permissions(Permissions::from_mode(mode & 0o7777 & !OTHERS))?;
    }
    Ok(file)
}

/// Locks a file until the returned handle is dropped. Blocks the calling thread for at most `patience`.
pub fn lock(path: &Path, patience: Duration) -> Result<File, LockError> {
    let failed = |source| LockError::Io {
        path: path.to_owned(),
        source,
    };
    let file = open(path).map_err(failed)?;
    let deadline = Instant::now() + patience;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::Error(error)) => return Err(failed(error)),
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => thread::sleep(LOCK_PAUSE),
            Err(TryLockError::WouldBlock) => {
                return Err(LockError::Held {
                    path: path.to_owned(),
                    patience,
                    holder: holder_in_words(&file),
                });
            }
        }
    }
}

/// The process that opened the file through which this lock is held (proc_locks(5)); `None` if unknown, for example
/// from another pid namespace.
pub fn lock_holder(file: &File) -> Option<u32> {
    let metadata = file.metadata().ok()?;
    let (major, minor) = (libc::major(metadata.dev()), libc::minor(metadata.dev()));
    let place = format!("{major:02x}:{minor:02x}:{}", metadata.ino());
    let locks = fs::read_to_string("/proc/locks").ok()?;
    locks.lines().find_map(|line| {
        // 1: FLOCK  ADVISORY  WRITE 4711 00:1a:4321 0 EOF
        let mut words = line.split_ascii_whitespace().skip(1);
        let is_held = words.next()? == "FLOCK";
        let pid = words.nth(2)?.parse().ok()?;
        (is_held && words.next()? == place).then_some(pid)
    })
}

/// The holder of a file's lock, in words.
pub fn holder_in_words(file: &File) -> String {
    let Some(pid) = lock_holder(file) else {
        return "another process".to_owned();
    };
    let folder = PathBuf::from(format!("/proc/{pid}"));
    let command = fs::read_to_string(folder.join("comm"));
    let user = fs::metadata(&folder).map(|metadata| metadata.uid());
    match (command, user) {
        (Ok(command), Ok(user)) => {
            format!("pid {pid} ({}, user {user})", command.trim().escape_debug())
        }
        _ => format!("pid {pid}"),
    }
}

/// Whether this user ID is root's or this process's.
fn is_own(user: u32) -> bool {
    let own = fs::metadata("/proc/self").map(|metadata| metadata.uid());
    user == 0 || own.is_ok_and(|own| own == user)
}

/// Removes the permissions of group and others from a file or folder that belongs to root or to this process's user.
/// Does nothing if the path does not exist or is a symbolic link. Returns whether anything changed.
pub fn tighten(path: &Path) -> io::Result<bool> {
    let metadata = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        metadata => metadata?,
    };
    let is_meant = (metadata.is_file() || metadata.is_dir()) && is_own(metadata.uid());
    let mode = metadata.mode() & 0o7777;
    if !is_meant || mode & OTHERS == 0 {
        return Ok(false);
    }
    fs::set_permissions(path, Permissions::from_mode(mode & !OTHERS))?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().mode() & 0o7777
    }

    #[test]
    fn what_is_made_is_for_its_owner_alone() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("a/b");
        make_folder(&folder).unwrap();
        assert_eq!([mode(&folder), mode(folder.parent().unwrap())], [0o700; 2]);
        drop(create(&folder.join("new")).unwrap());
        drop(open(&folder.join("opened")).unwrap());
        assert_eq!(mode(&folder.join("new")), 0o600);
        assert_eq!(mode(&folder.join("opened")), 0o600);
    }

    #[test]
    fn what_an_earlier_version_made_is_tightened() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        for mend in [
            (|path| open(path).map(drop)) as fn(&Path) -> io::Result<()>,
            |path| tighten(path).map(drop),
        ] {
            fs::write(&path, "kept").unwrap();
            fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
            mend(&path).unwrap();
            assert_eq!(mode(&path), 0o600);
            assert_eq!(fs::read_to_string(&path).unwrap(), "kept");
        }
        let folder = dir.path().join("folder");
        fs::create_dir(&folder).unwrap();
        fs::set_permissions(&folder, Permissions::from_mode(0o755)).unwrap();
        assert!(tighten(&folder).unwrap());
        assert!(!tighten(&folder).unwrap());
        assert_eq!(mode(&folder), 0o700);
        assert!(!tighten(&dir.path().join("gone")).unwrap());
    }

    #[test]
    fn a_link_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (target, link) = (dir.path().join("target"), dir.path().join("link"));
        fs::write(&target, "precious").unwrap();
        fs::set_permissions(&target, Permissions::from_mode(0o644)).unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        open(&link).unwrap_err();
        assert!(!tighten(&link).unwrap());
        assert_eq!(mode(&target), 0o644);
    }

    #[test]
    fn a_lock_that_cannot_be_had_names_who_holds_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let held = lock(&path, Duration::ZERO).unwrap();
        let error = lock(&path, Duration::from_millis(20))
            .unwrap_err()
            .to_string();
        let words = [
            path.display().to_string(),
            "20ms".to_owned(),
            format!("pid {}", std::process::id()),
        ];
        for word in words {
            assert!(error.contains(&word), "{word}: {error}");
        }
        drop(held);
        lock(&path, Duration::ZERO).unwrap();
    }
}
