//! Addresses and devices of this node's endpoints.

use std::time::Duration;

use clap::Args;
use health_model::address::parse_network;
use health_model::duration::parse_duration;
use health_model::ipam::AddressRange;
use health_model::labels::filter::LabelPattern;
use health_model::settings::AttachMode;
use ipnet::IpNet;

use super::form::Common;
use super::range::within;

/// This node's endpoints.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
#[command(next_help_heading = "Endpoints")]
pub struct EndpointSettings {
    /// Prefix of this node's endpoints, to register in etcd (repeatable or comma-separated)
    #[arg(
        long = "pod-cidr", value_name = "CIDR", value_parser = parse_network, value_delimiter = ',',
        add = Common
    )]
    pub pod_cidrs: Vec<IpNet>,
    /// Addresses of the pod CIDRs that are never allocated, as a CIDR or FIRST-LAST (repeatable or comma-separated)
    #[arg(long = "ipam-exclude", value_name = "RANGE", value_delimiter = ',')]
    pub ipam_excludes: Vec<AddressRange>,
    /// Minimum time before a released address is reused, unless no other address is free
    #[arg(
        long, value_name = "DURATION", default_value = "1m", value_parser = parse_duration,
        add = within::<Duration>(Duration::ZERO, Duration::from_hours(24))
    )]
    pub ipam_cooling_time: Duration,
    /// Labels of Kubernetes' pods that count for identities, as [SOURCE:][!]REGEX of the start of a key (repeatable or
    /// comma-separated): ! leaves labels out; a pattern without ! leaves out all labels that no such pattern matches
    #[arg(long, value_name = "PATTERN", value_delimiter = ',')]
    pub identity_labels: Vec<LabelPattern>,
    /// How programs are attached to devices
    #[arg(long, value_enum, value_name = "MODE", default_value_t)]
    pub attach_mode: AttachMode,
}
