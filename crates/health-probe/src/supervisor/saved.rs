//! What survives a restart of the agent.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;

use health_model::durable;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tracing::warn;

use crate::worker::Snapshot;
use crate::worker::restart::Backoffs;

/// What an agent left to the next one.
#[derive(Debug, Default)]
pub(super) struct SavedState {
    /// What was known of probes; `None` if no agent was here before.
    pub(super) snapshot: Option<Snapshot>,
    /// How long containers wait for their next restart.
    pub(super) backoffs: Backoffs,
    /// The UIDs of the pods that were ready.
    pub(super) ready: BTreeSet<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct File {
    version: u32,
    written: Timestamp,
    ready: BTreeSet<String>,
    probes: Snapshot,
}

const VERSION: u32 = 1;

impl SavedState {
    /// What the file has. One that cannot be used is told, and taken for none: what is not known is found out again.
    pub(super) fn read(path: &Path, now: Timestamp) -> Self {
        let text = match fs::read(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Self::default(),
            Err(error) => {
                warn!(file = %path.display(), %error, "cannot read what was known of probes");
                return Self::default();
            }
        };
        match serde_json::from_slice::<File>(&text) {
            Ok(mut file) if file.version == VERSION => {
                let since = Duration::try_from(now.duration_since(file.written));
                let backoffs = std::mem::take(&mut file.probes.backoffs);
                Self {
                    snapshot: Some(file.probes),
                    backoffs: Backoffs::restore(backoffs, since.unwrap_or_default()),
                    ready: file.ready,
                }
            }
            Ok(file) => {
                let version = file.version;
                warn!(file = %path.display(), version, "what was known of probes is of another version");
                Self::default()
            }
            Err(error) => {
                warn!(file = %path.display(), %error, "what was known of probes cannot be used");
                Self::default()
            }
        }
    }
}

/// Writes it down: whole, or as it was.
pub(super) fn write(path: &Path, probes: Snapshot, ready: BTreeSet<String>) -> io::Result<()> {
    let file = File {
        version: VERSION,
        written: Timestamp::now(),
        ready,
        probes,
    };
    durable::replace(path, &serde_json::to_vec(&file)?)
}
