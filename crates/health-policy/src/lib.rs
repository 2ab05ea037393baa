//! Policy: documents become rules, rules become the policy of an endpoint, and this policy becomes entries of
//! `HEALTH_POLICY`. This crate does not touch the kernel.
//!
//! [`parse`] reads the documents to import into a [`Repository`]. [`Repository::resolve`] finds the rules that select
//! an endpoint. The resulting [`ResolvedPolicy`] decides packets one by one, rule by rule. It compiles to a
//! [`CompiledPolicy`], whose entries make the same decisions in the kernel.

#![forbid(unsafe_code)]

mod cidr;
mod cilium;
mod compile;
mod cover;
mod document;
mod error;
mod field;
mod icmp;
mod kubernetes;
mod peer;
mod ports;
#[cfg(test)]
mod properties;
mod repository;
mod resolve;
mod rule;
mod selector;
mod services;
mod trace;

pub use compile::{CompiledDirection, CompiledPolicy, EntryKey, PolicyDiff};
pub use document::{Documents, Policy, parse, read_policy};
pub use error::{Place, PolicyError, Problem};
pub use peer::{Peer, prefix};
pub use repository::{HeldPolicy, ImportOutcome, PrefixCount, Repository, SavedPolicies};
pub use resolve::{
    Decision, Enforcement, PolicySettings, Reason, ResolvedDirection, ResolvedPolicy, Verdict,
};
pub use rule::{Action, Kind, PolicyName, RuleRef};
pub use services::{ClusterServices, Service};
pub use trace::{Trace, TraceEnd, TraceMatch, TraceRequest, TraceSide};
