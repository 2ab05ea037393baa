//! Settings that Kubernetes has no fields for: annotations that start with `service.health-agent.io/`.
//!
//! | of | annotation | value | means |
//! | --- | --- | --- | --- |
//! | a service | `algorithm` | `random`, `round-robin`, `maglev`, `least-connection` | how a backend is chosen for a new flow; the node's default if not set |
//! | a service | `forwarding` | `snat`, `dsr`, `hybrid` | how packets from clients outside reach backends on other nodes; the node's default if not set |
//! | an endpoint slice | `weight` | 1 to 1000 | the share of new flows of each endpoint of the slice, relative to those of the same service; 1 if not set |
//!
//! Weights are set on slices, because users who manage endpoints themselves write slices: the old version in one, the
//! new version in another. An endpoint that should get no new flows is not ready; there is no weight of 0.

use std::collections::BTreeMap;
use std::fmt;

use health_model::manifest::Problem;
use health_model::settings::ServiceForwarding;
use serde::{Deserialize, Serialize};

use super::error::Errors;

/// The prefix of our annotation keys.
pub const PREFIX: &str = "service.health-agent.io/";

/// Largest weight.
pub(crate) const WEIGHT_MAX: u16 = 1000;

const ALGORITHM: &str = "algorithm";
const FORWARDING: &str = "forwarding";
const WEIGHT: &str = "weight";

/// How a backend is chosen for a new flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Algorithm {
    /// At random.
    Random,
    /// In turn; with eBPF, at random where weights differ.
    RoundRobin,
    /// By a hash of the flow, the same on each node: few flows move when backends change.
    Maglev,
    /// With eBPF, the one with fewer flows of two random backends; with IPVS, the one with the fewest.
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

    /// Their names, in the same order.
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

type Annotations = BTreeMap<String, String>;

/// Reads a service's annotations.
pub(super) fn of_service(
    all: Option<&Annotations>,
    errors: &mut Errors,
) -> (Option<Algorithm>, Option<ServiceForwarding>) {
    let [algorithm, forwarding] = ours(all, [ALGORITHM, FORWARDING], errors);
    (
        one_of(algorithm, Algorithm::ALL, &Algorithm::NAMES, errors),
        one_of(
            forwarding,
            ServiceForwarding::ALL,
            &ServiceForwarding::NAMES,
            errors,
        ),
    )
}

/// The one of `all` that an annotation selects by its name in `names`.
fn one_of<T, const N: usize>(
    annotation: Option<(&str, &str)>,
    all: [T; N],
    names: &'static [&'static str; N],
    errors: &mut Errors,
) -> Option<T> {
    let (key, value) = annotation?;
    let found = all.into_iter().zip(names).find(|(_, name)| **name == value);
    if found.is_none() {
        errors.add(path(key), Problem::not_supported(value, names));
    }
    found.map(|(one, _)| one)
}

/// The weight in a slice's annotations; 1 if not set.
pub(super) fn weight(all: Option<&Annotations>, errors: &mut Errors) -> u16 {
    let [Some((key, value))] = ours(all, [WEIGHT], errors) else {
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

/// Our annotations that this kind of object may have. Any other annotation of ours is an error.
fn ours<'a, const N: usize>(
    all: Option<&'a Annotations>,
    known: [&'static str; N],
    errors: &mut Errors,
) -> [Option<(&'a str, &'a str)>; N] {
    let mut found = [None; N];
    for (key, value) in all.into_iter().flatten() {
        let Some(name) = key.strip_prefix(PREFIX) else {
            continue;
        };
        match known.iter().position(|known| *known == name) {
            Some(place) => found[place] = Some((key.as_str(), value.as_str())),
            None => errors.add(path(key), Problem::UnknownField("")),
        }
    }
    found
}

/// The path of an annotation.
pub(super) fn path(key: &str) -> String {
    format!("metadata.annotations[{key}]")
}
