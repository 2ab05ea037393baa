//! Settings for which Kubernetes has no fields: annotations that start with `service.health-agent.io/`.
//!
//! - `algorithm` on a service: how to choose a backend for a new flow: `random`, `round-robin`, `maglev` or
//!   `least-connection`; by default as set for the node.
//! - `forwarding` on a service: how packets from external clients reach backends on other nodes: `snat`, `dsr` or
//!   `hybrid`; by default as set for the node.
//! - `local-readiness` on a service from a cluster's API: whether this node's probes take endpoints on this node out of
//!   service before the cluster does: `true` or `false`; `false` by default.
//! - `weight` on an endpoint slice: each endpoint's share of new flows, relative to the other endpoints of the service:
//!   1 to 1000; 1 by default.
//!
//! Weights are set on slices, because users who manage endpoints themselves write slices: for example, one for the old
//! version and one for the new version. There is no weight of 0: an endpoint that should get no new flows is not ready.

use std::collections::BTreeMap;
use std::fmt;

use health_model::manifest::Problem;
use health_model::settings::ServiceForwarding;
use serde::{Deserialize, Serialize};

use super::error::Errors;

/// Prefix of our annotation keys.
pub const PREFIX: &str = "service.health-agent.io/";

/// Largest weight.
pub(crate) const WEIGHT_MAX: u16 = 1000;

const ALGORITHM: &str = "algorithm";
const FORWARDING: &str = "forwarding";
const LOCAL_READINESS: &str = "local-readiness";
const WEIGHT: &str = "weight";

/// How to choose a backend for a new flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Algorithm {
    /// A random backend.
    Random,
    /// Each backend in turn; with eBPF, a random one if weights differ.
    RoundRobin,
    /// By a hash of the flow that is the same on every node: few flows move when backends change.
    Maglev,
    /// With eBPF, the one with fewer flows of two random backends; with IPVS, the backend with the fewest connections.
    LeastConnection,
}

impl Algorithm {
    /// All algorithms.
    pub const ALL: [Self; 4] = [
        Self::Random,
        Self::RoundRobin,
        Self::Maglev,
        Self::LeastConnection,
    ];

    /// The names of [`Algorithm::ALL`], in the same order.
    const NAMES: [&str; 4] = ["random", "round-robin", "maglev", "least-connection"];

    /// Returns the name in annotations and listings.
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

/// A service's annotations.
pub(super) struct OfService {
    pub(super) algorithm: Option<Algorithm>,
    pub(super) forwarding: Option<ServiceForwarding>,
    pub(super) local_readiness: bool,
}

/// Reads a service's annotations.
pub(super) fn of_service(all: Option<&Annotations>, errors: &mut Errors) -> OfService {
    let known = [ALGORITHM, FORWARDING, LOCAL_READINESS];
    let [algorithm, forwarding, local_readiness] = ours(all, known, errors);
    OfService {
        algorithm: one_of(algorithm, Algorithm::ALL, &Algorithm::NAMES, errors),
        forwarding: one_of(
            forwarding,
            ServiceForwarding::ALL,
            &ServiceForwarding::NAMES,
            errors,
        ),
        local_readiness: one_of(local_readiness, [true, false], &["true", "false"], errors)
            .unwrap_or_default(),
    }
}

/// Returns the element of `all` that an annotation selects by its name in `names`.
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

/// Returns the weight in a slice's annotations; 1 if not set.
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

/// Returns those of our annotations that this kind of object may have. Any other annotation of ours is an error.
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

/// Returns the path of an annotation.
pub(super) fn path(key: &str) -> String {
    format!("metadata.annotations[{key}]")
}
