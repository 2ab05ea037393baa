//! Types that all parts of the agent share: labels and identities, address pools, durations, the words of policy,
//! events, the types of the API, what parts say of their work. No sockets, no kernel: `durable` and `private` write files, `document`
//! parses texts, `folder` watches files, `ipam` allocates addresses, `activity` reads the monotonic clock, `pace` spreads probes over time.

#![forbid(unsafe_code)]

pub mod activity;
pub mod address;
pub mod api;
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
