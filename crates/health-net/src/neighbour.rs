//! Neighbour entries: hardware addresses of IP addresses on a device.

use std::io;
use std::net::IpAddr;

use futures_util::StreamExt;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::neighbour::{NeighbourAttribute, NeighbourMessage, NeighbourState};
use rtnetlink::packet_core::{NLM_F_REQUEST, NetlinkMessage, NetlinkPayload};

use super::KernelError;
use super::link::Link;
use super::mac::MacAddr;
use super::netlink::{Handle, os_error};

/// Creates an entry that never expires, so that no resolution on the link is necessary.
pub async fn set_permanent(
    handle: &Handle,
    link: &Link,
    address: IpAddr,
    mac: MacAddr,
) -> Result<(), KernelError> {
    handle
        .neighbours()
        .add(link.index, address)
        .link_layer_address(&mac.0)
        .replace()
        .execute()
        .await
        .map_err(KernelError::netlink("write", entry(address, link)))
}

/// Returns the hardware address of a permanent entry, if one exists.
pub async fn permanent(
    handle: &Handle,
    link: &Link,
    address: IpAddr,
) -> Result<Option<MacAddr>, KernelError> {
    let failed = |source| KernelError::new("read", entry(address, link), source);
    // The library can only dump all entries.
    let mut wanted = handle.neighbours().add(link.index, address);
    wanted.message_mut().header.state = NeighbourState::None;
    let mut request = NetlinkMessage::from(RouteNetlinkMessage::GetNeighbour(
        wanted.message_mut().clone(),
    ));
    request.header.flags = NLM_F_REQUEST;
    let mut answers = handle
        .clone()
        .request(request)
        .map_err(|error| failed(os_error(error)))?;
    match answers.next().await.map(|answer| answer.payload) {
        Some(NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewNeighbour(entry))) => {
            Ok(permanent_mac(&entry))
        }
        Some(NetlinkPayload::Error(error))
            if error.to_io().raw_os_error() == Some(libc::ENOENT) =>
        {
            Ok(None)
        }
        Some(NetlinkPayload::Error(error)) => Err(failed(error.to_io())),
        _ => Err(failed(io::ErrorKind::UnexpectedEof.into())),
    }
}

/// Describes an entry, for errors.
fn entry(address: IpAddr, link: &Link) -> String {
    format!("the neighbour entry of {address} on device {}", link.name)
}

fn permanent_mac(entry: &NeighbourMessage) -> Option<MacAddr> {
    entry
        .attributes
        .iter()
        .filter(|_| entry.header.state == NeighbourState::Permanent)
        .find_map(|attribute| match attribute {
            NeighbourAttribute::LinkLayerAddress(bytes) => {
                <[u8; 6]>::try_from(bytes.as_slice()).ok().map(MacAddr)
            }
            _ => None,
        })
}
