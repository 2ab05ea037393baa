//! A folder of manifests that is reread when a file changes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::MissedTickBehavior;
use tracing::{info, warn};

use crate::file::{FileIdentity, read_regular};

/// How often the folder is polled. A file is read once two polls in a row agree on it, so that a half-written file is
/// not read. A file that never settles is read anyway if it is being replaced by renames.
const LOOK_PERIOD: Duration = Duration::from_millis(250);
/// Number of polls in a row that must disagree on a file before it counts as never settling.
const RESTLESS: u32 = 8;
/// Number of polls after which the folder counts as read, even if new files keep appearing.
const LONGEST_START: u32 = 40;
/// Problems of a file that keeps being replaced, and of one that keeps being written.
const KEEPS_BEING_REPLACED: &str = "keeps changing; reading it less often";
const KEEPS_BEING_WRITTEN: &str = "keeps changing; using its last objects until it settles";
/// Maximum size of a manifest in bytes.
pub const LONGEST: u64 = 64 << 20;
/// File extensions of manifests.
const EXTENSIONS: [&str; 3] = ["yaml", "yml", "json"];

/// What is known about a file.
pub trait Contents: Clone + Send + 'static {
    /// Applies the file's current text; objects with an error keep their previous state. Returns the problems.
    fn take(&mut self, path: &Path, text: &str) -> Vec<String>;

    /// Number of objects in it.
    fn count(&self) -> usize;
}

/// A watched folder of manifests, and the view that its reader derives from it. Dropping it stops the watch.
#[derive(Debug)]
pub struct Folder<S> {
    known: watch::Receiver<Arc<S>>,
    task: JoinHandle<()>,
}

impl<S: Default + Send + Sync + 'static> Folder<S> {
    /// Watches every `*.yaml`, `*.yml` and `*.json` file in a folder whose name does not start with a dot. `empty` is a
    /// file's state before it is first read; `show` derives the published view from all files. Must be called in a
    /// tokio runtime.
    pub fn watch<C: Contents>(
        path: &Path,
        empty: C,
        show: impl FnMut(&Files<C>) -> S + Send + 'static,
    ) -> Self {
        let (sender, known) = watch::channel(Arc::default());
        let files = Files {
            path: path.to_owned(),
            empty,
            files: BTreeMap::new(),
            changed: Vec::new(),
            problem: None,
            is_complete: false,
            looks: 0,
        };
        Self {
            known,
            task: tokio::spawn(files.follow(sender, show)),
        }
    }

    /// The current view, and its changes.
    pub fn known(&self) -> watch::Receiver<Arc<S>> {
        self.known.clone()
    }
}

impl<S> Drop for Folder<S> {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The files of a folder.
#[derive(Debug)]
pub struct Files<C> {
    path: PathBuf,
    /// State of a file before it is first read.
    empty: C,
    files: BTreeMap<PathBuf, Seen<C>>,
    /// Files that were read or removed since the last published view.
    changed: Vec<PathBuf>,
    /// What is wrong with the folder.
    problem: Option<String>,
    is_complete: bool,
    /// Number of polls until the folder counts as read.
    looks: u32,
}

/// A known file.
#[derive(Debug)]
struct Seen<C> {
    /// Its identity at the last poll, or why that could not be determined.
    last: Option<Result<FileIdentity, ErrorKind>>,
    /// Its identity when it was last read.
    read: Option<Result<FileIdentity, ErrorKind>>,
    /// Number of polls in a row that disagreed.
    restless: u32,
    contents: C,
    problems: Vec<String>,
}

impl<C: Contents> Files<C> {
    /// Whether every file was read at least once, except those that appeared in the meantime.
    pub fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// All files, by path.
    pub fn iter(&self) -> impl Iterator<Item = (&Path, &C)> {
        let files = self.files.iter();
        files.map(|(path, seen)| (path.as_path(), &seen.contents))
    }

    /// The files that changed since the last published view, by path; none for a removed file.
    pub fn changed(&self) -> impl Iterator<Item = (&PathBuf, Option<&C>)> {
        let changed = self.changed.iter();
        changed.map(|path| (path, self.files.get(path).map(|seen| &seen.contents)))
    }

    /// All problems, each with its file or folder.
    pub fn problems(&self) -> impl Iterator<Item = (&Path, &str)> {
        let folder = self.problem.iter();
        let folder = folder.map(|problem| (self.path.as_path(), problem.as_str()));
        folder.chain(self.files.iter().flat_map(|(path, seen)| {
            let problems = seen.problems.iter();
            problems.map(|problem| (path.as_path(), problem.as_str()))
        }))
    }

    async fn follow<S>(mut self, sender: watch::Sender<Arc<S>>, mut show: impl FnMut(&Self) -> S) {
        let mut ticks = tokio::time::interval(LOOK_PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let looked = spawn_blocking(move || {
                let is_news = self.look();
                (self, is_news)
            });
            let Ok((files, is_news)) = looked.await else {
                return;
            };
            self = files;
            if is_news {
                sender.send_replace(Arc::new(show(&self)));
                self.changed.clear();
            }
        }
    }

