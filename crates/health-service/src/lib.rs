//! Services of the node: what a kube-proxy knows and decides, without a kernel.
//!
//! Objects of Kubernetes become our own types ([`spec`]), change trackers gather what has changed ([`tracker`]), a
//! runner says when it is time to sync ([`runner`]), and a sync makes of it the state that a provider brings into the
//! kernel ([`state`]): frontends, and the backends that topology and policy choose for them ([`choice`]). [`maglev`]
//! computes tables for consistent choice; [`health_check`] says what load balancers and supervisors are told.
//!
//! Nothing in here reads a clock, except the task that drives a runner.

#![forbid(unsafe_code)]

pub mod choice;
pub mod health_check;
pub mod maglev;
pub mod runner;
pub mod spec;
pub mod state;
pub mod tracker;
