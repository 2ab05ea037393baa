//! Whether devices can carry packets right now.

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;

/// Returns the `devices` that are down, have no carrier or do not exist; empty if their state cannot be read.
pub fn without(devices: &[String]) -> Vec<&str> {
    let Ok(interfaces) = getifaddrs() else {
        return Vec::new();
    };
    // One entry per address, and one for the device itself.
    let running: Vec<String> = interfaces
        .filter(|interface| interface.flags.contains(InterfaceFlags::IFF_RUNNING))
        .map(|interface| interface.interface_name)
        .collect();
    let devices = devices.iter().filter(|device| !running.contains(device));
    devices.map(String::as_str).collect()
}
