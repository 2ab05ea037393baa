//! Single entries of the service maps, looked up as the programs do.

use std::io;
use std::net::{IpAddr, SocketAddr};

use aya::Pod;
use health_common::addr::Addr;
use health_common::ct::{FlowTuple, TUPLE_IN, TUPLE_OUT, Tuple4, Tuple6};
use health_common::service::choice::{flow_hash, ports_and_protocol};
use health_common::service::{Affinity, AffinityKey, Backend, FLOW_MOVED, Frontend, Pool};
use health_common::tcp::IP_PROTOCOL_TCP;
use health_common::tuple::{ServiceFlowParts, Tuple};
use ipnet::IpNet;

use super::keys::{FrontendKey, source_range};
use super::{ServiceMaps, ServicesError};
use crate::layout;
use crate::table::Table;

/// The endpoints of a flow, as in its first packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    /// IP protocol number.
    pub protocol: u8,
    /// The side that opens the flow.
    pub source: SocketAddr,
    /// The side to which the flow is opened.
    pub destination: SocketAddr,
}

/// A tuple of either IP version.
pub(crate) enum Tuples {
    V4(Tuple4),
    V6(Tuple6),
}

impl Connection {
    /// Whether it is a TCP connection.
    pub fn is_tcp(&self) -> bool {
        self.protocol == IP_PROTOCOL_TCP
    }

    /// Returns the flow's tuple in the maps' form, for [`TUPLE_OUT`] or [`TUPLE_IN`]; `None` if its addresses differ in
    /// IP version.
    pub(crate) fn tuples(&self, direction: u8) -> Option<Tuples> {
        match (self.source.ip(), self.destination.ip()) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let [saddr_be, daddr_be] = [source, destination].map(|ip| u32::from(ip).to_be());
                Some(Tuples::V4(self.tuple(saddr_be, daddr_be, direction)))
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                let [saddr_be, daddr_be] = [source, destination].map(|ip| Addr::from(ip).words_be);
                Some(Tuples::V6(self.tuple(saddr_be, daddr_be, direction)))
            }
            _ => None,
        }
    }

    fn tuple<A>(&self, saddr_be: A, daddr_be: A, direction: u8) -> FlowTuple<A> {
        FlowTuple {
            saddr_be,
            daddr_be,
            sport_be: self.source.port().to_be(),
            dport_be: self.destination.port().to_be(),
            protocol: self.protocol,
            direction,
            pad: 0,
        }
    }
}

/// One direction of a flow through a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceFlow {
    /// The new destination for an outbound tuple, a backend; the new source for an inbound tuple, the frontend.
    pub to: SocketAddr,
    /// Index of the backend in `HEALTH_BACKENDS`.
    pub backend: u32,
    /// Number of the service's port.
    pub service: u32,
    /// When the flow expires unless another packet arrives: `CLOCK_MONOTONIC`, in seconds. Not for TCP.
    pub expires: u32,
    /// [`health_common::service::FLOW_FROM_OUTSIDE`] and other bits.
    pub flags: u16,
    /// Set if the backend sees another client port than the client's own: for an outbound tuple, the port that the
    /// backend sees; for an inbound tuple, the client's own port.
    pub client_port: Option<u16>,
}

impl ServiceFlow {
    /// Converts the parts of an entry, and the address in them.
    pub(crate) fn new<A>(parts: &ServiceFlowParts<A>, ip: IpAddr) -> Self {
        let client_port =
            (parts.flags & FLOW_MOVED != 0).then(|| u16::from_be(parts.client_port_be));
        Self {
            to: SocketAddr::new(ip, u16::from_be(parts.to.1)),
            backend: parts.backend,
            service: parts.service,
            expires: parts.expires,
            flags: parts.flags,
            client_port,
        }
    }
}

