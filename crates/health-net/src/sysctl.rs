//! Settings under `/proc/sys/net`, which belong to the network namespace of the thread that reads or writes them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::KernelError;

/// A wanted value of a setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// The setting, as a path under `/proc/sys/net`: device names may contain dots.
    pub key: String,
    /// The value.
    pub value: String,
}

impl Setting {
    /// Creates a setting: `key` must become `value`.
    pub fn new(key: impl Into<String>, value: impl Into<String>) -> Self {
        Self {
            key: key.into(),
            value: value.into(),
        }
    }

    /// Writes the value to the setting.
    pub fn apply(&self) -> Result<(), KernelError> {
        write(&self.key, &self.value)
    }

    /// Like [`apply`](Self::apply), but does nothing if the kernel or the device has no such setting.
    pub fn apply_where_known(&self) -> Result<(), KernelError> {
        match read(&self.key)? {
            Some(_) => self.apply(),
            None => Ok(()),
        }
    }
}

/// Reads a setting; `None` if the kernel or the device has none with that name.
pub fn read(key: &str) -> Result<Option<String>, KernelError> {
    let path = path_of(key);
    match fs::read_to_string(&path) {
        Ok(text) => Ok(Some(text.trim_end().to_owned())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(KernelError::new("read", path.display(), source)),
    }
}

/// Writes a setting.
pub fn write(key: &str, value: &str) -> Result<(), KernelError> {
    let path = path_of(key);
    fs::write(&path, value).map_err(|source| {
        let what = format!("{value} to {}", path.display());
        KernelError::new("write", what, source)
    })
}

/// The original values of changed settings, in the order of the changes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Originals(Vec<Original>);

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Original {
    key: String,
    before: String,
    set: String,
}

impl Originals {
    /// Remembers a setting's current value, if the value is about to change and no older value is known.
    pub fn remember(&mut self, change: &Setting) -> Result<(), KernelError> {
        if self.0.iter().any(|original| original.key == change.key) {
            return Ok(());
        }
        if let Some(before) = read(&change.key)?.filter(|before| *before != change.value) {
            self.0.push(Original {
                key: change.key.clone(),
                before,
                set: change.value.clone(),
            });
        }
        Ok(())
    }

    /// Returns the settings that are remembered here but not in `older`.
    pub fn since(&self, older: &Self) -> Self {
        let known = |key: &str| older.0.iter().any(|original| original.key == key);
        Self(
            self.0
                .iter()
                .filter(|original| !known(&original.key))
                .cloned()
                .collect(),
        )
    }

    /// Restores the old values, in reverse order. Leaves a setting alone if another process has changed it in the
    /// meantime, or if its device is gone. Returns the restored settings, and the errors for those that could not be
    /// restored.
    pub fn restore(&self) -> (Vec<Setting>, Vec<KernelError>) {
        let (mut restored, mut failed) = (Vec::new(), Vec::new());
        for original in self.0.iter().rev() {
            match original.restore() {
                Ok(true) => restored.push(Setting::new(&original.key, &original.before)),
                Ok(false) => {}
                Err(error) => failed.push(error),
            }
        }
        (restored, failed)
    }
}

impl Original {
    fn restore(&self) -> Result<bool, KernelError> {
        if read(&self.key)?.is_none_or(|now| now != self.set) {
            return Ok(false);
        }
        write(&self.key, &self.before).map(|()| true)
    }
}

fn path_of(key: &str) -> PathBuf {
    Path::new("/proc/sys/net").join(key)
}
