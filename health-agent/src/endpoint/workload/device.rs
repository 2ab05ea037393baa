//! Veth pairs into namespaces of others.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::time::Duration;

use futures_util::future::try_join_all;
use ipnet::IpNet;
use tokio::time::{self, Instant};
use tracing::warn;

use super::{Blueprint, Devices, Found, Pair, Stack, Task, WorkloadError};
use crate::endpoint::health::ALIAS_PREFIX;
use crate::ipam::Family;
use crate::net::link::{self, Link, LinkError, VethPair};
use crate::net::neighbour;
use crate::net::netlink::Handle;
use crate::net::netns::{self, NetNs, NetNsId};
use crate::net::route::{self, Route, RouteError};
use crate::net::sysctl::Setting;

/// How long the kernel may take to notice that both ends are up: it looks once a second at the latest.
const CARRIER_PATIENCE: Duration = Duration::from_secs(3);
const CARRIER_POLL: Duration = Duration::from_millis(1);

/// How the name of an inner end begins that waits beside the host's end.
const SPARE_PREFIX: &str = "lxcspare";

/// The devices of this host.
#[derive(Clone, Debug)]
pub struct HostDevices {
    host: Handle,
    mark: String,
}

impl HostDevices {
    /// Those of an instance, by a netlink connection in the host's namespace.
    pub fn new(host: Handle, instance: &str) -> Self {
        let mark = format!("{ALIAS_PREFIX}{instance}/");
        Self { host, mark }
    }

    /// The endpoint that a device was made for, if this instance made it.
    fn endpoint_of(&self, link: &Link) -> Option<u16> {
        let alias = link.alias.as_deref()?;
        alias.strip_prefix(&self.mark)?.parse().ok()
    }

    async fn make(&self, blueprint: &Blueprint) -> Result<u32, WorkloadError> {
        let netns = NetNs::at(&blueprint.netns)?;
        let inside = netns::netlink_in(&netns)?;
        let ifindex = match self.hand_over(blueprint, &netns, &inside).await? {
            Some(ifindex) => ifindex,
            None => self.make_into(blueprint, &netns, &inside).await?,
        };
        let finished = finish_inner(blueprint, &netns, &inside).await;
        self.or_undo(&blueprint.pair, finished).await?;
        Ok(ifindex)
    }

    async fn make_spare(&self, pair: &Pair, families: &[Family]) -> Result<u32, WorkloadError> {
        link::create_veth(&self.host, &veth(pair, &spare_name(pair.id))).await?;
        let made = self.finish_outer(pair, families.iter().copied()).await;
        self.or_undo(pair, made).await
    }

    /// Moves the inner end of a pair that was prepared to where it belongs. Returns the number of the host's
    /// end; `None` if there is no such pair.
    async fn hand_over(
        &self,
        blueprint: &Blueprint,
        netns: &NetNs,
        inside: &Handle,
    ) -> Result<Option<u32>, WorkloadError> {
        let Some(ifindex) = blueprint.spare else {
            return Ok(None);
        };
        let inner = link::by_name(&self.host, &spare_name(blueprint.pair.id)).await?;
        let is_its = |inner: &Link| inner.peer.is_some_and(|peer| peer.index == ifindex);
        let Some(inner) = inner.filter(is_its) else {
            warn!(device = blueprint.pair.device, "a prepared pair is gone");
            self.undo(&blueprint.pair.device).await;
            return Ok(None);
        };
        let (into, name) = (netns.file().as_fd(), &blueprint.ifname);
        let moved = match link::move_to_netns_as(&self.host, &inner, into, name).await {
            Ok(()) => Ok(Some(ifindex)),
            Err(error) => Err(self.explain(error, blueprint, inside).await),
        };
        self.or_undo(&blueprint.pair, moved).await
    }

    async fn make_into(
        &self,
        blueprint: &Blueprint,
        netns: &NetNs,
        inside: &Handle,
    ) -> Result<u32, WorkloadError> {
        let Blueprint { pair, ifname, .. } = blueprint;
        let into = netns.file().as_fd();
        if let Err(error) = link::create_veth_into(&self.host, &veth(pair, ifname), into).await {
            return Err(self.explain(error, blueprint, inside).await);
        }
        let families = blueprint.stacks.iter();
        let families = families.map(|stack| Family::of(stack.address));
        let made = self.finish_outer(pair, families).await;
        self.or_undo(pair, made).await
    }

