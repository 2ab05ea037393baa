//! Identities in a JSON file, shared by the agents of one machine. Each change reads the whole file under a lock and
//! replaces it atomically. An unreadable file is left unchanged.

mod document;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use health_model::durable;
use health_model::identity::Identity;
use health_model::private::{self, LockError};
use jiff::Timestamp;
use tokio::time::{Instant, MissedTickBehavior};
use tracing::{info, warn};

use self::document::{Document, Wish, Writer};
use super::AddressAnnouncement;
use super::allocator::{Shared, Timing};
use super::view::View;

/// Suffix that turns the identity file's name into the lock file's name.
pub const LOCK_SUFFIX: &str = ".lock";

/// How often the file is checked. It is always replaced as a whole, so it can be read at any time.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// How long to wait while other agents use the file. Each holds the lock only for one read and one write.
const LOCK_PATIENCE: Duration = Duration::from_secs(5);
/// Maximum size of the file in bytes.
const MAX_LEN: u64 = 256 << 20;

/// Why the file cannot be used.
#[derive(Debug, thiserror::Error)]
enum FileError {
    #[error("cannot {attempt} {path}: {source}")]
    Io {
        attempt: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error(transparent)]
    Lock(#[from] LockError),
    #[error(
        "{path} is not an identity file: {reason}; fix it, or move it away and lose all identity numbers"
    )]
    Damaged { path: PathBuf, reason: String },
}

