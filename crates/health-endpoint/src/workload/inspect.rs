//! Compares the host's part of an endpoint with its intended state, and repairs differences. A workload's own namespace
//! is left alone: other programs may have added devices, addresses and routes there.

use health_net::link::Link;
use health_net::neighbour;
use health_net::route::{self, Route};

use super::device::HostDevices;
use super::{Blueprint, DeviceFault, WorkloadError};

impl HostDevices {
    /// Finds the faults, with two lookups per address.
    pub(super) async fn faults(
        &self,
        blueprint: &Blueprint,
        ifindex: u32,
    ) -> Result<Vec<DeviceFault>, WorkloadError> {
        let mut faults = Vec::new();
        let outer = outer_end(blueprint, ifindex);
        for stack in &blueprint.stacks {
            let entry = neighbour::permanent(&self.host, &outer, stack.address).await?;
            if entry != Some(blueprint.mac) {
                faults.push(DeviceFault::NeighbourMissing(stack.address));
            }
        }
        for stack in &blueprint.stacks {
            let wanted = stack.host_route(ifindex);
            let found = route::matching(&self.host, stack.address).await?;
            // The route has no source while no device has the node's address.
            let is_it = |found: &Route| {
                *found == wanted
                    || *found
                        == Route {
                            prefsrc: None,
                            ..wanted.clone()
                        }
            };
            if !found.as_ref().is_some_and(is_it) {
                faults.push(DeviceFault::RouteLost(wanted));
            }
        }
        Ok(faults)
    }

    /// Repairs one fault.
    pub(super) async fn put_right(
        &self,
        blueprint: &Blueprint,
        ifindex: u32,
        fault: &DeviceFault,
    ) -> Result<(), WorkloadError> {
        match fault {
            DeviceFault::RouteLost(wanted) => self.set_route(wanted).await?,
            DeviceFault::NeighbourMissing(address) => {
                let outer = outer_end(blueprint, ifindex);
                neighbour::set_permanent(&self.host, &outer, *address, blueprint.mac).await?;
            }
        }
        Ok(())
    }
}

fn outer_end(blueprint: &Blueprint, ifindex: u32) -> Link {
    Link {
        name: blueprint.device.clone(),
        index: ifindex,
        ..Link::default()
    }
}
