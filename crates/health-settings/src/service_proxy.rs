//! Settings of the proxy mode, which decides what in the kernel serves services.

use std::fmt;
use std::time::Duration;

use clap::{Args, ValueEnum};
use health_model::address::parse_network;
use health_model::duration::parse_duration;
use health_model::settings::InvalidSetting;
use ipnet::IpNet;

use super::check::{network, within};
use super::seconds::Seconds;

/// Longest scheduler name in bytes (`IP_VS_SCHEDNAME_MAXLEN` less the final zero).
const MAX_SCHEDULER_LEN: usize = 15;
const MIN_DRAIN_INTERVAL: Duration = Duration::from_millis(100);
const MAX_DRAIN_INTERVAL: Duration = Duration::from_secs(600);

/// How long IPVS keeps idle entries; 0 leaves the kernel's setting unchanged. The kernel accepts up to `INT_MAX / HZ`
/// seconds (net/netfilter/ipvs/ip_vs_ctl.c), which is 596 hours at 1000 Hz.
pub type IdleTimeout = Seconds<0, { 480 * 3600 }>;

/// What in the kernel serves services.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ServiceProxyMode {
    /// The agent's eBPF programs
    #[default]
    Ebpf,
    /// The kernel's load balancer IPVS, with ipset and nf_tables
    Ipvs,
}

impl ServiceProxyMode {
    /// The mode's name in the flag and on `/proxyMode`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ebpf => "ebpf",
            Self::Ipvs => "ipvs",
        }
    }
}

impl fmt::Display for ServiceProxyMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Settings of the mode `ipvs`.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
#[command(next_help_heading = "IPVS")]
pub struct IpvsSettings {
    /// Scheduler for services that choose no algorithm, by its ipvsadm name; ipvs mode only
    #[arg(long, value_name = "NAME", default_value = "rr")]
    pub ipvs_scheduler: String,
    /// Create no IPVS virtual servers for service addresses in this network (repeatable or comma-separated); ipvs
    /// mode only
    #[arg(long = "ipvs-exclude-cidr", value_name = "CIDR", value_parser = parse_network, value_delimiter = ',')]
    pub ipvs_exclude_cidrs: Vec<IpNet>,
    /// Answer ARP for an address only on the device that has it; ipvs mode only
    #[arg(long)]
    pub ipvs_strict_arp: bool,
    /// Masquerade all traffic to ClusterIPs, not only traffic from outside this node's pod CIDRs; ipvs mode only
    #[arg(long)]
    pub ipvs_masquerade_all: bool,
    /// Bit of the packet mark that requests masquerading, 0 to 31; ipvs mode only
    #[arg(long, value_name = "BIT", default_value_t = 14)]
    pub ipvs_masquerade_bit: u8,
    /// Time between two checks whether draining backends have lost their last connection, 100ms to 10m; ipvs mode only
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = parse_duration)]
    pub ipvs_drain_interval: Duration,
    /// How long idle TCP connections are kept, up to 480h; 0s leaves the kernel's setting unchanged; ipvs mode only
    #[arg(long, value_name = "DURATION", default_value_t)]
    pub ipvs_tcp_timeout: IdleTimeout,
    /// How long idle TCP connections are kept after a FIN, up to 480h; 0s leaves the kernel's setting unchanged; ipvs mode only
    #[arg(long, value_name = "DURATION", default_value_t)]
    pub ipvs_tcpfin_timeout: IdleTimeout,
    /// How long idle UDP flows are kept, up to 480h; 0s leaves the kernel's setting unchanged; ipvs mode only
    #[arg(long, value_name = "DURATION", default_value_t)]
    pub ipvs_udp_timeout: IdleTimeout,
}

impl Default for IpvsSettings {
    fn default() -> Self {
        super::defaults()
    }
}

impl IpvsSettings {
    pub(super) fn check(&self) -> Result<(), InvalidSetting> {
        let name = &self.ipvs_scheduler;
        let is_name = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_');
        if !(1..=MAX_SCHEDULER_LEN).contains(&name.len()) || !name.bytes().all(is_name) {
            return Err(InvalidSetting::new(
                "--ipvs-scheduler",
                name.escape_default(),
                format!("must be 1 to {MAX_SCHEDULER_LEN} letters, digits, '-' and '_'"),
            ));
        }
        for cidr in &self.ipvs_exclude_cidrs {
            network("--ipvs-exclude-cidr", cidr)?;
        }
        if self.ipvs_masquerade_bit > 31 {
            return Err(InvalidSetting::new(
                "--ipvs-masquerade-bit",
                self.ipvs_masquerade_bit,
                "must be 0 to 31",
            ));
        }
        within(
            "--ipvs-drain-interval",
            self.ipvs_drain_interval,
            MIN_DRAIN_INTERVAL,
            MAX_DRAIN_INTERVAL,
        )
    }
}
