//! Network namespaces, devices, addresses, routes and sysctls, by netlink and system calls; certificates for TLS.
//!
//! Functions that take a [`netlink::Handle`] work in the namespace where the handle was opened; all others work in
//! the calling thread's namespace.

pub mod address;
pub mod carrier;
pub mod cgroup;
pub mod changes;
pub mod clock;
mod error;
pub mod ethtool;
pub mod hostns;
pub mod inside;
pub mod link;
pub mod listen;
pub mod mac;
pub mod mtu;
pub mod neighbour;
pub mod netlink;
pub mod netns;
pub mod rawsock;
pub mod route;
mod socket;
pub mod socket_diag;
pub mod stdout;
pub mod sysctl;
pub mod tc;
pub mod tcp;
pub mod testing;
pub mod tls;
pub mod xdp;

pub use error::KernelError;
