//! Writes services directly into the maps, for measurements that need no agent.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use health_common::service::{ALGORITHM_RANDOM, KIND_CLUSTER_IP};
use health_datapath::services::{BackendSpec, FrontendSpec, PortSpec, ServiceTables, Target};
use health_service::maglev::{Maglev, SEED, SIZE, SizeError};
use health_service::provider::ebpf::MaglevTables;

pub(super) const TCP: u8 = 6;
/// The port of each service and the port of its backends.
pub(super) const PORT: u16 = 80;
pub(super) const BACKEND_PORT: u16 = 8080;
const CLUSTER4: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 0);
const CLUSTER6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, 0);

/// Fills Maglev tables like the agent does.
pub(super) fn maglev() -> Result<MaglevTables, SizeError> {
    Maglev::new(SIZE, SEED).map(MaglevTables::new)
}

/// The ClusterIP of service `number`.
pub(super) fn cluster_ip(number: u32, is_v4: bool) -> IpAddr {
    if is_v4 {
        Ipv4Addr::from_bits(CLUSTER4.to_bits() + 1 + number).into()
    } else {
        Ipv6Addr::from_bits(CLUSTER6.to_bits() + 1 + u128::from(number)).into()
    }
}

/// Service `number` with these backends.
pub(super) fn port(number: u32, backends: &[IpAddr]) -> PortSpec {
    let is_v4 = backends.first().is_none_or(IpAddr::is_ipv4);
    let backends = backends.iter().map(|ip| BackendSpec {
        address: SocketAddr::new(*ip, BACKEND_PORT),
        weight: 1,
    });
    PortSpec {
        protocol: TCP,
        frontends: vec![FrontendSpec {
            address: SocketAddr::new(cluster_ip(number, is_v4), PORT),
            kind: KIND_CLUSTER_IP,
            flags: 0,
            inside: Target::Cluster,
            outside: Target::Cluster,
        }],
        cluster: backends.collect(),
        algorithm: ALGORITHM_RANDOM,
        ..PortSpec::default()
    }
}

/// Writes services into the maps.
pub(super) fn serve(
    tables: &mut ServiceTables,
    ports: impl Iterator<Item = PortSpec>,
) -> anyhow::Result<()> {
    let mut maglev = maglev()?;
    let mut change = tables.change(0);
    for port in ports {
        change.set(None, &port, &mut maglev)?;
    }
    change.commit()?;
    Ok(())
}
