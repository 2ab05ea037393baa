//! Checks and opens the resources that an agent needs before it creates anything. A missing or busy resource fails the
//! start here.

use std::net::TcpListener;
use std::sync::Arc;

use health_endpoint::manager::Survey;
use health_mesh::hello;

use super::containers::Sources;
use super::endpoints;
use super::kubernetes_events::KubernetesEvents;
use super::kubernetes_pods::KubernetesPods;
use super::kubernetes_policies::KubernetesPolicies;
use super::services;
use super::source::AgentSource;
use super::start_context::StartContext;
use super::uplinks::{UplinkSurvey, Uplinks};

/// Resources opened before the agent creates anything.
pub(super) struct Preflight {
    pub(super) uplinks: (Uplinks, UplinkSurvey),
    /// The endpoints of previous agents.
    pub(super) survey: Survey,
    pub(super) opened: OpenedResources,
}

/// Resources that the parts of the agent take over.
pub(super) struct OpenedResources {
    /// Listeners at this node's addresses.
    pub(super) listeners: Vec<TcpListener>,
    /// `None` if the settings name no API server.
    pub(super) kubernetes_pods: Option<KubernetesPods>,
    /// `None` if the settings name no API server.
    pub(super) kubernetes_policies: Option<KubernetesPolicies>,
    /// `None` if this agent probes no containers.
    pub(super) pods: Option<Sources>,
    /// `None` if this agent serves no services.
    pub(super) services: Option<services::ProxyParts>,
}

impl Preflight {
    /// Opens all resources. Must be called in a tokio runtime.
    pub(super) async fn run(
        context: &StartContext<'_>,
        source: &Arc<AgentSource>,
    ) -> anyhow::Result<Self> {
        let StartContext {
            config,
            own,
            netlink,
        } = context;
        let uplinks = Uplinks::find(netlink, config, own).await?;
        // Comes first, because a port in use is a likely conflict.
        let listeners = hello::bind(&own.addresses, config.mesh.health_port)?;
        let services = services::ProxyParts::open(config, own)?;
        let kubernetes_pods = KubernetesPods::open(config)?;
        let events = KubernetesEvents::open(config)?;
        let kubernetes_policies = KubernetesPolicies::open(config, events.clone())?;
        let probed = kubernetes_pods.as_ref().and_then(KubernetesPods::probed);
        source.list_controllers(
            (kubernetes_pods.iter().flat_map(KubernetesPods::controllers))
                .chain(events.iter().map(KubernetesEvents::controller))
                .chain(
                    kubernetes_policies
                        .iter()
                        .flat_map(KubernetesPolicies::controllers),
                )
                .chain(services.iter().flat_map(services::ProxyParts::controllers)),
        );
        let pods = Sources::open(config, probed, events);
        Ok(Self {
            uplinks,
            survey: endpoints::survey(context).await?,
            opened: OpenedResources {
                listeners,
                kubernetes_pods,
                kubernetes_policies,
                pods,
                services,
            },
        })
    }
}
