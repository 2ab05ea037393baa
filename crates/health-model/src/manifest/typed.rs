//! Objects become values of their type.

use std::collections::BTreeSet;

use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_path_to_error::Segment;

use super::Problem;

/// Most wrong types of one object that are told.
const WRONG_TYPES_MAX: usize = 32;

/// What was read of an object.
#[derive(Clone, Debug, PartialEq)]
pub struct Typed<T> {
    /// It, without the fields of a wrong type; none if that leaves nothing.
    pub value: Option<T>,
    /// The paths of those fields, and what is wrong with each.
    pub problems: Vec<(String, Problem)>,
    /// The paths of all that was left out for them.
    removed: BTreeSet<String>,
}

impl<T> Typed<T> {
    /// Whether something was left out at this path or below, and may be missing only for that.
    pub fn is_removed(&self, path: &str) -> bool {
        self.removed.iter().any(|removed| removed.starts_with(path))
    }
}

/// Reads an object. What has a wrong type is told and taken out of it, so that the rest is looked at too.
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
        let told = path(&segments);
        if !typed.is_removed(&told) {
            let problem = Problem::WrongType(error.into_inner().to_string());
            typed.problems.push((told, problem));
        }
        // A place that is left empty may be wrong in turn: then the whole around it goes.
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
