//! Security identities: a number for each set of labels, the same on every node, and who has which
//! addresses.
//!
//! `allocator` is what others use. `wants` is what this node wants of the store, `view` what is known
//! of the whole cluster; `etcd` and `file` are the stores that bring the two together. `cidr` gives
//! prefixes identities of this node's own, and `ipcache` puts all addresses together.

mod allocator;
mod cidr;
#[cfg(feature = "etcd")]
mod etcd;
mod file;
mod ipcache;
#[cfg_attr(
    not(feature = "etcd"),
    allow(dead_code, reason = "the store in etcd alone asks for all of it")
)]
mod lasting;
#[cfg(test)]
mod testing;
#[cfg_attr(
    not(feature = "etcd"),
    allow(dead_code, reason = "the store in etcd alone asks for all of it")
)]
mod view;
#[cfg_attr(
    not(feature = "etcd"),
    allow(dead_code, reason = "the store in etcd alone asks for all of it")
)]
mod wants;

/// Name of the file in the state folder that holds the identities of a machine by itself.
pub const FILE: &str = "identities.json";

pub use self::allocator::{
    IdentityActivities, IdentityAllocator, IdentityError, OnOutage, OpenError, Timing,
};
pub use self::cidr::{CidrIdentities, FILE as CIDR_FILE};
pub use self::file::LOCK_SUFFIX;
pub use self::ipcache::{IpcacheInputs, ipcache};
pub use self::view::{AddressAnnouncement, Addresses, HeldIdentities, Identities};
