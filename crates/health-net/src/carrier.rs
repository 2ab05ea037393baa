//! Whether devices can carry packets right now.

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;

/// Those of `devices` that are down or have no carrier, and those that are not there. Empty if that
/// cannot be read.
pub fn without(devices: &[String]) -> Vec<&str> {
    let Ok(interfaces) = getifaddrs() else {
        return Vec::new();
    };
    // One entry for each address and one for the device itself.
    let running: Vec<String> = interfaces
        .filter(|interface| interface.flags.contains(InterfaceFlags::IFF_RUNNING))
        .map(|interface| interface.interface_name)
        .collect();
    let devices = devices.iter().filter(|device| !running.contains(device));
    devices.map(String::as_str).collect()
}
