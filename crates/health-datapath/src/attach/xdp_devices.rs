//! The devices through which the XDP program may send packets.

use std::collections::HashMap;

use health_common::service::xdp::{XDP_RETURNS, XDP_SENDS, XdpDevice};
use health_net::ethtool;
use health_net::xdp::{self, Mode};
use nix::net::if_::if_nametoindex;

use super::Hooks;
use crate::program::AttachPoint;

/// The driver of virtual Ethernet pairs.
const VETH: &str = "veth";

impl Hooks {
    /// Returns the devices that have the XDP program attached, by their current ifindex.
    pub(crate) fn xdp_devices(&self) -> HashMap<u32, XdpDevice> {
        let hooks = self.wanted.iter();
        hooks
            .filter(|hook| hook.program.attach_point() == AttachPoint::Xdp)
            .filter(|hook| self.is_attached(hook))
            .filter_map(|hook| {
                let number = if_nametoindex(hook.device.as_str()).ok()?;
                let mac = xdp::device(number).ok()?.mac?;
                let device = XdpDevice {
                    mac: mac.0,
                    flags: abilities(self.xdp_mode(), &hook.device, number),
                };
                Some((number, device))
            })
            .collect()
    }
}

/// What a device does with packets that the program passes to it.
fn abilities(mode: Mode, device: &str, number: u32) -> u16 {
    // The host's stack sends the packets, through any device.
    if mode == Mode::Generic {
        return XDP_RETURNS | XDP_SENDS;
    }
    let sends = match xdp::sends(number) {
        Ok(Some(true)) => XDP_SENDS,
        _ => 0,
    };
    // A driver that runs XDP programs sends the packets that they return. veth leaves them in the peer's ring, unless
    // the peer has a program too (drivers/net/veth.c, `veth_xdp_flush`).
    let returns = match ethtool::driver(device) {
        Ok(driver) if driver != VETH => XDP_RETURNS,
        _ => 0,
    };
    sends | returns
}
