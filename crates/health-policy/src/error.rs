//! Why a policy document is refused, and where in the document.

use std::fmt;

use health_model::document::DocumentError;
use health_model::labels::LabelError;
use health_model::manifest;

/// Why a document, and with it the whole import, is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{place}{problem}")]
pub struct PolicyError {
    /// Where the problem is.
    pub place: Place,
    /// The problem.
    pub problem: Problem,
}

impl PolicyError {
    /// Returns the same error for a field of this policy.
    pub(super) fn of_policy(mut self, policy: &impl fmt::Display) -> Self {
        self.place.policy = Some(policy.to_string());
        self
    }

    /// Returns the same error with its field's path moved from `from` to `to`.
    pub(super) fn moved(mut self, from: &str, to: &str) -> Self {
        if let Some(rest) = self.place.path.strip_prefix(from) {
            self.place.path = format!("{to}{rest}");
        }
        self
    }
}

impl From<Problem> for PolicyError {
    /// An error of the document as a whole.
    fn from(problem: Problem) -> Self {
        Self {
            place: Place::default(),
            problem,
        }
    }
}

/// A position in a document.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// The policy, if already known.
    pub policy: Option<String>,
    /// The full path of the field, such as `spec.egress[0].toFQDNs`; empty for the document as a whole.
    pub path: String,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(policy) = &self.policy {
            write!(f, "{policy}: ")?;
        }
        if !self.path.is_empty() {
            write!(f, "{}: ", self.path)?;
        }
        Ok(())
    }
}

/// The problem with a document.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// The document cannot be parsed.
    #[error(transparent)]
    Text(#[from] DocumentError),
    /// The document contains no policy.
    #[error("it contains no policy{}", but(.skipped))]
    Empty {
        /// Objects of other kinds in the document.
        skipped: Vec<String>,
    },
    /// The field has a meaning in Cilium or Kubernetes, but is not supported here.
    #[error("{0} is not supported")]
    Unsupported(&'static str),
    /// The field has a meaning only in a Kubernetes cluster.
    #[error(
        "{0} needs a Kubernetes cluster; follow one with --registry kubernetes or --policies-from-kubernetes"
    )]
    NeedsCluster(&'static str),
    /// No policy has such a field.
    #[error("unknown field")]
    UnknownField,
    /// The field is required.
    #[error("missing")]
    Missing,
    /// The value has the wrong type.
    #[error("must be {expected}, not {found}")]
    WrongType {
        /// The expected type.
        expected: &'static str,
        /// The actual type.
        found: &'static str,
    },
    /// The list is too long.
    #[error("too many entries: {count}; at most {max} are allowed")]
    TooMany {
        /// The length of the list.
        count: usize,
        /// The limit.
        max: usize,
    },
    /// The labels are invalid.
    #[error(transparent)]
    Label(#[from] LabelError),
    /// Kubernetes' API server refuses this; the message is the server's own.
    #[error(transparent)]
    Api(#[from] manifest::Problem),
    /// The value is invalid.
    #[error("{value:?} is {problem}")]
    Value {
        /// The value, shortened.
        value: String,
        /// The problem with the value, and what to write instead.
        problem: String,
    },
    /// Fields conflict with each other, or one has no effect.
    #[error("{0}")]
    Conflict(String),
}

impl Problem {
    /// Builds the error for an invalid value: `value` is `problem`.
    pub(super) fn value(value: impl fmt::Display, problem: impl Into<String>) -> Self {
        const SHOWN: usize = 64;
        let value = value.to_string();
        let value = match value.char_indices().nth(SHOWN) {
            Some((end, _)) => format!("{}...", &value[..end]),
            None => value,
        };
        Self::Value {
            value,
            problem: problem.into(),
        }
    }
}

/// Describes the objects that the document contains instead.
fn but(skipped: &[String]) -> String {
    match skipped {
        [] => String::new(),
        [one] => format!(", only {one}"),
        [first, rest @ ..] => format!(", only {first} and {} more of other kinds", rest.len()),
    }
}
