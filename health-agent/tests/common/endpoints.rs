//! An endpoint manager without devices, programs or namespaces, whose only endpoint is 1018.

use std::future::{Future, ready};
use std::net::IpAddr;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;

use health_endpoint::identities::{Hold, IdentitySource, IdentityUnavailable};
use health_endpoint::manager::{Manager, ManagerOptions, Survey};
use health_endpoint::regenerate::{RealizedPolicy, Regeneration, RegenerationError, Regenerator};
use health_endpoint::workload::{
    Blueprint, DeviceFault, Devices, FoundDevice, SavedEndpoint, StateDir, Task, WorkloadError,
};
use health_model::api::EndpointSettings;
use health_model::identity::Identity;
use health_model::ipam::NodeIpam;
use health_model::labels::LabelSet;
use health_net::mac::MacAddr;
use health_net::netns::NetNsId;
use health_registry::identity::HeldIdentities;
use jiff::Timestamp;
use tokio::sync::watch;

const ID: u16 = 1018;
const IFINDEX: u32 = 7;

struct NoDevices;

impl Devices for NoDevices {
    fn look_at(&self, _: &Path) -> Result<NetNsId, WorkloadError> {
        Ok(NetNsId { dev: 4, ino: 2 })
    }
    fn is_in_use(&self, _: IpAddr) -> Task<'_, Result<bool, WorkloadError>> {
        Box::pin(ready(Ok(false)))
    }
    fn create<'a>(&'a self, _: &'a Blueprint) -> Task<'a, Result<u32, WorkloadError>> {
        Box::pin(ready(Ok(IFINDEX)))
    }
    fn activate<'a>(&'a self, _: &'a Blueprint, _: u32) -> Task<'a, Result<(), WorkloadError>> {
        Box::pin(ready(Ok(())))
    }
    fn set_mtu<'a>(&'a self, _: &'a Blueprint) -> Task<'a, Result<(), WorkloadError>> {
        Box::pin(ready(Ok(())))
    }
    fn inspect<'a>(
        &'a self,
        _: &'a Blueprint,
        _: u32,
    ) -> Task<'a, Result<Vec<DeviceFault>, WorkloadError>> {
        Box::pin(ready(Ok(Vec::new())))
    }
    fn repair<'a>(
        &'a self,
        _: &'a Blueprint,
        _: u32,
        _: &'a DeviceFault,
    ) -> Task<'a, Result<(), WorkloadError>> {
        Box::pin(ready(Ok(())))
    }
    fn remove<'a>(&'a self, _: &'a str) -> Task<'a, Result<bool, WorkloadError>> {
        Box::pin(ready(Ok(true)))
    }
    fn find(&self, _: u32) -> Task<'_, Result<Option<FoundDevice>, WorkloadError>> {
        Box::pin(ready(Ok(Some(device()))))
    }
    fn list(&self) -> Task<'_, Result<Vec<FoundDevice>, WorkloadError>> {
        Box::pin(ready(Ok(vec![device()])))
    }
}

fn device() -> FoundDevice {
    FoundDevice {
        device: "lxc1018".to_owned(),
        ifindex: IFINDEX,
        endpoint: ID,
        is_up: true,
        has_peer: true,
    }
}

struct NoStore;

impl IdentitySource for NoStore {
    fn acquire<'a>(
        &'a self,
        labels: &'a LabelSet,
    ) -> Pin<Box<dyn Future<Output = Result<Hold, IdentityUnavailable>> + Send + 'a>> {
        Box::pin(ready(Ok(Hold {
            labels: labels.clone(),
            identity: Identity::INIT,
        })))
    }
    fn release(&self, _: Hold) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(ready(()))
    }
    fn held(&self) -> watch::Receiver<Arc<HeldIdentities>> {
        watch::channel(Arc::default()).1
    }
}

struct NoPrograms;

impl Regenerator for NoPrograms {
    fn held_back(&self) -> watch::Receiver<Option<RegenerationError>> {
        watch::channel(None).1
    }
    fn until_informed(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(ready(()))
    }
    fn until_covered(&self, _: Identity) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(ready(()))
    }
    fn regenerate<'a>(
        &'a self,
        _: &'a Regeneration,
    ) -> Pin<Box<dyn Future<Output = Result<RealizedPolicy, RegenerationError>> + Send + 'a>> {
        Box::pin(ready(Ok(RealizedPolicy::default())))
    }
    fn shut_off(
        &self,
        _: u16,
    ) -> Pin<Box<dyn Future<Output = Result<Option<RealizedPolicy>, RegenerationError>> + Send + '_>>
    {
        Box::pin(ready(Ok(None)))
    }
    fn remove(
        &self,
        _: u16,
    ) -> Pin<Box<dyn Future<Output = Result<(), RegenerationError>> + Send + '_>> {
        Box::pin(ready(Ok(())))
    }
}

/// Starts the manager, and waits until its endpoint is ready.
pub(super) async fn manager(state_dir: &Path) -> Manager {
    let cidr = "10.244.1.0/24".parse().unwrap();
    let options = ManagerOptions {
        states: StateDir::of(state_dir),
        ipam: NodeIpam::new(&[cidr], &[], &[], std::time::Duration::ZERO).unwrap(),
        node_addresses: Vec::new(),
        health: None,
        mtu: 1500,
        parallel: 1,
        devices: Arc::new(NoDevices),
        identities: Arc::new(NoStore),
        pods: None,
        regenerator: Arc::new(NoPrograms),
        clock: Timestamp::now,
    };
    let saved = SavedEndpoint {
        id: ID,
        name: Some("web-1".to_owned()),
        container_id: None,
        pod: None,
        network: None,
        labels: LabelSet::default(),
        given_labels: None,
        former_labels: None,
        identity: Identity::INIT,
        ipv4: Some([10, 244, 1, 18].into()),
        ipv6: None,
        mac: MacAddr([2, 0, 0, 0, 0, 1]),
        host_mac: MacAddr([2, 0, 0, 0, 0, 2]),
        mtu: 1500,
        netns: "/run/netns/web".into(),
        netns_id: NetNsId { dev: 4, ino: 1 },
        ifname: "eth0".to_owned(),
        device: "lxc1018".to_owned(),
        ifindex: Some(IFINDEX),
        created: Timestamp::UNIX_EPOCH,
        boot_id: None,
        has_default_route: true,
        settings: EndpointSettings::default(),
        is_deleting: false,
    };
    let survey = Survey {
        living: vec![saved],
        dropped: Vec::new(),
        lost: Vec::new(),
    };
    let manager = Manager::start(options, survey);
    let mut changes = manager.changes();
    while manager.endpoints()[0].state != "ready" {
        changes.changed().await.unwrap();
    }
    manager
}
