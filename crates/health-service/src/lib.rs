//! Services of the node: what kube-proxy knows and decides, and how that gets into the kernel.
//!
//! Sources ([`source`]) deliver Kubernetes objects, which become our own types ([`spec`]). Change trackers collect what
//! has changed ([`tracker`]), and a runner decides when to sync ([`runner`]). A sync turns the changes into the desired
//! state ([`state`]): frontends, and the backends that topology and policy choose for them ([`choice`]). A provider
//! writes that state into the kernel ([`provider`]). [`services`] is the task that connects all of this. [`maglev`]
//! computes tables for consistent choice; [`forwarding`] says how packets from clients outside reach backends on other
//! nodes; [`health_check`] computes the answers for load balancers and supervisors.
//!
//! Only the tasks read a clock, and only [`provider`] needs a kernel.

#![forbid(unsafe_code)]

pub mod choice;
mod difference;
pub mod forwarding;
pub mod health_check;
pub mod maglev;
pub mod provider;
pub mod runner;
pub mod services;
pub mod source;
pub mod spec;
pub mod state;
pub mod tracker;
