//! Routes of the main table, and this host's entries in the local table.

use std::collections::HashSet;
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use futures_util::TryStreamExt;
use ipnet::IpNet;
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteMetric,
    RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use super::KernelError;
use super::link;
use super::netlink::{Handle, os_error};

/// The protocol number that marks a route as created by this program. None of the `/etc/iproute2/rt_protos` files has
/// it, so `ip route` shows it as `proto 72`.
pub(crate) const ROUTE_PROTOCOL: u8 = 72;

/// The metric of [`RouteKind::Unreachable`]: every other route to the same destination takes precedence.
const LAST_METRIC: u32 = u32::MAX;

/// How a route handles packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RouteKind {
    /// Packets are forwarded.
    #[default]
    Unicast,
    /// Packets are dropped, and their senders get an ICMP error.
    Unreachable,
}

/// A route. The destination of a unicast route without a gateway is on the link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// How it handles packets.
    pub kind: RouteKind,
    /// Its destination.
    pub destination: IpNet,
    /// Next hop.
    pub gateway: Option<IpAddr>,
    /// Ifindex of the device; if unset, the kernel uses the gateway's device.
    pub device: Option<u32>,
    /// Source address for packets that do not have one yet.
    pub prefsrc: Option<IpAddr>,
    /// Size of the largest packet in bytes, if it differs from the device's MTU.
    pub mtu: Option<u32>,
    /// Who created it; see [`ROUTE_PROTOCOL`].
    pub protocol: u8,
}

impl Route {
    /// Returns a route of ours, with only its destination set.
    pub fn to(destination: IpNet) -> Self {
        Self {
            kind: RouteKind::Unicast,
            destination,
            gateway: None,
            device: None,
            prefsrc: None,
            mtu: None,
            protocol: ROUTE_PROTOCOL,
        }
    }

    /// Returns a route of ours that makes the destination unreachable, unless another route leads there.
    pub fn to_nobody(destination: IpNet) -> Self {
        Self {
            kind: RouteKind::Unreachable,
            ..Self::to(destination)
        }
    }

    fn message(&self) -> RouteMessage {
        let mut message = RouteMessage::default();
        let header = &mut message.header;
        header.address_family = family(self.destination.addr());
        header.destination_prefix_length = self.destination.prefix_len();
        header.table = RouteHeader::RT_TABLE_MAIN;
        header.protocol = RouteProtocol::from(self.protocol);
        let attributes = &mut message.attributes;
        match self.kind {
            RouteKind::Unicast => {
                header.kind = RouteType::Unicast;
                if self.gateway.is_none() && self.destination.addr().is_ipv4() {
                    header.scope = RouteScope::Link;
                }
            }
            RouteKind::Unreachable => {
                header.kind = RouteType::Unreachable;
                attributes.push(RouteAttribute::Priority(LAST_METRIC));
            }
        }
        attributes.push(RouteAttribute::Destination(self.destination.addr().into()));
        attributes.extend(self.gateway.map(|ip| RouteAttribute::Gateway(ip.into())));
        attributes.extend(self.device.map(RouteAttribute::Oif));
        attributes.extend(self.prefsrc.map(|ip| RouteAttribute::PrefSource(ip.into())));
        attributes.extend(
            self.mtu
                .map(|mtu| RouteAttribute::Metrics(vec![RouteMetric::Mtu(mtu)])),
        );
        message
    }
}

/// Formatted as by `ip route`, but with the ifindex instead of the device's name.
impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.kind == RouteKind::Unreachable {
            write!(f, "unreachable ")?;
        }
        write!(f, "{}", self.destination)?;
        if let Some(gateway) = self.gateway {
            write!(f, " via {gateway}")?;
        }
        if let Some(device) = self.device {
            write!(f, " dev #{device}")?;
        }
        if let Some(prefsrc) = self.prefsrc {
            write!(f, " src {prefsrc}")?;
        }
        if let Some(mtu) = self.mtu {
            write!(f, " mtu {mtu}")?;
        }
        Ok(())
    }
}

