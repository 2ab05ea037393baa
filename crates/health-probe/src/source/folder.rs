//! A folder of manifests, read again when a file changes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use health_model::api::PodProblem;
use health_model::file::FileIdentity;
use tokio::sync::watch;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::MissedTickBehavior;
use tracing::{info, warn};

use super::{Keeper, PodSet, SourcedPod};
use crate::spec::{self, Manifest};

/// How often the folder is looked at. A file is read when two looks in a row agree on it, so that one that is being
/// written is not read half way.
const LOOK_PERIOD: Duration = Duration::from_millis(250);
/// Longest manifest, bytes.
const LONGEST: u64 = 64 << 20;
/// Extensions of manifests.
const EXTENSIONS: [&str; 3] = ["yaml", "yml", "json"];

/// A folder of manifests. Dropping it ends the watch.
#[derive(Debug)]
pub struct Folder {
    pods: watch::Receiver<Arc<PodSet>>,
    task: JoinHandle<()>,
}

impl Folder {
    /// Begins to watch a folder: each file `*.yaml`, `*.yml` and `*.json` in it whose name begins with no dot. What
    /// cannot be used stands in [`PodSet::problems`]; pods that were read before from such a file stay as they were.
    /// Must be called in a tokio runtime.
    pub fn watch(path: &Path) -> Self {
        let (sender, pods) = watch::channel(Arc::default());
        let looker = Looker {
            path: path.to_owned(),
            ..Looker::default()
        };
        Self {
            pods,
            task: tokio::spawn(looker.follow(sender)),
        }
    }

    /// The pods, now and whenever they change.
    pub fn pods(&self) -> watch::Receiver<Arc<PodSet>> {
        self.pods.clone()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A file that was seen.
#[derive(Debug, Default)]
struct Seen {
    /// What it was at the last look, or why that could not be told.
    last: Option<Result<FileIdentity, ErrorKind>>,
    /// The same when it was read.
    read: Option<Result<FileIdentity, ErrorKind>>,
    pods: Vec<SourcedPod>,
    problems: Vec<String>,
}

#[derive(Debug, Default)]
struct Looker {
    path: PathBuf,
    files: BTreeMap<PathBuf, Seen>,
    /// What is wrong with the folder.
    problem: Option<String>,
    is_complete: bool,
}

impl Looker {
    async fn follow(mut self, sender: watch::Sender<Arc<PodSet>>) {
        let mut ticks = tokio::time::interval(LOOK_PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let looked = spawn_blocking(move || {
                let is_news = self.look();
                (self, is_news)
            });
            let Ok((looker, is_news)) = looked.await else {
                return;
            };
            self = looker;
            if is_news {
                sender.send_replace(Arc::new(self.set()));
            }
        }
    }

    /// Looks at every file, and reads those that have changed. Returns whether there is something to tell.
    fn look(&mut self) -> bool {
        let names = match list(&self.path) {
            Ok(names) => names,
            Err(error) => {
                let problem = format!("cannot be read: {error}");
                if self.problem.as_ref() == Some(&problem) {
                    return false;
                }
                warn!(folder = %self.path.display(), %error, "the folder of manifests cannot be read; its last pods stay");
                self.problem = Some(problem);
                return true;
            }
        };
        let mut is_news = self.problem.take().is_some();
        let known = self.files.len();
        self.files.retain(|path, _| names.contains(path));
        is_news |= self.files.len() != known;
        let mut settled = true;
        for path in names {
            let now = Some(FileIdentity::of(&path).map_err(|error| error.kind()));
            let seen = self.files.entry(path.clone()).or_default();
            let is_settled = seen.last == now;
            seen.last = now;
            if !is_settled {
                settled = false;
            } else if seen.read != now {
                seen.read = now;
                seen.take(&path);
                is_news = true;
            }
        }
        if settled && !self.is_complete {
            self.is_complete = true;
            is_news = true;
        }
        is_news
    }

    /// All that is known. Of two pods with one UID, that of the first file stays.
    fn set(&self) -> PodSet {
        let mut set = PodSet {
            is_complete: self.is_complete,
            ..PodSet::default()
        };
        let problem = |subject: &Path, problem: String| PodProblem {
            subject: subject.display().to_string(),
            problem,
        };
        let mut uids = BTreeMap::new();
        set.problems.extend(
            self.problem
                .iter()
                .map(|why| problem(&self.path, why.clone())),
        );
        for (path, seen) in &self.files {
            for why in &seen.problems {
                set.problems.push(problem(path, why.clone()));
            }
            for pod in &seen.pods {
                let (namespace, name) = (&pod.spec.namespace, &pod.spec.name);
                if let Some(first) = uids.insert(pod.spec.uid.clone(), path) {
                    uids.insert(pod.spec.uid.clone(), first);
                    let why = format!(
                        "pod {namespace}/{name}: metadata.uid: Duplicate value: {:?}: {} has it too",
                        pod.spec.uid,
                        first.display()
                    );
                    set.problems.push(problem(path, why));
                } else {
                    set.pods.push(pod.clone());
                }
            }
        }
        set
    }
}

impl Seen {
    /// Reads the file. What cannot be read, and pods with an error, stay as they were.
    fn take(&mut self, path: &Path) {
        let Manifest {
            pods,
            mut statuses,
            errors,
            ..
        } = match read(path) {
            Ok(text) => spec::read(&text),
            Err(error) => {
                warn!(file = %path.display(), %error, "a manifest cannot be read; its last pods stay");
                self.problems = vec![format!("cannot be read: {error}")];
                return;
            }
        };
        let source: Arc<str> = Arc::from(path.display().to_string());
        let before = std::mem::take(&mut self.pods);
        let mut now: Vec<_> = pods
            .into_iter()
            .map(|spec| SourcedPod {
                status: statuses.remove(&spec.uid),
                spec: Arc::new(spec),
                source: source.clone(),
                keeper: Keeper::Agent,
            })
            .collect();
        let uids: BTreeSet<_> = now.iter().map(|pod| pod.spec.uid.clone()).collect();
        let is_whole = |pod: &SourcedPod| {
            let name = format!("{}/{}", pod.spec.namespace, pod.spec.name);
            !errors
                .iter()
                .any(|error| error.pod.as_ref().is_none_or(|pod| *pod == name))
        };
        let kept = before
            .into_iter()
            .filter(|pod| !uids.contains(&pod.spec.uid) && !is_whole(pod));
        now.extend(kept);
        self.pods = now;
        self.problems = errors.iter().map(ToString::to_string).collect();
        if self.problems.is_empty() {
            info!(file = %path.display(), pods = self.pods.len(), "manifest read");
        } else {
            let problems = self.problems.join("; ");
            warn!(file = %path.display(), pods = self.pods.len(), problems, "a manifest has errors; pods with an error stay as they were");
        }
    }
}

/// The manifests of a folder.
fn list(folder: &Path) -> io::Result<BTreeSet<PathBuf>> {
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

/// The text of a file. Waits for nobody, as it would at a named pipe.
fn read(path: &Path) -> io::Result<String> {
    let mut options = File::options();
    let file = options
        .read(true)
        .custom_flags(nix::libc::O_NONBLOCK)
        .open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    let mut text = String::new();
    file.take(LONGEST + 1).read_to_string(&mut text)?;
    if text.len() as u64 > LONGEST {
        return Err(io::Error::other(format!("longer than {LONGEST} bytes")));
    }
    Ok(text)
}

#[cfg(test)]
mod tests;
