//! Security identities: one number per label set, the same on every node, and the identity of each address.
//!
//! Other crates use `allocator`. `wants` holds all that this node wants from the store, and `view` all that is known
//! about the cluster; the stores `etcd`, `file` and `kubernetes` reconcile the two. `local` gives prefixes and labelled nodes
//! identities that are local to this node, and `ipcache` combines all addresses.

mod allocator;
#[cfg(feature = "etcd")]
mod etcd;
mod file;
mod ipcache;
#[cfg(feature = "kubernetes")]
mod kubernetes;
#[cfg_attr(
    not(any(feature = "etcd", feature = "kubernetes")),
    allow(dead_code, reason = "the store in a file does not ask for all of it")
)]
mod lasting;
mod local;
#[cfg(any(feature = "etcd", feature = "kubernetes"))]
mod sets;
#[cfg(test)]
mod testing;
#[cfg_attr(
    not(all(feature = "etcd", feature = "kubernetes")),
    allow(dead_code, reason = "not every store asks for all of it")
)]
mod view;
#[cfg_attr(
    not(all(feature = "etcd", feature = "kubernetes")),
    allow(dead_code, reason = "not every store asks for all of it")
)]
mod wants;

pub use self::allocator::{
    EndpointDetails, IdentityActivities, IdentityAllocator, IdentityError, OnOutage, OpenError,
    Timing, remove_slices,
};
pub use self::file::LOCK_SUFFIX;
pub use self::ipcache::{IpcacheInputs, ipcache};
pub use self::local::{FILE as LOCAL_FILE, LocalIdentities, LocalNeeds, LocalNumbers};
pub use self::view::{AddressAnnouncement, Addresses, HeldIdentities, Identities};
