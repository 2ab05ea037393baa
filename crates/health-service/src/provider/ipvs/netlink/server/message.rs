//! Reading and writing messages of the IPVS family.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use health_model::ipam::Family;
use health_model::policy::Protocol;
use netlink_packet_core::{DefaultNla, Emitable};
use netlink_packet_generic::GenlFamily;

use super::super::attributes::{
    Malformed, be_u16_of, bytes, each, nested, octets, plain, text, text_of, u16_of, u32_of,
};
use super::Change;
use super::model::{
    Flags, Forwarding, Info, RealServer, Scheduler, ServerId, ServerKey, Timeouts, VirtualServer,
};

/// Bytes of `struct genlmsghdr`; the family has no header of its own.
const HEADER_LEN: usize = 4;
/// Flags are written as value and mask; this mask selects all of them.
const ALL_FLAGS: u32 = u32::MAX;

/// `IPVS_CMD_ATTR_*`.
mod part {
    pub(super) const SERVICE: u16 = 1;
    pub(super) const DEST: u16 = 2;
    pub(super) const TIMEOUT_TCP: u16 = 4;
    pub(super) const TIMEOUT_TCP_FIN: u16 = 5;
    pub(super) const TIMEOUT_UDP: u16 = 6;
}

/// `IPVS_SVC_ATTR_*`.
mod service {
    pub(super) const AF: u16 = 1;
    pub(super) const PROTOCOL: u16 = 2;
    pub(super) const ADDR: u16 = 3;
    pub(super) const PORT: u16 = 4;
    pub(super) const FWMARK: u16 = 5;
    pub(super) const SCHED_NAME: u16 = 6;
    pub(super) const FLAGS: u16 = 7;
    pub(super) const TIMEOUT: u16 = 8;
    pub(super) const NETMASK: u16 = 9;
}

/// `IPVS_DEST_ATTR_*`.
mod dest {
    pub(super) const ADDR: u16 = 1;
    pub(super) const PORT: u16 = 2;
    pub(super) const FWD_METHOD: u16 = 3;
    pub(super) const WEIGHT: u16 = 4;
    pub(super) const U_THRESH: u16 = 5;
    pub(super) const L_THRESH: u16 = 6;
    pub(super) const ACTIVE_CONNS: u16 = 7;
    pub(super) const INACT_CONNS: u16 = 8;
    pub(super) const PERSIST_CONNS: u16 = 9;
    pub(super) const ADDR_FAMILY: u16 = 11;
}

/// `IPVS_INFO_ATTR_*`.
mod info {
    pub(super) const VERSION: u16 = 1;
    pub(super) const CONN_TAB_SIZE: u16 = 2;
}

/// The request type (`IPVS_CMD_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Command {
    NewService = 1,
    SetService = 2,
    DelService = 3,
    GetService = 4,
    NewDest = 5,
    SetDest = 6,
    DelDest = 7,
    GetDest = 8,
    SetConfig = 12,
    GetConfig = 13,
    GetInfo = 15,
    Flush = 17,
}

/// A request.
#[derive(Clone, Debug)]
pub(super) struct IpvsMessage {
    pub(super) command: Command,
    pub(super) attributes: Vec<DefaultNla>,
}

impl GenlFamily for IpvsMessage {
    fn family_name() -> &'static str {
        "IPVS"
    }

    fn command(&self) -> u8 {
        self.command as u8
    }

    fn version(&self) -> u8 {
        1
    }
}

impl Emitable for IpvsMessage {
    fn buffer_len(&self) -> usize {
        self.attributes.as_slice().buffer_len()
    }

    fn emit(&self, buffer: &mut [u8]) {
        self.attributes.as_slice().emit(buffer);
    }
}

/// Returns the attributes of a reply.
pub(super) fn payload(object: &[u8]) -> Result<&[u8], Malformed> {
    let payload = object.get(HEADER_LEN..);
    payload.ok_or(Malformed("a generic header is cut off"))
}

/// Converts a change to a request.
pub(super) fn change(change: &Change) -> (Command, Vec<DefaultNla>) {
    match change {
        Change::AddServer(one) => (Command::NewService, vec![server(one)]),
        Change::SetServer(one) => (Command::SetService, vec![server(one)]),
        Change::DeleteServer(id) => (Command::DelService, vec![self::id(*id)]),
        Change::AddReal(id, one) => (Command::NewDest, vec![self::id(*id), real(one)]),
        Change::SetReal(id, one) => (Command::SetDest, vec![self::id(*id), real(one)]),
        Change::DeleteReal(id, one) => (Command::DelDest, vec![self::id(*id), real(one)]),
    }
}

