//! One IP version of an endpoint.

use std::net::IpAddr;

use health_net::route::Route;
use ipnet::IpNet;

/// One IP version of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stack {
    /// The endpoint's address.
    pub address: IpAddr,
    /// The endpoint's gateway, which is not on any device.
    pub gateway: IpAddr,
    /// The node's address, which the host uses as the source of packets to the endpoint.
    pub node: Option<IpAddr>,
}

impl Stack {
    /// Returns the host's route to the endpoint, through the device with ifindex `outer`.
    pub(crate) fn host_route(&self, outer: u32) -> Route {
        Route {
            device: Some(outer),
            prefsrc: self.node,
            ..Route::to(self.address.into())
        }
    }

    /// Returns the endpoint's routes: all traffic goes to the gateway, through the device with ifindex `inner`.
    pub(crate) fn inner_routes(&self, inner: u32, mtu: u32) -> [Route; 2] {
        let gateway = Route {
            device: Some(inner),
            ..Route::to(self.gateway.into())
        };
        let default = Route {
            gateway: Some(self.gateway),
            device: Some(inner),
            mtu: Some(mtu),
            ..Route::to(IpNet::new_assert(self.gateway, 0).trunc())
        };
        [gateway, default]
    }
}
