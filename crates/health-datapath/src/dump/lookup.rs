//! Single entries of maps, looked up as the programs do.

use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd as _;

use aya::maps::MapData;
use health_common::addr::Addr;
use health_common::ct::CtEntry;
use health_common::endpoint::EndpointInfo;
use health_common::identity;
use health_common::policy::{ANY_IDENTITY, PREFIX_PORT, PolicyEntry, PolicyKey};
use health_common::service::socket::{SocketFlow, SocketKey};
use ipnet::IpNet;

use super::flow::Version;
use super::{DumpError, Pinned};
use crate::aya_io::map_io;
use crate::ipcache;
use crate::layout::{self, MapLayout};
use crate::pin_folder::program_pin;
use crate::program::DatapathProgram;
use crate::services::{Connection, Tuples};
use crate::table::Table;
use crate::trie::Trie;

/// A packet to check against policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PolicyQuery {
    /// Number of the table.
    pub table: u32,
    /// [`POLICY_INGRESS`](health_common::policy::POLICY_INGRESS) or
    /// [`POLICY_EGRESS`](health_common::policy::POLICY_EGRESS).
    pub direction: u8,
    /// Identity of the other side.
    pub identity: u32,
    /// IP protocol number.
    pub protocol: u8,
    /// Destination port.
    pub port: u16,
}

impl Pinned {
    /// The local endpoint with this address.
    pub fn endpoint(&self, ip: IpAddr) -> Result<Option<EndpointInfo>, DumpError> {
        let endpoints = Table::<Addr, EndpointInfo>::new(self.map_data(&layout::ENDPOINTS)?);
        let found = endpoints.get(&ip.into());
        found.map_err(self.reading(&layout::ENDPOINTS))
    }

    /// The identity that applies to packets of this address.
    pub fn identity_of(&self, ip: IpAddr) -> Result<u32, DumpError> {
        let ipcache = Trie::<Addr, _>::new(self.map_data(&layout::IPCACHE)?);
        let found = ipcache.get(ipcache::prefix(IpNet::from(ip)));
        let found: Option<health_common::ipcache::IpcacheEntry> =
            found.map_err(self.reading(&layout::IPCACHE))?;
        Ok(found.map_or(identity::WORLD, |entry| entry.identity))
    }

    /// The policy entry that matches a packet; `None` if none does.
    pub fn policy_entry(&self, query: PolicyQuery) -> Result<Option<PolicyEntry>, DumpError> {
        let entries = Trie::<PolicyKey, PolicyEntry>::new(self.map_data(&layout::POLICY)?);
        let find = |identity| {
            let key = PolicyKey {
                table: query.table,
                direction: query.direction,
                identity,
                protocol: query.protocol,
                port_be: query.port.to_be(),
                ..PolicyKey::default()
            };
            let found = entries.get((PREFIX_PORT, key));
            found.map_err(self.reading(&layout::POLICY))
        };
        match find(query.identity)? {
            Some(entry) => Ok(Some(entry)),
            None => find(ANY_IDENTITY),
        }
    }

    /// The conntrack entry of a flow: with [`TUPLE_OUT`](health_common::ct::TUPLE_OUT) if it was opened locally or is
    /// masqueraded here, with [`TUPLE_IN`](health_common::ct::TUPLE_IN) if it came from outside.
    pub fn conntrack_entry(
        &self,
        flow: &Connection,
        direction: u8,
    ) -> Result<Option<CtEntry>, DumpError> {
        match flow.tuples(direction) {
            Some(Tuples::V4(tuple)) => self.conntrack_of(&tuple, flow.is_tcp()),
            Some(Tuples::V6(tuple)) => self.conntrack_of(&tuple, flow.is_tcp()),
            None => Ok(None),
        }
    }

    fn conntrack_of<T: Version>(
        &self,
        tuple: &T,
        is_tcp: bool,
    ) -> Result<Option<CtEntry>, DumpError> {
        let layout = &T::CT[usize::from(!is_tcp)];
        let entries = Table::<T, CtEntry>::new(self.map_data(layout)?);
        entries.get(tuple).map_err(self.reading(layout))
    }

    /// Looks up the actual peer of a host socket, which replaces the peer in the key.
    pub fn socket_entry(&self, key: &SocketKey) -> Result<Option<SocketFlow>, DumpError> {
        let sockets = Table::<SocketKey, SocketFlow>::new(self.map_data(&layout::SOCKETS)?);
        sockets.get(key).map_err(self.reading(&layout::SOCKETS))
    }

    /// Whether a program is pinned.
    pub fn has_program(&self, program: DatapathProgram) -> bool {
        program_pin(&self.dir, program).exists()
    }

    /// Duplicates the descriptor of one of our maps.
    pub(super) fn map_data(&self, layout: &MapLayout) -> Result<MapData, DumpError> {
        let open = self.open_as(layout)?;
        let copy = || -> io::Result<MapData> {
            MapData::from_fd(open.fd().as_fd().try_clone_to_owned()?).map_err(map_io)
        };
        copy().map_err(|source| DumpError::Kernel {
            what: "open",
            path: open.pin().to_owned(),
            source,
        })
    }

    fn reading(&self, layout: &MapLayout) -> impl FnOnce(io::Error) -> DumpError {
        let path = self.dir.join(layout.name);
        move |source| DumpError::Kernel {
            what: "look up entries in",
            path,
            source,
        }
    }
}