/// Builds the attributes that identify a virtual server.
pub(super) fn id(id: ServerId) -> DefaultNla {
    nested(part::SERVICE, &id_attributes(id))
}

fn id_attributes(id: ServerId) -> Vec<DefaultNla> {
    let family = plain(service::AF, family_number(id.family()).to_ne_bytes());
    match id {
        ServerId::Address(ServerKey { address, protocol }) => vec![
            family,
            plain(service::PROTOCOL, u16::from(protocol.0).to_ne_bytes()),
            plain(service::ADDR, address_buffer(address.ip())),
            plain(service::PORT, address.port().to_be_bytes()),
        ],
        ServerId::Mark(_, mark) => vec![family, plain(service::FWMARK, mark.to_ne_bytes())],
    }
}

fn server(server: &VirtualServer) -> DefaultNla {
    let mut attributes = id_attributes(server.id);
    let flags = server.flags.asked().0.to_ne_bytes();
    let flags: Vec<u8> = flags.into_iter().chain(ALL_FLAGS.to_ne_bytes()).collect();
    // Persistence applies to single client addresses: for IPv4 given as a netmask, for IPv6 as a prefix length.
    let netmask: u32 = match server.id.family() {
        Family::V4 => u32::MAX,
        Family::V6 => 128,
    };
    attributes.extend([
        text(service::SCHED_NAME, server.scheduler.name()),
        plain(service::FLAGS, flags),
        plain(service::TIMEOUT, server.timeout.to_ne_bytes()),
        plain(service::NETMASK, netmask.to_ne_bytes()),
    ]);
    nested(part::SERVICE, &attributes)
}

fn real(real: &RealServer) -> DefaultNla {
    let address = real.address;
    let family = family_number(Family::of(address.ip()));
    let number = |kind, number: u32| plain(kind, number.to_ne_bytes());
    nested(
        part::DEST,
        &[
            plain(dest::ADDR, address_buffer(address.ip())),
            plain(dest::PORT, address.port().to_be_bytes()),
            number(dest::FWD_METHOD, real.forwarding.into()),
            number(dest::WEIGHT, real.weight),
            number(dest::U_THRESH, real.upper_threshold),
            number(dest::L_THRESH, real.lower_threshold),
            plain(dest::ADDR_FAMILY, family.to_ne_bytes()),
        ],
    )
}

pub(super) fn timeouts(timeouts: Timeouts) -> Vec<DefaultNla> {
    let all = [
        (part::TIMEOUT_TCP, timeouts.tcp),
        (part::TIMEOUT_TCP_FIN, timeouts.tcp_fin),
        (part::TIMEOUT_UDP, timeouts.udp),
    ];
    all.map(|(kind, seconds)| plain(kind, seconds.to_ne_bytes()))
        .to_vec()
}

/// Parses a virtual server; `None` for a reply about something else.
pub(super) fn read_server(object: &[u8]) -> Result<Option<VirtualServer>, Malformed> {
    let Some(bytes) = find(payload(object)?, part::SERVICE)? else {
        return Ok(None);
    };
    let (mut family, mut protocol, mut address, mut port) = (None, None, None, None);
    let (mut mark, mut scheduler, mut flags, mut timeout) = (None, None, Flags::default(), 0);
    for attribute in each(bytes) {
        let (kind, value) = attribute?;
        match kind {
            service::AF => family = Some(family_of(u16_of(value, "a family")?)?),
            service::PROTOCOL => protocol = Some(u16_of(value, "a protocol")?),
            service::ADDR => address = Some(value),
            service::PORT => port = Some(be_u16_of(value, "a port")?),
            service::FWMARK => mark = Some(u32_of(value, "a mark")?),
            service::SCHED_NAME => scheduler = Some(text_of(value, "a scheduler")?),
            service::FLAGS => {
                let both: [u8; 8] = bytes_of_flags(value)?;
                flags = Flags(u32_of(&both[..4], "flags")?);
            }
            service::TIMEOUT => timeout = u32_of(value, "a timeout")?,
            _ => {}
        }
    }
    let family = family.ok_or(Malformed("a virtual server without a family"))?;
    let id = match (mark, protocol, address, port) {
        (Some(mark), ..) => ServerId::Mark(family, mark),
        (None, Some(protocol), Some(address), Some(port)) => ServerId::Address(ServerKey {
            address: SocketAddr::new(address_of(address, family)?, port),
            protocol: Protocol(u8::try_from(protocol).map_err(|_| Malformed("a protocol"))?),
        }),
        _ => return Err(Malformed("a virtual server without an address")),
    };
    Ok(Some(VirtualServer {
        id,
        scheduler: Scheduler::from(scheduler.unwrap_or_default().as_str()),
        flags,
        timeout,
    }))
}

