//! Services of the node: what a kube-proxy knows and decides, and what brings it into the kernel.
//!
//! Objects of Kubernetes come from sources ([`source`]) and become our own types ([`spec`]), change trackers gather what
//! has changed ([`tracker`]), a runner says when it is time to sync ([`runner`]), and a sync makes of it the state that a
//! provider brings into the kernel ([`state`]): frontends, and the backends that topology and policy choose for them
//! ([`choice`]). [`services`] is the task that does all of this. [`maglev`] computes tables for consistent choice;
//! [`health_check`] says what load balancers and supervisors are told. [`provider`] has what brings a state into the kernel.
//!
//! Nothing in here reads a clock, except the tasks; nothing but [`provider`] needs a kernel.

#![forbid(unsafe_code)]

pub mod choice;
pub mod health_check;
pub mod maglev;
pub mod provider;
pub mod runner;
pub mod services;
pub mod source;
pub mod spec;
pub mod state;
pub mod tracker;
