//! JSON files that are written completely or not at all, even if the machine stops. Only their owner can access them.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::private;

/// Extension of incomplete files.
pub const UNFINISHED: &str = "new";

/// Replaces the file's contents by a value; it is on disk when this returns. Creates the folder if necessary.
pub fn write(path: &Path, value: &impl Serialize) -> io::Result<()> {
    put(path, value, File::sync_all)
}

/// Like [`write`], for data that is useless after a reboot. If the agent is killed, the file has either its old or its
/// new contents, but the call does not wait for the disk.
pub fn replace(path: &Path, value: &impl Serialize) -> io::Result<()> {
    put(path, value, |_| Ok(()))
}

fn put(path: &Path, value: &impl Serialize, sync: fn(&File) -> io::Result<()>) -> io::Result<()> {
    let mut text = serde_json::to_vec(value)?;
    text.push(b'\n');
    let folder = path.parent().unwrap_or(Path::new("/"));
    private::make_folder(folder)?;
    let temporary = temporary(path);
    let written = || {
        // Left over from a killed agent.
        remove(&temporary)?;
        let mut file = private::create(&temporary)?;
        file.write_all(&text)?;
        sync(&file)?;
        fs::rename(&temporary, path)?;
        sync(&File::open(folder)?)
    };
    written().inspect_err(|_| {
        // The temporary file may not exist at all: the first error is the one to report.
        let _ = fs::remove_file(&temporary);
    })
}

/// Removes the file. Returns whether it existed.
pub fn remove(path: &Path) -> io::Result<bool> {
    match fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Name of a file until it is complete.
fn temporary(path: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".");
    name.push(UNFINISHED);
    path.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_as_a_whole_and_nothing_is_left_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("made/on/demand.json");
        for (put, value) in [(write as fn(&Path, &u32) -> _, 100), (replace, 2)] {
            put(&path, &value).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), format!("{value}\n"));
        }
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        assert!(remove(&path).unwrap());
        assert!(!remove(&path).unwrap());
    }
}
