//! Reading and writing message attributes. Numbers are in host byte order unless a function says otherwise.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use health_model::ipam::Family;
use netlink_packet_core::{DefaultNla, Emitable as _, NLA_F_NESTED, NLA_HEADER_SIZE, NlasIterator};
use netlink_packet_netfilter::NetfilterProtoFamily;

/// Bytes of `struct nfgenmsg` (include/uapi/linux/netfilter/nfnetlink.h).
const NETFILTER_HEADER_LEN: usize = 4;

/// The part of a reply that cannot be parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Malformed(pub(super) &'static str);

/// Creates any attribute.
pub(super) fn plain(kind: u16, value: impl Into<Vec<u8>>) -> DefaultNla {
    DefaultNla::new(kind, value.into())
}

/// Creates a string attribute, with a terminating zero byte.
pub(super) fn text(kind: u16, text: &str) -> DefaultNla {
    let mut bytes = text.as_bytes().to_vec();
    bytes.push(0);
    plain(kind, bytes)
}

/// Creates an attribute that contains nested attributes.
pub(super) fn nested(kind: u16, attributes: &[DefaultNla]) -> DefaultNla {
    let mut bytes = vec![0; attributes.buffer_len()];
    attributes.emit(&mut bytes);
    plain(kind | NLA_F_NESTED, bytes)
}

/// Returns the kinds, without their flags, and the values of attributes.
pub(super) fn each(bytes: &[u8]) -> impl Iterator<Item = Result<(u16, &[u8]), Malformed>> {
    NlasIterator::new(bytes).map(|attribute| {
        let attribute = attribute.map_err(|_| Malformed("an attribute is cut off"))?;
        let (kind, len) = (attribute.kind(), usize::from(attribute.length()));
        let value = attribute.into_inner().get(NLA_HEADER_SIZE..len);
        Ok((kind, value.unwrap_or_default()))
    })
}

/// Parses a value of N bytes.
pub(super) fn bytes<const N: usize>(
    value: &[u8],
    what: &'static str,
) -> Result<[u8; N], Malformed> {
    value.try_into().map_err(|_| Malformed(what))
}

pub(super) fn u16_of(value: &[u8], what: &'static str) -> Result<u16, Malformed> {
    bytes(value, what).map(u16::from_ne_bytes)
}

pub(super) fn u32_of(value: &[u8], what: &'static str) -> Result<u32, Malformed> {
    bytes(value, what).map(u32::from_ne_bytes)
}

/// Parses a number in network byte order.
pub(super) fn be_u16_of(value: &[u8], what: &'static str) -> Result<u16, Malformed> {
    bytes(value, what).map(u16::from_be_bytes)
}

/// Parses a string, up to a zero byte or the end.
pub(super) fn text_of(value: &[u8], what: &'static str) -> Result<String, Malformed> {
    let text = value.split(|byte| *byte == 0).next().unwrap_or_default();
    let text = str::from_utf8(text).map_err(|_| Malformed(what))?;
    Ok(text.to_owned())
}

/// Parses an address from its bytes in network order.
pub(super) fn address_of(value: &[u8], what: &'static str) -> Result<IpAddr, Malformed> {
    match value.len() {
        4 => Ok(Ipv4Addr::from(bytes::<4>(value, what)?).into()),
        _ => Ok(Ipv6Addr::from(bytes::<16>(value, what)?).into()),
    }
}

/// Returns the attributes of a netfilter object, which follow its header.
pub(super) fn netfilter_attributes(object: &[u8]) -> Result<&[u8], Malformed> {
    let attributes = object.get(NETFILTER_HEADER_LEN..);
    attributes.ok_or(Malformed("a netfilter header is cut off"))
}

/// Returns netfilter's number for a family.
pub(super) fn family_of(family: Family) -> NetfilterProtoFamily {
    match family {
        Family::V4 => NetfilterProtoFamily::IPv4,
        Family::V6 => NetfilterProtoFamily::IPv6,
    }
}

/// Returns the bytes of an address in network order.
pub(super) fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}
