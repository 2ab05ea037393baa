//! Services: a packet to a frontend is sent to a backend, and the backend's answers get the frontend's address.
//!
//! Known flows are looked up first, so that they keep their backend whatever happens to the service. Policy is
//! applied between the two translations: it sees the backend in a client's packets, and the client in packets to a
//! backend.

mod answer;
mod backend;
mod choice;
mod connected;
mod destination;
mod direct;
mod enabled;
mod endpoint;
mod error;
mod flow;
mod forward;
mod look_up;
mod new_flow;
mod reject;
mod request;
mod rewrite;
pub mod socket;
mod tracked;
mod uplink;
mod withdraw;

pub(crate) use answer::answered_to_outside;
pub use direct::Direct;
pub use enabled::{is_on, is_there};
pub use endpoint::{answer, send, withdraw};
pub(crate) use flow::{forget, forget_untracked, is_of_service, is_past_stack, tracked_flow};
pub(crate) use look_up::known_from_outside;
pub use reject::{SentErrors, Unreachable};
pub use uplink::{arrive, from_service, leave, to_service};