    /// Which of both names is taken, if that is what the kernel says.
    async fn explain(
        &self,
        error: LinkError,
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
                device: blueprint.pair.device.clone(),
            },
        }
    }

    /// Marks and sets up the host's end.
    async fn finish_outer(
        &self,
        pair: &Pair,
        families: impl Iterator<Item = Family>,
    ) -> Result<u32, WorkloadError> {
        let outer = existing(&self.host, &pair.device).await?;
        let mark = format!("{}{}", self.mark, pair.id);
        link::set_alias(&self.host, &outer, &mark).await?;
        for setting in outer_settings(&pair.device, families) {
            setting.apply()?;
        }
        Ok(outer.index)
    }

    async fn bring_up(&self, blueprint: &Blueprint, ifindex: u32) -> Result<(), WorkloadError> {
        let outer = Link {
            name: blueprint.pair.device.clone(),
            index: ifindex,
            ..Link::default()
        };
        link::set_up(&self.host, &outer).await?;
        let neighbours = blueprint.stacks.iter().map(|stack| {
            neighbour::set_permanent(&self.host, &outer, stack.address, blueprint.pair.mac)
        });
        try_join_all(neighbours).await?;
        let routes = blueprint
            .stacks
            .iter()
            .map(|stack| self.route_to(stack, ifindex));
        try_join_all(routes).await?;
        self.wait_until_running(&blueprint.pair.device, ifindex)
            .await
    }

    async fn resize(&self, blueprint: &Blueprint) -> Result<(), WorkloadError> {
        let inside = netns::netlink_in(&NetNs::at(&blueprint.netns)?)?;
        let (outer, inner) = tokio::try_join!(
            existing(&self.host, &blueprint.pair.device),
            existing(&inside, &blueprint.ifname)
        )?;
        if self.endpoint_of(&outer) != Some(blueprint.pair.id) {
            let device = blueprint.pair.device.clone();
            return Err(WorkloadError::ForeignDevice { device });
        }
        tokio::try_join!(
            link::set_mtu(&self.host, &outer, blueprint.pair.mtu),
            link::set_mtu(&inside, &inner, blueprint.pair.mtu)
        )?;
        let routes = inner_routes(blueprint, inner.index);
        try_join_all(routes.iter().map(|route| route::replace(&inside, route))).await?;
        Ok(())
    }

    /// Without the node's address as the source, where that is on no device for now.
    async fn route_to(&self, stack: &Stack, ifindex: u32) -> Result<(), RouteError> {
        let route = Route {
            device: Some(ifindex),
            prefsrc: stack.node,
            ..Route::to(stack.address.into())
        };
        match route::replace(&self.host, &route).await {
            Err(error) if error.os_code() == Some(libc::EINVAL) && route.prefsrc.is_some() => {
                let prefsrc = None;
                route::replace(&self.host, &Route { prefsrc, ..route }).await
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

    /// What came of a step after the pair was made, which a failure takes away again.
    async fn or_undo<T>(
        &self,
        pair: &Pair,
        result: Result<T, WorkloadError>,
    ) -> Result<T, WorkloadError> {
        if result.is_err() {
            self.undo(&pair.device).await;
        }
        result
    }

    async fn undo(&self, device: &str) {
        if let Err(error) = self.take_away(device).await {
            warn!(%error, device, "cannot undo the making of an endpoint");
        }
    }

    async fn take_away(&self, device: &str) -> Result<bool, WorkloadError> {
        let Some(found) = link::by_name(&self.host, device).await? else {
            return Ok(false);
        };
        // Between its making and its marking it has no alias.
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
        Box::pin(async move {
            let route = route::matching(&self.host, address).await?;
            Ok(route.is_some_and(|route| route.destination == IpNet::from(address)))
        })
    }

    fn prepare<'a>(
        &'a self,
        pair: &'a Pair,
        families: &'a [Family],
    ) -> Task<'a, Result<u32, WorkloadError>> {
        Box::pin(self.make_spare(pair, families))
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

    fn remove<'a>(&'a self, device: &'a str) -> Task<'a, Result<bool, WorkloadError>> {
        Box::pin(self.take_away(device))
    }

    fn list(&self) -> Task<'_, Result<Vec<Found>, WorkloadError>> {
        Box::pin(async {
            let links = link::list(&self.host).await?;
            let ours = links.into_iter().filter_map(|link| {
                Some(Found {
                    endpoint: self.endpoint_of(&link)?,
                    ifindex: link.index,
                    device: link.name,
                })
            });
            Ok(ours.collect())
        })
    }
}

