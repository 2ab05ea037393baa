//! Labels: identities consist of them, and policy selects by them.

pub mod filter;
pub mod pod;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Source of the labels of [reserved identities](crate::identity).
pub const RESERVED: &str = "reserved";
/// Source of the labels of CIDR identities.
pub const CIDR: &str = "cidr";
/// Source of the labels of Kubernetes nodes.
pub const NODE: &str = "node";
/// Source of labels without an explicit source.
pub const UNSPEC: &str = "unspec";

/// Sources of the labels that only agents assign, never to endpoints.
const OF_AGENTS: [&str; 2] = [RESERVED, CIDR];

/// Maximum length of a label as a string, in bytes.
pub const LABEL_MAX: usize = 1024;
/// Maximum number of labels of one endpoint.
pub const LABELS_MAX: usize = 256;
/// Maximum length of all labels of a pod as strings, in bytes.
pub const LABELS_BYTES_MAX: usize = 8192;

/// Why a string is not a label, or labels do not form a set.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LabelError {
    /// No key.
    #[error("label {0:?} has no key; expected SOURCE:KEY=VALUE, KEY=VALUE or KEY")]
    NoKey(String),
    /// Empty source.
    #[error("label {0:?} has an empty source; expected SOURCE:KEY=VALUE, KEY=VALUE or KEY")]
    NoSource(String),
    /// An equals sign in the key, or a colon or equals sign in the source: as a string, it would be another label.
    #[error("label {0:?} contains a separator in its source or key")]
    Separator(String),
    /// A character that would break listings and logs.
    #[error("label {0:?} contains a control character")]
    ControlCharacter(String),
    /// Too long.
    #[error(
        "the label that begins with {start:?} has {length} bytes; at most {LABEL_MAX} are allowed"
    )]
    TooLong {
        /// Length of the label.
        length: usize,
        /// How it starts.
        start: String,
    },
    /// The same key twice.
    #[error("label {key} appears twice, as {first:?} and as {second:?}")]
    Twice {
        /// Source and key.
        key: String,
        /// One value.
        first: String,
        /// Another.
        second: String,
    },
    /// Too many.
    #[error("too many labels: {0}; at most {LABELS_MAX} are allowed")]
    TooMany(usize),
    /// Too long in all.
    #[error("the labels have {0} bytes; at most {LABELS_BYTES_MAX} are allowed")]
    TooLarge(usize),
}

/// One label, as a string `SOURCE:KEY[=VALUE]`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Label {
    source: String,
    key: String,
    value: String,
}

impl Label {
    /// Builds a label from its parts.
    pub fn new(source: &str, key: &str, value: &str) -> Result<Self, LabelError> {
        let label = Self {
            source: source.to_owned(),
            key: key.to_owned(),
            value: value.to_owned(),
        };
        label.validate()?;
        Ok(label)
    }

    /// Builds the label of a reserved identity.
    pub fn reserved(name: &'static str) -> Self {
        Self {
            source: RESERVED.to_owned(),
            key: name.to_owned(),
            value: String::new(),
        }
    }

    /// Where it comes from: `k8s`, `container`, `reserved`, `cidr`, `unspec`.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Its key.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Its value, which is often empty.
    pub fn value(&self) -> &str {
        &self.value
    }

    /// Whether an endpoint may have it.
    pub fn is_for_endpoints(&self) -> bool {
        !OF_AGENTS.contains(&self.source())
    }

    fn validate(&self) -> Result<(), LabelError> {
        let length = self.source.len() + self.key.len() + self.value.len() + 2;
        if length > LABEL_MAX {
            let start = self.to_string().chars().take(32).collect();
            return Err(LabelError::TooLong { length, start });
        }
        let text = self.to_string();
        if text.chars().any(char::is_control) {
            return Err(LabelError::ControlCharacter(text));
        }
        if self.source.contains([':', '=']) || self.key.contains('=') {
            return Err(LabelError::Separator(text));
        }
        if self.source.is_empty() {
            return Err(LabelError::NoSource(text));
        }
        if self.key.is_empty() {
            return Err(LabelError::NoKey(text));
        }
        Ok(())
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.source, self.key)?;
        if !self.value.is_empty() {
            write!(f, "={}", self.value)?;
        }
        Ok(())
    }
}

impl FromStr for Label {
    type Err = LabelError;

    /// Parses a label. The first `=` starts the value; a `:` before it ends the source. Without a source it is
    /// [`UNSPEC`].
    fn from_str(text: &str) -> Result<Self, LabelError> {
        let (name, value) = text.split_once('=').unwrap_or((text, ""));
        let (source, key) = name.split_once(':').unwrap_or((UNSPEC, name));
        Self::new(source, key, value)
    }
}

impl TryFrom<String> for Label {
    type Error = LabelError;

    fn try_from(text: String) -> Result<Self, LabelError> {
        text.parse()
    }
}

impl From<Label> for String {
    fn from(label: Label) -> Self {
        label.to_string()
    }
}

