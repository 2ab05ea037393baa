//! A folder with manifests of services and endpoint slices.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use health_model::api::ServiceProblem;
use health_model::folder::{self, Contents, Files};
use health_model::manifest::{NoObject, Object, ObjectKind, ObjectKinds, Problem, objects};
use imbl::OrdMap;
use tokio::sync::watch;

use super::merge::Holders;
use super::object::{Readable, Reading, read};
use super::{ServiceSet, Sourced, Synced};
use crate::spec::{EndpointSlice, Extent, Selection, Service, ServiceName, SliceName, SpecError};

pub(super) const SERVICE: ObjectKind = ObjectKind {
    name: "Service",
    list: "ServiceList",
    versions: &["v1"],
};
pub(super) const SLICE: ObjectKind = ObjectKind {
    name: "EndpointSlice",
    list: "EndpointSliceList",
    versions: &["discovery.k8s.io/v1"],
};
pub(super) const KINDS: ObjectKinds = ObjectKinds {
    kinds: &[SERVICE, SLICE],
    names: &[
        "Service",
        "EndpointSlice",
        "ServiceList",
        "EndpointSliceList",
        "List",
    ],
    item_names: &["Service", "EndpointSlice"],
    noun: "service or endpoint slice",
};

/// A folder of manifests. Dropping it stops the watch.
#[derive(Debug)]
pub struct Folder(folder::Folder<ServiceSet>);

impl Folder {
    /// Starts watching a folder: all files `*.yaml`, `*.yml` and `*.json` in it whose name does not start with a dot.
    /// Anything unusable is listed in [`ServiceSet::problems`]; objects read earlier from such a file stay unchanged.
    /// Must be called in a tokio runtime.
    pub fn watch(path: &Path, selection: Selection) -> Self {
        let empty = FileObjects {
            selection: Arc::new(selection),
            services: OrdMap::new(),
            slices: OrdMap::new(),
        };
        let mut known = Holders::default();
        let show = move |files: &Files<FileObjects>| set(files, &mut known);
        Self(folder::Folder::watch(path, empty, show))
    }

    /// Returns the services and endpoint slices, with their changes.
    pub fn services(&self) -> watch::Receiver<Arc<ServiceSet>> {
        self.0.known()
    }
}

/// Returns all known objects. If two objects have the same kind and name, the one from the first file stays.
fn set(files: &Files<FileObjects>, known: &mut Holders<PathBuf>) -> ServiceSet {
    let problem = |(subject, problem): (&Path, &str)| ServiceProblem {
        subject: subject.display().to_string(),
        problem: problem.to_owned(),
    };
    for (path, file) in files.changed() {
        match file {
            Some(file) => known.set(path, &file.services, &file.slices),
            None => known.remove(path),
        }
    }
    ServiceSet {
        problems: files
            .problems()
            .map(problem)
            .chain(known.duplicates())
            .collect(),
        synced: Synced {
            services: files.is_complete(),
            slices: files.is_complete(),
        },
        ..known.objects()
    }
}

/// The objects of a file.
#[derive(Clone, Debug)]
struct FileObjects {
    selection: Arc<Selection>,
    services: OrdMap<ServiceName, Sourced<Service>>,
    slices: OrdMap<SliceName, Sourced<EndpointSlice>>,
}

impl Contents for FileObjects {
    fn take(&mut self, path: &Path, text: &str) -> Vec<String> {
        let mut problems = Problems::default();
        let mut services = Taken::of(&self.selection, path);
        let mut slices = Taken::of(&self.selection, path);
        for found in objects(text, &KINDS) {
            match found {
                Ok(object) if object.kind == SERVICE => services.take(object, &mut problems),
                Ok(object) => slices.take(object, &mut problems),
                Err(other) => problems.add(other),
            }
        }
        services.replace(&mut self.services, &problems);
        slices.replace(&mut self.slices, &problems);
        problems.list
    }

    fn count(&self) -> usize {
        self.services.len() + self.slices.len()
    }
}

/// Returns the problems of a manifest; none if an agent would accept all of it.
pub fn check(text: &str) -> Vec<String> {
    let mut objects = FileObjects {
        selection: Arc::default(),
        services: OrdMap::new(),
        slices: OrdMap::new(),
    };
    objects.take(Path::new(""), text)
}

/// Problems with a file.
#[derive(Default)]
struct Problems {
    list: Vec<String>,
    /// Whether an unreadable part may stand for any of the previous objects.
    is_unclear: bool,
}

impl Problems {
    fn add(&mut self, other: NoObject) {
        self.is_unclear |= !other.is_other_kind;
        self.list.push(match &*other.path {
            "" => other.problem.to_string(),
            path => format!("{path}: {}", other.problem),
        });
    }
}

/// The objects of one kind in a file.
struct Taken<'a, T: Readable> {
    selection: &'a Selection,
    source: Arc<str>,
    sound: BTreeMap<T::Name, Sourced<T>>,
    /// The `NAMESPACE/NAME` of each object with an error.
    ill: BTreeSet<String>,
}

impl<'a, T: Readable> Taken<'a, T> {
    fn of(selection: &'a Selection, path: &Path) -> Self {
        Self {
            selection,
            source: path.display().to_string().into(),
            sound: BTreeMap::new(),
            ill: BTreeSet::new(),
        }
    }

    fn take(&mut self, object: Object, problems: &mut Problems) {
        let prefix = object.prefix.clone();
        match read::<T>(object, self.selection) {
            Ok(Reading { name, .. }) if self.sound.contains_key(&name) => {
                let error = SpecError {
                    kind: T::KIND,
                    object: name.to_string(),
                    path: format!("{prefix}metadata.name"),
                    problem: Problem::Duplicate(name.to_string()),
                    extent: Extent::Object,
                };
                problems.list.push(error.to_string());
            }
            Ok(reading) => {
                let errors = reading.errors.iter();
                problems.list.extend(errors.map(ToString::to_string));
                let sourced = Sourced {
                    object: reading.object.ok().map(Arc::new),
                    trigger_time: reading.trigger_time,
                    source: self.source.clone(),
                };
                self.sound.insert(reading.name, sourced);
            }
            Err(unreadable) => {
                problems.is_unclear |= unreadable.object.is_none();
                self.ill.extend(unreadable.object);
                let errors = unreadable.errors.iter();
                problems.list.extend(errors.map(ToString::to_string));
            }
        }
    }

    /// Replaces the previous objects, except those with an error.
    fn replace(self, known: &mut OrdMap<T::Name, Sourced<T>>, problems: &Problems) {
        let is_gone = |name: &&T::Name| {
            let is_kept = problems.is_unclear || self.ill.contains(&name.to_string());
            !is_kept && !self.sound.contains_key(*name)
        };
        for name in known.keys().filter(is_gone).cloned().collect::<Vec<_>>() {
            known.remove(&name);
        }
        for (name, sourced) in self.sound {
            // An unchanged object also stays the same in memory, so that comparisons can skip it.
            if known.get(&name) != Some(&sourced) {
                known.insert(name, sourced);
            }
        }
    }
}
