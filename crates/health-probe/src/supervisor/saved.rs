//! State that survives a restart of the agent.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;

use health_model::durable;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tracing::warn;

use super::moment::{Moment, SinceBoot};
use crate::worker::Snapshot;
use crate::worker::restart::Backoffs;

/// The state that an agent saves for the next one.
#[derive(Debug, Default)]
pub(super) struct SavedState {
    /// The state of probes; `None` if no agent ran on this node before.
    pub(super) snapshot: Option<Snapshot>,
    /// The back-offs of containers' restarts.
    pub(super) backoffs: Backoffs,
    /// The UIDs of the pods that were ready.
    pub(super) ready: BTreeSet<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct File {
    version: u32,
    written: Timestamp,
    /// Missing in files written by earlier agents.
    #[serde(default)]
    written_since_boot: Option<SinceBoot>,
    ready: BTreeSet<String>,
    probes: Snapshot,
}

const VERSION: u32 = 1;

impl SavedState {
    /// Reads the file. An unusable file is logged and ignored: the agent finds out again whatever it does not know.
    pub(super) fn read(path: &Path, now: &Moment) -> Self {
        let text = match fs::read(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Self::default(),
            Err(error) => {
                warn!(file = %path.display(), %error, "cannot read the saved probe states");
                return Self::default();
            }
        };
        match serde_json::from_slice::<File>(&text) {
            Ok(file) if file.version == VERSION => file.state(now),
            Ok(file) => {
                let version = file.version;
                warn!(file = %path.display(), version, "the saved probe states have a different version; ignoring them");
                Self::default()
            }
            Err(error) => {
                warn!(file = %path.display(), %error, "cannot parse the saved probe states; \
                                                       ignoring them");
                Self::default()
            }
        }
    }
}

impl File {
    fn state(self, now: &Moment) -> SavedState {
        let written = Moment {
            wall: self.written,
            boot: self.written_since_boot,
        };
        let mut snapshot = self.probes;
        snapshot.age(now.since(&written));
        SavedState {
            backoffs: Backoffs::restore(std::mem::take(&mut snapshot.backoffs)),
            snapshot: Some(snapshot),
            ready: self.ready,
        }
    }
}

/// Writes the file atomically: replaces it as a whole or leaves it unchanged.
pub(super) fn write(
    path: &Path,
    now: Moment,
    probes: Snapshot,
    ready: BTreeSet<String>,
) -> io::Result<()> {
    let file = File {
        version: VERSION,
        written: now.wall,
        written_since_boot: now.boot,
        ready,
        probes,
    };
    durable::replace(path, &file)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::Arc;
    use std::time::Duration;

    use jiff::SignedDuration;
    use tempfile::TempDir;

    use super::*;
    use crate::spec::ProbeType;
    use crate::worker::restart::{FIRST_WAIT, RESET_AFTER};
    use crate::worker::{ProbeResult, SavedWorker};

    const MINUTE: Duration = Duration::from_secs(60);

    /// A moment this many seconds after a fixed wall-clock time, with an optional boot ID and boot time.
    fn moment(wall: i64, boot: Option<(&str, u64)>) -> Moment {
        let day: Timestamp = "2026-11-21T03:00:00Z".parse().unwrap();
        Moment {
            wall: day + SignedDuration::from_secs(wall),
            boot: boot.map(|(id, clock)| SinceBoot {
                id: id.to_owned(),
                clock: Duration::from_secs(clock),
            }),
        }
    }

    /// A snapshot with a container that was restarted just now, and the held result of a pod that was removed a minute
    /// ago.
    fn snapshot() -> Snapshot {
        let mut backoffs = Backoffs::default();
        let (pod, container) = (Arc::from("u"), Arc::from("app"));
        backoffs.restarted(&pod, &container, Duration::ZERO, Duration::ZERO);
        backoffs.count(&pod, &container);
        Snapshot {
            workers: vec![SavedWorker {
                pod_uid: "gone".to_owned(),
                container: "app".to_owned(),
                kind: ProbeType::Liveness,
                container_id: "c1".to_owned(),
                result: Some(ProbeResult::Failure),
                last: Some(ProbeResult::Failure),
                run: 0,
                on_hold: true,
                gone: Some(MINUTE),
            }],
            backoffs: backoffs.save(Duration::ZERO),
        }
    }

    fn file() -> (TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("probes.json");
        (dir, path)
    }

    /// How much time has passed for the back-off and the held result of a saved state.
    fn passed(saved: &SavedState) -> (Duration, Duration) {
        let age = saved.backoffs.save(Duration::ZERO)[0].age;
        let gone = saved.snapshot.as_ref().unwrap().workers[0].gone;
        (age, gone.unwrap() - MINUTE)
    }

    #[test]
    fn steps_of_the_wall_clock_between_two_runs_change_nothing() {
        let (_dir, path) = file();
        let written = moment(0, Some(("b1", 1000)));
        write(&path, written, snapshot(), BTreeSet::new()).unwrap();
        for wall in [-86_400, -1, 0, 20, 86_400] {
            let saved = SavedState::read(&path, &moment(wall, Some(("b1", 1020))));
            let expected = Duration::from_secs(20);
            assert_eq!(passed(&saved), (expected, expected), "wall {wall}");
            let ended = Duration::from_secs(1);
            let ready = saved.backoffs.ready("u", "app", ended);
            assert_eq!(ready, ended + FIRST_WAIT, "wall {wall}");
        }
    }

    #[test]
    fn a_long_absence_ends_a_back_off_though_the_wall_clock_was_set_back() {
        let (_dir, path) = file();
        let written = moment(0, Some(("b1", 1000)));
        write(&path, written, snapshot(), BTreeSet::new()).unwrap();
        let later = 1001 + RESET_AFTER.as_secs();
        let saved = SavedState::read(&path, &moment(-3600, Some(("b1", later))));
        let ready = saved.backoffs.ready("u", "app", Duration::ZERO);
        assert_eq!(ready, Duration::ZERO);
    }

    #[test]
    fn over_a_boot_time_passes_by_the_wall_clock_and_never_backward() {
        let (_dir, path) = file();
        let written = moment(0, Some(("b1", 1000)));
        write(&path, written, snapshot(), BTreeSet::new()).unwrap();
        for (wall, boot, expected) in [
            (30, Some(("b2", 5)), 30),
            (30, Some(("b2", 5000)), 30),
            (-30, Some(("b2", 5000)), 0),
            (30, None, 30),
            // The clock of a time namespace that shows an earlier time.
            (30, Some(("b1", 10)), 30),
        ] {
            let saved = SavedState::read(&path, &moment(wall, boot));
            let expected = Duration::from_secs(expected);
            assert_eq!(passed(&saved), (expected, expected), "{wall} {boot:?}");
        }
    }

    #[test]
    fn files_of_earlier_agents_are_read() {
        let (_dir, path) = file();
        let old = r#"{"version": 1, "written": "2026-11-21T03:00:00Z", "ready": ["u"], "probes": {
            "workers": [{"pod_uid": "u", "container": "app", "kind": "liveness", "container_id": "c1",
                "result": "failure", "last": "failure", "run": 0, "on_hold": true}],
            "backoffs": [{"pod_uid": "u", "container": "app", "wait_ns": 20000000000, "age_ns": 1000000000}]}}"#;
        fs::write(&path, old).unwrap();
        let saved = SavedState::read(&path, &moment(30, Some(("b1", 1000))));
        assert_eq!(saved.ready, BTreeSet::from(["u".to_owned()]));
        assert_eq!(saved.snapshot.unwrap().workers[0].gone, None);
        let backoffs = saved.backoffs.save(Duration::ZERO);
        assert_eq!(backoffs[0].age, Duration::from_secs(31));
        assert_eq!(backoffs[0].wait, Duration::from_secs(20));
    }

    #[test]
    fn a_file_that_cannot_be_used_is_taken_for_none() {
        let (_dir, path) = file();
        let now = moment(0, None);
        assert!(SavedState::read(&path, &now).snapshot.is_none());
        write(&path, now.clone(), snapshot(), BTreeSet::new()).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        let other = text.replace("\"version\":1", "\"version\":2");
        assert_ne!(other, text);
        for unusable in ["", &text[..text.len() - 2], "[]", &other] {
            fs::write(&path, unusable).unwrap();
            assert!(SavedState::read(&path, &now).snapshot.is_none());
        }
        // A folder instead of a file.
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(SavedState::read(&path, &now).snapshot.is_none());
        assert!(write(&path, now, snapshot(), BTreeSet::new()).is_err());
    }
}
