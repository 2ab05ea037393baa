//! Services from a folder that are never written to a kernel.

use std::convert::Infallible;
use std::fs;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use health_model::api::ServiceProblem;
use health_model::ipam::Family;
use health_server::services::ServiceCatalog;
use health_service::choice::Topology;
use health_service::forwarding::Forwarding;
use health_service::runner::Intervals;
use health_service::services::{Provider, Services, SyncSettings, Work};
use health_service::source::{Folder, Probed, Readiness};
use health_service::spec::Selection;
use jiff::Timestamp;
use tokio::sync::watch;

/// A service with backends in each state, a service that has taken one of its NodePorts, and one without endpoints.
const MANIFEST: &str = "
apiVersion: v1
kind: Service
metadata:
  namespace: shop
  name: web
  creationTimestamp: 2026-02-01T00:00:00Z
  annotations: {service.health-agent.io/algorithm: maglev}
spec:
  type: LoadBalancer
  clusterIP: 10.96.0.1
  ports: [{name: http, port: 80, nodePort: 30080}, {name: dns, port: 53, protocol: UDP, nodePort: 30053}]
  externalTrafficPolicy: Local
  healthCheckNodePort: 31000
  sessionAffinity: ClientIP
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {namespace: shop, name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: 8080}]
endpoints:
- {addresses: [10.244.1.7], nodeName: hnode1, zone: z1}
- {addresses: [10.244.1.8], nodeName: hnode1}
- {addresses: [10.244.2.9], nodeName: hnode2, conditions: {ready: false, serving: true, terminating: true}}
---
apiVersion: v1
kind: Service
metadata: {namespace: shop, name: old, creationTimestamp: 2026-01-01T00:00:00Z}
spec: {type: NodePort, clusterIP: 10.96.0.2, ports: [{port: 53, protocol: UDP, nodePort: 30053}]}
---
apiVersion: v1
kind: Service
metadata: {namespace: test, name: web}
spec: {clusterIPs: ['fd00::1'], ports: [{port: 80}]}
";
const BAD_MANIFEST: &str = "
apiVersion: v1
kind: Service
metadata: {namespace: shop, name: bad}
spec: {clusterIP: 10.96.0.3, ports: [{port: 0}]}
";

/// Services that are available until this is dropped.
pub(super) struct Served {
    pub(super) catalog: ServiceCatalog,
    _parts: (Services, Folder, Probed),
}

/// Starts serving, and waits until the services are known.
pub(super) async fn served(dir: &Path) -> Served {
    let path = dir.join("services");
    fs::create_dir(&path).unwrap();
    fs::write(path.join("web.yaml"), MANIFEST).unwrap();
    fs::write(path.join("bad.yaml"), BAD_MANIFEST).unwrap();
    let folder = Folder::watch(&path, Selection::default());
    let probes = [(7, true), (8, false)];
    let probes = probes.map(|(last, ready)| (IpAddr::from([10, 244, 1, last]), ready));
    let readiness = watch::channel(Arc::new(Readiness::from(probes))).1;
    let probed = Probed::of(folder.services(), "hnode1".into(), readiness.clone());
    let settings = SyncSettings {
        intervals: Intervals {
            min: Duration::ZERO,
            retry: Duration::from_secs(1),
            max: Duration::from_secs(3600),
        },
        families: Family::ALL.to_vec(),
        health_timeout: Duration::from_secs(3600),
        clock: Timestamp::now,
    };
    let topology = Topology {
        node: "hnode1".into(),
        zone: None,
    };
    let place = watch::channel(topology).1;
    let services = Services::start(settings, place, vec![probed.services()], NoKernel).unwrap();
    let handle = services.handle();
    handle.view().wait_for(|view| view.is_synced).await.unwrap();
    let unheard = ServiceProblem {
        subject: "service shop/web".into(),
        problem: "spec.healthCheckNodePort: cannot listen on 0.0.0.0:31000: \u{1b}[1m".into(),
    };
    let catalog = ServiceCatalog {
        forwarding: Forwarding::default(),
        handle,
        readiness,
        listener_problems: watch::channel(vec![unheard]).1,
    };
    Served {
        catalog,
        _parts: (services, folder, probed),
    }
}

struct NoKernel;

impl Provider for NoKernel {
    type Error = Infallible;

    async fn sync(&mut self, _: Work<'_>) -> Result<(), Infallible> {
        Ok(())
    }
}
