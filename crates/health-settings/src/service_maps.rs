//! Sizes of the service maps.

use clap::Args;
use health_common::service::socket::SOCKET_ENTRIES;
use health_common::service::{
    DEFAULT_AFFINITY, DEFAULT_BACKENDS, DEFAULT_FRONTENDS, DEFAULT_MAGLEV_TABLES,
    DEFAULT_SOURCE_RANGES, REVNAT_ANY_ENTRIES, REVNAT_ENTRIES,
};
use nix::sys::sysinfo::sysinfo;

use super::range::{Range, within};

fn entries() -> Range {
    within::<u32>(1 << 10, 1 << 24).of("entries")
}

/// Sizes of the maps of services; without services they take next to no memory.
#[derive(Args, Clone, Copy, Debug, PartialEq, Eq)]
#[command(next_help_heading = "Services")]
pub struct ServiceMapSettings {
    /// Maximum number of service frontends (address and port), per IP version; a map that already holds more keeps
    /// its size
    #[arg(long, value_name = "NUMBER", default_value_t = DEFAULT_FRONTENDS, add = entries())]
    pub service_frontend_max_entries: u32,
    /// Maximum number of backends; an endpoint counts once for each service port that it has; lists of backends have
    /// space for four times as many slots; a map that already holds more keeps its size
    #[arg(long, value_name = "NUMBER", default_value_t = DEFAULT_BACKENDS, add = entries())]
    pub service_backend_max_entries: u32,
    /// Maximum number of Maglev tables; a map that already holds more keeps its size
    #[arg(long, value_name = "NUMBER", default_value_t = DEFAULT_MAGLEV_TABLES, add = within::<u32>(1, 4096).of("tables"))]
    pub service_maglev_tables: u32,
    /// Maximum number of loadBalancerSourceRanges entries; a map that already holds more keeps its size
    #[arg(long, value_name = "NUMBER", default_value_t = DEFAULT_SOURCE_RANGES, add = entries())]
    pub service_source_range_max_entries: u32,
    /// Maximum number of session affinity entries
    #[arg(long, value_name = "NUMBER", default_value_t = DEFAULT_AFFINITY, add = entries())]
    pub service_affinity_max_entries: u32,
    /// Maximum number of entries for TCP flows through services, per IP version; each flow takes two [default: 262144
    /// on hosts with more than 4 GiB of memory, else 131072]
    #[arg(long, value_name = "NUMBER", default_value_t = default_flow_entries(), hide_default_value = true, add = entries())]
    pub service_flow_max_entries: u32,
    /// Maximum number of entries for flows through services of protocols other than TCP, per IP version; each flow
    /// takes two
    #[arg(long, value_name = "NUMBER", default_value_t = REVNAT_ANY_ENTRIES, add = entries())]
    pub service_flow_any_max_entries: u32,
    /// Maximum number of entries for the host's own sockets that use services; a connected socket takes two, an
    /// unconnected UDP socket two for each service
    #[arg(long, value_name = "NUMBER", default_value_t = SOCKET_ENTRIES, add = entries())]
    pub service_socket_max_entries: u32,
}

/// Default capacity for TCP according to this host's memory, with the thresholds of Linux's own conntrack
/// (`nf_conntrack_init_start`, net/netfilter/nf_conntrack_core.c).
fn default_flow_entries() -> u32 {
    let memory = sysinfo().map_or(0, |host| host.ram_total());
    if memory > 4 << 30 {
        2 * REVNAT_ENTRIES
    } else {
        REVNAT_ENTRIES
    }
}

impl Default for ServiceMapSettings {
    fn default() -> Self {
        super::defaults()
    }
}
