//! Veth pairs into foreign namespaces.

use std::net::IpAddr;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::time::Duration;

use futures_util::future::try_join_all;
use health_net::KernelError;
use health_net::link::{self, Link, VethPair};
use health_net::neighbour;
use health_net::netlink::Handle;
use health_net::netns::{self, NetNs, NetNsId};
use health_net::route::{self, Route};
use health_net::sysctl::Setting;
use tokio::time::{self, Instant};
use tracing::warn;

use super::{Blueprint, DeviceFault, Devices, FoundDevice, Task, WorkloadError};
use crate::health::ALIAS_PREFIX;
use crate::outer::outer_settings;

/// How long the kernel may take to notice that both ends are up; it checks at least once a second.
const CARRIER_PATIENCE: Duration = Duration::from_secs(3);
const CARRIER_POLL: Duration = Duration::from_millis(1);

/// The devices of this host.
#[derive(Clone, Debug)]
pub struct HostDevices {
    pub(super) host: Handle,
    mark: String,
}

impl HostDevices {
    /// Creates access to the devices of an instance, over a netlink connection in the host's namespace.
    pub fn new(host: Handle, instance: &str) -> Self {
        let mark = format!("{ALIAS_PREFIX}{instance}/");
        Self { host, mark }
    }

    /// Returns the endpoint for which this instance created a device; `None` for foreign devices.
    fn endpoint_of(&self, link: &Link) -> Option<u16> {
        let alias = link.alias.as_deref()?;
        alias.strip_prefix(&self.mark)?.parse().ok()
    }

    /// Converts a device if it belongs to this instance.
    fn found(&self, link: Link) -> Option<FoundDevice> {
        Some(FoundDevice {
            endpoint: self.endpoint_of(&link)?,
            ifindex: link.index,
            is_up: link.up,
            has_peer: link.peer.is_some_and(|peer| peer.is_alive()),
            device: link.name,
        })
    }

    async fn make(&self, blueprint: &Blueprint) -> Result<u32, WorkloadError> {
        let netns = NetNs::at(&blueprint.netns)?;
        let pair = VethPair {
            name: &blueprint.device,
            mac: blueprint.host_mac,
            peer_name: &blueprint.ifname,
            peer_mac: blueprint.mac,
            mtu: blueprint.mtu,
        };
        let inside = netns::netlink_in(&netns)?;
        if let Err(error) = link::create_veth_into(&self.host, &pair, netns.file().as_fd()).await {
            return Err(self.explain(error, blueprint, &inside).await);
        }
        let made = self.complete(blueprint, &netns, &inside).await;
        if made.is_err() {
            self.undo(&blueprint.device).await;
        }
        made
    }

    /// If the kernel's error is that a name is taken, finds which of the two it is.
    async fn explain(
        &self,
        error: KernelError,
        blueprint: &Blueprint,
        inside: &Handle,
    ) -> WorkloadError {
        if error.os_code() != Some(libc::EEXIST) {
            return error.into();
        }
        match link::by_name(inside, &blueprint.ifname).await {
            Ok(Some(_)) => WorkloadError::IfnameTaken {
                netns: blueprint.netns.clone(),
                ifname: blueprint.ifname.clone(),
            },
            _ => WorkloadError::ForeignDevice {
                device: blueprint.device.clone(),
            },
        }
    }

