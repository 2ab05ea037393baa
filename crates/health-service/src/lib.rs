//! Services of the node: everything that kube-proxy knows and decides, and how it gets into the kernel.
//!
//! Sources ([`source`]) deliver Kubernetes objects, which are converted to our own types ([`spec`]). Change trackers
//! collect the changes ([`tracker`]), and a runner decides when to sync ([`runner`]). A sync applies the changes to the
//! desired state ([`state`]): frontends, and the backends that topology and policy choose for them ([`choice`]). A
//! provider writes that state into the kernel ([`provider`]). [`services`] is the task that connects all of this.
//! [`maglev`] computes tables for consistent choice; [`forwarding`] determines how packets from external clients reach
//! backends on other nodes; [`health_check`] computes the responses for load balancers and supervisors.
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