/// Adds a route. Fails if a route with the same destination and metric exists (`EEXIST`).
pub async fn add(handle: &Handle, route: &Route) -> Result<(), KernelError> {
    let request = handle.route().add(route.message());
    request
        .execute()
        .await
        .map_err(KernelError::netlink("add", named(route)))
}

/// Adds a route, or replaces the one with the same destination and metric.
pub async fn replace(handle: &Handle, route: &Route) -> Result<(), KernelError> {
    let request = handle.route().add(route.message()).replace();
    request
        .execute()
        .await
        .map_err(KernelError::netlink("set", named(route)))
}

/// Deletes a route. Returns whether it existed.
pub async fn delete(handle: &Handle, route: &Route) -> Result<bool, KernelError> {
    let done = handle.route().del(route.message()).execute().await;
    match done.map_err(KernelError::netlink("delete", named(route))) {
        Ok(()) => Ok(true),
        Err(error) if error.os_code() == Some(libc::ESRCH) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Lists the routes of our protocol, both families.
pub async fn list_ours(handle: &Handle) -> Result<Vec<Route>, KernelError> {
    let protocol = RouteProtocol::from(ROUTE_PROTOCOL);
    let mut routes = list_main(handle, protocol).await?;
    routes.retain(|route| route.protocol == ROUTE_PROTOCOL);
    Ok(routes)
}

/// Lists the routes of the main table, both families and all protocols.
pub async fn list_all(handle: &Handle) -> Result<Vec<Route>, KernelError> {
    list_main(handle, RouteProtocol::Unspec).await
}

/// Lists the prefixes that reach this host: its addresses, the broadcast and anycast addresses of their networks, and
/// other entries of the local table, except for service addresses, which lead elsewhere. Each prefix comes with its
/// device's ifindex.
pub async fn to_this_host(handle: &Handle) -> Result<Vec<(IpNet, u32)>, KernelError> {
    let messages = list(handle, libc::RT_TABLE_LOCAL, RouteProtocol::Unspec).await?;
    let is_to_host = |message: &&RouteMessage| {
        message.header.table == libc::RT_TABLE_LOCAL
            && matches!(
                message.header.kind,
                RouteType::Local | RouteType::Broadcast | RouteType::Anycast
            )
    };
    let routes = messages.iter().filter(is_to_host).filter_map(parse);
    let mut prefixes: Vec<_> = routes
        .map(|route| (route.destination, route.device.unwrap_or(0)))
        .collect();
    if let Some(link) = link::by_name(handle, link::SERVICES_DEVICE).await? {
        let of_services = link::addresses_of(handle, link.index).await?.into_iter();
        let of_services = of_services.map(|carried| IpNet::from(carried.address));
        let of_services: HashSet<_> = of_services.collect();
        prefixes.retain(|(prefix, _)| !of_services.contains(prefix));
    }
    Ok(prefixes)
}

async fn list_main(handle: &Handle, protocol: RouteProtocol) -> Result<Vec<Route>, KernelError> {
    let messages = list(handle, RouteHeader::RT_TABLE_MAIN, protocol).await?;
    Ok(messages.iter().filter_map(parse).collect())
}

/// Dumps the routes of a table. [`RouteProtocol::Unspec`] matches any protocol.
async fn list(
    handle: &Handle,
    table: u8,
    protocol: RouteProtocol,
) -> Result<Vec<RouteMessage>, KernelError> {
    let mut routes = Vec::new();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        let mut filter = RouteMessage::default();
        filter.header.address_family = family;
        filter.header.table = table;
        filter.header.protocol = protocol;
        let request = RouteNetlinkMessage::GetRoute(filter);
        let listed = handle.list(request, |answer| match answer {
            RouteNetlinkMessage::NewRoute(message) => Some(message),
            _ => None,
        });
        match listed.await {
            Ok(messages) => routes.extend(messages),
            // A kernel without IPv6, or a table that has never had a route.
            Err(error) if is_absent_table(&error) => {}
            Err(error) => return Err(KernelError::new("list", "routes", error)),
        }
    }
    Ok(routes)
}

/// Finds the route that packets to an address take, whatever its creator or table, including routes to the host's own
/// addresses; `None` if no route delivers the packets.
pub async fn matching(handle: &Handle, address: IpAddr) -> Result<Option<Route>, KernelError> {
    look_up(handle, address, RouteFlags::FibMatch).await
}

/// Whether a device of the host has the address, or a route leads to this address alone.
pub async fn is_in_use(handle: &Handle, address: IpAddr) -> Result<bool, KernelError> {
    let route = matching(handle, address).await?;
    Ok(route.is_some_and(|route| route.destination == IpNet::from(address)))
}

/// Returns the ifindex of the device through which packets to an address leave. If the route has several next hops,
/// this is the one chosen for this address.
pub(crate) async fn device_towards(
    handle: &Handle,
    address: IpAddr,
) -> Result<Option<u32>, KernelError> {
    let route = look_up(handle, address, RouteFlags::empty()).await?;
    Ok(route.and_then(|route| route.device))
}

async fn look_up(
    handle: &Handle,
    address: IpAddr,
    flags: RouteFlags,
) -> Result<Option<Route>, KernelError> {
    let mut request = RouteMessage::default();
    request.header.address_family = family(address);
    request.header.destination_prefix_length = full_length(address);
    request.header.flags = flags;
    request
        .attributes
        .push(RouteAttribute::Destination(address.into()));
    let answer = handle.route().get(request).execute().try_next().await;
    match answer.map_err(os_error) {
        Ok(message) => Ok(message.as_ref().and_then(parse)),
        Err(source) if is_undeliverable(&source) => Ok(None),
        Err(source) => {
            let route = format!("the route to {address}");
            Err(KernelError::new("look up", route, source))
        }
    }
}

/// Names a route in errors, formatted as by `ip route`.
fn named(route: &Route) -> String {
    format!("route {route}")
}

fn is_absent_table(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EOPNOTSUPP | libc::EAFNOSUPPORT | libc::ENOENT)
    )
}

