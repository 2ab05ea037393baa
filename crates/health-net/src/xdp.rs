//! XDP programs on devices, and the devices' XDP capabilities. Works in the network namespace of the calling thread.

use std::io;

use netlink_packet_core::{NlaBuffer, NlasIterator};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::LinkMessage;
use netlink_sys::protocols::{NETLINK_GENERIC, NETLINK_ROUTE};

use super::mac::MacAddr;
use super::socket::KernelSocket;

/// Bytes of `struct ifinfomsg`.
const LINK_HEADER_LEN: usize = 16;
const IFLA_ADDRESS: u16 = 1;
const IFLA_XDP: u16 = 43;
/// Attributes nested in `IFLA_XDP`: the program of each mode.
const MODES: [(u16, Mode); 3] = [(5, Mode::Native), (6, Mode::Generic), (7, Mode::Hardware)];

/// Bytes of `struct genlmsghdr`.
const GENERIC_HEADER_LEN: usize = 4;
/// The netlink family that lists the other families, with its command and its attributes (`linux/genetlink.h`).
const CONTROL: u16 = 0x10;
const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;
/// The family that describes devices, from Linux 6.3 on (`linux/netdev.h`).
const NETDEV: &[u8] = b"netdev\0";
const GET_DEVICE: u8 = 1;
const DEVICE_INDEX: u16 = 1;
const DEVICE_XDP_FEATURES: u16 = 3;
/// The feature bit for sending packets that are redirected to the device.
const NDO_XMIT: u64 = 4;

/// What runs an XDP program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The device's driver, before the host's stack allocates a buffer.
    Native,
    /// The host's stack.
    Generic,
    /// The device itself.
    Hardware,
}

/// The XDP properties of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Device {
    /// Its hardware address, if that is an Ethernet address.
    pub mac: Option<MacAddr>,
    /// Ids of the programs on it, each with its mode.
    pub programs: Vec<(Mode, u32)>,
}

/// Looks a device up by its ifindex.
pub fn device(index: u32) -> io::Result<Device> {
    let mut message = LinkMessage::default();
    message.header.index = index;
    let mut device = Device::default();
    let request = RouteNetlinkMessage::GetLink(message);
    KernelSocket::open(NETLINK_ROUTE)?.request_message(&request, 0, &mut |_, payload| {
        device = Device::read(payload.get(LINK_HEADER_LEN..).unwrap_or_default());
        Ok(())
    })?;
    Ok(device)
}

impl Device {
    /// Reads the attributes of a link.
    fn read(attributes: &[u8]) -> Self {
        let mut device = Self::default();
        for attribute in each(attributes) {
            match attribute.kind() {
                IFLA_ADDRESS => device.mac = attribute.value().try_into().ok().map(MacAddr),
                IFLA_XDP => {
                    let programs = each(attribute.value()).filter_map(|attribute| {
                        let known = MODES.iter().find(|(kind, _)| *kind == attribute.kind());
                        let (_, mode) = known?;
                        let id = attribute.value().first_chunk()?;
                        Some((*mode, u32::from_ne_bytes(*id)))
                    });
                    device.programs = programs.collect();
                }
                _ => {}
            }
        }
        device
    }
}

fn each(attributes: &[u8]) -> impl Iterator<Item = NlaBuffer<&[u8]>> {
    NlasIterator::new(attributes).map_while(Result::ok)
}

/// Whether a device currently sends packets that programs in other devices' drivers redirect to it; `None` if the
/// kernel does not say. A veth sends them if its other end has a program or GRO; otherwise it also loses packets that
/// its own program sends back.
pub fn sends(index: u32) -> io::Result<Option<bool>> {
    let mut socket = KernelSocket::open(NETLINK_GENERIC)?;
    let mut family = None;
    let request = generic(GET_FAMILY, FAMILY_NAME, NETDEV);
    let known = socket.request(CONTROL, 0, &request, &mut |_, payload| {
        family = found(payload, FAMILY_ID).or(family);
        Ok(())
    });
    match known {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(None),
        known => known?,
    }
    let Some(family) = family else {
        return Ok(None);
    };
    let mut features = None;
    let request = generic(GET_DEVICE, DEVICE_INDEX, &index.to_ne_bytes());
    socket.request(
        u16::from_ne_bytes(family),
        0,
        &request,
        &mut |_, payload| {
            features = found(payload, DEVICE_XDP_FEATURES).or(features);
            Ok(())
        },
    )?;
    Ok(features.map(|features| u64::from_ne_bytes(features) & NDO_XMIT != 0))
}

/// Builds a generic netlink message with one attribute.
fn generic(command: u8, attribute: u16, value: &[u8]) -> Vec<u8> {
    const VERSION: u8 = 1;
    let mut message = vec![command, VERSION, 0, 0];
    message.extend(((4 + value.len()) as u16).to_ne_bytes());
    message.extend(attribute.to_ne_bytes());
    message.extend(value);
    message.resize(message.len().next_multiple_of(4), 0);
    message
}

/// Returns the first bytes of an attribute in a generic netlink message.
fn found<const N: usize>(payload: &[u8], kind: u16) -> Option<[u8; N]> {
    let mut attributes = each(payload.get(GENERIC_HEADER_LEN..)?);
    let attribute = attributes.find(|attribute| attribute.kind() == kind)?;
    attribute.value().first_chunk().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        generic(0, kind, value)[GENERIC_HEADER_LEN..].to_vec()
    }

    #[test]
    fn the_programs_of_a_device_are_identified_by_what_runs_them() {
        let attached = attribute(2, &[4]);
        let [native, generic] =
            [(5, 77_u32), (6, 78)].map(|(kind, id)| attribute(kind, &id.to_ne_bytes()));
        let inner = [attached, native, generic].concat();
        let link = [attribute(1, &[2, 0, 0, 0, 0, 9]), attribute(43, &inner)].concat();
        let expected = Device {
            mac: Some(MacAddr([2, 0, 0, 0, 0, 9])),
            programs: vec![(Mode::Native, 77), (Mode::Generic, 78)],
        };
        assert_eq!(Device::read(&link), expected);
        assert_eq!(Device::read(&[]), Device::default());
    }

    #[test]
    fn attributes_of_generic_netlink_are_found() {
        let message = generic(1, 7, &9_u32.to_ne_bytes());
        assert_eq!(found(&message, 7), Some(9_u32.to_ne_bytes()));
        assert_eq!(found::<8>(&message, 7), None);
        assert_eq!(found::<4>(&message, 8), None);
        assert_eq!(found::<4>(&[], 7), None);
    }
}
