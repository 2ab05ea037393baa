//! Keys of frontends and source ranges, of both families.

use std::net::SocketAddr;

use health_common::addr::Addr;
use health_common::service::{FrontendKey4, FrontendKey6, SourceRange};
use ipnet::IpNet;

use crate::ipcache;
use crate::trie::Prefix;

/// Number of bits before the address in a source range.
const SERVICE_BITS: u32 = u32::BITS;

/// A backend's address, and its port in network byte order.
pub(super) type Socket = (Addr, u16);

/// Converts an address to the maps' form.
pub(super) fn socket(address: SocketAddr) -> Socket {
    (address.ip().into(), address.port().to_be())
}

/// Converts an address from the maps' form.
pub(super) fn socket_addr((addr, port_be): Socket) -> SocketAddr {
    SocketAddr::new(addr.to_ip(), u16::from_be(port_be))
}

/// The address of a service: the key of a frontend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct FrontendKey {
    pub(super) addr: Addr,
    pub(super) port_be: u16,
    pub(super) protocol: u8,
}

impl FrontendKey {
    pub(super) fn new(address: SocketAddr, protocol: u8) -> Self {
        let (addr, port_be) = socket(address);
        Self {
            addr,
            port_be,
            protocol,
        }
    }

    pub(super) fn address(&self) -> SocketAddr {
        socket_addr((self.addr, self.port_be))
    }

    /// Returns the key in `HEALTH_SVC4`; `None` for IPv6.
    pub(super) fn key4(&self) -> Option<FrontendKey4> {
        self.addr.is_v4().then(|| FrontendKey4 {
            addr_be: self.addr.words_be[3],
            port_be: self.port_be,
            protocol: self.protocol,
            pad: 0,
        })
    }

    /// Returns the key in `HEALTH_SVC6`; `None` for IPv4.
    pub(super) fn key6(&self) -> Option<FrontendKey6> {
        (!self.addr.is_v4()).then_some(FrontendKey6 {
            addr_be: self.addr.words_be,
            port_be: self.port_be,
            protocol: self.protocol,
            pad: 0,
        })
    }
}

impl From<FrontendKey4> for FrontendKey {
    fn from(key: FrontendKey4) -> Self {
        Self {
            addr: Addr::v4(key.addr_be),
            port_be: key.port_be,
            protocol: key.protocol,
        }
    }
}

impl From<FrontendKey6> for FrontendKey {
    fn from(key: FrontendKey6) -> Self {
        Self {
            addr: Addr::v6(key.addr_be),
            port_be: key.port_be,
            protocol: key.protocol,
        }
    }
}

/// Returns the key that allows these sources to use the port with this number.
pub(super) fn source_range(number: u32, sources: IpNet) -> Prefix<SourceRange> {
    let (len, addr) = ipcache::prefix(sources.trunc());
    let service_be = number.to_be();
    (SERVICE_BITS + len, SourceRange { service_be, addr })
}

/// Returns the port number and the sources of such a key; `None` if the key is invalid.
pub(crate) fn read_source_range((len, range): &Prefix<SourceRange>) -> Option<(u32, IpNet)> {
    let sources = (len.checked_sub(SERVICE_BITS)?, range.addr);
    Some((u32::from_be(range.service_be), ipcache::net(&sources)?))
}
