//! Settings under `/proc/sys/net`, which show the network namespace of the thread that reads them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::KernelError;

/// A value that a setting shall have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// The setting, as a path under `/proc/sys/net`: names of devices may contain dots.
    pub key: String,
    /// The value.
    pub value: String,
}

impl Setting {
    /// `key` shall be `value`.
    pub fn new(key: impl Into<String>, value: impl Into<String>) -> Self {
        Self {
            key: key.into(),
            value: value.into(),
        }
    }

    /// Gives the setting its value.
    pub fn apply(&self) -> Result<(), KernelError> {
        write(&self.key, &self.value)
    }

    /// The same, unless the kernel or the device has no such setting.
    pub fn apply_where_known(&self) -> Result<(), KernelError> {
        match read(&self.key)? {
            Some(_) => self.apply(),
            None => Ok(()),
        }
    }
}

/// Reads a setting; `None` where the kernel or the device has none of that name.
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

/// What settings were before they were changed, in the order of the changes.
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
    /// Remembers a setting's present value, if it is about to change and no older one is known.
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

    /// Those remembered here and not in `older`.
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

    /// Gives back the old values, the last change first. A setting that someone else has changed in
    /// the meantime, or whose device is gone, is left alone. Returns what was restored and what
    /// could not be.
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
