//! The folder of an instance's pins: its lock, its removal, and maps of another layout, which are set aside.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use aya::maps::{Array, MapData, MapInfo};
use health_common::config::DatapathConfig;
use health_model::settings::Location;
use tracing::warn;

use super::DatapathError;
use super::attach::Clsact;
use super::layout::{self, LINK_PINS, MAPS, PROGRAM_PINS};
use super::loader::{file_error, typed};

/// Sees to it that there are no maps of another layout in the folder of pins, and that all links that
/// serve stay pinned: there, or in the folder set aside.
pub(super) fn make_room(pins: &Path) -> Result<(), DatapathError> {
    let aside = set_aside(pins);
    if has_other_layout(pins) {
        warn!(
            pins = %pins.display(),
            "pinned maps are of another layout: conntrack, translations, round-trip times and counters begin anew, \
             endpoints keep the former programs and policy until theirs are complete"
        );
        if !aside.exists() {
            return fs::rename(pins, &aside).map_err(file_error("rename", pins));
        }
        // A change of layout did not come to its end. The links of the programs before it are aside;
        // here are those that it has taken over by then, which are the same, and those it made.
        move_links(pins, &aside)?;
        remove_tree(pins)?;
    }
    if !pins.exists() && aside.exists() && !has_other_layout(&aside) {
        fs::rename(&aside, pins).map_err(file_error("rename", &aside))?;
    }
    Ok(())
}

/// Moves all pinned links from one instance's folder to another, in place of those of the same name.
fn move_links(from: &Path, to: &Path) -> Result<(), DatapathError> {
    let (from, to) = (from.join(LINK_PINS), to.join(LINK_PINS));
    let entries = match fs::read_dir(&from) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(file_error("read", &from))?,
    };
    make_folder(&to)?;
    for entry in entries {
        let entry = entry.map_err(file_error("read", &from))?;
        let path = entry.path();
        fs::rename(&path, to.join(entry.file_name())).map_err(file_error("rename", &path))?;
    }
    Ok(())
}

/// Removes all programs of an instance from their devices and all its pins, which frees everything that has
/// no other user. Returns what was removed, in words.
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

/// The folder beside `pins` for maps of another layout. No instance's name has an underscore.
pub(super) fn set_aside(pins: &Path) -> PathBuf {
    let mut name = pins.file_name().unwrap_or_default().to_owned();
    name.push("_old");
    pins.with_file_name(name)
}

/// Fails when an agent works with an instance's pins. Pid files do not tell: agents of one instance with
/// runtime folders of their own share nothing else.
pub fn require_unused(location: &Location) -> Result<(), DatapathError> {
    lock(&location.pins()).map(drop)
}

/// Locks the folder of pins, which must be there.
pub(super) fn locked(pins: &Path) -> Result<File, DatapathError> {
    lock(pins)?.ok_or_else(|| file_error("lock", pins)(io::ErrorKind::NotFound.into()))
}

/// Locks the folder of pins; `None` when there is none.
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

/// Whether there are pinned maps that these programs would misread.
fn has_other_layout(pins: &Path) -> bool {
    let other_sizes = MAPS.iter().any(|map| {
        MapInfo::from_pin(pins.join(map.name)).is_ok_and(|info| {
            info.key_size() != map.key_size || info.value_size() != map.value_size
        })
    });
    let version = typed(
        pins,
        &layout::CONFIG,
        Array::<MapData, DatapathConfig>::try_from,
    )
    .ok()
    .and_then(|config| config.get(&0, 0).ok())
    .map_or(0, |config| config.layout_version);
    // Zero: made, and its agent gone before it wrote the settings.
    other_sizes || (version != 0 && version != health_common::LAYOUT_VERSION)
}

/// Removes a file or a folder with all in it; `bpffs` knows no recursive removal of its own.
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
