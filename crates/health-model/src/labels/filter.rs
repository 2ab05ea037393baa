//! Which labels count for identities. The form of patterns, the default ones and the rule by which they decide are
//! Cilium's (`pkg/labelsfilter`), so that the same policies select the same endpoints.

use std::fmt;
use std::str::FromStr;

use regex::bytes::{Regex, RegexBuilder};

use super::Label;

/// Memory that the compiled form of one pattern may take, in bytes.
const PATTERN_SIZE: usize = 64 << 10;

/// Source of patterns that match labels of every source, as in selectors of policies.
const ANY: &str = "any";

/// The patterns of every filter. Labels that change with each rollout or with each pod would give every pod an identity
/// of its own.
const DEFAULT: [&str; 17] = [
    "reserved:.*",
    r"io\.kubernetes\.pod\.namespace",
    r"io\.cilium\.k8s\.namespace\.labels",
    r"app\.kubernetes\.io",
    r"io\.cilium\.k8s\.policy\.cluster",
    r"!io\.kubernetes",
    r"!kubernetes\.io",
    r"!statefulset\.kubernetes\.io/pod-name",
    r"!apps\.kubernetes\.io/pod-index",
    r"!batch\.kubernetes\.io/job-completion-index",
    r"!.*beta\.kubernetes\.io",
    r"!k8s\.io",
    "!pod-template-generation",
    "!pod-template-hash",
    "!controller-revision-hash",
    "!annotation.*",
    "!etcd_node",
];

/// Why a string is not a [`LabelPattern`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LabelPatternError {
    /// The pattern has no expression.
    #[error("pattern {0:?} has no expression; expected [SOURCE:][!]REGEX")]
    Empty(String),
    /// No label matches it, since keys have no spaces.
    #[error("pattern {0:?} contains a space, which no label does; separate patterns with commas")]
    Space(String),
    /// The exclamation mark stands before the source.
    #[error("pattern {0:?} has '!' before its source; expected [SOURCE:][!]REGEX")]
    MisplacedMark(String),
    /// The expression is invalid.
    #[error("pattern {pattern:?} has an invalid regular expression: {problem}")]
    Expression {
        /// The pattern.
        pattern: String,
        /// What is wrong, in one line.
        problem: String,
    },
}

/// A pattern `[SOURCE:][!]REGEX` of labels that count, or with `!` of labels that do not. The expression must match at
/// the start of a key.
#[derive(Clone, Debug)]
pub struct LabelPattern {
    text: String,
    source: Option<String>,
    excludes: bool,
    expression: Regex,
}

impl LabelPattern {
    /// Length of the matched start of the label's key in bytes.
    fn matched(&self, label: &Label) -> Option<usize> {
        if self
            .source
            .as_ref()
            .is_some_and(|source| source != label.source())
        {
            return None;
        }
        let found = self.expression.find(label.key().as_bytes())?;
        (found.start() == 0).then_some(found.end())
    }
}

impl FromStr for LabelPattern {
    type Err = LabelPatternError;

    fn from_str(text: &str) -> Result<Self, LabelPatternError> {
        if text.contains(char::is_whitespace) {
            return Err(LabelPatternError::Space(text.to_owned()));
        }
        let (source, rest) = match text.split_once(':') {
            Some((source, rest)) => (Some(source), rest),
            None => (None, text),
        };
        if source.is_some_and(|source| source.starts_with('!')) {
            return Err(LabelPatternError::MisplacedMark(text.to_owned()));
        }
        let expression = rest.strip_prefix('!').unwrap_or(rest);
        if expression.is_empty() {
            return Err(LabelPatternError::Empty(text.to_owned()));
        }
        // Keys are ASCII, so the expressions need no Unicode tables.
        let compiled = RegexBuilder::new(expression)
            .unicode(false)
            .size_limit(PATTERN_SIZE)
            .build();
        let expression = compiled.map_err(|error| LabelPatternError::Expression {
            pattern: text.to_owned(),
            problem: error
                .to_string()
                .lines()
                .last()
                .unwrap_or_default()
                .trim()
                .to_owned(),
        })?;
        Ok(Self {
            text: text.to_owned(),
            source: source
                .filter(|source| !matches!(*source, "" | ANY))
                .map(str::to_owned),
            excludes: rest.starts_with('!'),
            expression,
        })
    }
}

