//! The pid file: one agent at a time per runtime folder.

use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use health_model::private;

/// Why the pid file could not be taken.
#[derive(Debug, thiserror::Error)]
pub enum PidFileError {
    /// A live agent holds it.
    #[error(
        "another agent is running as pid {pid} and holds {path}; stop it, or give this one its own --instance and --runtime-dir"
    )]
    Held {
        /// The holder's pid, as written in the file.
        pid: String,
        /// The pid file.
        path: PathBuf,
    },
    /// A process that is not an agent holds it.
    #[error(
        "the pid file {path} is locked by {holder}, which did not write it; stop that process (earlier versions of the agent let any user open this file)"
    )]
    Locked {
        /// The holder, in words.
        holder: String,
        /// The pid file.
        path: PathBuf,
    },
    /// The file is unusable.
    #[error("cannot {what} the pid file {path}: {source}")]
    Io {
        /// The attempted operation.
        what: &'static str,
        /// The pid file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// A locked file with this process's id in it. Dropping it removes the file.
///
/// The lock, not the file, shows that an agent runs: the next agent takes over a file that a killed agent left.
#[derive(Debug)]
pub struct PidFile {
    path: PathBuf,
    // Held for its lock, which is released on close.
    _file: File,
}

impl PidFile {
    /// Takes the pid file at `path`, whose folder must exist.
    pub fn acquire(path: &Path) -> Result<Self, PidFileError> {
        let failed = |what| {
            move |source| PidFileError::Io {
                what,
                path: path.to_owned(),
                source,
            }
        };
        loop {
            let mut file = private::open(path).map_err(failed("open"))?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    let mut text = String::new();
                    file.read_to_string(&mut text).map_err(failed("read"))?;
                    let is_its_own = |holder: u32| text.trim() == holder.to_string();
                    if !text.trim().is_empty()
                        && private::lock_holder(&file).is_some_and(|holder| !is_its_own(holder))
                    {
                        return Err(PidFileError::Locked {
                            holder: private::holder_in_words(&file),
                            path: path.to_owned(),
                        });
                    }
                    let pid = match text.trim() {
                        "" => "unknown (it has just started)".to_owned(),
                        pid => pid.to_owned(),
                    };
                    return Err(PidFileError::Held {
                        pid,
                        path: path.to_owned(),
                    });
                }
                Err(TryLockError::Error(e)) => return Err(failed("lock")(e)),
            }
            // The last holder may have removed the file between open and lock. Then the lock is on a file that no other
            // process can find.
            if !is_at(&file, path).map_err(failed("inspect"))? {
                continue;
            }
            file.set_len(0).map_err(failed("empty"))?;
            writeln!(file, "{}", std::process::id()).map_err(failed("write"))?;
            return Ok(Self {
                path: path.to_owned(),
                _file: file,
            });
        }
    }
}

impl Drop for PidFile {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove the pid file");
        }
    }
}

fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let open = file.metadata()?;
    match fs::metadata(path) {
        Ok(there) => Ok((open.dev(), open.ino()) == (there.dev(), there.ino())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_held_file_names_its_holder_and_goes_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("health-agent.pid");
        let held = PidFile::acquire(&path).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(text, format!("{}\n", std::process::id()));
        let error = PidFile::acquire(&path).expect_err("it is held").to_string();
        let pid = format!("is running as pid {} ", std::process::id());
        assert!(error.contains(&pid), "{error}");
        drop(held);
        assert!(!path.exists());
        PidFile::acquire(&path).unwrap();
    }

    #[test]
    fn a_file_left_behind_is_taken_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("health-agent.pid");
        fs::write(&path, "4194304000\nmore than a pid\n").unwrap();
        let _held = PidFile::acquire(&path).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(text, format!("{}\n", std::process::id()));
    }

    #[test]
    fn a_missing_folder_is_named() {
        let error = PidFile::acquire(Path::new("/nonexistent/x.pid")).expect_err("no folder");
        assert!(error.to_string().contains("/nonexistent/x.pid"), "{error}");
    }
}
