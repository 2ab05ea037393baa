//! Listeners on the health-check node ports of services (`pkg/proxy/healthcheck/service_health.go` of Kubernetes): each
//! tells load balancers whether this node has endpoints of its service.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use health_model::api::ServiceProblem;
use health_net::listen;
use health_service::health_check::{ServiceAnswer, ServiceHealth};
use health_service::services::Handle;
use health_service::spec::ServiceName;
use health_service::state::HealthCheck;
use hyper::header::HeaderName;
use hyper::{HeaderMap, StatusCode};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tracing::{info, warn};

use super::pages::json;
use crate::api::monitor::{Answer, BACKLOG, Monitor, Page, is_missing};

/// What load balancers are told, by family as in [`Family::ALL`](health_model::ipam::Family::ALL). Sent with each sync,
/// whether it changed or not.
pub type HealthChecks = [BTreeMap<ServiceName, HealthCheck>; 2];

/// All addresses of the node, by family as in [`HealthChecks`].
pub const EVERYWHERE: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::UNSPECIFIED),
    IpAddr::V6(Ipv6Addr::UNSPECIFIED),
];

/// Longest wait for the requests under way on a port that is closed.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Listens on the health-check node ports. Dropping it closes them.
#[derive(Debug)]
pub struct ServiceListeners {
    deaf: watch::Receiver<Vec<ServiceProblem>>,
    task: JoinHandle<()>,
}

impl ServiceListeners {
    /// Begins to listen at these addresses. Must be called in a tokio runtime.
    pub fn start(
        addresses: [IpAddr; 2],
        mut checks: watch::Receiver<Arc<HealthChecks>>,
        handle: Handle,
    ) -> Self {
        let (sender, deaf) = watch::channel(Vec::new());
        let task = tokio::spawn(async move {
            let mut families = addresses.map(|address| Family::new(address, handle.clone()));
            loop {
                let all = checks.borrow_and_update().clone();
                for (family, checks) in families.iter_mut().zip(&*all) {
                    family.sync(checks).await;
                }
                let problems = families.iter().flat_map(Family::problems).collect();
                sender.send_replace(problems);
                if checks.changed().await.is_err() {
                    // Nobody serves services any more, and so nobody has endpoints.
                    return;
                }
            }
        });
        Self { deaf, task }
    }

    /// The services on whose port nobody listens, and why.
    pub fn deaf(&self) -> watch::Receiver<Vec<ServiceProblem>> {
        self.deaf.clone()
    }
}

impl Drop for ServiceListeners {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The listeners of a family.
#[derive(Debug)]
struct Family {
    address: IpAddr,
    health: Arc<SharedHealth>,
    /// By service.
    open: HashMap<ServiceName, Monitor>,
    /// Ports that could not be opened, and why.
    failed: BTreeMap<ServiceName, (u16, String)>,
}

/// What requests are answered from.
#[derive(Debug)]
struct SharedHealth {
    known: Mutex<ServiceHealth>,
    handle: Handle,
}

impl SharedHealth {
    fn known(&self) -> MutexGuard<'_, ServiceHealth> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer(&self, service: &ServiceName) -> Answer {
        let is_healthy = self.handle.livez().healthy;
        let Some(answer) = self.known().answer(service, is_healthy) else {
            // It is about to be closed: whoever asks must not take that for an endpoint.
            let status = StatusCode::SERVICE_UNAVAILABLE;
            return Answer::of_text(status, "text/plain", format!("{service} is gone\n"));
        };
        let weight = (WEIGHT_HEADER, answer.local_endpoints.into());
        json(answer.code(), &answer, Some(weight))
    }
}

const WEIGHT_HEADER: HeaderName = HeaderName::from_static(ServiceAnswer::WEIGHT_HEADER);

impl Family {
    fn new(address: IpAddr, handle: Handle) -> Self {
        Self {
            address,
            health: Arc::new(SharedHealth {
                known: Mutex::default(),
                handle,
            }),
            open: HashMap::new(),
            failed: BTreeMap::new(),
        }
    }

    /// Closes, opens and moves listeners.
    async fn sync(&mut self, checks: &BTreeMap<ServiceName, HealthCheck>) {
        let listeners = self.health.known().sync(checks);
        for (service, port) in listeners.close {
            if let Some(monitor) = self.open.remove(&service) {
                // Its port may be wanted by another; what takes longer is cut off.
                let _ = tokio::time::timeout(CLOSE_TIMEOUT, monitor.shutdown()).await;
                info!(%service, port, "load balancers are told no more of a service");
            }
        }
        self.failed
            .retain(|service, (port, _)| checks.get(service).is_some_and(|one| one.port == *port));
        for (service, port) in listeners.open {
            match self.listen(&service, port) {
                Ok(monitor) => {
                    self.failed.remove(&service);
                    if let Some(monitor) = monitor {
                        self.open.insert(service.clone(), monitor);
                        let address = self.address;
                        info!(%service, %address, port, "load balancers are told of a service");
                    }
                }
                Err(error) => {
                    self.health.known().failed(&service);
                    self.note_failure(service, port, error.to_string());
                }
            }
        }
    }

    /// None on a host without this family.
    fn listen(&self, service: &ServiceName, port: u16) -> io::Result<Option<Monitor>> {
        let listener = match listen::tcp(SocketAddr::new(self.address, port), BACKLOG) {
            Ok(listener) => listener,
            Err(error) if is_missing(&error) => return Ok(None),
            Err(error) => return Err(error),
        };
        // Load balancers ask for whatever path they are set to.
        let pages = ["/", "/{*path}"].map(|path| {
            let (health, service) = (self.health.clone(), service.clone());
            let answer = move |_: &HeaderMap| health.answer(&service);
            Page {
                path,
                answer: Box::new(answer),
            }
        });
        Monitor::start(vec![listener], pages).map(Some)
    }

    /// Tells it once for all the times that it is tried.
    fn note_failure(&mut self, service: ServiceName, port: u16, error: String) {
        let failure = (port, error);
        if self.failed.get(&service) != Some(&failure) {
            let (port, error) = &failure;
            let address = self.address;
            warn!(%service, %address, port, error, "cannot listen on the health-check node port of a service; it is tried again at the next sync");
        }
        self.failed.insert(service, failure);
    }

    fn problems(&self) -> impl Iterator<Item = ServiceProblem> {
        self.failed.iter().map(|(service, (port, error))| {
            let address = SocketAddr::new(self.address, *port);
            ServiceProblem {
                subject: format!("service {service}"),
                problem: format!(
                    "spec.healthCheckNodePort: cannot listen on {address}: {error}; load balancers hear nothing of it"
                ),
            }
        })
    }
}