/// Name of the inner end of a pair while it waits for its endpoint.
fn spare_name(id: u16) -> String {
    format!("{SPARE_PREFIX}{id}")
}

fn veth<'a>(pair: &'a Pair, inner: &'a str) -> VethPair<'a> {
    VethPair {
        name: &pair.device,
        mac: pair.host_mac,
        peer_name: inner,
        peer_mac: pair.mac,
        mtu: pair.mtu,
    }
}

async fn existing(handle: &Handle, name: &str) -> Result<Link, WorkloadError> {
    let found = link::by_name(handle, name).await?;
    found.ok_or_else(|| WorkloadError::DeviceGone(name.to_owned()))
}

async fn finish_inner(
    blueprint: &Blueprint,
    netns: &NetNs,
    inside: &Handle,
) -> Result<(), WorkloadError> {
    let inner = existing(inside, &blueprint.ifname).await?;
    let settings = inner_settings(blueprint);
    netns.run_in(|| settings.iter().try_for_each(Setting::apply))??;
    // The kernel does them in the order in which they are sent; nobody waits for the answers in between.
    let addresses = blueprint
        .stacks
        .iter()
        .map(|stack| link::add_address(inside, &inner, stack.address));
    let (_, _) = tokio::try_join!(link::set_up(inside, &inner), try_join_all(addresses))?;
    let routes = inner_routes(blueprint, inner.index);
    try_join_all(routes.iter().map(|route| route::replace(inside, route))).await?;
    Ok(())
}

/// Settings of the host's end, which end with it.
fn outer_settings(device: &str, families: impl Iterator<Item = Family>) -> Vec<Setting> {
    let mut settings = vec![Setting::new(format!("ipv4/conf/{device}/rp_filter"), "0")];
    for family in families {
        match family {
            Family::V4 => {
                settings.push(Setting::new(format!("ipv4/conf/{device}/forwarding"), "1"));
            }
            Family::V6 => settings.extend([
                Setting::new(format!("ipv6/conf/{device}/disable_ipv6"), "0"),
                // No link-local address: it would take part in duplicate address detection first.
                Setting::new(format!("ipv6/conf/{device}/addr_gen_mode"), "1"),
                Setting::new(format!("ipv6/conf/{device}/forwarding"), "1"),
            ]),
        }
    }
    settings
}

/// Settings of the inner end. Runtimes disable IPv6 in new namespaces.
fn inner_settings(blueprint: &Blueprint) -> Vec<Setting> {
    let ifname = &blueprint.ifname;
    let has_ipv6 = blueprint.stacks.iter().any(|stack| stack.address.is_ipv6());
    let enabled = || Setting::new(format!("ipv6/conf/{ifname}/disable_ipv6"), "0");
    has_ipv6.then(enabled).into_iter().collect()
}

/// Everything goes to the gateway.
fn inner_routes(blueprint: &Blueprint, inner: u32) -> Vec<Route> {
    let routes = blueprint.stacks.iter().flat_map(|stack| {
        let gateway = Route {
            device: Some(inner),
            ..Route::to(stack.gateway.into())
        };
        let default = Route {
            gateway: Some(stack.gateway),
            device: Some(inner),
            mtu: Some(blueprint.pair.mtu),
            ..Route::to(everywhere(stack.gateway))
        };
        [gateway, default]
    });
    routes.collect()
}

fn everywhere(family_of: IpAddr) -> IpNet {
    let any: IpAddr = match family_of {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    IpNet::new_assert(any, 0)
}
