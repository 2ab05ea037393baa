//! Why a manifest is refused, and where in it.

use std::fmt;

use health_model::document::DocumentError;

/// One thing that is wrong with a manifest.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct SpecError {
    /// `NAMESPACE/NAME` of the pod, if it could be told yet.
    pub pod: Option<String>,
    /// The container, if it is about one that has a name.
    pub container: Option<String>,
    /// The path of the field as Kubernetes writes it, such as `spec.containers[0].livenessProbe.httpGet.port`; empty
    /// for the text as a whole.
    pub path: String,
    /// What is wrong.
    pub problem: Problem,
}

impl fmt::Display for SpecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(pod) = &self.pod {
            write!(f, "pod {pod}")?;
            if let Some(container) = &self.container {
                write!(f, ", container {container}")?;
            }
            f.write_str(": ")?;
        }
        if !self.path.is_empty() {
            write!(f, "{}: ", self.path)?;
        }
        self.problem.fmt(f)
    }
}

/// What is wrong, in the words of Kubernetes where it has some.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// A text that cannot be read.
    #[error(transparent)]
    Text(#[from] DocumentError),
    /// No pod in it.
    #[error("there is no pod in it")]
    Empty,
    /// A value of another type. The reader's words.
    #[error("Invalid value: {0}")]
    WrongType(String),
    /// A field that does not exist.
    #[error("unknown field{0}")]
    UnknownField(&'static str),
    /// A value that cannot be.
    #[error("Invalid value: {value}: {detail}")]
    Invalid {
        /// The value, shortened; text in quotes.
        value: String,
        /// What it must be.
        detail: String,
    },
    /// A field that must be there.
    #[error("Required value{}", prefixed(.0))]
    Required(&'static str),
    /// A value that is none of a few.
    #[error("Unsupported value: {value:?}: supported values: {}", quoted(.supported))]
    NotSupported {
        /// The value, shortened.
        value: String,
        /// Those that there are.
        supported: &'static [&'static str],
    },
    /// A field that must not be there.
    #[error("Forbidden: {0}")]
    Forbidden(&'static str),
    /// A value that another one has.
    #[error("Duplicate value: {0:?}")]
    Duplicate(String),
}

impl Problem {
    /// A text that cannot be: it is `detail` that it must be.
    pub(super) fn invalid(value: &str, detail: impl Into<String>) -> Self {
        Self::Invalid {
            value: format!("{:?}", shortened(value)),
            detail: detail.into(),
        }
    }

    /// A number that cannot be.
    pub(super) fn invalid_number(value: i64, detail: impl Into<String>) -> Self {
        Self::Invalid {
            value: value.to_string(),
            detail: detail.into(),
        }
    }

    /// A text that is none of a few.
    pub(super) fn not_supported(value: &str, supported: &'static [&'static str]) -> Self {
        Self::NotSupported {
            value: shortened(value),
            supported,
        }
    }
}

fn prefixed(detail: &str) -> String {
    match detail {
        "" => String::new(),
        detail => format!(": {detail}"),
    }
}

fn quoted(values: &[&str]) -> String {
    let quoted: Vec<_> = values.iter().map(|value| format!("{value:?}")).collect();
    quoted.join(", ")
}

fn shortened(text: &str) -> String {
    const SHOWN: usize = 64;
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

/// What is wrong with the pod that is read, and which part of it is.
#[derive(Debug, Default)]
pub(super) struct Errors {
    pub(super) list: Vec<SpecError>,
    pub(super) pod: Option<String>,
    pub(super) container: Option<String>,
}

impl Errors {
    pub(super) fn add(&mut self, path: impl Into<String>, problem: Problem) {
        self.list.push(SpecError {
            pod: self.pod.clone(),
            container: self.container.clone(),
            path: path.into(),
            problem,
        });
    }
}
