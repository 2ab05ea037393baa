//! Errors in objects, each with its object and the path of the field.

use std::fmt;

use health_model::manifest::Problem;
use health_model::printable::printable;

/// The kinds of objects that services are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A `Service`.
    Service,
    /// An `EndpointSlice`.
    Slice,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Service => "service",
            Self::Slice => "endpoint slice",
        })
    }
}

/// How much of an object an error concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// One member of a list, such as an address. The member is left out, and the others are unaffected.
    Member,
    /// The whole object: its meaning without the error is unclear.
    Object,
}

/// An error in an object. The field at this path is left out or gets its default; the rest of the object is used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{kind} {}: {}: {problem}", printable(.object), printable(.path))]
pub struct SpecError {
    /// The kind of the object.
    pub kind: Kind,
    /// The object's `NAMESPACE/NAME`.
    pub object: String,
    /// The path of the field as Kubernetes writes it, such as `spec.ports[0].nodePort`.
    pub path: String,
    /// The problem with the field.
    pub problem: Problem,
    /// How much of the object the error concerns.
    pub extent: Extent,
}

/// Collects the errors of the object that is being read.
#[derive(Debug)]
pub(super) struct Errors {
    kind: Kind,
    object: String,
    list: Vec<SpecError>,
}

impl Errors {
    pub(super) fn of(kind: Kind, namespace: &str, name: &str) -> Self {
        Self {
            kind,
            object: format!("{namespace}/{name}"),
            list: Vec::new(),
        }
    }

    /// Adds an error that concerns the whole object.
    pub(super) fn add(&mut self, path: impl Into<String>, problem: Problem) {
        self.push(path.into(), problem, Extent::Object);
    }

    /// Adds an error of one list member, which is left out.
    pub(super) fn leave_out(&mut self, path: impl Into<String>, problem: Problem) {
        self.push(path.into(), problem, Extent::Member);
    }

    fn push(&mut self, path: String, problem: Problem, extent: Extent) {
        self.list.push(SpecError {
            kind: self.kind,
            object: self.object.clone(),
            path,
            problem,
            extent,
        });
    }

    /// Returns the number of errors.
    pub(super) fn len(&self) -> usize {
        self.list.len()
    }

    /// Marks all errors from index `first` on as concerning the whole object, because they have emptied a list.
    pub(super) fn concern_the_object(&mut self, first: usize) {
        for error in self.list.iter_mut().skip(first) {
            error.extent = Extent::Object;
        }
    }

    pub(super) fn into_list(self) -> Vec<SpecError> {
        self.list
    }
}
