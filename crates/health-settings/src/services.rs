//! Settings of services: where they come from, when they are synced, and where health and metrics are served.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use health_model::address::parse_network;
use health_model::duration::{duration_text, parse_duration};
use health_model::settings::{HostRouting, InvalidSetting, ServiceForwarding, ServiceXdp};
use ipnet::IpNet;

use super::check::{Invalid, network};
use super::form::Common;
use super::range::within;
use super::{
    ExternalIpSetting, IpvsSettings, ListenAddress, ServiceMapSettings, ServiceProxyMode,
    ServiceSources, Settings,
};

/// Maximum length of a zone name in bytes: the limit for a label value.
const MAX_ZONE_LEN: usize = 63;
/// Why every mode except `snat` needs a key that only nodes of the mesh have.
pub const FORWARDING_NEEDS_KEY: &str = "needs --mesh-key-file with your own key: with the public key, anyone could send packets \
     in the name of a service";

/// Services.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
#[command(next_help_heading = "Services")]
pub struct ServiceSettings {
    /// Folder of manifests (*.yaml, *.yml, *.json) of the services and endpoint slices to serve; files are read again
    /// when they change
    #[arg(long, value_name = "DIR", add = Common)]
    pub service_manifests: Option<PathBuf>,
    /// Sources outside this node.
    #[command(flatten)]
    pub sources: ServiceSources,
    /// Implementation that serves services (after a change, established TCP connections stay with the previous one
    /// until they end)
    #[arg(long, value_enum, value_name = "MODE", default_value_t)]
    pub service_proxy_mode: ServiceProxyMode,
    /// Serve NodePorts only at addresses in this network (repeatable or comma-separated) [default: at all addresses of
    /// this node, except link-local ones]
    #[arg(long = "service-node-port-cidr", value_name = "CIDR", value_parser = parse_network, value_delimiter = ',')]
    pub service_node_port_cidrs: Vec<IpNet>,
    /// External addresses (spec.externalIPs) at which services are served: no-nodes for addresses that no node has,
    /// all, none, or CIDR[,CIDR...] for addresses in these networks
    #[arg(long, value_name = "ADDRESSES", default_value = "no-nodes")]
    pub service_external_ips: ExternalIpSetting,
    /// Zone of this node, as named in the hints of endpoint slices [default: with --registry kubernetes, the zone of
    /// the Node object]
    #[arg(long, value_name = "ZONE")]
    pub service_node_zone: Option<String>,
    /// Shortest time between two changes of the datapath for services
    #[arg(
        long, value_name = "DURATION", default_value = "20ms", value_parser = parse_duration,
        add = within::<Duration>(Duration::ZERO, Duration::from_secs(10))
    )]
    pub service_sync_min: Duration,
    /// Time between two full checks of the service datapath; the node becomes unhealthy if a change waits twice as
    /// long
    #[arg(
        long, value_name = "DURATION", default_value = "30s", value_parser = parse_duration,
        add = within::<Duration>(Duration::from_secs(1), Duration::from_hours(1))
    )]
    pub service_sync_max: Duration,
    /// How packets from external clients reach backends on other nodes, unless the service overrides it (dsr and
    /// hybrid need --mesh-key-file with your own key, and --service-proxy-mode ebpf)
    #[arg(long, value_enum, value_name = "MODE", default_value_t)]
    pub service_forwarding: ServiceForwarding,
    /// XDP programs on the uplinks that forward packets of known flows between clients outside and backends on other
    /// nodes
    #[arg(long, value_enum, value_name = "MODE", default_value_t)]
    pub service_xdp: ServiceXdp,
    /// How packets reach endpoints of this node (ebpf works only with services and --service-proxy-mode ebpf)
    #[arg(long, value_enum, value_name = "MODE", default_value_t)]
    pub host_routing: HostRouting,
    /// Address of GET /healthz and /livez, which report the state of services to load balancers and supervisors:
    /// ADDRESS:PORT, localhost:PORT (both IP versions) or off; always off without services
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:10256")]
    pub service_healthz_address: ListenAddress,
    /// Address of GET /metrics, /healthz and /proxyMode, as served by kube-proxy: ADDRESS:PORT, localhost:PORT (both IP
    /// versions) or off; always off without services
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:10249")]
    pub service_metrics_address: ListenAddress,
    /// Sizes of the maps.
    #[command(flatten)]
    pub maps: ServiceMapSettings,
    /// The `ipvs` mode.
    #[command(flatten)]
    pub ipvs: IpvsSettings,
}

