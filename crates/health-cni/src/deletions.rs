//! Deletions that wait for an agent. The CNI plugin queues them while no agent runs, so that deleting a container never
//! has to wait; the agent carries them out.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use health_model::durable;
use health_model::private::{self, LockError};
use health_model::settings::Location;
use serde::{Deserialize, Serialize};

const EXTENSION: &str = "json";
/// Name of the lock file; every reader and writer of the folder locks it.
const LOCK: &str = "deletions.lock";
/// How long to wait for the lock.
const LOCK_PATIENCE: Duration = Duration::from_secs(5);
/// Maximum number of queued deletions: more than a node can have endpoints.
const MOST: usize = 4096;
/// Maximum size of a file in bytes. A file holds a container id and the name of a device.
const MAX_LEN: u64 = 64 * 1024;

/// An endpoint to delete, identified by its attachment.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Deletion {
    /// The container.
    pub container_id: String,
    /// Name of the device in the container's namespace.
    pub ifname: String,
}

/// Why deletions cannot be queued or read.
#[derive(Debug, thiserror::Error)]
pub enum DeletionsError {
    /// Another process held the folder's lock for too long, or locking failed.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// A file or the folder is unusable.
    #[error("cannot {attempt} {}: {source}", path.display())]
    Io {
        /// The attempted operation.
        attempt: &'static str,
        /// The file concerned.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The queue is full.
    #[error("{MOST} deletions are already queued in {}; start the agent to carry them out", .0.display())]
    Full(PathBuf),
}

/// The folder of deletions, locked.
#[derive(Debug)]
pub struct Deletions {
    folder: PathBuf,
    // Held for its lock, which is released on close.
    _lock: File,
}

impl Deletions {
    /// Locks the deletions folder of the agent at this location, and creates it if it is missing. Blocks for at most
    /// 5 s.
    pub fn lock(location: &Location) -> Result<Self, DeletionsError> {
        let folder = location.deletions();
        private::make_folder(&folder).map_err(|source| error("make", &folder, source))?;
        let lock = private::lock(&folder.join(LOCK), LOCK_PATIENCE)?;
        Ok(Self {
            folder,
            _lock: lock,
        })
    }

    /// Whether this deletion seems to be queued. Without the lock, the answer may be outdated a moment later.
    pub(crate) fn seems_to_wait(location: &Location, deletion: &Deletion) -> bool {
        file(&location.deletions(), deletion).exists()
    }

    /// Whether any deletion seems to be queued.
    pub fn is_anything_waiting(location: &Location) -> bool {
        let entries = fs::read_dir(location.deletions());
        entries.is_ok_and(|mut entries| {
            entries.any(|entry| entry.is_ok_and(|entry| is_deletion(&entry.path())))
        })
    }

    /// Whether this deletion is queued.
    pub fn waits(&self, deletion: &Deletion) -> bool {
        file(&self.folder, deletion).exists()
    }

    /// Queues a deletion. Does nothing if it is queued already.
    pub fn add(&self, deletion: &Deletion) -> Result<(), DeletionsError> {
        let path = file(&self.folder, deletion);
        if !path.exists() && self.files()?.len() >= MOST {
            return Err(DeletionsError::Full(self.folder.clone()));
        }
        durable::write(&path, deletion).map_err(|source| error("write", &path, source))
    }

    /// Removes a deletion from the queue. Returns whether it was queued.
    pub fn remove(&self, deletion: &Deletion) -> Result<bool, DeletionsError> {
        let path = file(&self.folder, deletion);
        durable::remove(&path).map_err(|source| error("remove", &path, source))
    }

    /// Returns the queued deletions and the problems with other files. Removes files with invalid content; keeps
    /// unreadable files for a later read.
    pub fn read(&self) -> Result<(Vec<Deletion>, Vec<String>), DeletionsError> {
        let (mut deletions, mut problems) = (Vec::new(), Vec::new());
        for path in self.files()? {
            match read(&path) {
                Ok(deletion) => {
                    // Another version of this program may have named the file differently.
                    let name = file(&self.folder, &deletion);
                    if name != path {
                        fs::rename(&path, &name)
                            .map_err(|source| error("rename", &path, source))?;
                    }
                    deletions.push(deletion);
                }
                Err(problem) if problem.kind() != io::ErrorKind::InvalidData => {
                    problems.push(format!("{}: {problem}", path.display()));
                }
                Err(problem) => {
                    durable::remove(&path).map_err(|source| error("remove", &path, source))?;
                    problems.push(format!("{}: {problem}", path.display()));
                }
            }
        }
        Ok((deletions, problems))
    }

