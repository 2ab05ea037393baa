//! Keeps the rules across restarts in a file in the state directory.

use std::path::{Path, PathBuf};
use std::{fs, io};

use health_model::durable;
use health_policy::Repository;

use super::EnforceError;

/// Name of the file.
pub const FILE: &str = "policies.json";

/// The file that holds a [`Repository`].
#[derive(Clone, Debug)]
pub(super) struct Store {
    path: PathBuf,
}

impl Store {
    pub(super) fn in_dir(dir: &Path) -> Self {
        Self {
            path: dir.join(FILE),
        }
    }

    /// Reads the saved rules. If there is no file, there are no rules.
    pub(super) fn load(&self) -> Result<Repository, EnforceError> {
        let read = match fs::read(&self.path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(io::Error::from),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Repository::default()),
            Err(error) => Err(error),
        };
        read.map_err(|source| EnforceError::Damaged {
            path: self.path.clone(),
            source,
        })
    }

    /// Writes the rules atomically: a crash at any moment leaves either the old or the new rules.
    pub(super) fn save(&self, repository: &Repository) -> Result<(), EnforceError> {
        durable::write(&self.path, repository).map_err(|source| EnforceError::Save {
            path: self.path.clone(),
            source,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: &str = r#"[{"labels": ["a"], "endpointSelector": {}, "ingress": [{}]}]"#;

    #[test]
    fn rules_are_kept_and_a_damaged_file_is_an_error_that_names_it() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::in_dir(dir.path());
        assert_eq!(store.load().unwrap(), Repository::default());
        let mut repository = Repository::default();
        repository.import(RULES).unwrap();
        store.save(&repository).unwrap();
        assert_eq!(store.load().unwrap(), repository);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        fs::write(&store.path, "{\"revision\":1").unwrap();
        let error = store.load().unwrap_err().to_string();
        assert!(error.contains(FILE), "{error}");
        assert!(store.path.exists(), "what may be mended is not lost");
    }
}