impl Default for ServiceSettings {
    fn default() -> Self {
        super::defaults()
    }
}

impl ServiceSettings {
    /// Whether any services are served.
    pub const fn has_services(&self) -> bool {
        self.service_manifests.is_some() || self.sources.has_any()
    }

    /// How XDP forwards packets of services; off unless the agent's programs serve them.
    pub const fn xdp(&self) -> ServiceXdp {
        match self.service_proxy_mode {
            ServiceProxyMode::Ebpf if self.has_services() => self.service_xdp,
            ServiceProxyMode::Ebpf | ServiceProxyMode::Ipvs => ServiceXdp::Off,
        }
    }

    /// Whether the agent's programs deliver packets to endpoints of this node. This requires that they also serve
    /// services, because nothing else may translate addresses on the way.
    pub const fn has_host_routing(&self) -> bool {
        matches!(
            (self.service_proxy_mode, self.host_routing),
            (ServiceProxyMode::Ebpf, HostRouting::Ebpf)
        ) && self.has_services()
    }

    /// The addresses at which pages are served, by flag; none if no services are configured.
    pub(super) fn listens(&self) -> impl Iterator<Item = (&'static str, ListenAddress)> {
        let all = [
            ("--service-healthz-address", self.service_healthz_address),
            ("--service-metrics-address", self.service_metrics_address),
        ];
        all.into_iter().filter(|_| self.has_services())
    }

    /// Checks that backends' nodes can answer outside clients, if the forwarding mode requires it.
    fn check_forwarding(&self, settings: &Settings) -> Result<(), Invalid> {
        let forwarding = self.service_forwarding;
        if forwarding != ServiceForwarding::Snat
            && self.service_proxy_mode == ServiceProxyMode::Ipvs
        {
            let why = "not with --service-proxy-mode ipvs; use ebpf, or snat";
            let invalid = InvalidSetting::new("--service-forwarding", forwarding, why);
            return Err(Invalid::with(invalid, ["--service-proxy-mode"]));
        }
        self.check_forwarding_key(settings.node.mesh_key_file.is_none())
            .map_err(|invalid| Invalid::with(invalid, ["--mesh-key-file"]))
    }

    /// Checks that nodes can trust each other's information about packets, given whether the mesh key is well known.
    pub fn check_forwarding_key(&self, is_public: bool) -> Result<(), InvalidSetting> {
        let forwarding = self.service_forwarding;
        if is_public && forwarding != ServiceForwarding::Snat {
            let flag = "--service-forwarding";
            return Err(InvalidSetting::new(flag, forwarding, FORWARDING_NEEDS_KEY));
        }
        Ok(())
    }

    /// Checks these settings, except the addresses to listen on.
    pub(super) fn check(&self, settings: &Settings) -> Result<(), Invalid> {
        self.sources.check(settings)?;
        self.ipvs.check()?;
        for cidr in &self.service_node_port_cidrs {
            network("--service-node-port-cidr", cidr)?;
        }
        self.check_forwarding(settings)?;
        if let Some(path) = &self.service_manifests
            && !path.is_absolute()
        {
            let why = "must be an absolute path";
            return Err(InvalidSetting::new("--service-manifests", path.display(), why).into());
        }
        if let Some(zone) = &self.service_node_zone {
            let is_name = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
            if !(1..=MAX_ZONE_LEN).contains(&zone.len()) || !zone.bytes().all(is_name) {
                return Err(InvalidSetting::new(
                    "--service-node-zone",
                    zone.escape_default(),
                    format!("must be 1 to {MAX_ZONE_LEN} letters, digits, '-', '_' and '.'"),
                )
                .into());
            }
        }
        let Self {
            service_sync_min: min,
            service_sync_max: max,
            ..
        } = *self;
        if max < min {
            let why = "must not be shorter than --service-sync-min";
            let invalid = InvalidSetting::new("--service-sync-max", duration_text(max), why);
            return Err(Invalid::with(invalid, ["--service-sync-min"]));
        }
        Ok(())
    }
}