/// Whether a lookup's error is a valid result: no route, or an unreachable, prohibit or blackhole route.
fn is_undeliverable(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ENETUNREACH | libc::EHOSTUNREACH | libc::EACCES | libc::EINVAL)
    )
}

fn family(address: IpAddr) -> AddressFamily {
    match address {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    }
}

fn full_length(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

fn parse(message: &RouteMessage) -> Option<Route> {
    let any: IpAddr = match message.header.address_family {
        AddressFamily::Inet => Ipv4Addr::UNSPECIFIED.into(),
        AddressFamily::Inet6 => Ipv6Addr::UNSPECIFIED.into(),
        _ => return None,
    };
    let length = message.header.destination_prefix_length;
    let mut route = Route::to(IpNet::new(any, length).ok()?);
    route.protocol = message.header.protocol.into();
    if message.header.kind == RouteType::Unreachable {
        route.kind = RouteKind::Unreachable;
    }
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(address) => {
                route.destination = IpNet::new(ip(address)?, length).ok()?;
            }
            RouteAttribute::Gateway(address) => route.gateway = ip(address),
            // With IPv6, unreachable routes are on the loopback device.
            RouteAttribute::Oif(_) if route.kind == RouteKind::Unreachable => {}
            RouteAttribute::Oif(index) => route.device = Some(*index),
            RouteAttribute::PrefSource(address) => route.prefsrc = ip(address),
            RouteAttribute::Metrics(metrics) => {
                route.mtu = metrics.iter().find_map(|metric| match metric {
                    RouteMetric::Mtu(mtu) => Some(*mtu),
                    _ => None,
                });
            }
            _ => {}
        }
    }
    Some(route)
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(ip) => Some((*ip).into()),
        RouteAddress::Inet6(ip) => Some((*ip).into()),
        _ => None,
    }
}
