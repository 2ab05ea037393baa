//! What all parts of the agent talk about: labels and identities, address pools, durations, the words of policy,
//! events, the types of the API. Nothing here does anything but keep files whole: it reads, checks, compares and
//! shows.

pub mod api;
pub mod durable;
pub mod duration;
pub mod events;
pub mod flow;
pub mod identity;
pub mod ipam;
pub mod labels;
pub mod policy;
pub mod settings;
