//! Entries of the service maps in dumps.

use std::fmt;
use std::net::SocketAddr;

use health_common::addr::Addr;
use health_common::service::{Backend, Frontend, FrontendKey, Pool};
use health_model::flow::IpProtocol;
use ipnet::IpNet;
use serde::Serialize;

use crate::bpf::entry::Entry;

/// A frontend's key.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(in crate::bpf) struct FrontendPlace {
    protocol: IpProtocol,
    address: SocketAddr,
}

impl fmt::Display for FrontendPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.protocol, self.address)
    }
}

/// The array entries from which a backend is chosen.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct PoolPlaces {
    at: u32,
    length: u32,
}

impl From<Pool> for PoolPlaces {
    fn from(pool: Pool) -> Self {
        Self {
            at: pool.at,
            length: pool.len,
        }
    }
}

/// A frontend's value.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(in crate::bpf) struct FrontendValue {
    service: u32,
    inside: PoolPlaces,
    outside: PoolPlaces,
    affinity_s: u32,
    flags: u16,
    algorithm: u8,
    kind: u8,
}

impl fmt::Display for FrontendValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            service,
            inside,
            outside,
            affinity_s,
            flags,
            algorithm,
            kind,
        } = self;
        write!(
            f,
            "service={service} inside={}+{} outside={}+{} affinity={affinity_s}s flags={flags:#x} \
             algorithm={algorithm} kind={kind}",
            inside.at, inside.length, outside.at, outside.length
        )
    }
}

/// Converts a frontend for display.
pub(in crate::bpf) fn frontend<A>(
    (key, frontend): (FrontendKey<A>, Frontend),
    addr: fn(A) -> Addr,
) -> Entry<FrontendPlace, FrontendValue> {
    let ip = addr(key.addr_be).to_ip();
    Entry {
        key: FrontendPlace {
            protocol: IpProtocol(key.protocol),
            address: SocketAddr::new(ip, u16::from_be(key.port_be)),
        },
        value: FrontendValue {
            service: frontend.service,
            inside: frontend.inside.into(),
            outside: frontend.outside.into(),
            affinity_s: frontend.affinity_secs,
            flags: frontend.flags,
            algorithm: frontend.algorithm,
            kind: frontend.kind,
        },
    }
}

/// A backend's value.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(in crate::bpf) struct BackendValue {
    address: SocketAddr,
    service: u32,
    flags: u16,
    flows: u32,
}

impl fmt::Display for BackendValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            address,
            service,
            flags,
            flows,
        } = self;
        write!(
            f,
            "{address} service={service} flags={flags:#x} flows={flows}"
        )
    }
}

/// Converts a backend for display.
pub(in crate::bpf) fn backend((index, backend): (u32, Backend)) -> Entry<u32, BackendValue> {
    let port = u16::from_be(backend.port_be);
    Entry {
        key: index,
        value: BackendValue {
            address: SocketAddr::new(backend.addr.to_ip(), port),
            service: backend.service,
            flags: backend.flags,
            flows: backend.flows,
        },
    }
}

/// Converts an array entry for display.
pub(in crate::bpf) fn place((at, number): (u32, u32)) -> Entry<u32, u32> {
    Entry {
        key: at,
        value: number,
    }
}

/// A source range that may use a service.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(in crate::bpf) struct SourceRangeKey {
    service: u32,
    sources: IpNet,
}

impl fmt::Display for SourceRangeKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "service={} {}", self.service, self.sources)
    }
}

/// Converts a source range for display.
pub(in crate::bpf) fn source_range(
    (service, sources): (u32, IpNet),
) -> Entry<SourceRangeKey, &'static str> {
    Entry {
        key: SourceRangeKey { service, sources },
        value: "allowed",
    }
}