/// Sorted labels, each source and key at most once. Sets of the same labels are equal, no matter how they were written.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "Vec<Label>", into = "Vec<Label>")]
pub struct LabelSet(Vec<Label>);

impl LabelSet {
    /// Builds a set. Duplicates of a label are merged.
    pub fn new(labels: impl IntoIterator<Item = Label>) -> Result<Self, LabelError> {
        let mut labels: Vec<Label> = labels.into_iter().collect();
        labels.sort_unstable();
        labels.dedup();
        if labels.len() > LABELS_MAX {
            return Err(LabelError::TooMany(labels.len()));
        }
        let same_key = labels
            .windows(2)
            .find(|pair| (&pair[0].source, &pair[0].key) == (&pair[1].source, &pair[1].key));
        match same_key {
            Some(pair) => Err(LabelError::Twice {
                key: format!("{}:{}", pair[0].source, pair[0].key),
                first: pair[0].value.clone(),
                second: pair[1].value.clone(),
            }),
            None => Ok(Self(labels)),
        }
    }

    /// The set with the single label of a reserved identity.
    pub fn reserved(name: &'static str) -> Self {
        Self(vec![Label::reserved(name)])
    }

    /// The same set with the label of a reserved identity.
    #[must_use]
    pub fn with_reserved(mut self, name: &'static str) -> Self {
        let label = Label::reserved(name);
        if let Err(at) = self.0.binary_search(&label) {
            self.0.insert(at, label);
        }
        self
    }

    /// The labels in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Label> {
        self.0.iter()
    }

    /// Whether it has no labels.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The label with this source and key, whatever its value.
    pub fn get(&self, source: &str, key: &str) -> Option<&Label> {
        self.0
            .binary_search_by(|label| (label.source(), label.key()).cmp(&(source, key)))
            .ok()
            .map(|at| &self.0[at])
    }

    /// Whether it contains the label of this reserved identity.
    pub fn has_reserved(&self, name: &str) -> bool {
        self.get(RESERVED, name).is_some()
    }
}

impl TryFrom<Vec<Label>> for LabelSet {
    type Error = LabelError;

    fn try_from(labels: Vec<Label>) -> Result<Self, LabelError> {
        Self::new(labels)
    }
}

impl From<LabelSet> for Vec<Label> {
    fn from(set: LabelSet) -> Self {
        set.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(labels: &[&str]) -> Result<LabelSet, LabelError> {
        LabelSet::new(labels.iter().map(|label| label.parse().unwrap()))
    }

    #[test]
    fn labels_are_read_as_they_are_shown() {
        for (text, source, key, value) in [
            ("k8s:app=web", "k8s", "app", "web"),
            ("reserved:host", "reserved", "host", ""),
            (
                "unspec:url=http://a:80/?b=c",
                "unspec",
                "url",
                "http://a:80/?b=c",
            ),
            ("cidr:10.0.0.0/8", "cidr", "10.0.0.0/8", ""),
        ] {
            let label: Label = text.parse().unwrap();
            assert_eq!(
                (label.source(), label.key(), label.value()),
                (source, key, value)
            );
            assert_eq!(label.to_string(), text);
        }
        assert_eq!(
            "app=web".parse::<Label>().unwrap().to_string(),
            "unspec:app=web"
        );
    }

    #[test]
    fn what_is_no_label_is_named() {
        for bad in [
            "",
            ":",
            "=",
            ":a",
            "a:",
            "a:=b",
            "=b",
            "a=\n",
            "a\u{1b}[2J=b",
        ] {
            assert!(bad.parse::<Label>().is_err(), "{bad:?}");
        }
        let long = format!("a={}", "x".repeat(LABEL_MAX));
        assert!(matches!(
            long.parse::<Label>(),
            Err(LabelError::TooLong { .. })
        ));
    }

    #[test]
    fn a_label_that_would_read_as_another_one_is_refused() {
        for (source, key, value) in [("k8s", "a=b", "c"), ("k8s:a", "b", ""), ("k=8s", "a", "")] {
            let refused = Label::new(source, key, value);
            assert!(matches!(refused, Err(LabelError::Separator(_))), "{key}");
        }
        assert!(Label::new("k8s", "a:b", "c=d").is_ok());
    }

    #[test]
    fn sets_are_equal_in_any_order_and_hold_each_key_once() {
        assert_eq!(set(&["b=1", "a=1", "b=1"]), set(&["a=1", "b=1"]));
        assert!(matches!(
            set(&["a=1", "a=2"]),
            Err(LabelError::Twice { .. })
        ));
        assert!(set(&["k8s:a=1", "container:a=2"]).is_ok());
        let many: Vec<String> = (0..=LABELS_MAX).map(|i| format!("k{i}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert_eq!(set(&many), Err(LabelError::TooMany(LABELS_MAX + 1)));
        assert_eq!(
            set(&["k8s:a=1", "b"])
                .unwrap()
                .get("k8s", "a")
                .unwrap()
                .value(),
            "1"
        );
    }
}
