//! An agent's lifecycle, from settings to shutdown.
//!
//! [`run`] checks the settings and the machine, has `assembly` build an agent in stages, and has `supervise` look after
//! it until it stops. The assembly imports the parts; no part imports the assembly. The API and the metrics read
//! `source`.

mod api_access;
mod assembly;
mod check_schedule;
mod cleanup;
mod containers;
mod deletions;
mod endpoints;
mod event_relay;
mod folders;
#[cfg_attr(not(feature = "kubernetes"), path = "no_kubernetes_events.rs")]
mod kubernetes_events;
#[cfg_attr(not(feature = "kubernetes"), path = "no_kubernetes_pods.rs")]
mod kubernetes_pods;
#[cfg_attr(not(feature = "kubernetes"), path = "no_kubernetes_policies.rs")]
mod kubernetes_policies;
mod node;
#[cfg_attr(not(feature = "kubernetes"), path = "no_node_condition.rs")]
mod node_condition;
mod outcome;
mod own_addresses;
mod own_node;
mod pages;
mod preflight;
mod probing;
mod registration;
mod reload;
mod repair;
mod routes;
mod run;
pub mod services;
mod settings_in_force;
mod source;
mod start_context;
mod started_parts;
mod stop;
mod supervise;
mod uplinks;

pub use self::cleanup::{cleanup, cleanup_services};
pub use self::reload::Reread;
pub use self::run::run;
