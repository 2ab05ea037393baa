//! A folder of pod manifests.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use health_model::api::PodProblem;
use health_model::folder::{self, Contents, Files};
use tokio::sync::watch;
use tracing::info;

use super::{Keeper, PodSet, SourcedPod};
use crate::spec::{self, Manifest};

/// A folder of manifests. Dropping it stops the watch.
#[derive(Debug)]
pub struct Folder(folder::Folder<PodSet>);

impl Folder {
    /// Starts watching a folder: the `*.yaml`, `*.yml` and `*.json` files in it whose names do not start with a dot.
    /// Anything unusable is listed in [`PodSet::problems`]; pods read earlier from such a file stay unchanged. Must be
    /// called in a tokio runtime.
    pub fn watch(path: &Path) -> Self {
        Self(folder::Folder::watch(path, FilePods::default(), set))
    }

    /// The pods, now and whenever they change.
    pub fn pods(&self) -> watch::Receiver<Arc<PodSet>> {
        self.0.known()
    }
}

/// Combines the pods of all files. If two pods have the same UID, the one from the first file is used.
fn set(files: &Files<FilePods>) -> PodSet {
    let problem = |subject: &Path, problem: String| PodProblem {
        subject: subject.display().to_string(),
        problem,
    };
    let problems = files.problems();
    let mut set = PodSet {
        pods: Vec::new(),
        problems: problems
            .map(|(path, why)| problem(path, why.to_owned()))
            .collect(),
        is_complete: files.is_complete(),
    };
    let mut uids = BTreeMap::new();
    for (path, FilePods(pods)) in files.iter() {
        for pod in pods {
            let (namespace, name) = (&pod.spec.namespace, &pod.spec.name);
            if let Some(first) = uids.insert(pod.spec.uid.clone(), path) {
                uids.insert(pod.spec.uid.clone(), first);
                let why = format!(
                    "pod {namespace}/{name}: metadata.uid: Duplicate value: {:?}: also used in {}",
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

/// The pods of a file.
#[derive(Clone, Debug, Default)]
struct FilePods(Vec<SourcedPod>);

impl Contents for FilePods {
    fn take(&mut self, path: &Path, text: &str) -> Vec<String> {
        let Manifest {
            pods,
            mut statuses,
            errors,
            skipped,
            ..
        } = spec::read(text);
        if !skipped.is_empty() {
            let skipped = skipped.join(", ");
            info!(file = %path.display(), skipped, "skipped objects that are not pods");
        }
        let source: Arc<str> = Arc::from(path.display().to_string());
        let before = std::mem::take(&mut self.0);
        self.0 = pods
            .into_iter()
            .map(|spec| SourcedPod {
                status: statuses.remove(&spec.uid),
                spec: Arc::new(spec),
                source: source.clone(),
                keeper: Keeper::Agent,
            })
            .collect();
        let uids: BTreeSet<_> = self.0.iter().map(|pod| pod.spec.uid.clone()).collect();
        let is_whole = |pod: &SourcedPod| {
            let name = format!("{}/{}", pod.spec.namespace, pod.spec.name);
            !errors
                .iter()
                .any(|error| error.pod.as_ref().is_none_or(|pod| *pod == name))
        };
        let kept = before
            .into_iter()
            .filter(|pod| !uids.contains(&pod.spec.uid) && !is_whole(pod));
        self.0.extend(kept);
        errors.iter().map(ToString::to_string).collect()
    }

    fn count(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests;
