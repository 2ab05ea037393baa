//! Files that are read again when they change.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::SystemTime;

/// Tells one content of a path from the next, links followed: a file that is edited, replaced by a rename, or reached
/// through another link differs in at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileIdentity {
    device: u64,
    inode: u64,
    /// Where the file system knows: the numbers of files that are gone are given to others.
    created: Option<SystemTime>,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl FileIdentity {
    /// Whether this is the same file as another one, whatever is in it.
    pub fn is_same_file(&self, other: &Self) -> bool {
        (self.device, self.inode, self.created) == (other.device, other.inode, other.created)
    }

    /// Length, bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// What stands at a path now. Fails if that cannot be told, as of a link to nothing.
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
