//! Files that are read again when they change.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::time::SystemTime;

/// Reads the text of a regular file of at most `longest` bytes. Neither blocks on a named pipe nor reads endlessly from
/// a device.
pub fn read_regular(path: &Path, longest: u64) -> io::Result<String> {
    let file = File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    let mut text = String::new();
    file.take(longest + 1).read_to_string(&mut text)?;
    if text.len() as u64 > longest {
        return Err(io::Error::other(format!("longer than {longest} bytes")));
    }
    Ok(text)
}

/// Distinguishes successive contents of a path, following links. After an edit, a replacement by a rename or a change
/// of the link, at least one field differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileIdentity {
    device: u64,
    inode: u64,
    /// Set if the file system records it: inode numbers are reused.
    created: Option<SystemTime>,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl FileIdentity {
    /// Whether both are the same file, regardless of contents.
    pub(crate) fn is_same_file(&self, other: &Self) -> bool {
        (self.device, self.inode, self.created) == (other.device, other.inode, other.created)
    }

    /// Length in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The file currently at a path. Fails if it cannot be read, as for a dangling link.
    pub fn of(path: &Path) -> io::Result<Self> {
        let metadata = fs::metadata(path)?;
        Ok(Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            created: metadata.created().ok(),
            size: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        })
    }
}
