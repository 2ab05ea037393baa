//! When policy is enforced: the mode of the settings, and the mode that a command has set, which takes precedence over
//! the settings until a command withdraws it.

use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

use health_model::durable;
use health_model::policy::PolicyMode;

use super::{EnforceError, Enforcer, lock};

/// Name of the file with the mode that a command has set.
pub const MODE_FILE: &str = "policy-mode.json";

/// The modes, and the file of the commanded one.
pub(super) struct Modes {
    path: PathBuf,
    of_settings: PolicyMode,
    commanded: Option<PolicyMode>,
}

impl Modes {
    /// Reads the mode that a command of an earlier agent has set.
    pub(super) fn load(dir: &Path, of_settings: PolicyMode) -> Result<Self, EnforceError> {
        let path = dir.join(MODE_FILE);
        let damaged = |source: io::Error| EnforceError::Damaged {
            path: path.clone(),
            source,
        };
        let commanded = match fs::read(&path) {
            Ok(bytes) => {
                Some(serde_json::from_slice(&bytes).map_err(|error| damaged(error.into()))?)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(damaged(error)),
        };
        Ok(Self {
            path,
            of_settings,
            commanded,
        })
    }

    /// The mode in force.
    pub(super) fn in_force(&self) -> PolicyMode {
        self.commanded.unwrap_or(self.of_settings)
    }

    fn save(&self, commanded: Option<PolicyMode>) -> io::Result<()> {
        match commanded {
            Some(mode) => durable::write(&self.path, &mode),
            None => durable::remove(&self.path).map(drop),
        }
    }
}

impl Enforcer {
    /// Sets the mode of the settings; endpoints follow unless a command has set another one.
    pub fn set_mode(&self, mode: PolicyMode) {
        let mut modes = lock(&self.0.modes);
        modes.of_settings = mode;
        self.follow_mode(modes.in_force());
    }

    /// Sets the mode until the next command, also over restarts; `None` returns to the mode of the settings. Saves it
    /// before it takes effect. Returns the mode in force, which endpoints follow.
    pub fn command_mode(&self, mode: Option<PolicyMode>) -> Result<PolicyMode, EnforceError> {
        let mut modes = lock(&self.0.modes);
        modes.save(mode).map_err(|source| EnforceError::Save {
            path: modes.path.clone(),
            source,
        })?;
        modes.commanded = mode;
        let mode = modes.in_force();
        self.follow_mode(mode);
        Ok(mode)
    }

    /// The mode that a command has set, if any.
    pub fn commanded_mode(&self) -> Option<PolicyMode> {
        lock(&self.0.modes).commanded
    }

    /// Waits up to `patience` for endpoints to follow a mode. Returns whether they do.
    pub async fn mode_in_force(&self, mode: PolicyMode, patience: Duration) -> bool {
        let mut followed = self.0.followed_mode.subscribe();
        let reached = followed.wait_for(|followed| *followed == Some(mode));
        tokio::time::timeout(patience, reached).await.is_ok()
    }

    fn follow_mode(&self, mode: PolicyMode) {
        self.0.settings.send_if_modified(|settings| {
            let is_news = settings.mode != mode;
            settings.mode = mode;
            is_news
        });
    }
}
