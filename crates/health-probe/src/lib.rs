//! Liveness, readiness and startup probes of containers, with the kubelet's semantics.
//!
//! [`spec`] converts pod manifests into a description of what to probe. [`worker`] is an engine without a clock,
//! sockets or tasks: it decides when to probe, and what each [`Outcome`] means. The [`mechanism`]s send the probes, and
//! the [`prober`] connects the engine with them. The [`supervisor`] probes the pods of its [`source`]s, and stops and
//! restarts containers through the [`runtime`].

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