fn bytes_of_flags(value: &[u8]) -> Result<[u8; 8], Malformed> {
    bytes(value, "flags")
}

/// Parses a real server of a virtual server in this family; behind a tunnel, a real server may be of the other family.
/// `None` for a reply about something else.
pub(super) fn read_real(object: &[u8], family: Family) -> Result<Option<RealServer>, Malformed> {
    let Some(bytes) = find(payload(object)?, part::DEST)? else {
        return Ok(None);
    };
    let (mut family, mut address, mut port) = (family, None, None);
    let mut real = RealServer::new((Ipv4Addr::UNSPECIFIED, 0).into(), 0);
    for attribute in each(bytes) {
        let (kind, value) = attribute?;
        match kind {
            dest::ADDR => address = Some(value),
            dest::PORT => port = Some(be_u16_of(value, "a port")?),
            dest::FWD_METHOD => {
                real.forwarding = Forwarding::from(u32_of(value, "a forwarding")?);
            }
            dest::WEIGHT => real.weight = u32_of(value, "a weight")?,
            dest::U_THRESH => real.upper_threshold = u32_of(value, "a threshold")?,
            dest::L_THRESH => real.lower_threshold = u32_of(value, "a threshold")?,
            dest::ACTIVE_CONNS => real.active = u32_of(value, "connections")?,
            dest::INACT_CONNS => real.inactive = u32_of(value, "connections")?,
            dest::PERSIST_CONNS => real.persistent = u32_of(value, "connections")?,
            dest::ADDR_FAMILY => family = family_of(u16_of(value, "a family")?)?,
            _ => {}
        }
    }
    let (Some(address), Some(port)) = (address, port) else {
        return Err(Malformed("a real server without an address"));
    };
    real.address = SocketAddr::new(address_of(address, family)?, port);
    Ok(Some(real))
}

pub(super) fn read_info(object: &[u8]) -> Result<Info, Malformed> {
    let (mut version, mut table_size) = (0, 0);
    for attribute in each(payload(object)?) {
        let (kind, value) = attribute?;
        match kind {
            info::VERSION => version = u32_of(value, "a version")?,
            info::CONN_TAB_SIZE => table_size = u32_of(value, "a size")?,
            _ => {}
        }
    }
    let [_, major, minor, patch] = version.to_be_bytes();
    Ok(Info {
        version: (major, minor, patch),
        table_size,
    })
}

pub(super) fn read_timeouts(object: &[u8]) -> Result<Timeouts, Malformed> {
    let mut timeouts = Timeouts::default();
    for attribute in each(payload(object)?) {
        let (kind, value) = attribute?;
        let seconds = match kind {
            part::TIMEOUT_TCP => &mut timeouts.tcp,
            part::TIMEOUT_TCP_FIN => &mut timeouts.tcp_fin,
            part::TIMEOUT_UDP => &mut timeouts.udp,
            _ => continue,
        };
        *seconds = u32_of(value, "a timeout")?;
    }
    Ok(timeouts)
}

fn find(attributes: &[u8], wanted: u16) -> Result<Option<&[u8]>, Malformed> {
    for attribute in each(attributes) {
        let (kind, value) = attribute?;
        if kind == wanted {
            return Ok(Some(value));
        }
    }
    Ok(None)
}

fn family_number(family: Family) -> u16 {
    let number = match family {
        Family::V4 => libc::AF_INET,
        Family::V6 => libc::AF_INET6,
    };
    number as u16
}

fn family_of(number: u16) -> Result<Family, Malformed> {
    let known = |family: &Family| family_number(*family) == number;
    let found = Family::ALL.into_iter().find(known);
    found.ok_or(Malformed("a family"))
}

/// Builds a `union nf_inet_addr`: 16 bytes, of which IPv4 uses the first four.
fn address_buffer(address: IpAddr) -> Vec<u8> {
    let mut buffer = octets(address);
    buffer.resize(16, 0);
    buffer
}

fn address_of(buffer: &[u8], family: Family) -> Result<IpAddr, Malformed> {
    let cut = Malformed("an address is cut off");
    match family {
        Family::V4 => {
            let octets = buffer.first_chunk::<4>().ok_or(cut)?;
            Ok(Ipv4Addr::from(*octets).into())
        }
        Family::V6 => {
            let octets = buffer.first_chunk::<16>().ok_or(cut)?;
            Ok(Ipv6Addr::from(*octets).into())
        }
    }
}
