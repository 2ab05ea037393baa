//! Reads pods from YAML and JSON documents.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use health_model::manifest::{NoObject, Object, ObjectKind, ObjectKinds, objects, typed};
use serde::Deserialize as _;
use serde_json::{Value, json};

use super::error::{Problem, SpecError};
use super::{PodSpec, ProbeType, object};
use crate::worker::PodStatus;

/// The objects that hold pods or pod templates.
const KINDS: ObjectKinds = ObjectKinds {
    kinds: &[
        POD,
        kind("Deployment", "DeploymentList", &["apps/v1"]),
        kind("DaemonSet", "DaemonSetList", &["apps/v1"]),
        kind("StatefulSet", "StatefulSetList", &["apps/v1"]),
        kind("ReplicaSet", "ReplicaSetList", &["apps/v1"]),
        kind(
            "ReplicationController",
            "ReplicationControllerList",
            &["v1"],
        ),
        kind("Job", "JobList", &["batch/v1"]),
        CRON_JOB,
    ],
    names: NAMES,
    item_names: match NAMES.split_last() {
        Some((_list, items)) => items,
        None => &[],
    },
    noun: "pod",
};
/// The kinds that error messages name. Lists cannot be nested.
const NAMES: &[&str] = &[
    "Pod",
    "Deployment",
    "DaemonSet",
    "StatefulSet",
    "ReplicaSet",
    "ReplicationController",
    "Job",
    "CronJob",
    "List",
];
const POD: ObjectKind = kind("Pod", "PodList", &["v1"]);
const CRON_JOB: ObjectKind = kind("CronJob", "CronJobList", &["batch/v1"]);

const fn kind(
    name: &'static str,
    list: &'static str,
    versions: &'static [&'static str; 1],
) -> ObjectKind {
    ObjectKind {
        name,
        list,
        versions,
    }
}

/// The fields of probes, by the field that contains them; `""` is the probe itself.
const FIELDS: [(&str, &[&str]); 5] = [
    (
        "",
        &[
            "exec",
            "httpGet",
            "tcpSocket",
            "grpc",
            "initialDelaySeconds",
            "periodSeconds",
            "timeoutSeconds",
            "successThreshold",
            "failureThreshold",
            "terminationGracePeriodSeconds",
        ],
    ),
    ("exec", &["command"]),
    (
        "httpGet",
        &["path", "port", "host", "scheme", "httpHeaders"],
    ),
    ("tcpSocket", &["port", "host"]),
    ("grpc", &["port", "service"]),
];

/// The contents of a manifest. A pod with an error is left out completely; other pods are not affected.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Manifest {
    /// The pods, in the order of the manifest. All UIDs differ.
    pub pods: Vec<PodSpec>,
    /// The container statuses in the manifest, if any, by UID.
    pub statuses: BTreeMap<Arc<str>, PodStatus>,
    /// All errors.
    pub errors: Vec<SpecError>,
    /// The kind and name of each object of another kind, if the manifest also has pods.
    pub skipped: Vec<String>,
    uids: BTreeSet<Arc<str>>,
}

/// Reads the pods in a string, which is JSON, or YAML with one or more documents: objects of kind `Pod`, objects with a
/// pod template, and lists. A template becomes one pod with the name of its object. Unknown fields of probes are
/// errors; other unknown fields are ignored.
pub fn read(text: &str) -> Manifest {
    let mut manifest = Manifest::default();
    let mut others = Vec::new();
    for found in objects(text, &KINDS) {
        match found {
            Ok(object) => manifest.read_object(object),
            Err(NoObject {
                path,
                problem,
                name: Some(name),
                ..
            }) => others.push((name, path, problem)),
            Err(other) => manifest.add_error(other.path, other.problem),
        }
    }
    let has_pods = !manifest.pods.is_empty() || !manifest.errors.is_empty();
    for (name, path, problem) in others {
        match has_pods {
            true => manifest.skipped.push(name),
            // Nothing in the manifest is usable, which deserves more than a hint.
            false => manifest.add_error(path, problem),
        }
    }
    manifest
}

/// The path of the pod template in objects of this kind; empty for pods.
fn template_path(kind: ObjectKind) -> &'static str {
    match kind {
        POD => "",
        CRON_JOB => "spec.jobTemplate.spec.template",
        _ => "spec.template",
    }
}

/// Builds a pod from an object's template at this path, with the object's name and namespace. `None` if there is no
/// template.
fn templated(object: &mut Value, path: &str) -> Option<Value> {
    let pointer = format!("/{}", path.replace('.', "/"));
    let mut pod = object.pointer_mut(&pointer)?.take();
    let fields = pod.as_object_mut()?;
    let metadata = fields.entry("metadata").or_insert_with(|| json!({}));
    if metadata.is_null() {
        *metadata = json!({});
    }
    if let Some(metadata) = metadata.as_object_mut() {
        for field in ["name", "namespace", "uid"] {
            metadata.remove(field);
        }
        for field in ["name", "namespace"] {
            if let Some(value) = object["metadata"].get(field) {
                metadata.insert(field.to_owned(), value.clone());
            }
        }
    }
    fields.remove("status");
    Some(pod)
}

impl Manifest {
    fn add_error(&mut self, path: String, problem: Problem) {
        self.errors.push(SpecError {
            pod: None,
            container: None,
            path,
            problem,
        });
    }