    /// Marks and configures the host's end, and completes the inner end.
    async fn complete(
        &self,
        blueprint: &Blueprint,
        netns: &NetNs,
        inside: &Handle,
    ) -> Result<u32, WorkloadError> {
        let (outer, inner) = tokio::try_join!(
            existing(&self.host, &blueprint.device),
            existing(inside, &blueprint.ifname)
        )?;
        let mark = format!("{}{}", self.mark, blueprint.id);
        link::set_alias(&self.host, &outer, &mark).await?;
        let has_family = |is_v4| {
            let mut stacks = blueprint.stacks.iter();
            stacks.any(|stack| stack.address.is_ipv4() == is_v4)
        };
        for setting in outer_settings(&blueprint.device, has_family(true), has_family(false)) {
            setting.apply_where_known()?;
        }
        let settings = inner_settings(blueprint);
        netns.run_in(|| settings.iter().try_for_each(Setting::apply))??;
        // The kernel handles these requests in the order in which they are sent, so there is no need to wait for each
        // reply.
        let addresses = blueprint
            .stacks
            .iter()
            .map(|stack| link::add_address(inside, &inner, stack.address));
        let (_, _) = tokio::try_join!(link::set_up(inside, &inner), try_join_all(addresses))?;
        let routes: Vec<_> = inner_routes(blueprint, inner.index).collect();
        try_join_all(routes.iter().map(|route| route::replace(inside, route))).await?;
        Ok(outer.index)
    }

    async fn bring_up(&self, blueprint: &Blueprint, ifindex: u32) -> Result<(), WorkloadError> {
        let outer = Link {
            name: blueprint.device.clone(),
            index: ifindex,
            ..Link::default()
        };
        link::set_up(&self.host, &outer).await?;
        let neighbours = blueprint.stacks.iter().map(|stack| {
            neighbour::set_permanent(&self.host, &outer, stack.address, blueprint.mac)
        });
        try_join_all(neighbours).await?;
        let routes: Vec<Route> = blueprint
            .stacks
            .iter()
            .map(|stack| stack.host_route(ifindex))
            .collect();
        try_join_all(routes.iter().map(|route| self.set_route(route))).await?;
        self.wait_until_running(&blueprint.device, ifindex).await
    }

    async fn resize(&self, blueprint: &Blueprint) -> Result<(), WorkloadError> {
        let inside = netns::netlink_in(&NetNs::at(&blueprint.netns)?)?;
        let (outer, inner) = tokio::try_join!(
            existing(&self.host, &blueprint.device),
            existing(&inside, &blueprint.ifname)
        )?;
        if self.endpoint_of(&outer) != Some(blueprint.id) {
            let device = blueprint.device.clone();
            return Err(WorkloadError::ForeignDevice { device });
        }
        tokio::try_join!(
            link::set_mtu(&self.host, &outer, blueprint.mtu),
            link::set_mtu(&inside, &inner, blueprint.mtu)
        )?;
        let routes: Vec<_> = inner_routes(blueprint, inner.index).collect();
        try_join_all(routes.iter().map(|route| route::replace(&inside, route))).await?;
        Ok(())
    }

    /// Sets a route. Omits the node's address as the source while no device has it.
    pub(super) async fn set_route(&self, route: &Route) -> Result<(), KernelError> {
        match route::replace(&self.host, route).await {
            Err(error) if error.os_code() == Some(libc::EINVAL) && route.prefsrc.is_some() => {
                let without_source = Route {
                    prefsrc: None,
                    ..route.clone()
                };
                route::replace(&self.host, &without_source).await
            }
            done => done,
        }
    }

    async fn wait_until_running(&self, device: &str, ifindex: u32) -> Result<(), WorkloadError> {
        let deadline = Instant::now() + CARRIER_PATIENCE;
        let mut poll = time::interval(CARRIER_POLL);
        loop {
            poll.tick().await;
            match link::by_index(&self.host, ifindex).await? {
                Some(link) if link.running => return Ok(()),
                Some(_) if Instant::now() < deadline => {}
                Some(_) => return Err(WorkloadError::NotRunning(device.to_owned())),
                None => return Err(WorkloadError::DeviceGone(device.to_owned())),
            }
        }
    }

    async fn undo(&self, device: &str) {
        if let Err(error) = self.take_away(device).await {
            warn!(%error, device, "cannot undo the creation of an endpoint");
        }
    }

    async fn take_away(&self, device: &str) -> Result<bool, WorkloadError> {
        let Some(found) = link::by_name(&self.host, device).await? else {
            return Ok(false);
        };
        // The device has no alias between its creation and its marking.
        let is_ours = match found.alias {
            Some(_) => self.endpoint_of(&found).is_some(),
            None => found.peer.is_some() && !found.up,
        };
        if !is_ours {
            let device = device.to_owned();
            return Err(WorkloadError::ForeignDevice { device });
        }
        Ok(link::delete(&self.host, &found).await?)
    }
}

