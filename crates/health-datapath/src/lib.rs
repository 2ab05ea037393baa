//! User-space side of the datapath: loads, pins and attaches programs, wraps maps in types, dumps them.
//!
//! A [`Datapath`] combines these parts: [`pin_folder`] (the pins of an instance, and their lock), `programs` (loaded
//! from the object, pinned and connected), `maps` (opened, with changes of layout and size), `attach` (hooks on devices
//! and the root cgroup), and `workloads` (endpoints that come and go). `program` names all programs, and [`layout`] all
//! maps.
//!
//! Some maps have their own modules, for the crates that write them: [`services`], [`policy`], [`ipcache`] and [`own`].
//! [`kernel_rtt`] and [`arrival_store`] read and write round trips and arrivals; the mesh accesses them through
//! [`rtt_store`]. [`conntrack`] schedules and carries out the removal of expired entries. [`events`] relays the events
//! that the programs report.
//!
//! Without an agent, [`dump`] reads pinned objects. [`kernel`] checks the agent's requirements on the kernel, and
//! [`features`] tries the kernel's features.

pub mod arrival_store;
mod asm;
mod attach;
mod aya_io;
pub mod conntrack;
mod datapath;
pub mod dump;
mod error;
pub mod events;
pub mod features;
pub mod ipcache;
pub mod kernel;
pub mod kernel_rtt;
mod known_trie;
pub mod layout;
mod link_pin;
mod maps;
mod optional_parts;
pub mod own;
pub mod pin_folder;
pub mod policy;
pub mod process;
mod program;
mod programs;
pub mod rtt_store;
pub mod services;
mod sys;
mod table;
mod trie;
mod walk;
mod workloads;

pub use attach::{Attachment, Attachments, Hook, HookFault, SocketFault};
pub use datapath::{Datapath, LoadSettings};
pub use error::{DatapathError, TrieError};
pub use maps::MapSizes;
pub use program::{AttachPoint, DatapathProgram, Direction};
pub use programs::{COMPRESSED_PROGRAMS, LogError, ProgramLog, programs};
pub use workloads::Workload;
