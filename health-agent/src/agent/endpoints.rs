//! The endpoints of workloads: their manager, and what builds their datapath.

use std::future::Future;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context as _;
use health_common::endpoint::EndpointInfo;
use jiff::Timestamp;

use super::addresses;
use super::node::NodeDatapath;
use crate::config::Config;
use crate::datapath::{Datapath, Workload, loader};
use crate::endpoint::identities::ReservedOnly;
use crate::endpoint::manager::{self, Manager, ManagerOptions, Parts, Survey};
use crate::endpoint::regenerate::{NotRegenerated, Realized, Regeneration, Regenerator};
use crate::endpoint::workload::{HostDevices, Saved, StateDir};
use crate::ipam::NodeIpam;
use crate::net::netlink::Handle;
use crate::nodes::Node;

/// Most regenerations at a time.
const PARALLEL: usize = 4;

/// What there is of former agents' endpoints, with nothing left of those that do not live.
pub(super) async fn survey(config: &Config, netlink: &Handle) -> anyhow::Result<Survey> {
    let location = &config.location;
    // Another agent's endpoints are not to be touched.
    loader::require_unused(location)?;
    let devices = HostDevices::new(netlink.clone(), &location.instance);
    manager::survey(&states(&location.state_dir), &devices)
        .await
        .context("cannot take over the endpoints of the agent before this one")
}

/// Begins to manage endpoints, those of the survey first.
pub(super) fn start(
    config: &Config,
    own: &Node,
    netlink: &Handle,
    node: &NodeDatapath,
    survey: Survey,
) -> anyhow::Result<Manager> {
    let location = &config.location;
    let ipam = NodeIpam::new(
        &own.pod_cidrs,
        &own.addresses,
        &config.ipam_excludes,
        config.ipam_cooling_time,
    )?;
    let options = ManagerOptions {
        states: states(&location.state_dir),
        ipam,
        node_addresses: own.addresses.clone(),
        health: (node.endpoint.id(), addresses(&node.endpoint)),
        mtu: node.endpoint.mtu(),
        parallel: PARALLEL,
    };
    let parts = Parts {
        devices: Arc::new(HostDevices::new(netlink.clone(), &location.instance)),
        identities: Arc::new(ReservedOnly),
        regenerator: Arc::new(Builder(node.shared_datapath())),
        clock: Timestamp::now,
    };
    Ok(Manager::start(options, parts, survey))
}

fn states(state_dir: &Path) -> StateDir {
    StateDir::of(state_dir)
}

/// A former agent's endpoint as programs know it, unless the maps know better.
pub(super) fn workload(saved: &Saved) -> Option<Workload> {
    Some(Workload {
        device: saved.device.clone(),
        addresses: saved.addresses().collect(),
        info: EndpointInfo {
            ifindex: saved.ifindex?,
            identity: saved.identity.0,
            id: saved.id,
            mac: saved.mac.0,
            host_mac: saved.host_mac.0,
            ..EndpointInfo::default()
        },
    })
}

/// Builds endpoints without policy.
struct Builder(Arc<Mutex<Datapath>>);

impl Builder {
    /// Does something with the datapath where it may take its time.
    async fn with_datapath<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Datapath) -> T + Send + 'static,
    ) -> Result<T, NotRegenerated> {
        let datapath = self.0.clone();
        let work = move || work(&mut datapath.lock().unwrap_or_else(PoisonError::into_inner));
        let done = tokio::task::spawn_blocking(work).await;
        done.map_err(|error| NotRegenerated(error.to_string()))
    }
}

impl Regenerator for Builder {
    fn regenerate<'a>(
        &'a self,
        endpoint: &'a Regeneration,
    ) -> Pin<Box<dyn Future<Output = Result<Realized, NotRegenerated>> + Send + 'a>> {
        let workload = Workload {
            device: endpoint.device.clone(),
            addresses: endpoint.addresses.clone(),
            info: EndpointInfo {
                ifindex: endpoint.ifindex,
                identity: endpoint.identity.0,
                id: endpoint.id,
                mac: endpoint.mac.0,
                host_mac: endpoint.host_mac.0,
                ..EndpointInfo::default()
            },
        };
        Box::pin(async {
            self.with_datapath(|datapath| datapath.set_workload(workload))
                .await?
                .map_err(|error| NotRegenerated(error.to_string()))?;
            Ok(Realized::default())
        })
    }

    fn remove(
        &self,
        id: u16,
    ) -> Pin<Box<dyn Future<Output = Result<(), NotRegenerated>> + Send + '_>> {
        Box::pin(async move {
            self.with_datapath(move |datapath| datapath.remove_workload(id))
                .await?
                .map(drop)
                .map_err(|error| NotRegenerated(error.to_string()))
        })
    }
}
