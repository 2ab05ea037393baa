//! Comparing the devices of an endpoint with what they shall be, and putting right what differs.

use std::net::IpAddr;

use health_net::link::{self, Link};
use health_net::netlink::Handle;
use health_net::netns::{self, NetNs};
use health_net::route::{self, Route};
use health_net::{KernelError, neighbour};

use super::device::{HostDevices, inner_routes, route_to};
use super::{Blueprint, DeviceFault, Extent, WorkloadError};

impl HostDevices {
    /// What is wrong, in the order in which it can be put right. Costs two lookups for each address on the host;
    /// inside, a namespace to enter and three listings.
    pub(super) async fn faults(
        &self,
        blueprint: &Blueprint,
        ifindex: u32,
        extent: Extent,
    ) -> Result<Vec<DeviceFault>, WorkloadError> {
        let mut faults = Vec::new();
        if extent == Extent::Both
            && let Some((inside, inner)) = inner_end(blueprint).await?
        {
            faults.extend(faults_inside(&inside, &inner, blueprint).await?);
        }
        let outer = outer_end(blueprint, ifindex);
        for stack in &blueprint.stacks {
            let entry = neighbour::permanent(&self.host, &outer, stack.address).await?;
            if entry != Some(blueprint.mac) {
                faults.push(DeviceFault::NeighbourMissing(stack.address));
            }
        }
        for stack in &blueprint.stacks {
            let wanted = route_to(stack, ifindex);
            let found = route::matching(&self.host, stack.address).await?;
            // It has no source while the node's address is on no device.
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

    /// Puts one thing right.
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
            inner_fault => {
                if let Some((inside, inner)) = inner_end(blueprint).await? {
                    put_right_inside(&inside, &inner, inner_fault).await?;
                }
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

/// The inner end, and netlink in its namespace; `None` where it has another name by now, or its namespace no file.
async fn inner_end(blueprint: &Blueprint) -> Result<Option<(Handle, Link)>, WorkloadError> {
    let netns = match NetNs::at(&blueprint.netns) {
        Err(error) if error.is_gone() => return Ok(None),
        netns => netns?,
    };
    let inside = netns::netlink_in(&netns)?;
    let inner = link::by_name(&inside, &blueprint.ifname).await?;
    Ok(inner.map(|inner| (inside, inner)))
}

async fn faults_inside(
    inside: &Handle,
    inner: &Link,
    blueprint: &Blueprint,
) -> Result<Vec<DeviceFault>, KernelError> {
    let mut faults = Vec::new();
    if inner.mac != Some(blueprint.mac) {
        faults.push(DeviceFault::InnerMacChanged(blueprint.mac));
    }
    if !inner.up {
        faults.push(DeviceFault::InnerDown);
    }
    let there = link::addresses(inside).await?;
    let has = |wanted: IpAddr| {
        there
            .iter()
            .any(|one| one.index == inner.index && one.address == wanted)
    };
    let wanted = blueprint.stacks.iter().map(|stack| stack.address);
    faults.extend(
        wanted
            .filter(|wanted| !has(*wanted))
            .map(DeviceFault::AddressMissing),
    );
    // Their MTU follows the node's in steps of its own.
    let without_mtu = |route: &Route| Route {
        mtu: None,
        ..route.clone()
    };
    let routes: Vec<Route> = route::list_ours(inside)
        .await?
        .iter()
        .map(without_mtu)
        .collect();
    let wanted = inner_routes(blueprint, inner.index).into_iter();
    faults.extend(
        wanted
            .filter(|wanted| !routes.contains(&without_mtu(wanted)))
            .map(DeviceFault::InnerRouteLost),
    );
    Ok(faults)
}

async fn put_right_inside(
    inside: &Handle,
    inner: &Link,
    fault: &DeviceFault,
) -> Result<(), KernelError> {
    match fault {
        DeviceFault::InnerMacChanged(wanted) => link::set_mac(inside, inner, *wanted).await,
        DeviceFault::InnerDown => link::set_up(inside, inner).await,
        DeviceFault::AddressMissing(address) => link::add_address(inside, inner, *address).await,
        DeviceFault::InnerRouteLost(wanted) => route::replace(inside, wanted).await,
        DeviceFault::RouteLost(_) | DeviceFault::NeighbourMissing(_) => Ok(()),
    }
}
