//! The intended state of the health endpoint: its addresses, and the resulting routes and settings.

use std::net::IpAddr;
use std::time::Duration;

use health_model::ipam::{Family, IpamError, Pool};
use health_net::KernelError;
use health_net::link::{self, Link, LinkAddress};
use health_net::mac::MacAddr;
use health_net::netlink::Handle;
use health_net::route::{self, Route};
use health_net::sysctl::{self, Setting};
use rand::seq::IteratorRandom as _;
use tokio::time::{self, Instant};

use super::state::{ENDPOINT_IDS, State};
use super::{DEVICE, ETHERNET_MTU, HealthEndpointSpec, HealthError, forwarding, pair};
use crate::outer::outer_settings;
use crate::stack::Stack;

/// How long to wait for a node address to pass duplicate address detection, which takes a second or two.
const ADDRESS_PATIENCE: Duration = Duration::from_secs(5);
const ADDRESS_POLL: Duration = Duration::from_millis(50);

/// Minimum MTU of IPv6 links in bytes (RFC 8200 section 5).
const IPV6_MIN_MTU: u32 = 1280;

/// The intended endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) id: u16,
    pub(super) mac: MacAddr,
    pub(super) host_mac: MacAddr,
    /// MTU of both ends in bytes.
    pub(super) mtu: u32,
    /// One stack per family, IPv4 first.
    pub(super) stacks: Vec<Stack>,
    /// Names of the devices that lead to other nodes.
    pub(super) uplinks: Vec<String>,
}

/// The previous state of the endpoint.
#[derive(Clone, Debug, Default)]
pub(super) struct PreviousEndpoint {
    pub(super) id: Option<u16>,
    /// The hardware addresses of the endpoint and of the host's end.
    pub(super) macs: Option<(MacAddr, MacAddr)>,
    pub(super) addresses: Vec<IpAddr>,
    /// Whether the endpoint's device still exists, so that its addresses are in use by the endpoint itself.
    pub(super) device_stands: bool,
}

impl PreviousEndpoint {
    /// Returns the previous state as recorded in the state file.
    pub(super) fn of_state(state: &State) -> Self {
        Self {
            id: Some(state.id),
            macs: Some((state.mac, state.host_mac)),
            addresses: state.addresses().collect(),
            device_stands: false,
        }
    }
}

impl Plan {
    /// Chooses addresses, and looks up the values that depend on the host.
    pub(super) async fn make(
        host: &Handle,
        spec: &HealthEndpointSpec,
        past: &PreviousEndpoint,
    ) -> Result<Self, HealthError> {
        let usable: Vec<IpAddr> = usable_addresses(spec).collect();
        let devices = node_devices(host, &usable).await?;
        let uplinks = uplinks(&devices, spec)?;
        let mtu = mtu(&devices, spec.mtu_device.as_deref())?;
        let stacks = stacks(host, spec, past).await?;
        if stacks.iter().any(|stack| stack.address.is_ipv6()) {
            if sysctl::read("ipv6/conf/all/forwarding")?.is_none() {
                return Err(HealthError::NoIpv6);
            }
            if mtu < IPV6_MIN_MTU {
                return Err(HealthError::MtuTooSmall(mtu));
            }
        }
        let mut rng = rand::rng();
        let (mac, host_mac) = past
            .macs
            .unwrap_or_else(|| (MacAddr::random(&mut rng), MacAddr::random(&mut rng)));
        let is_free = |id: &u16| !spec.taken_ids.contains(id);
        let id = match past.id.filter(is_free) {
            Some(id) => id,
            None => ENDPOINT_IDS
                .filter(is_free)
                .choose(&mut rng)
                .ok_or(HealthError::NoIds)?,
        };
        Ok(Self {
            id,
            mac,
            host_mac,
            mtu,
            stacks,
            uplinks,
        })
    }

    pub(super) fn stack(&self, family: Family) -> Option<&Stack> {
        self.stacks
            .iter()
            .find(|stack| Family::of(stack.address) == family)
    }

    pub(super) fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.stacks.iter().map(|stack| stack.address)
    }

    /// Returns the host's routes to the endpoint, through the device with ifindex `outer`.
    pub(super) fn host_routes(&self, outer: u32) -> impl Iterator<Item = Route> {
        self.stacks.iter().map(move |stack| stack.host_route(outer))
    }

    /// Returns the endpoint's routes: all traffic goes to the gateway, through the device with ifindex `inner`.
    pub(super) fn inner_routes(&self, inner: u32) -> impl Iterator<Item = Route> {
        let stacks = self.stacks.iter();
        stacks.flat_map(move |stack| stack.inner_routes(inner, self.mtu))
    }

    /// Returns the settings of the host's end, which disappear with the device.
    pub(super) fn device_settings(&self) -> Vec<Setting> {
        let has_family = |family| self.stack(family).is_some();
        outer_settings(DEVICE, has_family(Family::V4), has_family(Family::V6))
    }

    /// Returns the permanent settings of the host, which cleanup restores, in the order in which to apply them.
    pub(super) fn host_settings(&self) -> Result<Vec<Setting>, KernelError> {
        let families = self.addresses().map(Family::of).collect();
        forwarding::settings(&self.uplinks, &families)
    }
}

