//! The service maps, and rows of their flows and clients.

use std::net::IpAddr;

use aya::Pod;
use aya::maps::lpm_trie::Key;
use health_common::ct::{Tuple4, Tuple6};
use health_common::service::socket::{SocketFlow, SocketKey};
use health_common::service::{
    Affinity, AffinityKey, Backend, Frontend, FrontendKey4, FrontendKey6, SourceRange,
};
use ipnet::IpNet;

use super::flow::Version;
use super::map::decode;
use super::{DumpError, Flow, Pinned, Rows};
use crate::layout::{self, MapLayout};
use crate::services::{ServiceFlow, ServiceMaps, read_source_range};

/// A client with affinity to a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceClient {
    /// Its address.
    pub client: IpAddr,
    /// Number of the service's port.
    pub service: u32,
    /// Index of the backend in `HEALTH_BACKENDS`.
    pub backend: u32,
    /// When it last opened a flow to the backend: `CLOCK_MONOTONIC`, in seconds.
    pub last_used: u32,
}

impl Pinned {
    /// The service maps.
    pub fn services(&self) -> Result<ServiceMaps, DumpError> {
        ServiceMaps::open(|layout| self.map_data(layout))
    }

    /// Flows through services: TCP over IPv4 and over IPv6, then other protocols.
    pub fn service_flow_rows(&self) -> Result<[Rows<(Flow, ServiceFlow)>; 4], DumpError> {
        Ok([
            self.rows(&layout::REVNAT4, flow::<Tuple4>)?,
            self.rows(&layout::REVNAT6, flow::<Tuple6>)?,
            self.rows(&layout::REVNAT_ANY4, flow::<Tuple4>)?,
            self.rows(&layout::REVNAT_ANY6, flow::<Tuple6>)?,
        ])
    }

    /// IPv4 service frontends.
    pub fn frontend4_rows(&self) -> Result<Rows<(FrontendKey4, Frontend)>, DumpError> {
        self.rows(&layout::SVC4, decode)
    }

    /// IPv6 service frontends.
    pub fn frontend6_rows(&self) -> Result<Rows<(FrontendKey6, Frontend)>, DumpError> {
        self.rows(&layout::SVC6, decode)
    }

    /// Backends by index, without empty slots.
    pub fn backend_rows(&self) -> Result<Rows<(u32, Backend)>, DumpError> {
        self.rows(&layout::BACKENDS, |key, value| {
            decode(key, value).filter(|(_, backend): &(u32, Backend)| backend.service != 0)
        })
    }

    /// The nonzero slots of `HEALTH_SLOTS` or `HEALTH_MAGLEV`.
    pub fn slot_rows(&self, map: &MapLayout) -> Result<Rows<(u32, u32)>, DumpError> {
        self.rows(map, |key, value| {
            decode(key, value).filter(|(_, slot): &(u32, u32)| *slot != 0)
        })
    }

    /// Allowed clients: a service port's number, and the source range.
    pub fn source_range_rows(&self) -> Result<Rows<(u32, IpNet)>, DumpError> {
        self.rows(&layout::SOURCE_RANGES, |key, value| {
            let (key, _): (Key<SourceRange>, u32) = decode(key, value)?;
            read_source_range(&(key.prefix_len(), key.data()))
        })
    }

    /// The redirections of the host's own sockets.
    pub fn socket_rows(&self) -> Result<Rows<(SocketKey, SocketFlow)>, DumpError> {
        self.rows(&layout::SOCKETS, decode)
    }

    /// Clients with affinity to a backend.
    pub fn service_client_rows(&self) -> Result<Rows<ServiceClient>, DumpError> {
        self.rows(&layout::AFFINITY, |key, value| {
            let (key, affinity): (AffinityKey, Affinity) = decode(key, value)?;
            Some(ServiceClient {
                client: key.client.to_ip(),
                service: key.service,
                backend: affinity.backend,
                last_used: affinity.last_used,
            })
        })
    }
}

fn flow<T: Version<ServiceFlow: Pod>>(key: &[u8], value: &[u8]) -> Option<(Flow, ServiceFlow)> {
    let (tuple, flow) = decode::<T, T::ServiceFlow>(key, value)?;
    let parts = T::service_flow_parts(&flow);
    let flow = ServiceFlow::new(&parts, T::ip(parts.to.0));
    Some((Flow::of(&tuple), flow))
}