impl fmt::Display for LabelPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl PartialEq for LabelPattern {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Eq for LabelPattern {}

/// Decides which labels count for identities.
#[derive(Clone, Debug)]
pub struct LabelFilter {
    patterns: Vec<LabelPattern>,
    /// Whether only labels that a pattern includes count.
    is_closed: bool,
}

impl LabelFilter {
    /// The default patterns and these. If one of these includes labels, all labels that no pattern includes are
    /// excluded.
    pub fn with(added: &[LabelPattern]) -> Self {
        let default = DEFAULT.iter().filter_map(|pattern| pattern.parse().ok());
        Self {
            patterns: default.chain(added.iter().cloned()).collect(),
            is_closed: added.iter().any(|pattern| !pattern.excludes),
        }
    }

    /// Whether a label counts: the longest match that includes it is longer than the shortest that excludes it.
    pub fn includes(&self, label: &Label) -> bool {
        let lengths = |excludes: bool| {
            let patterns = self
                .patterns
                .iter()
                .filter(move |pattern| pattern.excludes == excludes);
            patterns.filter_map(|pattern| pattern.matched(label))
        };
        match (lengths(false).max(), lengths(true).min()) {
            (included, Some(excluded)) => included > Some(excluded),
            (included, None) => included.is_some() || !self.is_closed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filter(added: &[&str]) -> LabelFilter {
        let added: Vec<LabelPattern> = added.iter().map(|text| text.parse().unwrap()).collect();
        LabelFilter::with(&added)
    }

    fn kept<'a>(added: &[&str], labels: &[&'a str]) -> Vec<&'a str> {
        let filter = filter(added);
        let counts = |text: &&&str| filter.includes(&text.parse().unwrap());
        labels.iter().filter(counts).copied().collect()
    }

    #[test]
    fn all_default_patterns_are_valid() {
        assert_eq!(filter(&[]).patterns.len(), DEFAULT.len());
    }

    #[test]
    fn labels_of_rollouts_and_of_single_pods_do_not_count() {
        const COUNTING: [&str; 8] = [
            "k8s:app=web",
            "k8s:app.kubernetes.io/name=web",
            "k8s:io.kubernetes.pod.namespace=shop",
            "k8s:io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name=shop",
            "k8s:io.cilium.k8s.policy.cluster=default",
            "k8s:io.cilium.k8s.policy.serviceaccount=web",
            "k8s:topology.kubernetes.io/zone=a",
            "reserved:health",
        ];
        const OTHERS: [&str; 10] = [
            "k8s:pod-template-hash=5d4f",
            "k8s:pod-template-generation=3",
            "k8s:controller-revision-hash=7f",
            "k8s:statefulset.kubernetes.io/pod-name=db-0",
            "k8s:apps.kubernetes.io/pod-index=0",
            "k8s:batch.kubernetes.io/job-completion-index=4",
            "k8s:kubernetes.io/os=linux",
            "k8s:beta.kubernetes.io/os=linux",
            "k8s:io.kubernetes.container.name=web",
            "k8s:annotation.x=y",
        ];
        let all: Vec<&str> = COUNTING.into_iter().chain(OTHERS).collect();
        assert_eq!(kept(&[], &all), COUNTING);
    }

    #[test]
    fn a_pattern_that_includes_leaves_all_others_out() {
        let labels = [
            "k8s:app=web",
            "k8s:tier=gold",
            "container:app=web",
            "k8s:io.kubernetes.pod.namespace=shop",
        ];
        assert_eq!(kept(&["k8s:app"], &labels), [labels[0], labels[3]]);
        assert_eq!(kept(&["k8s:!app"], &labels), labels[1..]);
        let of_every_source = [labels[0], labels[2], labels[3]];
        for pattern in ["app", ":app", "any:app"] {
            assert_eq!(kept(&[pattern], &labels), of_every_source);
        }
        // The longer match wins.
        assert_eq!(
            kept(&["!ti", "tier"], &labels),
            labels[1..2]
                .iter()
                .chain(&labels[3..])
                .copied()
                .collect::<Vec<_>>()
        );
        // An expression must match at the start.
        assert_eq!(kept(&["!ier"], &labels), labels);
    }

    #[test]
    fn an_invalid_pattern_is_named() {
        for (text, part) in [
            ("", "no expression"),
            ("k8s:", "no expression"),
            ("k8s:!", "no expression"),
            ("!k8s:app", "before its source"),
            ("k8s:(", "k8s:("),
            ("k8s:app k8s:tier", "separate patterns with commas"),
            (" k8s:app", "separate patterns with commas"),
            ("(a{1000}){1000}", "size limit"),
        ] {
            let error = text.parse::<LabelPattern>().unwrap_err().to_string();
            assert!(
                error.contains(part) && !error.contains('\n'),
                "{text:?}: {error}"
            );
        }
    }
}
