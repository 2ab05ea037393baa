//! The folder of an instance's pins, and its lock.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use health_model::settings::Location;

use crate::error::{DatapathError, file_error};
use crate::program::DatapathProgram;

/// Subfolder of an instance's pins for its programs.
pub(crate) const PROGRAM_PINS: &str = "programs";
/// Subfolder of an instance's pins for its links.
pub(crate) const LINK_PINS: &str = "links";
/// Subfolder of an instance's pins with one folder, named by ifindex, for each clsact qdisc that was created for its
/// programs.
pub(crate) const QDISC_NOTES: &str = "qdiscs";

/// The folder of an instance's pins, locked.
#[derive(Debug)]
pub(crate) struct PinFolder {
    path: PathBuf,
    // Holds the lock on the folder; closing it releases the lock.
    lock: File,
}

impl PinFolder {
    /// Locks the folder and creates whatever is missing in it. While an existing folder is locked, `prepare` may set it
    /// aside.
    pub(crate) fn open(
        path: PathBuf,
        prepare: impl FnOnce(&Path) -> Result<(), DatapathError>,
    ) -> Result<Self, DatapathError> {
        // The lock on a folder that was set aside is no longer needed.
        let former = lock(&path)?;
        prepare(&path)?;
        make_folders(&path)?;
        drop(former);
        let lock = locked(&path)?;
        Ok(Self { path, lock })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Creates missing folders.
    pub(crate) fn make_folders(&mut self) -> Result<(), DatapathError> {
        let had_pins = self.path.exists();
        make_folders(&self.path)?;
        if !had_pins {
            self.lock = locked(&self.path)?;
        }
        Ok(())
    }
}

/// The pin of a program.
pub(crate) fn program_pin(pins: &Path, program: DatapathProgram) -> PathBuf {
    pins.join(PROGRAM_PINS).join(program.name())
}

/// Pins an object at `path`, replacing an existing pin. `fresh` is an unused path beside it.
pub(crate) fn replace_pin<T>(
    path: &Path,
    fresh: &Path,
    pin: impl FnOnce(&Path) -> Result<T, DatapathError>,
) -> Result<T, DatapathError> {
    // A killed start may have left a pin here. Its object is open in this process by now, or no longer needed.
    remove_tree(fresh)?;
    let pinned = pin(fresh)?;
    // The pin exists at every moment: a killed start leaves either the former object or the new one there.
    fs::rename(fresh, path).map_err(file_error("rename", fresh))?;
    Ok(pinned)
}

/// The folder beside `pins` for maps of another layout. No instance's name has an underscore.
pub(crate) fn former_layout_pins(pins: &Path) -> PathBuf {
    let mut name = pins.file_name().unwrap_or_default().to_owned();
    name.push("_old");
    pins.with_file_name(name)
}

/// Fails if an agent is using an instance's pins. Pid files cannot show this: agents of one instance with separate
/// runtime folders share only the pins.
pub fn require_unused(location: &Location) -> Result<(), DatapathError> {
    lock(&location.pins()).map(drop)
}

/// Locks the pin folder, which must exist.
fn locked(pins: &Path) -> Result<File, DatapathError> {
    lock(pins)?.ok_or_else(|| file_error("lock", pins)(io::ErrorKind::NotFound.into()))
}

/// Locks the pin folder; `None` if it does not exist.
pub(crate) fn lock(pins: &Path) -> Result<Option<File>, DatapathError> {
    let folder = match File::open(pins) {
        Ok(folder) => folder,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(file_error("open", pins)(error)),
    };
    match folder.try_lock() {
        Ok(()) => Ok(Some(folder)),
        Err(TryLockError::WouldBlock) => Err(DatapathError::InUse(pins.to_owned())),
        Err(TryLockError::Error(error)) => Err(file_error("lock", pins)(error)),
    }
}

fn make_folders(pins: &Path) -> Result<(), DatapathError> {
    [
        pins.to_owned(),
        pins.join(PROGRAM_PINS),
        pins.join(LINK_PINS),
    ]
    .iter()
    .try_for_each(|folder| make_folder(folder))
}

pub(crate) fn make_folder(folder: &Path) -> Result<(), DatapathError> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)
        .map_err(file_error("create", folder))
}

/// Removes a file, or a folder with its contents; `bpffs` has no recursive removal of its own.
pub(crate) fn remove_tree(path: &Path) -> Result<(), DatapathError> {
    let result = if path.is_dir() {
        fs::remove_dir_all(path)
    } else {
        fs::remove_file(path)
    };
    match result {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(file_error("remove", path)(error))
        }
        _ => Ok(()),
    }
}
