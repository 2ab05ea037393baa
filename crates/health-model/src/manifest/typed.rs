//! Converts objects into typed values.

use std::collections::BTreeSet;

use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_path_to_error::Segment;

use super::Problem;

/// Maximum number of wrong types reported per object.
const WRONG_TYPES_MAX: usize = 32;

/// Result of reading an object.
#[derive(Clone, Debug, PartialEq)]
pub struct Typed<T> {
    /// The value without the fields of a wrong type; none if too little remains.
    pub value: Option<T>,
    /// Paths of those fields, and what is wrong with each.
    pub problems: Vec<(String, Problem)>,
    /// Paths of everything that was removed because of these problems.
    removed: BTreeSet<String>,
}

impl<T> Typed<T> {
    /// Whether something was removed at or below this path, so that it may be missing only for that reason.
    pub fn is_removed(&self, path: &str) -> bool {
        self.removed.iter().any(|removed| removed.starts_with(path))
    }
}

/// Deserializes an object. Values of a wrong type are reported and removed, so that the rest gets checked too.
pub fn typed<T: DeserializeOwned>(object: &mut Value) -> Typed<T> {
    let mut typed = Typed {
        value: None,
        problems: Vec::new(),
        removed: BTreeSet::new(),
    };
    loop {
        let error = match serde_path_to_error::deserialize(&*object) {
            Ok(value) => {
                typed.value = Some(value);
                return typed;
            }
            Err(error) => error,
        };
        let segments: Vec<Segment> = error.path().iter().cloned().collect();
        let reported = path(&segments);
        if !typed.is_removed(&reported) {
            let problem = Problem::WrongType(error.into_inner().to_string());
            typed.problems.push((reported, problem));
        }
        // The emptied field may have a wrong type in turn: then remove its parent.
        let mut depth = segments.len();
        while depth > 0 && typed.removed.contains(&path(&segments[..depth])) {
            depth -= 1;
        }
        if depth == 0 || typed.removed.len() >= WRONG_TYPES_MAX {
            return typed;
        }
        if let Some(value) = find(object, &segments[..depth]) {
            *value = Value::Null;
        }
        typed.removed.insert(path(&segments[..depth]));
    }
}

/// Formats a path as Kubernetes does.
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
