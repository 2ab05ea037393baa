//! The agent's folders, made as needed and given back when the start fails.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

use crate::config::Location;

/// The folders that were not there before, outermost first.
#[derive(Debug, Default)]
pub(super) struct NewFolders(Vec<PathBuf>);

impl NewFolders {
    /// Makes the runtime and the state folder.
    pub(super) fn make(location: &Location) -> anyhow::Result<Self> {
        let mut new = Self::default();
        for folder in [&location.runtime_dir, &location.state_dir] {
            if let Err(error) = new.make_one(folder) {
                new.remove();
                return Err(error);
            }
        }
        Ok(new)
    }

    fn make_one(&mut self, folder: &Path) -> anyhow::Result<()> {
        let mut missing: Vec<_> = folder
            .ancestors()
            .take_while(|path| !path.exists())
            .collect();
        missing.reverse();
        for path in missing {
            fs::create_dir(path)
                .with_context(|| format!("cannot create folder {}", path.display()))?;
            self.0.push(path.to_owned());
        }
        Ok(())
    }

    /// Removes those that are empty.
    pub(super) fn remove(self) {
        for folder in self.0.iter().rev() {
            // One that others use by now stays.
            let _ = fs::remove_dir(folder);
        }
    }
}
