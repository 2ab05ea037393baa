//! Types shared by all parts of the agent: labels and identities, address pools, durations, policy vocabulary, events,
//! API types, and activity reports. No sockets and no kernel access. `durable` and `private` write files, `document`
//! parses text, `folder` watches files, `ipam` allocates addresses, `activity` reads the monotonic clock, and `pace`
//! spreads probes over time.

#![forbid(unsafe_code)]

pub mod activity;
pub mod address;
pub mod api;
pub mod causes;
pub mod document;
pub mod durable;
pub mod duration;
pub mod events;
pub mod file;
pub mod flow;
pub mod folder;
pub mod identity;
pub mod ipam;
pub mod labels;
pub mod manifest;
pub mod pace;
pub mod policy;
pub mod printable;
pub mod private;
pub mod settings;
pub mod task;