/// Follows a file, and keeps the wants of `node` in it. Never returns.
pub(super) fn run(
    shared: Arc<Shared>,
    path: PathBuf,
    node: &str,
    timing: Timing,
) -> impl Future<Output = ()> + Send + use<> {
    let writer = Writer {
        session: format!("{:016x}", rand::random::<u64>()),
        node: node.to_owned(),
        timing,
    };
    let mut follower = Follower {
        shared,
        store: Arc::new(IdentityFile { path, writer }),
        view: View::new(timing.settle()),
        started: Instant::now(),
        taken: None,
        heard: Timestamp::now(),
        lost: None,
    };
    let keep_period = timing.look_period.min(timing.lease / 6);
    async move {
        let mut ticks = tokio::time::interval(POLL_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut keep_at = Instant::now();
        let mut is_behind = false;
        loop {
            // Waiting callers are served immediately. All other updates are batched, because each update reads and
            // writes the whole file.
            let is_time = tokio::select! {
                _ = ticks.tick() => true,
                () = follower.shared.wake.notified() => {
                    is_behind = true;
                    follower.shared.wants().has_waiters()
                }
            };
            if !is_time {
                continue;
            }
            if is_behind || Instant::now() >= keep_at || follower.has_changed() {
                is_behind = false;
                keep_at = Instant::now() + keep_period;
                follower.keep(keep_period).await;
            }
            follower.expire();
        }
    }
}

/// Distinguishes versions of the file.
type Stamp = (u64, u64, u64, i64, i64);

struct Follower {
    shared: Arc<Shared>,
    store: Arc<IdentityFile>,
    view: View,
    started: Instant,
    /// The version that was last read; `None` if there was no file.
    taken: Option<Stamp>,
    /// When the file was last usable.
    heard: Timestamp,
    /// Why the file was last unusable.
    lost: Option<String>,
}

impl Follower {
    fn has_changed(&self) -> bool {
        self.lost.is_some() || stamp(&self.store.path) != self.taken
    }

    /// Writes the wants to the file, and takes over the file's contents. `period` is the maximum time until the next
    /// call.
    async fn keep(&mut self, period: Duration) {
        let (sets, wish) = {
            let wants = self.shared.wants();
            let sets: Vec<_> = wants.sets().collect();
            let addresses = wants.addresses();
            let wish = Wish {
                sets: sets
                    .iter()
                    .map(|wanted| (wanted.labels.clone(), wanted.identity))
                    .collect(),
                addresses: addresses
                    .map(|(ip, announce)| (ip, (announce.identity, announce.node)))
                    .collect(),
                forgets_earlier: wants.forgets_earlier(),
            };
            (sets, wish)
        };
        let store = self.store.clone();
        let updated = tokio::task::spawn_blocking(move || store.update(&wish)).await;
        let updated = match updated {
            Ok(Ok(updated)) => updated,
            Ok(Err(error)) => return self.lost(error.to_string()),
            Err(error) => return self.lost(error.to_string()),
        };
        self.taken = updated.stamp;
        self.heard = Timestamp::now();
        // Each change of the file also drops unused entries.
        for reporter in [&self.shared.store_reporter, &self.shared.collector_reporter] {
            reporter.end(None, Some(period));
        }
        if self.lost.take().is_some() {
            info!(path = %self.store.path.display(), "the identity file is usable again");
        }
        {
            let mut wants = self.shared.wants();
            wants.recover();
            let now = Instant::now();
            for (wanted, answer) in sets.iter().zip(&updated.granted) {
                wants.answered(&wanted.labels, answer, now);
            }
            self.shared.hub.publish_held(wants.held());
        }
        self.take(&updated.document);
    }

    /// Takes over the contents of the file.
    fn take(&mut self, document: &Document) {
        let now = self.started.elapsed();
        let identities: BTreeSet<Identity> = document.identities.keys().copied().collect();
        let owned = document.addresses.iter();
        let owned = owned.filter_map(|(ip, one)| Some((*ip, document.owner(one)?.to_owned())));
        self.view.retain(&identities, &owned.clone().collect(), now);
        for (identity, entry) in &document.identities {
            self.view
                .put_identity(*identity, entry.labels.clone(), None);
            for node in document.references(entry) {
                self.view.put_reference(*identity, node);
            }
        }
        for (ip, owner) in owned {
            let address = &document.addresses[&ip];
            let announced = AddressAnnouncement {
                identity: address.identity,
                node: address.node,
                owner,
            };
            // Newer than any announcement that is about to be removed; the file lists each address once.
            let order = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
            self.view.put_address(ip, order, announced, None);
        }
        self.view.expire(now);
        self.shared.hub.publish(&self.view, Vec::new(), None);
    }

    fn expire(&mut self) {
        if self.lost.is_none() && self.view.expire(self.started.elapsed()) {
            self.shared.hub.publish(&self.view, Vec::new(), None);
        }
    }

    fn lost(&mut self, reason: String) {
        if self.lost.as_ref() != Some(&reason) {
            warn!(
                reason,
                "cannot read or write identities; keeping the known ones"
            );
        }
        self.shared.fail(self.heard, reason.clone());
        self.lost = Some(reason);
    }
}

/// The identity file, and this writer of it.
struct IdentityFile {
    path: PathBuf,
    writer: Writer,
}

/// Result of a change.
struct FileUpdate {
    document: Document,
    granted: Vec<super::wants::Answer>,
    stamp: Option<Stamp>,
}

impl IdentityFile {
    /// Changes the file under its lock. Writes the file only if the contents change.
    fn update(&self, wish: &Wish) -> Result<FileUpdate, FileError> {
        let _lock = self.lock()?;
        let known = self.read()?;
        let mut document = known.clone().unwrap_or_default();
        let granted = document.grant(&self.writer, wish, Timestamp::now());
        if known.as_ref() != Some(&document) {
            self.write(&document)?;
        }
        Ok(FileUpdate {
            document,
            granted,
            stamp: stamp(&self.path),
        })
    }

    /// Waits up to [`LOCK_PATIENCE`] for the lock. The lock is a separate file, because the identity file itself is
    /// replaced.
    fn lock(&self) -> Result<File, FileError> {
        let path = beside(&self.path, LOCK_SUFFIX);
        let failed = |source| FileError::Io {
            attempt: "lock",
            path: path.clone(),
            source,
        };
        if let Some(folder) = path.parent() {
            private::make_folder(folder).map_err(failed)?;
        }
        Ok(private::lock(&path, LOCK_PATIENCE)?)
    }

    /// Reads the file; `None` if there is no file yet.
    fn read(&self) -> Result<Option<Document>, FileError> {
        let path = &self.path;
        let io = |source| FileError::Io {
            attempt: "read",
            path: path.clone(),
            source,
        };
        let damaged = |reason| FileError::Damaged {
            path: path.clone(),
            reason,
        };
        match fs::metadata(path) {
            Ok(metadata) if metadata.len() > MAX_LEN => {
                return Err(damaged(format!(
                    "it is too large ({} bytes)",
                    metadata.len()
                )));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Ok(_) | Err(_) => {}
        }
        let bytes = fs::read(path).map_err(io)?;
        Document::parse(&bytes).map(Some).map_err(damaged)
    }

    /// Replaces the file atomically: readers see either the complete old file or the complete new file.
    fn write(&self, document: &Document) -> Result<(), FileError> {
        durable::write(&self.path, document).map_err(|source| FileError::Io {
            attempt: "write",
            path: self.path.clone(),
            source,
        })
    }
}

fn stamp(path: &Path) -> Option<Stamp> {
    let metadata = fs::metadata(path).ok()?;
    Some((
        metadata.dev(),
        metadata.ino(),
        metadata.len(),
        metadata.mtime(),
        metadata.mtime_nsec(),
    ))
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}
