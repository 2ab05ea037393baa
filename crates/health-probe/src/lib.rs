//! Liveness, readiness and startup probes of containers, with the kubelet's semantics.
//!
//! Manifests of pods become what is to be probed ([`spec`]); an engine without clock, socket or task decides when, and
//! what each [`Outcome`] means ([`worker`]); the [`mechanism`]s probe, and the [`prober`] brings all of that together. The
//! [`supervisor`] has the pods of its [`source`]s probed, and ends and restarts containers through the [`runtime`].

#![forbid(unsafe_code)]

pub mod mechanism;
mod outcome;
pub mod prober;
pub mod runtime;
pub mod source;
pub mod spec;
pub mod supervisor;
pub mod worker;

pub use outcome::{Outcome, RawResult};
