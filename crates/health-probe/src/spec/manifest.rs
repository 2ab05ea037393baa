//! Texts with pods in them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use health_model::document;
use serde::Deserialize as _;
use serde_json::Value;
use serde_path_to_error::Segment;

use super::error::{Problem, SpecError};
use super::{PodSpec, ProbeType, object};
use crate::worker::PodStatus;

/// Most wrong types of one pod that are told.
const WRONG_TYPES_MAX: usize = 32;

/// The fields of probes, by the field that holds them; `""` is the probe itself.
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

/// What a text holds. A pod with an error is left out as a whole; the others do not suffer for it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Manifest {
    /// The pods, in the order of the text. No two have one UID.
    pub pods: Vec<PodSpec>,
    /// What the text says of their containers, by UID, where it says something.
    pub statuses: BTreeMap<Arc<str>, PodStatus>,
    /// All that is wrong.
    pub errors: Vec<SpecError>,
    /// Those of the pods.
    uids: BTreeSet<Arc<str>>,
}

/// Reads the pods of a text in YAML, which may hold several documents, or JSON: objects of kind `Pod`, `PodList` or
/// `List`. Fields of probes that do not exist are errors; other fields are not looked at.
pub fn read(text: &str) -> Manifest {
    let mut manifest = Manifest::default();
    match document::parse(text) {
        Ok(documents) => {
            for document in documents.into_iter().filter(|document| !document.is_null()) {
                manifest.read_document(document);
            }
        }
        Err(error) => manifest.add_error("", Problem::Text(error)),
    }
    if manifest.pods.is_empty() && manifest.errors.is_empty() {
        manifest.add_error("", Problem::Empty("pod"));
    }
    manifest
}

impl Manifest {
    fn add_error(&mut self, path: &str, problem: Problem) {
        self.errors.push(SpecError {
            pod: None,
            container: None,
            path: path.to_owned(),
            problem,
        });
    }

    fn read_document(&mut self, mut document: Value) {
        let kind = document.get("kind").and_then(Value::as_str);
        if !matches!(kind, Some("List" | "PodList")) {
            return self.read_object(document, "", &["Pod", "PodList", "List"]);
        }
        let implied = kind == Some("PodList");
        let is_v1 = self.is_v1(&document, "", false);
        match document.get_mut("items").map(Value::take) {
            _ if !is_v1 => {}
            Some(Value::Array(items)) => {
                for (i, mut item) in items.into_iter().enumerate() {
                    if let (true, Value::Object(fields)) = (implied, &mut item) {
                        // The API leaves both out of a list of one kind.
                        fields.entry("kind").or_insert_with(|| "Pod".into());
                        fields.entry("apiVersion").or_insert_with(|| "v1".into());
                    }
                    self.read_object(item, &format!("items[{i}]."), &["Pod"]);
                }
            }
            None | Some(Value::Null) => {}
            Some(_) => self.add_error("items", Problem::WrongType("must be a list".to_owned())),
        }
    }

    fn read_object(&mut self, object: Value, prefix: &str, kinds: &'static [&'static str]) {
        let Some(fields) = object.as_object() else {
            let path = prefix.trim_end_matches('.');
            return self.add_error(path, Problem::WrongType("must be an object".to_owned()));
        };
        match fields.get("kind") {
            Some(Value::String(kind)) if kind == "Pod" => {}
            Some(Value::String(kind)) => {
                let problem = Problem::not_supported(kind, kinds);
                return self.add_error(&format!("{prefix}kind"), problem);
            }
            _ => return self.add_error(&format!("{prefix}kind"), Problem::Required("")),
        }
        if !self.is_v1(&object, prefix, true) {
            return;
        }
        match read_pod(object) {
            Ok((pod, _)) if self.uids.contains(&pod.uid) => {
                let uid = Problem::Duplicate(pod.uid.to_string());
                self.add_error(&format!("{prefix}metadata.uid"), uid);
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
                    path: format!("{prefix}{}", error.path),
                    ..error
                })),
        }
    }

    fn is_v1(&mut self, object: &Value, prefix: &str, must_be: bool) -> bool {
        let path = format!("{prefix}apiVersion");
        match object.get("apiVersion") {
            Some(Value::String(version)) if version == "v1" => return true,
            None if !must_be => return true,
            Some(Value::String(version)) => {
                self.add_error(&path, Problem::not_supported(version, &["v1"]));
            }
            _ => self.add_error(&path, Problem::Required("")),
        }
        false
    }
}

/// A pod, or all that is wrong with it. What has a wrong type is told and taken out, so that the rest is looked at too.
pub(crate) fn read_pod(mut object: Value) -> Result<(PodSpec, Option<PodStatus>), Vec<SpecError>> {
    let mut problems = unknown_fields(&object);
    let mut removed = BTreeSet::new();
    let pod: object::Pod = loop {
        let error = match serde_path_to_error::deserialize(&object) {
            Ok(pod) => break pod,
            Err(error) => error,
        };
        let segments: Vec<Segment> = error.path().iter().cloned().collect();
        let told = path(&segments);
        let is_inside = |removed: &String| removed.starts_with(&told);
        if !removed.iter().any(is_inside) {
            problems.push((told, Problem::WrongType(error.into_inner().to_string())));
        }
        // A place that is left empty may be wrong in turn: then the whole around it goes.
        let mut depth = segments.len();
        while depth > 0 && removed.contains(&path(&segments[..depth])) {
            depth -= 1;
        }
        if depth == 0 || removed.len() >= WRONG_TYPES_MAX {
            return Err(in_pod(&object, problems));
        }
        if let Some(value) = find(&mut object, &segments[..depth]) {
            *value = Value::Null;
        }
        removed.insert(path(&segments[..depth]));
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
            // What is missing only because it was taken out is no error of its own.
            let is_own =
                |error: &SpecError| !removed.iter().any(|path| path.starts_with(&error.path));
            all.extend(errors.into_iter().filter(is_own));
            Err(all)
        }
    }
}

/// What a pod says of its containers, if that can be read.
pub(crate) fn read_status(object: &Value) -> Option<PodStatus> {
    let pod = object::Pod::deserialize(object).ok()?;
    PodStatus::from_pod(&pod.into())
}

/// The problems as those of this pod.
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

/// The fields of probes that do not exist, and those of containers that look as if they were to hold a probe.
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
                ("grpc", "mode") => ": the annotation CONTAINER.TYPE.mode sets it",
                _ => "",
            };
            unknown.push((format!("{path}.{name}"), Problem::UnknownField(hint)));
        }
    }
}

/// The path as Kubernetes writes it.
fn path(segments: &[Segment]) -> String {
    let mut path = String::new();
    for segment in segments {
        match segment {
            Segment::Seq { index } => path.push_str(&format!("[{index}]")),
            Segment::Map { key } | Segment::Enum { variant: key } => {
                if !path.is_empty() {
                    path.push('.');
                }
                path.push_str(key);
            }
            Segment::Unknown => path.push('?'),
        }
    }
    path
}

fn find<'a>(object: &'a mut Value, segments: &[Segment]) -> Option<&'a mut Value> {
    segments
        .iter()
        .try_fold(object, |value, segment| match segment {
            Segment::Seq { index } => value.get_mut(*index),
            Segment::Map { key } | Segment::Enum { variant: key } => value.get_mut(key),
            Segment::Unknown => None,
        })
}