    /// Polls every file and reads those that have changed. Returns whether there is news to publish.
    fn look(&mut self) -> bool {
        let names = match manifests(&self.path) {
            Ok(names) => names,
            Err(error) => {
                let problem = format!("cannot be read: {error}");
                if self.problem.as_ref() == Some(&problem) {
                    return false;
                }
                warn!(folder = %self.path.display(), %error, "cannot read the manifest folder; keeping its last objects");
                self.problem = Some(problem);
                return true;
            }
        };
        let mut is_news = self.problem.take().is_some();
        if is_news {
            info!(folder = %self.path.display(), "the manifest folder is readable again");
        }
        let gone = self.files.keys().filter(|path| !names.contains(*path));
        for path in gone.cloned().collect::<Vec<_>>() {
            self.files.remove(&path);
            self.changed.push(path);
            is_news = true;
        }
        let (mut settled, mut grows) = (true, false);
        for path in names {
            let now = Some(FileIdentity::of(&path).map_err(|error| error.kind()));
            let seen = self.files.entry(path.clone());
            let seen = seen.or_insert_with(|| Seen {
                last: None,
                read: None,
                restless: 0,
                contents: self.empty.clone(),
                problems: Vec::new(),
            });
            let change = Change::between(seen.last, now);
            seen.last = now;
            grows |= change == Change::Grown;
            seen.restless = match change {
                Change::None => 0,
                _ => seen.restless + 1,
            };
            let is_restless = seen.restless > 0 && seen.restless.is_multiple_of(RESTLESS);
            if change == Change::None && seen.read != now {
                seen.read = now;
                seen.take(&path);
            } else if is_restless && change == Change::Replaced {
                seen.read = None;
                seen.take(&path);
                seen.keeps_changing(&path, KEEPS_BEING_REPLACED);
            } else if is_restless && !seen.is_reported(KEEPS_BEING_WRITTEN) {
                seen.read = None;
                seen.keeps_changing(&path, KEEPS_BEING_WRITTEN);
            } else {
                settled &= change == Change::None || seen.restless > RESTLESS;
                continue;
            }
            self.changed.push(path);
            is_news = true;
        }
        if !self.is_complete {
            self.looks += 1;
            // A file that is still being copied delays completion: otherwise the objects in it would be removed.
            self.is_complete = !grows && (settled || self.looks >= LONGEST_START);
            is_news |= self.is_complete;
        }
        is_news
    }
}

/// How a file changed between two polls.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Change {
    /// Unchanged.
    None,
    /// It grew.
    Grown,
    /// Another, already written file was renamed over it.
    Replaced,
    /// Any other change.
    Other,
}

impl Change {
    fn between(
        former: Option<Result<FileIdentity, ErrorKind>>,
        now: Option<Result<FileIdentity, ErrorKind>>,
    ) -> Self {
        match (former, now) {
            _ if former == now => Self::None,
            (Some(Ok(former)), Some(Ok(now))) if !now.is_same_file(&former) => Self::Replaced,
            (Some(Ok(former)), Some(Ok(now))) if now.size() > former.size() => Self::Grown,
            _ => Self::Other,
        }
    }
}

impl<C: Contents> Seen<C> {
    /// Reads the file. If that fails, its objects stay unchanged.
    fn take(&mut self, path: &Path) {
        match read_regular(path, LONGEST) {
            Ok(text) => self.take_text(path, &text),
            Err(error) => {
                warn!(file = %path.display(), %error, "cannot read a manifest; keeping its last objects");
                self.problems = vec![format!("cannot be read: {error}")];
            }
        }
    }

    /// Reports that the file never settles, in addition to its other problems.
    fn keeps_changing(&mut self, path: &Path, problem: &str) {
        if self.restless == RESTLESS {
            warn!(file = %path.display(), "a manifest {problem}");
        }
        self.problems.push(problem.to_owned());
    }

    fn is_reported(&self, problem: &str) -> bool {
        self.problems.iter().any(|reported| reported == problem)
    }

    fn take_text(&mut self, path: &Path, text: &str) {
        self.problems = self.contents.take(path, text);
        let objects = self.contents.count();
        if self.problems.is_empty() {
            info!(file = %path.display(), objects, "manifest read");
        } else {
            let problems = self.problems.join("; ");
            warn!(file = %path.display(), objects, problems, "a manifest has errors; objects with errors are unchanged");
        }
    }
}

/// Lists the manifests in a folder: the `*.yaml`, `*.yml` and `*.json` files whose name does not start with a dot.
pub fn manifests(folder: &Path) -> io::Result<BTreeSet<PathBuf>> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let extension = path.extension().and_then(|text| text.to_str());
        let is_manifest = extension.is_some_and(|extension| EXTENSIONS.contains(&extension));
        let name = path.file_name().map(|name| name.as_encoded_bytes());
        if is_manifest && name.is_some_and(|name| !name.starts_with(b".")) {
            found.insert(path);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Length of the text that was last taken.
    #[derive(Clone)]
    struct Length(usize);

    impl Contents for Length {
        fn take(&mut self, _: &Path, text: &str) -> Vec<String> {
            self.0 = text.len();
            Vec::new()
        }

        fn count(&self) -> usize {
            1
        }
    }

    #[test]
    fn a_manifest_that_is_too_long_keeps_its_last_objects() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.yaml");
        let mut seen = Seen {
            last: None,
            read: None,
            restless: 0,
            contents: Length(0),
            problems: Vec::new(),
        };
        fs::write(&path, "kind: Service").unwrap();
        seen.take(&path);
        assert_eq!((seen.contents.0, seen.problems.len()), (13, 0));
        // A sparse file: the zeros take no disk space.
        let file = fs::File::options().write(true).open(&path).unwrap();
        file.set_len(LONGEST + 1).unwrap();
        seen.take(&path);
        assert_eq!(seen.contents.0, 13);
        assert_eq!(
            seen.problems,
            ["cannot be read: longer than 67108864 bytes"]
        );
    }
}
