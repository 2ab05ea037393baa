//! Kubernetes manifests: the objects in them, and what is wrong with them.

mod names;
mod objects;
mod typed;

use crate::document::DocumentError;

pub use names::{
    check_dns_label, check_label_key, check_label_value, check_port_name, check_subdomain,
};
pub use objects::{NoObject, Object, ObjectKind, ObjectKinds, objects};
pub use typed::{Typed, typed};

/// The namespace of an object that names none.
pub const NAMESPACE: &str = "default";

/// The annotation by which a kubelet marks an object that only mirrors a pod of its own manifest folder. The value is
/// that pod's UID, which the runtime also has. Other clients can set the annotation too.
pub const MIRROR_ANNOTATION: &str = "kubernetes.io/config.mirror";

/// Kubernetes' message for a number that is not a port.
pub const PORT_OUT_OF_RANGE: &str = "must be between 1 and 65535, inclusive";

/// What is wrong, in Kubernetes' own wording where it exists.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// A document that cannot be parsed.
    #[error(transparent)]
    Text(#[from] DocumentError),
    /// No object of the wanted kinds.
    #[error("no {0} found")]
    Empty(&'static str),
    /// A value of the wrong type, with the parser's message.
    #[error("Invalid value: {0}")]
    WrongType(String),
    /// A field that does not exist.
    #[error("unknown field{0}")]
    UnknownField(&'static str),
    /// An invalid value.
    #[error("Invalid value: {value}: {detail}")]
    Invalid {
        /// The value, shortened; strings in quotes.
        value: String,
        /// What it must be.
        detail: String,
    },
    /// A missing required field.
    #[error("Required value{}", prefixed(.0))]
    Required(&'static str),
    /// A value outside a fixed set.
    #[error("Unsupported value: {value:?}: supported values: {}", quoted(.supported))]
    NotSupported {
        /// The value, shortened.
        value: String,
        /// The allowed values.
        supported: &'static [&'static str],
    },
    /// A field that must not be set.
    #[error("Forbidden: {0}")]
    Forbidden(&'static str),
    /// A value that another element already uses.
    #[error("Duplicate value: {0:?}")]
    Duplicate(String),
}

impl Problem {
    /// An invalid string; `detail` says what it must be.
    pub fn invalid(value: &str, detail: impl Into<String>) -> Self {
        Self::Invalid {
            value: format!("{:?}", shortened(value)),
            detail: detail.into(),
        }
    }

    /// An invalid number; `detail` says what it must be.
    pub fn invalid_number(value: i64, detail: impl Into<String>) -> Self {
        Self::Invalid {
            value: value.to_string(),
            detail: detail.into(),
        }
    }

    /// A string outside a fixed set.
    pub fn not_supported(value: &str, supported: &'static [&'static str]) -> Self {
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

/// Checks the name of an object or namespace: a DNS subdomain (RFC 1123), which is safe in tables and paths.
pub fn check_name(name: &str) -> Result<(), Problem> {
    const LENGTH_MAX: usize = 253;
    let fits =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte);
    if name.len() > LENGTH_MAX || !name.bytes().all(fits) {
        let detail = "must be at most 253 lower-case letters, digits, '-' and '.'";
        return Err(Problem::invalid(name, detail));
    }
    Ok(())
}

/// Checks the name of a port of a service or of its endpoints: a DNS label (RFC 1123).
pub fn check_label(name: &str) -> Result<(), Problem> {
    const LENGTH_MAX: usize = 63;
    let fits = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let is_bare = name.starts_with('-') || name.ends_with('-') || name.is_empty();
    if name.len() > LENGTH_MAX || is_bare || !name.bytes().all(fits) {
        let detail =
            "must be at most 63 lower-case letters, digits and '-', with no '-' at either end";
        return Err(Problem::invalid(name, detail));
    }
    Ok(())
}