    fn read_object(&mut self, object: Object) {
        let Object {
            kind,
            mut prefix,
            mut value,
        } = object;
        let path = template_path(kind);
        if !path.is_empty() {
            let Some(pod) = templated(&mut value, path) else {
                return self.add_error(format!("{prefix}{path}"), Problem::Required(""));
            };
            value = pod;
        }
        let own_prefix = prefix.clone();
        if !path.is_empty() {
            prefix.push_str(path);
            prefix.push('.');
        }
        match read_pod(value) {
            Ok((pod, _)) if self.uids.contains(&pod.uid) => {
                let uid = Problem::Duplicate(pod.uid.to_string());
                let field = if kind == POD { "uid" } else { "name" };
                self.add_error(format!("{own_prefix}metadata.{field}"), uid);
            }
            Ok((pod, status)) => {
                self.uids.insert(pod.uid.clone());
                if let Some(status) = status {
                    self.statuses.insert(pod.uid.clone(), status);
                }
                self.pods.push(pod);
            }
            Err(errors) => self
                .errors
                .extend(errors.into_iter().map(|error| SpecError {
                    path: match &*error.path {
                        // The name and namespace belong to the object itself.
                        "metadata.name" | "metadata.namespace" => {
                            format!("{own_prefix}{}", error.path)
                        }
                        path => format!("{prefix}{path}"),
                    },
                    ..error
                })),
        }
    }
}

/// Reads a pod, or returns all problems with it. Values of the wrong type are reported and removed, so that the other
/// values are checked too.
pub(crate) fn read_pod(mut object: Value) -> Result<(PodSpec, Option<PodStatus>), Vec<SpecError>> {
    let mut problems = unknown_fields(&object);
    let mut typed = typed::<object::Pod>(&mut object);
    problems.append(&mut typed.problems);
    let Some(pod) = typed.value.take() else {
        return Err(in_pod(&object, problems));
    };
    let pod = pod.into();
    match PodSpec::from_pod(&pod) {
        Ok(spec) if problems.is_empty() => {
            let status = PodStatus::from_pod(&pod);
            let says_something = |status: &PodStatus| {
                !status.containers.is_empty() || !status.init_containers.is_empty()
            };
            Ok((spec, status.filter(says_something)))
        }
        Ok(_) => Err(in_pod(&object, problems)),
        Err(errors) => {
            let mut all = in_pod(&object, problems);
            // A field that is missing only because its value was removed is not a separate error.
            let is_own = |error: &SpecError| !typed.is_removed(&error.path);
            all.extend(errors.into_iter().filter(is_own));
            Err(all)
        }
    }
}

/// The container statuses in a pod, if they can be read.
pub(crate) fn read_status(object: &Value) -> Option<PodStatus> {
    let pod = object::Pod::deserialize(object).ok()?;
    PodStatus::from_pod(&pod.into())
}

/// Converts problems to errors of this pod.
fn in_pod(object: &Value, problems: Vec<(String, Problem)>) -> Vec<SpecError> {
    let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str);
    let name = text("/metadata/name");
    let namespace = text("/metadata/namespace").unwrap_or("default");
    let pod = name.map(|name| format!("{namespace}/{name}"));
    let container = |path: &str| {
        let (list, rest) = path.strip_prefix("spec.")?.split_once('[')?;
        let (index, _) = rest.split_once(']')?;
        text(&format!("/spec/{list}/{index}/name")).map(str::to_owned)
    };
    problems
        .into_iter()
        .map(|(path, problem)| SpecError {
            pod: pod.clone(),
            container: container(&path),
            path,
            problem,
        })
        .collect()
}

/// Finds unknown fields of probes, and fields of containers that look as if they should hold a probe.
fn unknown_fields(object: &Value) -> Vec<(String, Problem)> {
    let mut unknown = Vec::new();
    for list in ["containers", "initContainers"] {
        let containers = object.pointer(&format!("/spec/{list}"));
        let containers = containers.and_then(Value::as_array);
        for (i, container) in containers.into_iter().flatten().enumerate() {
            let path = format!("spec.{list}[{i}]");
            for (name, value) in container.as_object().into_iter().flatten() {
                let path = format!("{path}.{name}");
                if ProbeType::ALL.iter().any(|kind| kind.field() == name) {
                    unknown_of_probe(value, &path, &mut unknown);
                } else if name.to_ascii_lowercase().ends_with("probe") {
                    unknown.push((path, Problem::UnknownField("")));
                }
            }
        }
    }
    unknown
}

fn unknown_of_probe(probe: &Value, path: &str, unknown: &mut Vec<(String, Problem)>) {
    for (part, known) in FIELDS {
        let (value, path) = match part {
            "" => (Some(probe), path.to_owned()),
            part => (probe.get(part), format!("{path}.{part}")),
        };
        let fields = value.and_then(Value::as_object).into_iter().flatten();
        for (name, _) in fields.filter(|(name, _)| !known.contains(&name.as_str())) {
            let hint = match (part, name.as_str()) {
                ("grpc", "mode") => ": set it with the annotation CONTAINER.TYPE.mode",
                _ => "",
            };
            unknown.push((format!("{path}.{name}"), Problem::UnknownField(hint)));
        }
    }
}