    fn files(&self) -> Result<Vec<PathBuf>, DeletionsError> {
        let entries = fs::read_dir(&self.folder).and_then(Iterator::collect);
        let entries: Vec<fs::DirEntry> =
            entries.map_err(|source| error("list", &self.folder, source))?;
        let paths = entries.into_iter().map(|entry| entry.path());
        Ok(paths.filter(|path| is_deletion(path)).collect())
    }
}

fn is_deletion(path: &Path) -> bool {
    path.extension().is_some_and(|found| found == EXTENSION)
}

fn file(folder: &Path, deletion: &Deletion) -> PathBuf {
    // Bounds the length of the name. Only a container id crafted for that purpose could collide.
    let mut hasher = DefaultHasher::new();
    deletion.hash(&mut hasher);
    folder.join(format!("{:016x}.{EXTENSION}", hasher.finish()))
}

fn read(path: &Path) -> io::Result<Deletion> {
    let mut text = Vec::new();
    File::open(path)?.take(MAX_LEN).read_to_end(&mut text)?;
    serde_json::from_slice(&text).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

fn error(attempt: &'static str, path: &Path, source: io::Error) -> DeletionsError {
    DeletionsError::Io {
        attempt,
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn location(dir: &Path) -> Location {
        Location {
            instance: "default".to_owned(),
            runtime_dir: dir.to_owned(),
            state_dir: dir.join("state"),
            bpf_root: "/sys/fs/bpf".into(),
        }
    }

    fn deletion(n: usize) -> Deletion {
        Deletion {
            container_id: format!("c{n}"),
            ifname: "eth0".to_owned(),
        }
    }

    #[test]
    fn a_file_of_another_name_is_removed_too_and_one_that_cannot_be_read_holds_up_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let location = location(dir.path());
        let deletions = Deletions::lock(&location).unwrap();
        let folder = location.deletions();
        let text = serde_json::to_vec(&deletion(1)).unwrap();
        fs::write(folder.join("other.json"), text).unwrap();
        fs::create_dir(folder.join("a.json")).unwrap();
        let (waiting, problems) = deletions.read().unwrap();
        assert_eq!(waiting, [deletion(1)]);
        assert!(problems[0].contains("a.json"), "{problems:?}");
        assert!(deletions.remove(&deletion(1)).unwrap());
        assert_eq!(deletions.read().unwrap().0, []);
    }

    #[test]
    fn what_waits_is_read_once_until_it_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let location = location(dir.path());
        assert!(!Deletions::is_anything_waiting(&location));
        let deletions = Deletions::lock(&location).unwrap();
        for n in [1, 2, 1] {
            deletions.add(&deletion(n)).unwrap();
        }
        let other = Deletion {
            ifname: "net1".to_owned(),
            ..deletion(1)
        };
        assert!(!Deletions::seems_to_wait(&location, &other));
        assert!(Deletions::seems_to_wait(&location, &deletion(1)));
        let (mut waiting, problems) = deletions.read().unwrap();
        waiting.sort_by(|a, b| a.container_id.cmp(&b.container_id));
        assert_eq!(
            (waiting, problems),
            (vec![deletion(1), deletion(2)], vec![])
        );
        assert!(deletions.remove(&deletion(1)).unwrap());
        assert!(!deletions.remove(&deletion(1)).unwrap());
        assert_eq!(deletions.read().unwrap().0, [deletion(2)]);
    }

    #[test]
    fn files_that_cannot_be_read_are_named_and_go() {
        let dir = tempfile::tempdir().unwrap();
        let location = location(dir.path());
        let deletions = Deletions::lock(&location).unwrap();
        fs::write(location.deletions().join("half.json"), "{\"contai").unwrap();
        deletions.add(&deletion(1)).unwrap();
        let (waiting, problems) = deletions.read().unwrap();
        assert_eq!(waiting, [deletion(1)]);
        assert!(problems[0].contains("half.json"), "{problems:?}");
        assert_eq!(deletions.read().unwrap().1, [""; 0]);
    }

    #[test]
    fn there_is_a_bound_which_names_the_folder() {
        let dir = tempfile::tempdir().unwrap();
        let location = location(dir.path());
        let deletions = Deletions::lock(&location).unwrap();
        for n in 0..MOST {
            fs::write(location.deletions().join(format!("{n}.json")), "{}").unwrap();
        }
        let error = deletions.add(&deletion(1)).unwrap_err().to_string();
        assert!(
            error.contains(&location.deletions().display().to_string()),
            "{error}"
        );
    }

    #[test]
    fn only_one_at_a_time_is_at_the_folder() {
        let dir = tempfile::tempdir().unwrap();
        let location = location(dir.path());
        let held = Deletions::lock(&location).unwrap();
        let path = location.deletions().join(LOCK);
        private::lock(&path, Duration::ZERO).unwrap_err();
        drop(held);
        private::lock(&path, Duration::ZERO).unwrap();
    }
}
