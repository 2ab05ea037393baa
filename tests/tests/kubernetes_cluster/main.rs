//! A real Kubernetes cluster of two nodes, whose agents run as pods of `deploy/kubernetes`: what its users see. And what agents
//! read and write at its API server.

mod api_server;
mod client;
mod faults;
mod policies;
mod uninstall;
mod workloads;

/// The names of the nodes.
const NODES: [&str; 2] = ["n1", "n2"];
