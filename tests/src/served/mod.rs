//! A web service on the test bed: backends that respond with their names, the manifests of the service and its
//! endpoints, and clients that count the responses by backend.

mod backend;
mod bind;
mod client;
mod datagrams;
mod manifest;
pub mod show;

pub use backend::{Backend, PORT};
pub use client::{Answer, Answers, Connection, curl, curl_soon};
pub use datagrams::{Datagrams, reply_to};
pub use manifest::{Manifests, ServiceManifest, ServicePort, SliceEndpoint, cluster_ips};
