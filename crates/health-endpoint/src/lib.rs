//! This node's endpoints, and the routes to other nodes' endpoints.
//!
//! [`manager`] creates, restores and deletes the endpoints of workloads; [`lifecycle`] defines their states.
//! [`workload`] creates their devices and keeps their files; [`health`] does both for the health endpoint.
//! [`enforcement`] keeps their policy in the maps. [`queue`] and [`regenerate`] connect the manager with the builders
//! of endpoint datapaths, [`identities`] connects it with the store of identities, and [`pods`] with the pods in Kubernetes. [`peer_routes`] and
//! [`pod_routes`] maintain routes.

#![forbid(unsafe_code)]

pub mod enforcement;
pub mod error;
pub mod health;
pub mod identities;
pub mod lifecycle;
pub mod log;
pub mod manager;
mod outer;
pub mod peer_routes;
pub mod pod_routes;
pub mod pods;
pub mod queue;
pub mod regenerate;
mod stack;
pub mod workload;
