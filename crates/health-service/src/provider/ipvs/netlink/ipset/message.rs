//! Reading and writing messages of the ipset subsystem.

use std::net::IpAddr;

use health_model::policy::Protocol;
use ipnet::IpNet;
use netlink_packet_core::{DefaultNla, NLA_F_NET_BYTEORDER};
use netlink_packet_netfilter::{
    NetfilterHeader, NetfilterMessage, NetfilterMessageInner, NetfilterProtoFamily,
    NetfilterSubsystem,
};

use super::super::attributes::{
    Malformed, address_of, be_u16_of, bytes, each, family_of, nested, netfilter_attributes, octets,
    plain, text,
};
use super::model::{Entry, SetSpec, SetType};

/// `NFNL_SUBSYS_IPSET`.
const SUBSYSTEM: u8 = 6;
/// The ipset protocol version that kernels have supported since 4.17.
const VERSION: u8 = 7;
/// Initial number of rows in a new set, which grows as needed.
const HASH_SIZE: u32 = 1024;

/// `IPSET_ATTR_*` of commands.
mod command {
    pub(super) const PROTOCOL: u16 = 1;
    pub(super) const SETNAME: u16 = 2;
    pub(super) const TYPENAME: u16 = 3;
    pub(super) const REVISION: u16 = 4;
    pub(super) const FAMILY: u16 = 5;
    pub(super) const DATA: u16 = 7;
    pub(super) const ADT: u16 = 8;
    pub(super) const LINENO: u16 = 9;
    pub(super) const INDEX: u16 = 11;
}

/// `IPSET_ATTR_*` of sets and entries.
mod data {
    pub(super) const IP: u16 = 1;
    pub(super) const PORT: u16 = 4;
    pub(super) const PORT_TO: u16 = 5;
    pub(super) const PROTO: u16 = 7;
    pub(super) const HASHSIZE: u16 = 18;
    pub(super) const MAXELEM: u16 = 19;
    pub(super) const IP2: u16 = 20;
    pub(super) const CIDR2: u16 = 21;
    pub(super) const IPV4: u16 = 1;
    pub(super) const IPV6: u16 = 2;
}

/// The request type (`IPSET_CMD_*`).
#[derive(Clone, Copy, Debug)]
#[repr(u8)]
pub(super) enum Command {
    Create = 2,
    Destroy = 3,
    List = 7,
    Add = 9,
    Del = 10,
    GetByName = 14,
}

fn message(command: Command, name: &str, more: Vec<DefaultNla>) -> NetfilterMessage {
    let mut attributes = vec![
        plain(command::PROTOCOL, [VERSION]),
        text(command::SETNAME, name),
    ];
    attributes.extend(more);
    NetfilterMessage::new(
        NetfilterHeader::new(NetfilterProtoFamily::IPv4, 0, 0),
        NetfilterMessageInner::Other {
            subsys: NetfilterSubsystem::Other(SUBSYSTEM),
            message_type: command as u8,
            attributes,
        },
    )
}

/// Builds a request about a set as a whole.
pub(super) fn named(command: Command, name: &str) -> NetfilterMessage {
    message(command, name, Vec::new())
}

pub(super) fn create(set: &SetSpec) -> NetfilterMessage {
    let number = |kind: u16, number: u32| plain(kind | NLA_F_NET_BYTEORDER, number.to_be_bytes());
    let (family, data) = match set.kind {
        SetType::BitmapPort => (
            NetfilterProtoFamily::Unspec,
            [port(data::PORT, 0), port(data::PORT_TO, u16::MAX)],
        ),
        _ => (
            family_of(set.family),
            [
                number(data::HASHSIZE, HASH_SIZE),
                number(data::MAXELEM, set.max_entries),
            ],
        ),
    };
    let attributes = vec![
        text(command::TYPENAME, set.kind.name()),
        plain(command::REVISION, [set.kind.revision()]),
        plain(command::FAMILY, [u8::from(family)]),
        nested(command::DATA, &data),
    ];
    message(Command::Create, &set.name, attributes)
}