impl Devices for HostDevices {
    fn look_at(&self, netns: &Path) -> Result<NetNsId, WorkloadError> {
        let id = NetNs::at(netns)?.id()?;
        if id == netns::own_id()? {
            return Err(WorkloadError::OwnNetns(netns.to_owned()));
        }
        Ok(id)
    }

    fn is_in_use(&self, address: IpAddr) -> Task<'_, Result<bool, WorkloadError>> {
        Box::pin(async move { Ok(route::is_in_use(&self.host, address).await?) })
    }

    fn create<'a>(&'a self, blueprint: &'a Blueprint) -> Task<'a, Result<u32, WorkloadError>> {
        Box::pin(self.make(blueprint))
    }

    fn activate<'a>(
        &'a self,
        blueprint: &'a Blueprint,
        ifindex: u32,
    ) -> Task<'a, Result<(), WorkloadError>> {
        Box::pin(self.bring_up(blueprint, ifindex))
    }

    fn set_mtu<'a>(&'a self, blueprint: &'a Blueprint) -> Task<'a, Result<(), WorkloadError>> {
        Box::pin(self.resize(blueprint))
    }

    fn inspect<'a>(
        &'a self,
        blueprint: &'a Blueprint,
        ifindex: u32,
    ) -> Task<'a, Result<Vec<DeviceFault>, WorkloadError>> {
        Box::pin(self.faults(blueprint, ifindex))
    }

    fn repair<'a>(
        &'a self,
        blueprint: &'a Blueprint,
        ifindex: u32,
        fault: &'a DeviceFault,
    ) -> Task<'a, Result<(), WorkloadError>> {
        Box::pin(self.put_right(blueprint, ifindex, fault))
    }

    fn remove<'a>(&'a self, device: &'a str) -> Task<'a, Result<bool, WorkloadError>> {
        Box::pin(self.take_away(device))
    }

    fn find(&self, ifindex: u32) -> Task<'_, Result<Option<FoundDevice>, WorkloadError>> {
        Box::pin(async move {
            let link = link::by_index(&self.host, ifindex).await?;
            Ok(link.and_then(|link| self.found(link)))
        })
    }

    fn list(&self) -> Task<'_, Result<Vec<FoundDevice>, WorkloadError>> {
        Box::pin(async {
            let links = link::list(&self.host).await?;
            let ours = links.into_iter().filter_map(|link| self.found(link));
            Ok(ours.collect())
        })
    }
}

async fn existing(handle: &Handle, name: &str) -> Result<Link, WorkloadError> {
    let found = link::by_name(handle, name).await?;
    found.ok_or_else(|| WorkloadError::DeviceGone(name.to_owned()))
}

/// Returns the settings of the inner end.
fn inner_settings(blueprint: &Blueprint) -> Vec<Setting> {
    let ifname = &blueprint.ifname;
    if !blueprint.stacks.iter().any(|stack| stack.address.is_ipv6()) {
        return Vec::new();
    }
    vec![
        // The programs know the link-local address derived from the hardware address.
        Setting::new(format!("ipv6/conf/{ifname}/addr_gen_mode"), "0"),
        // Container runtimes disable IPv6 in new namespaces.
        Setting::new(format!("ipv6/conf/{ifname}/disable_ipv6"), "0"),
    ]
}

/// Returns the routes of the inner end. All traffic goes to the gateway, unless the namespace's default routes lead to
/// another endpoint.
fn inner_routes(blueprint: &Blueprint, inner: u32) -> impl Iterator<Item = Route> {
    let stacks = blueprint.stacks.iter();
    let stacks = stacks.filter(|_| blueprint.has_default_route);
    stacks.flat_map(move |stack| stack.inner_routes(inner, blueprint.mtu))
}
