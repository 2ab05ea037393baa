//! What an agent opens and binds before it creates anything: whatever is missing or in use ends the start here.

use std::net::TcpListener;
use std::sync::Arc;

use anyhow::Context as _;
use health_endpoint::manager::Survey;
use health_mesh::hello;
use health_metrics::Exporter;
use health_model::settings::Location;
use health_server::monitor::{self, Monitor};

use super::containers::Sources;
use super::endpoints;
use super::foundation::Foundation;
use super::pages;
use super::services;
use super::source::AgentSource;
use super::uplinks::{UplinkSurvey, Uplinks};

/// What is ready before anything is created.
pub(super) struct Groundwork {
    pub(super) uplinks: (Uplinks, UplinkSurvey),
    /// The endpoints of former agents.
    pub(super) survey: Survey,
    /// The pages for monitoring. They already answer.
    pub(super) monitors: [Monitor; 2],
    pub(super) opened: Opened,
}

/// What the parts of the agent take over.
pub(super) struct Opened {
    /// Listeners at this node's addresses.
    pub(super) listeners: Vec<TcpListener>,
    pub(super) exporter: Arc<Exporter<AgentSource, Location>>,
    /// `None` if this agent probes no containers.
    pub(super) pods: Option<Sources>,
    /// `None` if this agent serves no services.
    pub(super) services: Option<services::Parts>,
}

impl Groundwork {
    /// Must be called in a tokio runtime.
    pub(super) async fn lay(
        foundation: &Foundation<'_>,
        source: &Arc<AgentSource>,
    ) -> anyhow::Result<Self> {
        let Foundation {
            config,
            own,
            netlink,
        } = foundation;
        let uplinks = Uplinks::find(netlink, config, own).await?;
        // A port in use is the most likely conflict.
        let listeners = hello::bind(&own.addresses, config.mesh.health_port)?;
        let healthz = monitor::bind("--healthz-address", &config.api.healthz_address)?;
        let scrapes = monitor::bind("--metrics-address", &config.api.metrics_address)?;
        let services = services::Parts::open(config, own)?;
        let pods = Sources::open(config)?;
        let exporter = Arc::new(Exporter::new(source.clone(), config.location.clone()));
        let monitors = [
            Monitor::start(healthz, [pages::healthz(source.clone())])
                .context("cannot serve GET /healthz")?,
            Monitor::start(scrapes, [pages::metrics(exporter.clone())])
                .context("cannot serve GET /metrics")?,
        ];
        Ok(Self {
            uplinks,
            survey: endpoints::survey(foundation).await?,
            monitors,
            opened: Opened {
                listeners,
                exporter,
                pods,
                services,
            },
        })
    }
}
