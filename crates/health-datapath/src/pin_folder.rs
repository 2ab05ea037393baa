//! The folder of an instance's pins: locking and removal.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

use health_model::settings::Location;

use super::DatapathError;
use super::attach::Clsact;
use super::layout::{LINK_PINS, PROGRAM_PINS};
use super::layout_change::set_aside;
use super::loader::file_error;

/// Detaches all programs of an instance and removes all its pins, which frees everything without another user. Returns
/// descriptions of what was removed.
pub fn remove(location: &Location) -> Result<Vec<String>, DatapathError> {
    let pins = location.pins();
    let mut removed = Clsact::of(&pins).remove_others(&[])?;
    for path in [set_aside(&pins), pins.clone()] {
        if path.exists() {
            remove_tree(&path)?;
            removed.push(format!("pins {}", path.display()));
        }
    }
    // The folder of all instances goes with the last one.
    if let Some(parent) = pins.parent() {
        let _ = fs::remove_dir(parent);
    }
    Ok(removed)
}

/// Fails if an agent is using an instance's pins. Pid files cannot show this: agents of one instance with separate runtime
/// folders share nothing else.
pub fn require_unused(location: &Location) -> Result<(), DatapathError> {
    lock(&location.pins()).map(drop)
}

/// Locks the pin folder, which must exist.
pub(super) fn locked(pins: &Path) -> Result<File, DatapathError> {
    lock(pins)?.ok_or_else(|| file_error("lock", pins)(io::ErrorKind::NotFound.into()))
}

/// Locks the pin folder; `None` if it does not exist.
pub(super) fn lock(pins: &Path) -> Result<Option<File>, DatapathError> {
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

pub(super) fn make_folders(pins: &Path) -> Result<(), DatapathError> {
    [
        pins.to_owned(),
        pins.join(PROGRAM_PINS),
        pins.join(LINK_PINS),
    ]
    .iter()
    .try_for_each(|folder| make_folder(folder))
}

pub(super) fn make_folder(folder: &Path) -> Result<(), DatapathError> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)
        .map_err(file_error("create", folder))
}

/// Removes a file, or a folder with its contents; `bpffs` has no recursive removal of its own.
pub(super) fn remove_tree(path: &Path) -> Result<(), DatapathError> {
    let result = if path.is_dir() {
        fs::remove_dir_all(path)
    } else {
        fs::remove_file(path)
    };
    match result {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(file_error("remove", path)(error))
        }
        _ => Ok(()),
    }
}