/// Builds a request to add or remove entries.
pub(super) fn edit(asked: Command, name: &str, entries: &[Entry]) -> NetfilterMessage {
    let entries = entries
        .iter()
        .map(|entry| nested(command::DATA, &entry_attributes(entry)));
    let entries: Vec<_> = entries.collect();
    let attributes = vec![
        // With several entries, a line number is required, but not used.
        plain(command::LINENO, 0_u32.to_ne_bytes()),
        nested(command::ADT, &entries),
    ];
    message(asked, name, attributes)
}

fn entry_attributes(entry: &Entry) -> Vec<DefaultNla> {
    let protocol = |protocol: Protocol| plain(data::PROTO, [protocol.0]);
    match *entry {
        Entry::Ip(ip) => vec![address(data::IP, ip)],
        Entry::Port(number) => vec![port(data::PORT, number)],
        Entry::IpPort(ip, over, number) => vec![
            address(data::IP, ip),
            port(data::PORT, number),
            protocol(over),
        ],
        Entry::IpPortIp(ip, over, number, second) => vec![
            address(data::IP, ip),
            port(data::PORT, number),
            protocol(over),
            address(data::IP2, second),
        ],
        Entry::IpPortNet(ip, over, number, net) => vec![
            address(data::IP, ip),
            port(data::PORT, number),
            protocol(over),
            address(data::IP2, net.addr()),
            plain(data::CIDR2, [net.prefix_len()]),
        ],
    }
}

fn address(kind: u16, ip: IpAddr) -> DefaultNla {
    let inner = match ip {
        IpAddr::V4(_) => data::IPV4,
        IpAddr::V6(_) => data::IPV6,
    };
    nested(kind, &[plain(inner | NLA_F_NET_BYTEORDER, octets(ip))])
}

fn port(kind: u16, number: u16) -> DefaultNla {
    plain(kind | NLA_F_NET_BYTEORDER, number.to_be_bytes())
}

pub(super) fn read_index(object: &[u8]) -> Result<Option<u16>, Malformed> {
    for attribute in each(netfilter_attributes(object)?) {
        let (kind, value) = attribute?;
        if kind == command::INDEX {
            return be_u16_of(value, "the number of a set").map(Some);
        }
    }
    Ok(None)
}

/// Parses the entries in one part of a dump.
pub(super) fn read_entries(object: &[u8]) -> Result<Vec<Entry>, Malformed> {
    let mut entries = Vec::new();
    for attribute in each(netfilter_attributes(object)?) {
        let (kind, value) = attribute?;
        if kind != command::ADT {
            continue;
        }
        for entry in each(value) {
            entries.push(read_entry(entry?.1)?);
        }
    }
    Ok(entries)
}

fn read_entry(bytes_of: &[u8]) -> Result<Entry, Malformed> {
    let (mut ip, mut port, mut protocol, mut second, mut prefix) = (None, None, None, None, None);
    for attribute in each(bytes_of) {
        let (kind, value) = attribute?;
        match kind {
            data::IP => ip = Some(read_address(value)?),
            data::PORT => port = Some(be_u16_of(value, "a port")?),
            data::PROTO => protocol = Some(Protocol(bytes::<1>(value, "a protocol")?[0])),
            data::IP2 => second = Some(read_address(value)?),
            data::CIDR2 => prefix = Some(bytes::<1>(value, "a prefix")?[0]),
            _ => {}
        }
    }
    Ok(match (ip, protocol, port, second, prefix) {
        (Some(ip), None, None, None, None) => Entry::Ip(ip),
        (None, None, Some(port), None, None) => Entry::Port(port),
        (Some(ip), Some(protocol), Some(port), None, None) => Entry::IpPort(ip, protocol, port),
        (Some(ip), Some(protocol), Some(port), Some(second), None) => {
            Entry::IpPortIp(ip, protocol, port, second)
        }
        (Some(ip), Some(protocol), Some(port), Some(second), Some(prefix)) => {
            let net = IpNet::new(second, prefix).map_err(|_| Malformed("a prefix"))?;
            Entry::IpPortNet(ip, protocol, port, net)
        }
        _ => return Err(Malformed("an entry of another kind of set")),
    })
}

fn read_address(nest: &[u8]) -> Result<IpAddr, Malformed> {
    for attribute in each(nest) {
        let (kind, value) = attribute?;
        if [data::IPV4, data::IPV6].contains(&kind) {
            return address_of(value, "an address");
        }
    }
    Err(Malformed("an address is missing"))
}
