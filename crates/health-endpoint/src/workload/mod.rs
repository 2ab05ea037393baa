//! Endpoints of containers and other workloads: a veth pair into any network namespace, and what is kept
//! of it across restarts.

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

/// Name of the inner end where none is asked for.
pub const DEFAULT_IFNAME: &str = "eth0";

/// How the names of the host's ends begin.
const DEVICE_PREFIX: &str = "lxc";

/// An answer that takes its time.
pub type Task<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// What the devices of an endpoint shall be.
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
    /// Hardware address of the host's end, which is the gateway's.
    pub host_mac: MacAddr,
    /// MTU of both, bytes.
    pub mtu: u32,
    /// One for each IP version, IPv4 first.
    pub stacks: Vec<Stack>,
    /// Whether the routes of the namespace that lead out lead to it.
    pub has_default_route: bool,
}

/// One IP version of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stack {
    /// Its address.
    pub address: IpAddr,
    /// Its gateway, which is on no device.
    pub gateway: IpAddr,
    /// The node's address, from which the host talks to the endpoint.
    pub node: Option<IpAddr>,
}

/// A host's end that this instance has made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundDevice {
    /// Its name.
    pub device: String,
    /// Its number.
    pub ifindex: u32,
    /// The endpoint that it was made for.
    pub endpoint: u16,
    /// Whether it is up.
    pub is_up: bool,
    /// Whether the namespace of the inner end is there.
    pub has_peer: bool,
}

/// The devices of endpoints. What a call made before it failed is removed by it again.
pub trait Devices: Send + Sync {
    /// Looks whether a file is a network namespace that an endpoint can be made in.
    fn look_at(&self, netns: &Path) -> Result<NetNsId, WorkloadError>;
    /// Whether somebody on this host has the address.
    fn is_in_use(&self, address: IpAddr) -> Task<'_, Result<bool, WorkloadError>>;
    /// Makes the pair. The inner end is complete, the host's end down. Returns the number of the latter.
    fn create<'a>(&'a self, blueprint: &'a Blueprint) -> Task<'a, Result<u32, WorkloadError>>;
    /// Brings the host's end up, with its routes, and waits until packets pass.
    fn activate<'a>(
        &'a self,
        blueprint: &'a Blueprint,
        ifindex: u32,
    ) -> Task<'a, Result<(), WorkloadError>>;
    /// Gives both ends, and the route that leads out, the blueprint's MTU.
    fn set_mtu<'a>(&'a self, blueprint: &'a Blueprint) -> Task<'a, Result<(), WorkloadError>>;
    /// Looks for what is not as it was made on the host, for a device that is up. Changes nothing.
    fn inspect<'a>(
        &'a self,
        blueprint: &'a Blueprint,
        ifindex: u32,
    ) -> Task<'a, Result<Vec<DeviceFault>, WorkloadError>>;
    /// Puts one thing right that was found.
    fn repair<'a>(
        &'a self,
        blueprint: &'a Blueprint,
        ifindex: u32,
        fault: &'a DeviceFault,
    ) -> Task<'a, Result<(), WorkloadError>>;
    /// Removes the host's end of this name, and with it the other. One of somebody else is left alone.
    /// Returns whether it was there.
    fn remove<'a>(&'a self, device: &'a str) -> Task<'a, Result<bool, WorkloadError>>;
    /// The host's end of this number, if there is one that this instance has made.
    fn find(&self, ifindex: u32) -> Task<'_, Result<Option<FoundDevice>, WorkloadError>>;
    /// All host's ends that this instance has made.
    fn list(&self) -> Task<'_, Result<Vec<FoundDevice>, WorkloadError>>;
}

/// Name of the host's end of an endpoint's pair.
pub fn device_name(id: u16) -> String {
    format!("{DEVICE_PREFIX}{id}")
}
