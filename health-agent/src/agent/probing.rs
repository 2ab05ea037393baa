//! Probing: the prober, and the responder that answers other agents at this node's addresses.

use std::net::TcpListener;
use std::sync::Arc;

use anyhow::Context as _;
use health_mesh::hello::{Identity, Responder};
use health_mesh::{Mesh, MeshHandle, MeshOptions, Tuning};
use health_model::api::{AgentProblem, FullMap, PolicyLag};
use health_registry::nodes::NodeSet;
use health_settings::MeshSettings;
use tokio::sync::watch::Receiver;

use super::node::NodeDatapath;
use super::own_node;
use super::start_context::StartContext;

/// The running prober and responder.
pub(super) struct Probing {
    /// The mesh stops when this is dropped.
    pub(super) mesh: MeshHandle,
    pub(super) host_responder: Responder,
}

/// Inputs that probing takes from other parts.
pub(super) struct ProbingInputs {
    pub(super) nodes: Receiver<Arc<NodeSet>>,
    /// Listeners at this node's addresses.
    pub(super) listeners: Vec<TcpListener>,
    /// This node's nearly full maps, for reports.
    pub(super) full_maps: Receiver<Vec<FullMap>>,
    /// This node's endpoints that do not enforce its current policy, for reports.
    pub(super) policy_lag: Receiver<Option<PolicyLag>>,
    /// This agent's problems, for reports.
    pub(super) problems: Receiver<Vec<AgentProblem>>,
}

impl Probing {
    pub(super) fn start(
        StartContext { config, own, .. }: &StartContext<'_>,
        node: &NodeDatapath,
        inputs: ProbingInputs,
    ) -> anyhow::Result<Self> {
        let arrivals = Arc::new(node.datapath().arrivals()?);
        let identity = Identity {
            node: own.full_name(),
            keys: node.keys.hello.clone(),
            hosts_only: node.endpoint.is_none(),
        };
        let host_responder = Responder::start(
            identity,
            inputs.listeners,
            node.health_addresses(),
            arrivals,
        )
        .context("cannot start the GET /hello responder")?;
        let mut local_addresses = own.addresses.clone();
        local_addresses.extend(&own.secondary_addresses);
        let options = MeshOptions {
            local: own.full_name(),
            local_addresses,
            uplinks: node.uplinks().to_vec(),
            tuning: tuning(&config.mesh),
            passive_rtt: config.mesh.passive_rtt,
            port: config.mesh.health_port,
            icmp_id: node.icmp_id,
            session: node.session,
            keys: node.keys.clone(),
            one_way: config.mesh.one_way,
            hosts_only: own_node::hosts_only(config, own).map(|why| why.to_string()),
            state_dir: config.location.state_dir.clone(),
            full_maps: inputs.full_maps,
            policy_lag: inputs.policy_lag,
            problems: inputs.problems,
        };
        let rows = Arc::new(node.datapath().rtt()?);
        let mesh = Mesh::start(options, inputs.nodes, rows, node.health_addresses())?;
        Ok(Self {
            mesh,
            host_responder,
        })
    }
}

/// The mesh parameters that can change while the mesh runs.
pub(super) fn tuning(settings: &MeshSettings) -> Tuning {
    Tuning {
        intervals: settings.probe_intervals(),
        rate: settings.probe_rate,
        timeout: settings.probe_timeout,
        loss_threshold: f64::from(settings.loss_threshold) / 100.0,
        passive_relief: settings.passive_relief,
        path_mtu_interval: settings.path_mtu_interval.0,
    }
}
