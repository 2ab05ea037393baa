//! Files that are read again when they change.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::SystemTime;

/// Distinguishes successive contents of a path, following links. A file that is edited, replaced by a rename, or
/// reached through another link differs in at least one field.
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
    /// Whether this is the same file as another one, regardless of contents.
    pub fn is_same_file(&self, other: &Self) -> bool {
        (self.device, self.inode, self.created) == (other.device, other.inode, other.created)
    }

    /// Length, bytes.
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
