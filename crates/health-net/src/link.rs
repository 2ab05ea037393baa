//! Devices and their addresses.

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd};

use futures_util::TryStreamExt;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::{
    AddressAttribute, AddressFlags, AddressHeaderFlags, AddressMessage, AddressScope, CacheInfo,
};
use netlink_packet_route::link::{
    InfoData, InfoKind, InfoVeth, LinkAttribute, LinkFlags, LinkInfo, LinkLayerType, LinkMessage,
};
use rtnetlink::{LinkDummy, LinkMessageBuilder, LinkUnspec, LinkVeth};

use super::KernelError;
use super::mac::MacAddr;
use super::netlink::Handle;

/// A device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Link {
    /// Its ifindex.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// The kind of software device (`veth`, `bridge`); `None` for hardware and the loopback.
    pub kind: Option<String>,
    /// The header with which its packets begin.
    pub header: LinkHeader,
    /// Its hardware address, if that is an Ethernet address.
    pub mac: Option<MacAddr>,
    /// Size of the largest packet in bytes, without the Ethernet header.
    pub mtu: u32,
    /// Whether it is administratively up.
    pub up: bool,
    /// Whether packets pass: the device and its other side are up. For a veth, the kernel establishes this a moment
    /// after both ends come up, and drops packets until then.
    pub running: bool,
    /// Whether it is a loopback.
    pub loopback: bool,
    /// Free text with which its creator marked it.
    pub alias: Option<String>,
    /// The other end, if it is a veth.
    pub peer: Option<Peer>,
}

/// The header with which a device's packets begin when traffic control programs see them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LinkHeader {
    /// An Ethernet header.
    #[default]
    Ethernet,
    /// The IP header: tun devices, WireGuard, IP-in-IP tunnels, PPP.
    Ip,
    /// Another header, or one that differs between the directions.
    Other,
}

impl LinkHeader {
    /// Returns the header of a device with this type and kind.
    fn of(link_type: LinkLayerType, kind: Option<&str>) -> Self {
        match link_type {
            LinkLayerType::Ether | LinkLayerType::Loopback => Self::Ethernet,
            // Packets that arrive through IPsec keep the header of the device on which they arrived first.
            _ if matches!(kind, Some("xfrm" | "vti" | "vti6")) => Self::Other,
            // Follows `dev_is_mac_header_xmit` (include/linux/if_arp.h), except for GRE, whose header depends on the
            // tunnel's settings.
            LinkLayerType::None
            | LinkLayerType::Rawip
            | LinkLayerType::Ppp
            | LinkLayerType::Tunnel
            | LinkLayerType::Tunnel6
            | LinkLayerType::Sit => Self::Ip,
            _ => Self::Other,
        }
    }
}

/// The other end of a veth pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its ifindex in its own namespace.
    pub index: u32,
    /// The id of the peer's namespace in this namespace; `None` if both are the same, negative if the peer's namespace
    /// is being removed.
    pub netnsid: Option<i32>,
}

impl Peer {
    /// Whether the peer's namespace still exists. The kernel assigns no id to a namespace that is being removed, and
    /// soon removes the pair (net/core/net_namespace.c, `peernet2id_alloc`).
    pub fn is_alive(&self) -> bool {
        self.netnsid.is_none_or(|number| number >= 0)
    }
}

/// An address of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkAddress {
    /// The device's ifindex.
    pub index: u32,
    /// The address.
    pub address: IpAddr,
    /// Number of network bits.
    pub prefix_len: u8,
    /// Whether it cannot be used (yet), because it has not passed duplicate address detection.
    pub tentative: bool,
}

/// The properties of a new veth pair.
#[derive(Clone, Debug)]
pub struct VethPair<'a> {
    /// Name of one end.
    pub name: &'a str,
    /// Hardware address of that end.
    pub mac: MacAddr,
    /// Name of the other end.
    pub peer_name: &'a str,
    /// Hardware address of the other end.
    pub peer_mac: MacAddr,
    /// MTU of both ends in bytes.
    pub mtu: u32,
}

/// Finds a device by its name.
pub async fn by_name(handle: &Handle, name: &str) -> Result<Option<Link>, KernelError> {
    let request = handle.link().get().match_name(name);
    one(request, device(name)).await
}

/// Finds a device by its ifindex.
pub async fn by_index(handle: &Handle, index: u32) -> Result<Option<Link>, KernelError> {
    let request = handle.link().get().match_index(index);
    one(request, device(index)).await
}

