//! The host's kernel settings for forwarding between its uplinks and its endpoints. The health endpoint maintains them;
//! on nodes without one, [`ensure`] does.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::{fs, io};

use health_model::durable;
use health_model::ipam::Family;
use health_net::KernelError;
use health_net::sysctl::{self, Originals, Setting};
use tracing::warn;

use super::HealthError;

/// Name of the file with the original settings.
const FILE_NAME: &str = "forwarding.json";

/// Returns the settings for endpoints with addresses of these families, in the order in which to apply them.
pub(super) fn settings(
    uplinks: &[String],
    families: &BTreeSet<Family>,
) -> Result<Vec<Setting>, KernelError> {
    let mut settings = Vec::new();
    if families.contains(&Family::V4) {
        for uplink in uplinks {
            settings.push(Setting::new(format!("ipv4/conf/{uplink}/forwarding"), "1"));
        }
    }
    if families.contains(&Family::V6) {
        for uplink in uplinks {
            // A router ignores advertisements. Unless configured to accept them anyway, the host would lose its default
            // route with the next setting.
            let key = format!("ipv6/conf/{uplink}/accept_ra");
            if sysctl::read(&key)?.as_deref() == Some("1") {
                settings.push(Setting::new(key, "2"));
            }
        }
        settings.push(Setting::new("ipv6/conf/all/forwarding", "1"));
    }
    Ok(settings)
}

/// Makes the host forward the packets of endpoints with addresses of these families. Returns the settings that it
/// changed. Saves the original values in `state_dir`, for [`cleanup`](super::cleanup()).
pub fn ensure(
    state_dir: &Path,
    uplinks: &[String],
    families: impl Iterator<Item = Family>,
) -> Result<Vec<Setting>, HealthError> {
    let mut changes = Vec::new();
    for wanted in settings(uplinks, &families.collect())? {
        // On a kernel without IPv6, there is nothing to set.
        let now = sysctl::read(&wanted.key)?;
        if now.is_some_and(|now| now != wanted.value) {
            changes.push(wanted);
        }
    }
    if changes.is_empty() {
        return Ok(changes);
    }
    let file = OriginalsFile::in_dir(state_dir);
    let mut originals = file.load();
    for change in &changes {
        originals.remember(change)?;
    }
    // Save before the first change, so that it can be undone whatever happens.
    file.save(&originals)?;
    for change in &changes {
        change.apply()?;
    }
    Ok(changes)
}

/// The file with the original settings.
pub(super) struct OriginalsFile(PathBuf);

impl OriginalsFile {
    pub(super) fn in_dir(state_dir: &Path) -> Self {
        Self(state_dir.join(FILE_NAME))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    /// Reads the file. Logs if the file cannot be read, and then returns nothing.
    pub(super) fn load(&self) -> Originals {
        let read = match fs::read(&self.0) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Originals::default(),
            read => read,
        };
        let originals = read.and_then(|bytes| Ok(serde_json::from_slice(&bytes)?));
        originals.unwrap_or_else(|error: io::Error| {
            warn!(file = %self.0.display(), %error, "ignoring unreadable original kernel settings");
            Originals::default()
        })
    }

    fn save(&self, originals: &Originals) -> Result<(), HealthError> {
        durable::write(&self.0, originals).map_err(|source| self.error("write", source))
    }

    /// Removes the file. Returns whether it existed.
    pub(super) fn remove(&self) -> Result<bool, HealthError> {
        durable::remove(&self.0).map_err(|source| self.error("remove", source))
    }

    fn error(&self, attempt: &'static str, source: io::Error) -> HealthError {
        HealthError::State {
            attempt,
            path: self.0.clone(),
            source,
        }
    }
}
