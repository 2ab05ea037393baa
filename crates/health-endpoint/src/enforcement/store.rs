//! Keeps policies across restarts in the state directory, in a file for each origin.

use std::path::{Path, PathBuf};
use std::{fs, io};

use health_model::durable;
use health_model::policy::PolicyOrigin;
use health_policy::Repository;

/// Name of the file with the imported policies.
pub const FILE: &str = "policies.json";
/// Name of the file with the policies of the Kubernetes cluster, for restarts while its API server is unavailable.
pub const CLUSTER_FILE: &str = "policies-kubernetes.json";

/// Name that [`CLUSTER_FILE`] gets if it cannot be read.
pub const DAMAGED_CLUSTER_FILE: &str = "policies-kubernetes.json.damaged";

/// The file that holds the policies of one origin.
#[derive(Clone, Debug)]
pub(super) struct Store {
    path: PathBuf,
    origin: PolicyOrigin,
}

impl Store {
    pub(super) fn in_dir(dir: &Path, origin: PolicyOrigin) -> Self {
        let name = match origin {
            PolicyOrigin::Imported => FILE,
            PolicyOrigin::Kubernetes => CLUSTER_FILE,
        };
        Self {
            path: dir.join(name),
            origin,
        }
    }

    /// Adds the saved policies to the repository. Returns whether there is a file.
    pub(super) fn load(&self, repository: &mut Repository) -> io::Result<bool> {
        let bytes = match fs::read(&self.path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(error),
        };
        let saved = serde_json::from_slice(&bytes)?;
        repository
            .restore(&saved, self.origin)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        Ok(true)
    }

    /// Renames the cluster's file, which cannot be read, and logs why.
    pub(super) fn put_aside(&self, error: &io::Error) {
        let aside = self.path.with_file_name(DAMAGED_CLUSTER_FILE);
        tracing::error!(
            path = %self.path.display(),
            aside = %aside.display(),
            %error,
            "cannot read the saved policies of the Kubernetes cluster; new endpoints wait for its API server"
        );
        // The file is only of use for finding out what happened.
        let _ = fs::rename(&self.path, &aside);
    }

    /// Writes the policies atomically: a crash at any moment leaves either the old or the new ones.
    pub(super) fn save(&self, repository: &Repository) -> io::Result<()> {
        durable::write(&self.path, &repository.saved(self.origin))
    }

    /// Removes the file. Succeeds if there is none.
    pub(super) fn remove(&self) -> io::Result<()> {
        durable::remove(&self.path).map(drop)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: &str = r#"[{"labels": ["a"], "endpointSelector": {}, "ingress": [{}]}]"#;

    #[test]
    fn rules_are_kept_and_a_damaged_file_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::in_dir(dir.path(), PolicyOrigin::Imported);
        let load = || {
            let mut repository = Repository::default();
            store
                .load(&mut repository)
                .map(|is_there| (repository, is_there))
        };
        assert_eq!(load().unwrap(), (Repository::default(), false));
        let mut repository = Repository::default();
        repository.import(RULES).unwrap();
        store.save(&repository).unwrap();
        assert_eq!(load().unwrap(), (repository, true));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        fs::write(&store.path, "{\"revision\":1").unwrap();
        load().unwrap_err();
        assert!(store.path.exists(), "what may be mended is not lost");
    }
}
