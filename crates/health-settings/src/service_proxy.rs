//! Settings for the proxy mode: which part of the kernel handles service traffic.

use std::fmt;
use std::time::Duration;

use clap::{Args, ValueEnum};
use health_model::address::parse_network;
use health_model::duration::parse_duration;
use health_model::settings::InvalidSetting;
use ipnet::IpNet;

use super::check::network;
use super::range::{Range, within};
use super::seconds::Seconds;

/// Maximum length of a scheduler name in bytes (`IP_VS_SCHEDNAME_MAXLEN` minus the terminating zero).
const MAX_SCHEDULER_LEN: usize = 15;

/// Range of the time for which IPVS keeps idle entries. The kernel accepts up to `INT_MAX / HZ` seconds
/// (net/netfilter/ipvs/ip_vs_ctl.c), which is 596 hours at 1000 Hz.
fn idle_timeout() -> Range {
    within::<Seconds>(Duration::ZERO, Duration::from_hours(480))
}

/// The part of the kernel that serves services.
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

/// Settings of the `ipvs` mode.
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
    /// Bit of the packet mark that requests masquerading; ipvs mode only
    #[arg(long, value_name = "BIT", default_value_t = 14, add = within::<u8>(0, 31))]
    pub ipvs_masquerade_bit: u8,
    /// Time between two checks whether draining backends have lost their last connection; ipvs mode only
    #[arg(
        long, value_name = "DURATION", default_value = "10s", value_parser = parse_duration,
        add = within::<Duration>(Duration::from_millis(100), Duration::from_mins(10))
    )]
    pub ipvs_drain_interval: Duration,
    /// How long idle TCP connections are kept; 0s leaves the kernel's setting unchanged; ipvs mode only
    #[arg(long, value_name = "DURATION", default_value_t, add = idle_timeout())]
    pub ipvs_tcp_timeout: Seconds,
    /// How long idle TCP connections are kept after a FIN; 0s leaves the kernel's setting unchanged; ipvs mode only
    #[arg(long, value_name = "DURATION", default_value_t, add = idle_timeout())]
    pub ipvs_tcpfin_timeout: Seconds,
    /// How long idle UDP flows are kept; 0s leaves the kernel's setting unchanged; ipvs mode only
    #[arg(long, value_name = "DURATION", default_value_t, add = idle_timeout())]
    pub ipvs_udp_timeout: Seconds,
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
        Ok(())
    }
}
