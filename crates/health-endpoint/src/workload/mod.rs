//! Endpoints of containers and other workloads: a veth pair into any network namespace, and state that is kept across
//! restarts.

mod cleanup;
mod device;
mod error;
mod fault;
mod inspect;
mod state;

use std::future::Future;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;

use health_net::mac::MacAddr;
use health_net::netns::NetNsId;

pub use self::cleanup::cleanup;
pub use self::device::HostDevices;
pub use self::error::WorkloadError;
pub use self::fault::DeviceFault;
pub use self::state::{DamagedFile, SavedEndpoint, StateDir};
pub use crate::stack::Stack;

/// Default name of the inner end.
pub(crate) const DEFAULT_IFNAME: &str = "eth0";

/// Prefix of the names of the host's ends.
const DEVICE_PREFIX: &str = "lxc";

/// A boxed future.
pub type Task<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The intended devices of an endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blueprint {
    /// The endpoint's id.
    pub id: u16,
    /// Name of the host's end.
    pub device: String,
    /// Name of the inner end.
    pub ifname: String,
    /// File of the namespace of the inner end.
    pub netns: PathBuf,
    /// Hardware address of the inner end.
    pub mac: MacAddr,
    /// Hardware address of the host's end, which is also the gateway's.
    pub host_mac: MacAddr,
    /// MTU of both ends in bytes.
    pub mtu: u32,
    /// One stack per IP version, IPv4 first.
    pub stacks: Vec<Stack>,
    /// Whether the namespace's default routes lead to this endpoint.
    pub has_default_route: bool,
}

/// A host's end that this instance created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundDevice {
    /// The device's name.
    pub device: String,
    /// The device's ifindex.
    pub ifindex: u32,
    /// The endpoint for which it was created.
    pub endpoint: u16,
    /// Whether the device is up.
    pub is_up: bool,
    /// Whether the namespace of the inner end exists.
    pub has_peer: bool,
}

/// Manages the devices of endpoints. A failing call removes everything it created.
pub trait Devices: Send + Sync {
    /// Checks that a file is a network namespace in which an endpoint can be created, and identifies the namespace.
    fn look_at(&self, netns: &Path) -> Result<NetNsId, WorkloadError>;
    /// Whether an address is in use on this host.
    fn is_in_use(&self, address: IpAddr) -> Task<'_, Result<bool, WorkloadError>>;
    /// Creates the pair. The inner end is complete afterwards, the host's end is down. Returns the ifindex of the
    /// host's end.
    fn create<'a>(&'a self, blueprint: &'a Blueprint) -> Task<'a, Result<u32, WorkloadError>>;
    /// Brings the host's end up with its routes, and waits until packets pass.
    fn activate<'a>(
        &'a self,
        blueprint: &'a Blueprint,
        ifindex: u32,
    ) -> Task<'a, Result<(), WorkloadError>>;
    /// Sets the blueprint's MTU on both ends and on the default route.
    fn set_mtu<'a>(&'a self, blueprint: &'a Blueprint) -> Task<'a, Result<(), WorkloadError>>;
    /// Finds differences between the host and the created state, for a device that is up. Changes nothing.
    fn inspect<'a>(
        &'a self,
        blueprint: &'a Blueprint,
        ifindex: u32,
    ) -> Task<'a, Result<Vec<DeviceFault>, WorkloadError>>;
    /// Repairs one of the faults found.
    fn repair<'a>(
        &'a self,
        blueprint: &'a Blueprint,
        ifindex: u32,
        fault: &'a DeviceFault,
    ) -> Task<'a, Result<(), WorkloadError>>;
    /// Removes the host's end with this name, and with it the inner end. Leaves a foreign device alone. Returns whether
    /// the device existed.
    fn remove<'a>(&'a self, device: &'a str) -> Task<'a, Result<bool, WorkloadError>>;
    /// Finds the host's end with this ifindex, if this instance created it.
    fn find(&self, ifindex: u32) -> Task<'_, Result<Option<FoundDevice>, WorkloadError>>;
    /// Returns all host's ends that this instance created.
    fn list(&self) -> Task<'_, Result<Vec<FoundDevice>, WorkloadError>>;
}

/// Returns the name of the host's end of an endpoint's pair.
pub fn device_name(id: u16) -> String {
    format!("{DEVICE_PREFIX}{id}")
}