async fn one(
    request: rtnetlink::LinkGetRequest,
    device: String,
) -> Result<Option<Link>, KernelError> {
    let answer = request
        .execute()
        .try_next()
        .await
        .map_err(KernelError::netlink("find", device));
    match answer {
        Ok(message) => Ok(message.map(Link::from)),
        Err(error) if is_missing(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Lists all devices.
pub async fn list(handle: &Handle) -> Result<Vec<Link>, KernelError> {
    let request = RouteNetlinkMessage::GetLink(LinkMessage::default());
    let listed = handle.list(request, |answer| match answer {
        RouteNetlinkMessage::NewLink(message) => Some(Link::from(message)),
        _ => None,
    });
    listed
        .await
        .map_err(|source| KernelError::new("list", "devices", source))
}

/// Lists the addresses of all devices.
pub async fn addresses(handle: &Handle) -> Result<Vec<LinkAddress>, KernelError> {
    list_addresses(handle, AddressMessage::default()).await
}

/// Lists the addresses of one device only; empty if it is gone.
pub async fn addresses_of(handle: &Handle, index: u32) -> Result<Vec<LinkAddress>, KernelError> {
    let mut filter = AddressMessage::default();
    filter.header.index = index;
    match list_addresses(handle, filter).await {
        Err(error) if is_missing(&error) => Ok(Vec::new()),
        listed => listed,
    }
}

async fn list_addresses(
    handle: &Handle,
    filter: AddressMessage,
) -> Result<Vec<LinkAddress>, KernelError> {
    let request = RouteNetlinkMessage::GetAddress(filter);
    let listed = handle.list(request, |answer| match answer {
        RouteNetlinkMessage::NewAddress(message) => link_address(&message),
        _ => None,
    });
    listed
        .await
        .map_err(|source| KernelError::new("list", "addresses", source))
}

/// The device that carries service addresses if IPVS serves them: packets to these addresses do not end on this host.
pub const SERVICES_DEVICE: &str = "health-ipvs0";

/// Lists all devices with their addresses.
pub async fn list_with_addresses(
    handle: &Handle,
) -> Result<Vec<(Link, Vec<LinkAddress>)>, KernelError> {
    let mut by_index: HashMap<u32, Vec<LinkAddress>> = HashMap::new();
    for address in addresses(handle).await? {
        by_index.entry(address.index).or_default().push(address);
    }
    let links = list(handle).await?;
    Ok(links
        .into_iter()
        .map(|link| {
            let addresses = by_index.remove(&link.index).unwrap_or_default();
            (link, addresses)
        })
        .collect())
}

/// Finds the devices that carry any of the `wanted` addresses, each with those addresses.
pub async fn carrying(
    handle: &Handle,
    wanted: &[IpAddr],
) -> Result<Vec<(Link, Vec<IpAddr>)>, KernelError> {
    let links = list_with_addresses(handle).await?;
    Ok(links
        .into_iter()
        .filter_map(|(link, addresses)| {
            let carried: Vec<_> = addresses
                .iter()
                .map(|address| address.address)
                .filter(|address| wanted.contains(address))
                .collect();
            (!carried.is_empty()).then_some((link, carried))
        })
        .collect())
}

/// Creates a veth pair, both ends down and in the handle's namespace.
pub async fn create_veth(handle: &Handle, pair: &VethPair<'_>) -> Result<(), KernelError> {
    create(handle, pair, |peer| peer).await
}

async fn create(
    handle: &Handle,
    pair: &VethPair<'_>,
    place: impl FnOnce(LinkMessageBuilder<LinkUnspec>) -> LinkMessageBuilder<LinkUnspec>,
) -> Result<(), KernelError> {
    let peer = LinkMessageBuilder::<LinkUnspec>::new()
        .name(pair.peer_name)
        .address(pair.peer_mac.0.to_vec())
        .mtu(pair.mtu);
    let peer = place(peer);
    let message = LinkMessageBuilder::<LinkVeth>::new(pair.name, pair.peer_name)
        .set_info_data(InfoData::Veth(InfoVeth::Peer(peer.build())))
        .address(pair.mac.0.to_vec())
        .mtu(pair.mtu)
        .build();
    handle
        .link()
        .add(message)
        .execute()
        .await
        .map_err(KernelError::netlink("create veth", device(pair.name)))
}

/// Creates a veth pair, both ends down: the first in the handle's namespace, the other in `netns`.
pub async fn create_veth_into(
    handle: &Handle,
    pair: &VethPair<'_>,
    netns: BorrowedFd<'_>,
) -> Result<(), KernelError> {
    create(handle, pair, |peer| peer.setns_by_fd(netns.as_raw_fd())).await
}

/// Creates a dummy device, which is down at first. It carries addresses and sends nothing.
pub async fn create_dummy(handle: &Handle, name: &str) -> Result<(), KernelError> {
    let message = LinkDummy::new(name).build();
    let request = handle.link().add(message).execute();
    let attempt = KernelError::netlink("create dummy", device(name));
    request.await.map_err(attempt)
}

/// Marks a device with free text.
pub async fn set_alias(handle: &Handle, link: &Link, alias: &str) -> Result<(), KernelError> {
    change(handle, link, "set the alias of", |m| m.alias(alias)).await
}

/// Changes a device's hardware address.
pub async fn set_mac(handle: &Handle, link: &Link, mac: MacAddr) -> Result<(), KernelError> {
    change(handle, link, "set the hardware address of", |m| {
        m.address(mac.0.to_vec())
    })
    .await
}

/// Changes a device's MTU, in bytes.
pub async fn set_mtu(handle: &Handle, link: &Link, mtu: u32) -> Result<(), KernelError> {
    change(handle, link, "set the MTU of", |m| m.mtu(mtu)).await
}

/// Brings a device up.
pub async fn set_up(handle: &Handle, link: &Link) -> Result<(), KernelError> {
    change(handle, link, "bring up", LinkMessageBuilder::up).await
}

/// Takes a device down.
pub async fn set_down(handle: &Handle, link: &Link) -> Result<(), KernelError> {
    change(handle, link, "take down", LinkMessageBuilder::down).await
}

/// Moves a device to another namespace, where it keeps its name and is down. Its ifindex may change.
pub async fn move_to_netns(
    handle: &Handle,
    link: &Link,
    netns: BorrowedFd<'_>,
) -> Result<(), KernelError> {
    change(handle, link, "move to another namespace", |m| {
        m.setns_by_fd(netns.as_raw_fd())
    })
    .await
}

async fn change(
    handle: &Handle,
    link: &Link,
    attempt: &'static str,
    edit: impl FnOnce(LinkMessageBuilder<LinkUnspec>) -> LinkMessageBuilder<LinkUnspec>,
) -> Result<(), KernelError> {
    let message = edit(LinkUnspec::new_with_index(link.index)).build();
    handle
        .link()
        .set(message)
        .execute()
        .await
        .map_err(KernelError::netlink(attempt, device(&link.name)))
}

/// Deletes a device; for a veth pair, both ends. Returns whether it existed.
pub async fn delete(handle: &Handle, link: &Link) -> Result<bool, KernelError> {
    let done = handle.link().del(link.index).execute().await;
    match done.map_err(KernelError::netlink("delete", device(&link.name))) {
        Ok(()) => Ok(true),
        Err(error) if is_missing(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Adds a single address (`/32` or `/128`) to a device, usable at once. An existing address stays unchanged.
pub async fn add_address(handle: &Handle, link: &Link, address: IpAddr) -> Result<(), KernelError> {
    add(handle, link, address, |_| ()).await
}

/// Like [`add_address`], for an address that must only be a destination, never a source: the kernel does not select it
/// as the source of this host's packets, or of packets that it masquerades, while another address is available.
pub async fn add_destination_address(
    handle: &Handle,
    link: &Link,
    address: IpAddr,
) -> Result<(), KernelError> {
    let keep_back = |message: &mut AddressMessage| match address {
        // `inet_select_addr` in net/ipv4/devinet.c skips link and host scope.
        IpAddr::V4(_) => message.header.scope = AddressScope::Host,
        // `ipv6_dev_get_saddr` in net/ipv6/addrconf.c selects deprecated addresses last (RFC 6724, section 5).
        IpAddr::V6(_) => {
            let mut lifetimes = CacheInfo::default();
            lifetimes.ifa_valid = u32::MAX;
            let attribute = AddressAttribute::CacheInfo(lifetimes);
            message.attributes.push(attribute);
        }
    };
    add(handle, link, address, keep_back).await
}

async fn add(
    handle: &Handle,
    link: &Link,
    address: IpAddr,
    edit: impl FnOnce(&mut AddressMessage),
) -> Result<(), KernelError> {
    let prefix_len = if address.is_ipv4() { 32 } else { 128 };
    let mut request = handle
        .address()
        .add(link.index, address, prefix_len)
        .replace();
    let message = request.message_mut();
    if address.is_ipv6() {
        // No other node on this link can have the address.
        message.header.flags |= AddressHeaderFlags::Nodad;
    }
    edit(message);
    request.execute().await.map_err(KernelError::netlink(
        "add an address to",
        device(&link.name),
    ))
}

/// Removes a single address (`/32` or `/128`) from a device. Returns whether the device had it.
pub async fn delete_address(
    handle: &Handle,
    link: &Link,
    address: IpAddr,
) -> Result<bool, KernelError> {
    let prefix_len = if address.is_ipv4() { 32 } else { 128 };
    let mut request = handle.address().add(link.index, address, prefix_len);
    let message = std::mem::take(request.message_mut());
    let done = handle.address().del(message).execute().await;
    let attempt = KernelError::netlink("delete an address of", device(&link.name));
    match done.map_err(attempt) {
        Ok(()) => Ok(true),
        Err(error) if error.os_code() == Some(libc::EADDRNOTAVAIL) || is_missing(&error) => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Names a device by name or ifindex, for errors.
fn device(which: impl fmt::Display) -> String {
    format!("device {which}")
}

fn is_missing(error: &KernelError) -> bool {
    error.os_code() == Some(libc::ENODEV)
}

impl From<LinkMessage> for Link {
    fn from(message: LinkMessage) -> Self {
        let flags = message.header.flags;
        let mut link = Self {
            index: message.header.index,
            name: String::new(),
            kind: None,
            header: LinkHeader::default(),
            mac: None,
            mtu: 0,
            up: flags.contains(LinkFlags::Up),
            running: flags.contains(LinkFlags::Running),
            loopback: flags.contains(LinkFlags::Loopback),
            alias: None,
            peer: None,
        };
        let (mut lower, mut netnsid) = (None, None);
        for attribute in message.attributes {
            match attribute {
                LinkAttribute::IfName(name) => link.name = name,
                LinkAttribute::Address(bytes) => {
                    link.mac = <[u8; 6]>::try_from(bytes).ok().map(MacAddr);
                }
                LinkAttribute::Mtu(mtu) => link.mtu = mtu,
                LinkAttribute::IfAlias(alias) => link.alias = Some(alias),
                LinkAttribute::Link(index) => lower = Some(index),
                LinkAttribute::LinkNetNsId(id) => netnsid = Some(id),
                LinkAttribute::LinkInfo(infos) => {
                    link.kind = infos.iter().find_map(|info| match info {
                        LinkInfo::Kind(kind) => Some(kind.to_string()),
                        _ => None,
                    });
                }
                _ => {}
            }
        }
        link.header = LinkHeader::of(message.header.link_layer_type, link.kind.as_deref());
        if link.kind.as_deref() == Some(&InfoKind::Veth.to_string()) {
            link.peer = lower.map(|index| Peer { index, netnsid });
        }
        link
    }
}

fn link_address(message: &AddressMessage) -> Option<LinkAddress> {
    // On a point-to-point device, `Address` is the other side's address.
    let local = message.attributes.iter().find_map(|a| match a {
        AddressAttribute::Local(address) => Some(*address),
        _ => None,
    });
    let address = message.attributes.iter().find_map(|a| match a {
        AddressAttribute::Address(address) => Some(*address),
        _ => None,
    });
    let unusable = AddressFlags::Tentative | AddressFlags::Dadfailed;
    let tentative = message
        .attributes
        .iter()
        .any(|a| matches!(a, AddressAttribute::Flags(flags) if flags.intersects(unusable)));
    Some(LinkAddress {
        index: message.header.index,
        address: local.or(address)?,
        prefix_len: message.header.prefix_len,
        tentative,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_packets_begin_with_depends_on_the_type_of_the_device() {
        for (link_type, kind, header) in [
            (LinkLayerType::Ether, None, LinkHeader::Ethernet),
            (LinkLayerType::Ether, Some("veth"), LinkHeader::Ethernet),
            (LinkLayerType::Loopback, None, LinkHeader::Ethernet),
            (LinkLayerType::None, Some("tun"), LinkHeader::Ip),
            (LinkLayerType::None, Some("wireguard"), LinkHeader::Ip),
            (LinkLayerType::Tunnel, Some("ipip"), LinkHeader::Ip),
            (LinkLayerType::Ppp, None, LinkHeader::Ip),
            (LinkLayerType::None, Some("xfrm"), LinkHeader::Other),
            (LinkLayerType::Tunnel, Some("vti"), LinkHeader::Other),
            (LinkLayerType::Ipgre, Some("gre"), LinkHeader::Other),
            (LinkLayerType::Infiniband, None, LinkHeader::Other),
        ] {
            assert_eq!(
                LinkHeader::of(link_type, kind),
                header,
                "{link_type:?} {kind:?}"
            );
        }
    }
}
