//! Liveness, readiness and startup probes of containers, with the kubelet's semantics.
//!
//! Manifests of pods become what is to be probed ([`spec`]); an engine without clock, socket or task decides when, and
//! what each [`Outcome`] means ([`worker`]); the [`mechanism`]s probe, and the [`prober`] brings all of it together.

#![forbid(unsafe_code)]

pub mod mechanism;
mod outcome;
pub mod prober;
pub mod spec;
pub mod worker;

pub use outcome::{Outcome, RawResult};
