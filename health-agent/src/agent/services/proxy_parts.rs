//! Resources that the service proxy needs before it starts.

use std::net::TcpListener;
use std::path::PathBuf;

use anyhow::Context as _;
use health_model::activity::{self, Controller, Reporter};
use health_registry::nodes::Node;
use health_server::page_server;
use health_service::provider::ipvs::netlink::server::Timeouts;
use health_service::provider::ipvs::plan::PlanSettings;
use health_service::provider::ipvs::rules::RuleSettings;
use health_service::provider::ipvs::{self, Ipvs};
use health_settings::{ServiceProxyMode, Settings};

use super::sources::Sources;

/// Resources that the proxy needs before it starts: open sources, bound ports, and the IPVS provider.
pub(in crate::agent) struct ProxyParts {
    pub(super) sources: Sources,
    pub(super) ports: Ports,
    /// Set in mode `ipvs`.
    pub(super) ipvs: Option<Ipvs>,
    /// Reports the syncs.
    pub(super) syncs: Reporter,
}

impl ProxyParts {
    /// Opens everything, so that an agent that cannot serve services fails before it changes anything. `None` if the
    /// settings name no source. Must be called in a tokio runtime.
    pub(in crate::agent) fn open(config: &Settings, own: &Node) -> anyhow::Result<Option<Self>> {
        let Some(sources) = Sources::open(config)? else {
            return Ok(None);
        };
        let ipvs = match config.services.service_proxy_mode {
            ServiceProxyMode::Ebpf => None,
            ServiceProxyMode::Ipvs => {
                let opened = Ipvs::open(ipvs_settings(config, own));
                Some(opened.context("cannot serve services with --service-proxy-mode ipvs")?)
            }
        };
        Ok(Some(Self {
            sources,
            ports: Ports::open(config)?,
            ipvs,
            syncs: activity::channel().0,
        }))
    }

    /// What is known about the watches outside this node, and the syncs.
    pub(in crate::agent) fn controllers(&self) -> impl Iterator<Item = Controller> {
        let syncs = Controller::new("service-sync", self.syncs.activity());
        self.sources.controllers().into_iter().chain([syncs])
    }
}

/// Listeners on the ports that report the state of services. No other process can bind these ports.
pub(super) struct Ports {
    pub(super) health: Vec<TcpListener>,
    pub(super) metrics: Vec<TcpListener>,
    /// Where the answers for load balancers are saved.
    pub(super) state_dir: PathBuf,
}

impl Ports {
    /// Binds the listeners.
    fn open(config: &Settings) -> Result<Self, page_server::BindError> {
        let settings = &config.services;
        Ok(Self {
            health: page_server::bind(
                "--service-healthz-address",
                &settings.service_healthz_address,
            )?,
            metrics: page_server::bind(
                "--service-metrics-address",
                &settings.service_metrics_address,
            )?,
            state_dir: config.location.state_dir.clone(),
        })
    }
}

/// How IPVS serves, or how it used to serve if another mode is in use now.
pub(super) fn ipvs_settings(config: &Settings, own: &Node) -> ipvs::Settings {
    let settings = &config.services.ipvs;
    ipvs::Settings {
        plan: PlanSettings {
            scheduler: settings.ipvs_scheduler.as_str().into(),
            excluded_networks: settings.ipvs_exclude_cidrs.clone(),
        },
        rules: RuleSettings {
            pod_networks: own.pod_cidrs.clone(),
            masquerade_all: settings.ipvs_masquerade_all,
            masquerade_mark: 1 << settings.ipvs_masquerade_bit,
        },
        node_port_networks: config.services.service_node_port_cidrs.clone(),
        strict_arp: settings.ipvs_strict_arp,
        drain_interval: settings.ipvs_drain_interval,
        timeouts: Timeouts {
            tcp: settings.ipvs_tcp_timeout.secs(),
            tcp_fin: settings.ipvs_tcpfin_timeout.secs(),
            udp: settings.ipvs_udp_timeout.secs(),
        },
    }
}