fn usable_addresses(spec: &HealthEndpointSpec) -> impl Iterator<Item = IpAddr> {
    let unusable = |address: &&IpAddr| !spec.unusable_addresses.contains(address);
    spec.node_addresses.iter().filter(unusable).copied()
}

/// Waits until each of the node's addresses is usable on some device, and returns all devices.
async fn node_devices(
    host: &Handle,
    node_addresses: &[IpAddr],
) -> Result<Vec<(Link, Vec<LinkAddress>)>, HealthError> {
    let deadline = Instant::now() + ADDRESS_PATIENCE;
    let mut poll = time::interval(ADDRESS_POLL);
    loop {
        poll.tick().await;
        let devices = link::list_with_addresses(host).await?;
        let mut tentative = None;
        for &wanted in node_addresses {
            let found: Vec<_> = devices
                .iter()
                .flat_map(|(_, addresses)| addresses)
                .filter(|address| address.address == wanted)
                .collect();
            if found.is_empty() {
                return Err(HealthError::ForeignNodeAddress(wanted));
            }
            if found.iter().all(|address| address.tentative) {
                tentative = Some(wanted);
            }
        }
        match tentative {
            None => return Ok(devices),
            Some(address) if Instant::now() >= deadline => {
                return Err(HealthError::TentativeNodeAddress(address));
            }
            Some(_) => {}
        }
    }
}

/// Returns the uplinks in the settings or, if there are none, the devices that carry the node's addresses.
fn uplinks(
    devices: &[(Link, Vec<LinkAddress>)],
    spec: &HealthEndpointSpec,
) -> Result<Vec<String>, HealthError> {
    for name in &spec.uplinks {
        device_named(devices, name)?;
    }
    if !spec.uplinks.is_empty() {
        return Ok(spec.uplinks.clone());
    }
    let carries_node = |addresses: &[LinkAddress]| {
        addresses
            .iter()
            .any(|address| spec.node_addresses.contains(&address.address))
    };
    Ok(devices
        .iter()
        .filter(|(link, addresses)| !link.loopback && carries_node(addresses))
        .map(|(link, _)| link.name.clone())
        .collect())
}

fn mtu(devices: &[(Link, Vec<LinkAddress>)], device: Option<&str>) -> Result<u32, HealthError> {
    if let Some(name) = device {
        return Ok(device_named(devices, name)?.mtu);
    }
    Ok(devices
        .iter()
        .map(|(link, _)| link)
        .filter(|link| link.up && !link.loopback && !pair::is_an_agents(link))
        .map(|link| link.mtu)
        .min()
        .unwrap_or(ETHERNET_MTU))
}

fn device_named<'a>(
    devices: &'a [(Link, Vec<LinkAddress>)],
    name: &str,
) -> Result<&'a Link, HealthError> {
    devices
        .iter()
        .map(|(link, _)| link)
        .find(|link| link.name == name)
        .ok_or_else(|| HealthError::NoSuchDevice(name.to_owned()))
}

async fn stacks(
    host: &Handle,
    spec: &HealthEndpointSpec,
    past: &PreviousEndpoint,
) -> Result<Vec<Stack>, HealthError> {
    let mut stacks = Vec::new();
    for family in Family::ALL {
        let of_family = |address: &&IpAddr| Family::of(**address) == family;
        let fixed = spec.fixed_addresses.iter().find(of_family).copied();
        let Some(mut pool) = Pool::new(family, &spec.pod_cidrs, &spec.node_addresses)? else {
            if let Some(address) = fixed {
                let cidrs = Default::default();
                return Err(IpamError::NotInPool { address, cidrs }.into());
            }
            continue;
        };
        pool = pool.excluding(&spec.excluded);
        let last = past.addresses.iter().find(of_family).copied();
        let in_place = last.filter(|_| past.device_stands);
        let address = match fixed {
            Some(address) => claim(host, &mut pool, address, in_place).await?,
            None => allocate(host, &mut pool, last, in_place).await?,
        };
        stacks.push(Stack {
            address,
            gateway: pool.gateway(),
            node: usable_addresses(spec).find(|address| of_family(&address)),
        });
    }
    if stacks.is_empty() {
        return Err(HealthError::NoPodCidr);
    }
    Ok(stacks)
}

async fn claim(
    host: &Handle,
    pool: &mut Pool,
    address: IpAddr,
    in_place: Option<IpAddr>,
) -> Result<IpAddr, HealthError> {
    pool.claim(address)?;
    if in_place != Some(address) && route::is_in_use(host, address).await? {
        return Err(IpamError::Taken(address).into());
    }
    Ok(address)
}

async fn allocate(
    host: &Handle,
    pool: &mut Pool,
    mut last: Option<IpAddr>,
    in_place: Option<IpAddr>,
) -> Result<IpAddr, HealthError> {
    loop {
        let address = pool.allocate(last.take(), &mut rand::rng())?;
        // An address already in use stays taken in the pool, so this loop ends.
        if in_place == Some(address) || !route::is_in_use(host, address).await? {
            return Ok(address);
        }
    }
}
