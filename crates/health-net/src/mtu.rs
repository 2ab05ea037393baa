//! The largest packets that can be sent to an address, as far as this host determines it.

use std::io;
use std::net::IpAddr;

use futures_util::{Stream, StreamExt, TryStreamExt};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{AfSpecInet6, AfSpecUnspec, LinkAttribute, LinkMessage};
use rtnetlink::MulticastGroup;
use rtnetlink::packet_core::NetlinkPayload;

use super::netlink::{Handle, os_error};
use super::{KernelError, route};

/// How packets to an address leave this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WayOut {
    /// Name of the device.
    pub device: String,
    /// The device's MTU: the largest IP packet that it accepts, in bytes.
    pub device_mtu: u32,
    /// The largest packet that this host sends, in bytes. Less than the device's MTU if a lower limit comes from the
    /// route or, for IPv6, from the device's settings or a router advertisement (RFC 4861 section 4.6.4).
    pub mtu: u32,
}

/// Finds the way out to an address; `None` if no route leads there.
pub async fn way_out(handle: &Handle, address: IpAddr) -> Result<Option<WayOut>, KernelError> {
    let Some(route) = route::matching(handle, address).await? else {
        return Ok(None);
    };
    let index = match route.device {
        Some(index) => Some(index),
        // The route has several next hops.
        None => route::device_towards(handle, address).await?,
    };
    let Some(index) = index else {
        return Ok(None);
    };
    let answer = handle.link().get().match_index(index).execute();
    let message = answer.into_stream().try_next().await;
    let message = message.map_err(|error| {
        let device = format!("device #{index} of the route to {address}");
        KernelError::new("find", device, os_error(error))
    })?;
    Ok(message.and_then(|message| way_through(&message, address, route.mtu)))
}

/// A device's MTU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceMtu {
    /// Name of the device.
    pub device: String,
    /// The largest IP packet that the device accepts, in bytes.
    pub mtu: u32,
}

/// Opens a connection for [`way_out`] in the calling thread's network namespace, and subscribes to device events. Each
/// event yields the device's current MTU. Must be called inside a tokio runtime.
pub fn open() -> io::Result<(Handle, impl Stream<Item = DeviceMtu> + Unpin)> {
    let (mut connection, requests, messages) =
        rtnetlink::new_multicast_connection(&[MulticastGroup::Link])?;
    let handle = Handle::of(&mut connection, requests);
    tokio::spawn(connection);
    let reported = messages.filter_map(|(message, _)| {
        std::future::ready(match message.payload {
            NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewLink(link)) => device_mtu(&link),
            _ => None,
        })
    });
    Ok((handle, reported))
}

fn device_mtu(message: &LinkMessage) -> Option<DeviceMtu> {
    let attributes = || message.attributes.iter();
    let device = attributes().find_map(|attribute| match attribute {
        LinkAttribute::IfName(name) => Some(name.clone()),
        _ => None,
    })?;
    let mtu = attributes().find_map(|attribute| match attribute {
        LinkAttribute::Mtu(mtu) => Some(*mtu),
        _ => None,
    })?;
    Some(DeviceMtu { device, mtu })
}

fn way_through(message: &LinkMessage, address: IpAddr, route_mtu: Option<u32>) -> Option<WayOut> {
    let DeviceMtu {
        device,
        mtu: device_mtu,
    } = device_mtu(message)?;
    let ipv6_mtu = message.attributes.iter().find_map(ipv6_mtu);
    let settings_mtu = ipv6_mtu.filter(|_| address.is_ipv6());
    Some(WayOut {
        device,
        device_mtu,
        mtu: [Some(device_mtu), route_mtu, settings_mtu]
            .into_iter()
            .flatten()
            .filter(|&mtu| mtu > 0)
            .min()
            .unwrap_or(device_mtu),
    })
}

/// `net.ipv6.conf.DEVICE.mtu`.
fn ipv6_mtu(attribute: &LinkAttribute) -> Option<u32> {
    let LinkAttribute::AfSpecUnspec(families) = attribute else {
        return None;
    };
    let mut ipv6 = families.iter().filter_map(|family| match family {
        AfSpecUnspec::Inet6(ipv6) => Some(ipv6),
        _ => None,
    });
    ipv6.next()?.iter().find_map(|setting| match setting {
        AfSpecInet6::DevConf(settings) => u32::try_from(settings.mtu6).ok(),
        _ => None,
    })
}
