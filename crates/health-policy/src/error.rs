//! Why a policy document is refused, and where in it.

use std::fmt;

use health_model::document::DocumentError;
use health_model::labels::LabelError;
use health_model::manifest;

/// A document is refused, and with it the whole import.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{place}{problem}")]
pub struct PolicyError {
    /// Where.
    pub place: Place,
    /// What is wrong.
    pub problem: Problem,
}

impl PolicyError {
    /// The same error, of a field of this policy.
    pub(super) fn of_policy(mut self, policy: &impl fmt::Display) -> Self {
        self.place.policy = Some(policy.to_string());
        self
    }

    /// The same error, of a field that stands elsewhere than where it was read from.
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

/// A place in a document.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// The policy, if it could be told yet.
    pub policy: Option<String>,
    /// The whole path of the field, such as `spec.egress[0].toFQDNs`; empty for the document.
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

/// What is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// A text that cannot be read.
    #[error(transparent)]
    Text(#[from] DocumentError),
    /// No policy in it.
    #[error("it contains no policy{}", but(.skipped))]
    Empty {
        /// Objects of other kinds that are in it.
        skipped: Vec<String>,
    },
    /// A field that means something, but not here.
    #[error("{0} is not supported")]
    Unsupported(&'static str),
    /// A field that no policy has.
    #[error("unknown field")]
    UnknownField,
    /// A field that must be there.
    #[error("missing")]
    Missing,
    /// A value of another type.
    #[error("must be {expected}, not {found}")]
    WrongType {
        /// What it must be.
        expected: &'static str,
        /// What it is.
        found: &'static str,
    },
    /// A list that is too long.
    #[error("{count} are too many; at most {max} are allowed")]
    TooMany {
        /// Its length.
        count: usize,
        /// The limit.
        max: usize,
    },
    /// Labels that cannot be.
    #[error(transparent)]
    Label(#[from] LabelError),
    /// What the API server of Kubernetes refuses, in its words.
    #[error(transparent)]
    Api(#[from] manifest::Problem),
    /// A value that cannot be.
    #[error("{value:?} is {problem}")]
    Value {
        /// The value, shortened.
        value: String,
        /// What is wrong with it, and what to write.
        problem: String,
    },
    /// Fields that cannot stand together, or a choice that has no effect.
    #[error("{0}")]
    Conflict(String),
}

impl Problem {
    /// A value that cannot be: `value` is `problem`.
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

/// What is there instead.
fn but(skipped: &[String]) -> String {
    match skipped {
        [] => String::new(),
        [one] => format!(", only {one}"),
        [first, rest @ ..] => format!(", only {first} and {} more of other kinds", rest.len()),
    }
}