impl ServiceMaps {
    pub(super) fn frontend(&self, key: FrontendKey) -> Result<Option<Frontend>, ServicesError> {
        match (key.key4(), key.key6()) {
            (Some(key), _) => reading(layout::SVC4.name, self.frontends4.get(&key)),
            (_, Some(key)) => reading(layout::SVC6.name, self.frontends6.get(&key)),
            (None, None) => Ok(None),
        }
    }

    /// The backend at an index, if it exists.
    pub fn backend(&self, index: u32) -> Result<Option<Backend>, ServicesError> {
        let found = reading(layout::BACKENDS.name, self.backends.get(&index))?;
        Ok(found.filter(|backend| backend.service != 0))
    }

    /// Returns the backend to which a client sticks, for the port with this number.
    pub fn client(&self, client: IpAddr, service: u32) -> Result<Option<Affinity>, ServicesError> {
        let client = client.into();
        let found = self.affinity.get(&AffinityKey { client, service });
        reading(layout::AFFINITY.name, found)
    }

    /// Whether a client is in the source ranges of the port with this number.
    pub fn is_in_range(&self, client: IpAddr, service: u32) -> Result<bool, ServicesError> {
        let key = source_range(service, IpNet::from(client));
        let found = reading(layout::SOURCE_RANGES.name, self.source_ranges.get(key))?;
        Ok(found.is_some())
    }

    /// Returns where the packets of a flow to a service are sent.
    pub fn flow(&self, flow: &Connection) -> Result<Option<ServiceFlow>, ServicesError> {
        self.flow_in(flow, TUPLE_OUT)
    }

    /// Returns the source that a backend's packets with these addresses get.
    pub fn answer(&self, packet: &Connection) -> Result<Option<ServiceFlow>, ServicesError> {
        self.flow_in(packet, TUPLE_IN)
    }

    fn flow_in(
        &self,
        flow: &Connection,
        direction: u8,
    ) -> Result<Option<ServiceFlow>, ServicesError> {
        let map = usize::from(!flow.is_tcp());
        match flow.tuples(direction) {
            Some(Tuples::V4(tuple)) => {
                let name = [layout::REVNAT4, layout::REVNAT_ANY4][map].name;
                find(&self.flows4[map], name, &tuple, Addr::v4)
            }
            Some(Tuples::V6(tuple)) => {
                let name = [layout::REVNAT6, layout::REVNAT_ANY6][map].name;
                find(&self.flows6[map], name, &tuple, Addr::v6)
            }
            None => Ok(None),
        }
    }

    /// Returns the index of the backend that a Maglev table chooses for a flow, for a frontend with affinity
    /// (`is_by_client`) or without.
    pub fn by_maglev(
        &self,
        pool: Pool,
        flow: &Connection,
        is_by_client: bool,
    ) -> Result<Option<u32>, ServicesError> {
        let hash = flow_hash(
            &Addr::from(flow.source.ip()).words_be,
            &Addr::from(flow.destination.ip()).words_be,
            ports_and_protocol(
                flow.source.port().to_be(),
                flow.destination.port().to_be(),
                flow.protocol,
                is_by_client,
            ),
        );
        match hash.checked_rem(pool.len) {
            Some(place) => reading(layout::MAGLEV.name, self.maglev.get(&(pool.at + place))),
            None => Ok(None),
        }
    }
}

fn find<T: Tuple<ServiceFlow: Pod> + Pod>(
    flows: &Table<T, T::ServiceFlow>,
    name: &'static str,
    tuple: &T,
    addr: fn(T::Address) -> Addr,
) -> Result<Option<ServiceFlow>, ServicesError> {
    let found = reading(name, flows.get(tuple))?;
    Ok(found.map(|flow| {
        let parts = T::service_flow_parts(&flow);
        ServiceFlow::new(&parts, addr(parts.to.0).to_ip())
    }))
}

pub(super) fn reading<T>(map: &'static str, found: io::Result<T>) -> Result<T, ServicesError> {
    found.map_err(|source| ServicesError::kernel("look up entries in", map, source))
}
