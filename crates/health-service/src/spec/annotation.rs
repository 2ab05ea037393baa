//! Settings that Kubernetes has no fields for: annotations that begin with `service.health-agent.io/`.
//!
//! | of | annotation | value | means |
//! | --- | --- | --- | --- |
//! | a service | `algorithm` | `random`, `round-robin`, `maglev`, `least-connection` | how a backend is chosen for a new flow; the node's default if not set |
//! | an endpoint slice | `weight` | 1 to 1000 | the share of new flows of each endpoint of the slice, relative to those of the same service; 1 if not set |
//!
//! Weights are set on slices, because users who manage endpoints themselves write slices: the old version in one, the new
//! version in another. An endpoint that should get no new flows is not ready; there is no weight of 0.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use health_model::manifest::Problem;
use serde::{Deserialize, Serialize};

use super::error::Errors;

/// What the keys of our annotations begin with.
pub const PREFIX: &str = "service.health-agent.io/";

/// Largest weight.
pub const WEIGHT_MAX: u16 = 1000;

const ALGORITHM: &str = "algorithm";
const WEIGHT: &str = "weight";

/// How a backend is chosen for a new flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Algorithm {
    /// At random.
    Random,
    /// In turn.
    RoundRobin,
    /// By a hash of the flow, the same on each node: few flows move when backends change.
    Maglev,
    /// The backend with the fewest flows.
    LeastConnection,
}

impl Algorithm {
    /// All of them.
    pub const ALL: [Self; 4] = [
        Self::Random,
        Self::RoundRobin,
        Self::Maglev,
        Self::LeastConnection,
    ];

    const NAMES: [&str; 4] = ["random", "round-robin", "maglev", "least-connection"];

    /// Its name in annotations and listings.
    pub const fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The text is not the name of an algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an algorithm; use random, round-robin, maglev or least-connection")]
pub struct AlgorithmError;

impl FromStr for Algorithm {
    type Err = AlgorithmError;

    fn from_str(text: &str) -> Result<Self, AlgorithmError> {
        let named = |algorithm: &Self| algorithm.name() == text;
        Self::ALL.into_iter().find(named).ok_or(AlgorithmError)
    }
}

type Annotations = BTreeMap<String, String>;

/// The algorithm in a service's annotations.
pub(super) fn algorithm(all: Option<&Annotations>, errors: &mut Errors) -> Option<Algorithm> {
    let (key, value) = ours(all, ALGORITHM, errors)?;
    let algorithm = value.parse().ok();
    if algorithm.is_none() {
        let problem = Problem::not_supported(value, &Algorithm::NAMES);
        errors.add(path(key), problem);
    }
    algorithm
}

/// The weight in a slice's annotations; 1 if there is none.
pub(super) fn weight(all: Option<&Annotations>, errors: &mut Errors) -> u16 {
    let Some((key, value)) = ours(all, WEIGHT, errors) else {
        return 1;
    };
    let weight = value.parse().ok();
    weight
        .filter(|weight| (1..=WEIGHT_MAX).contains(weight))
        .unwrap_or_else(|| {
            let detail = "must be a whole number between 1 and 1000, inclusive";
            errors.add(path(key), Problem::invalid(value, detail));
            1
        })
}

/// The annotation of ours that this kind of object may have. Any other annotation of ours is an error.
fn ours<'a>(
    all: Option<&'a Annotations>,
    known: &'static str,
    errors: &mut Errors,
) -> Option<(&'a str, &'a str)> {
    let mut found = None;
    for (key, value) in all.into_iter().flatten() {
        match key.strip_prefix(PREFIX) {
            Some(name) if name == known => found = Some((key.as_str(), value.as_str())),
            Some(_) => errors.add(path(key), Problem::UnknownField("")),
            None => {}
        }
    }
    found
}

/// The path of an annotation.
pub(super) fn path(key: &str) -> String {
    format!("metadata.annotations[{key}]")
}
