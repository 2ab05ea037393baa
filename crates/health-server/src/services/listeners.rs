//! Listeners on the health-check node ports of services (`pkg/proxy/healthcheck/service_health.go` of Kubernetes). Each
//! tells load balancers whether this node has endpoints of its service.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use health_model::api::ServiceProblem;
use health_model::task::AbortOnDrop;
use health_net::listen;
use health_service::health_check::{ServiceAnswer, ServiceHealth};
use health_service::services::Handle;
use health_service::spec::ServiceName;
use health_service::state;
use hyper::header::HeaderName;
use hyper::{HeaderMap, StatusCode};
use tokio::sync::watch;
use tracing::{info, warn};

use super::pages::json;
use crate::page_server::{Answer, BACKLOG, Page, PageServer, is_missing};

/// What to report to load balancers, by family as in [`Family::ALL`](health_model::ipam::Family::ALL). Sent with each
/// sync, even if unchanged.
pub type HealthChecks = [state::HealthChecks; 2];

/// All addresses of the node, by family as in [`HealthChecks`].
pub const EVERYWHERE: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::UNSPECIFIED),
    IpAddr::V6(Ipv6Addr::UNSPECIFIED),
];

/// Maximum time that closing a port waits for its current requests.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Listens on the health-check node ports. Closes them when dropped.
#[derive(Debug)]
pub struct ServiceListeners {
    problems: watch::Receiver<Vec<ServiceProblem>>,
    _task: AbortOnDrop,
}

impl ServiceListeners {
    /// Starts to listen on these addresses. Must be called in a tokio runtime.
    pub fn start(
        addresses: [IpAddr; 2],
        mut checks: watch::Receiver<Arc<HealthChecks>>,
        handle: Handle,
    ) -> Self {
        let (sender, problems) = watch::channel(Vec::new());
        let task = AbortOnDrop::spawn(async move {
            let mut families = addresses.map(|address| Family::new(address, handle.clone()));
            loop {
                let all = checks.borrow_and_update().clone();
                for (family, checks) in families.iter_mut().zip(&*all) {
                    family.sync(checks).await;
                }
                let found = families.iter().flat_map(Family::problems).collect();
                sender.send_replace(found);
                if checks.changed().await.is_err() {
                    // The service proxy has stopped: no service has endpoints here.
                    return;
                }
            }
        });
        Self {
            problems,
            _task: task,
        }
    }

    /// The services whose port could not be opened, and why.
    pub fn problems(&self) -> watch::Receiver<Vec<ServiceProblem>> {
        self.problems.clone()
    }
}

/// The listeners of a family.
#[derive(Debug)]
struct Family {
    address: IpAddr,
    health: Arc<SharedHealth>,
    /// By service.
    open: HashMap<ServiceName, PageServer>,
    /// Ports that could not be opened, and why.
    failed: BTreeMap<ServiceName, (u16, String)>,
}

/// The state that responses are made from.
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
            // The listener is about to close. The response must not suggest that there are endpoints.
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
    async fn sync(&mut self, checks: &state::HealthChecks) {
        let listeners = self.health.known().sync(checks);
        let closing = listeners.close.iter().filter_map(|(service, port)| {
            let server = self.open.remove(service)?;
            info!(%service, port, "closed the health-check node port of a service");
            Some(server.shutdown())
        });
        // Other services may need these ports, so slow requests are cut off.
        let _ = tokio::time::timeout(CLOSE_TIMEOUT, join_all(closing)).await;
        self.failed
            .retain(|service, (port, _)| checks.get(service).is_some_and(|one| one.port == *port));
        for (service, port) in listeners.open {
            match self.listen(&service, port) {
                Ok(server) => {
                    self.failed.remove(&service);
                    if let Some(server) = server {
                        self.open.insert(service.clone(), server);
                        let address = self.address;
                        info!(%service, %address, port, "opened the health-check node port of a service");
                    }
                }
                Err(error) => {
                    self.health.known().failed(&service);
                    self.note_failure(service, port, error.to_string());
                }
            }
        }
    }

    /// Opens a listener; `None` if the host lacks this family.
    fn listen(&self, service: &ServiceName, port: u16) -> io::Result<Option<PageServer>> {
        let listener = match listen::tcp(SocketAddr::new(self.address, port), BACKLOG) {
            Ok(listener) => listener,
            Err(error) if is_missing(&error) => return Ok(None),
            Err(error) => return Err(error),
        };
        // Load balancers may be configured to request any path.
        let pages = ["/", "/{*path}"].map(|path| {
            let (health, service) = (self.health.clone(), service.clone());
            let answer = move |_: &HeaderMap| health.answer(&service);
            Page {
                path,
                answer: Box::new(answer),
            }
        });
        PageServer::start(vec![listener], pages).map(Some)
    }

    /// Records a failure, and logs it if it is new.
    fn note_failure(&mut self, service: ServiceName, port: u16, error: String) {
        let failure = (port, error);
        if self.failed.get(&service) != Some(&failure) {
            let (port, error) = &failure;
            let address = self.address;
            warn!(%service, %address, port, error, "cannot listen on the health-check node port of a service; it will be retried at the next sync");
        }
        self.failed.insert(service, failure);
    }

    fn problems(&self) -> impl Iterator<Item = ServiceProblem> {
        self.failed.iter().map(|(service, (port, error))| {
            let address = SocketAddr::new(self.address, *port);
            ServiceProblem {
                subject: format!("service {service}"),
                problem: format!(
                    "spec.healthCheckNodePort: cannot listen on {address}: {error}; load balancers get no answer on this port"
                ),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use health_service::state::HealthCheck;

    use super::super::testing::{Bed, get};
    use super::*;

    /// Listeners on loopback addresses, and their inputs.
    struct Stand {
        bed: Bed,
        checks: watch::Sender<Arc<HealthChecks>>,
        problems: watch::Receiver<Vec<ServiceProblem>>,
        _listeners: ServiceListeners,
    }

    /// An address that has no other listeners, and one on which a free port is found.
    fn addresses() -> [IpAddr; 2] {
        let [.., first, second] = std::process::id().to_be_bytes();
        [
            Ipv4Addr::new(127, 83, first, second).into(),
            Ipv6Addr::LOCALHOST.into(),
        ]
    }

    fn free_port() -> u16 {
        let listener = TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).unwrap();
        listener.local_addr().unwrap().port()
    }

    impl Stand {
        async fn start(results: &[bool]) -> Self {
            let mut bed = Bed::start(results);
            bed.until(|view| view.is_synced).await;
            bed.until_healthy(true).await;
            let (checks, followed) = watch::channel(Arc::default());
            let listeners = ServiceListeners::start(addresses(), followed, bed.handle.clone());
            let mut problems = listeners.problems();
            problems.changed().await.unwrap();
            Self {
                bed,
                checks,
                problems,
                _listeners: listeners,
            }
        }

        /// Syncs services with these names, ports and endpoint counts, in both families.
        async fn sync(&mut self, services: &[(&str, u16, usize)]) {
            let checks = services.iter().map(|&(name, port, local_endpoints)| {
                let check = HealthCheck {
                    port,
                    local_endpoints,
                };
                (ServiceName::new("shop", name), check)
            });
            let checks: state::HealthChecks = checks.collect();
            self.checks.send_replace(Arc::new([checks.clone(), checks]));
            self.problems.changed().await.unwrap();
        }
    }

    async fn is_closed(address: IpAddr, port: u16) -> bool {
        tokio::net::TcpStream::connect((address, port))
            .await
            .is_err()
    }

    #[tokio::test]
    async fn load_balancers_are_notified_of_endpoints_at_any_path() {
        let mut stand = Stand::start(&[true, false]).await;
        let port = free_port();
        stand.sync(&[("web", port, 2)]).await;
        for address in addresses() {
            for path in ["/", "/healthz", "/some/where"] {
                let (code, headers, body) = get((address, port).into(), path).await;
                assert_eq!(code, 200, "{address} {path}: {body}");
                assert_eq!(headers["x-load-balancing-endpoint-weight"], "2");
                assert_eq!(headers["content-type"], "application/json");
                assert_eq!(headers["x-content-type-options"], "nosniff");
                assert_eq!(
                    body,
                    r#"{"service":{"namespace":"shop","name":"web"},"localEndpoints":2,"serviceProxyHealthy":true}"#
                );
            }
        }
        // Keeps the listeners open, since only the count changes.
        stand.sync(&[("web", port, 0)]).await;
        let at = (addresses()[0], port).into();
        let (code, headers, body) = get(at, "/").await;
        assert!(
            code == 503 && body.contains("\"localEndpoints\":0"),
            "{body}"
        );
        assert_eq!(headers["x-load-balancing-endpoint-weight"], "0");

        stand.sync(&[("web", port, 2)]).await;
        stand.bed.change();
        stand.bed.until_healthy(false).await;
        let (code, _, body) = get(at, "/").await;
        assert!(
            code == 503 && body.contains("\"serviceProxyHealthy\":false"),
            "{body}"
        );
    }

    #[tokio::test]
    async fn listeners_open_move_and_close_with_their_services() {
        let mut stand = Stand::start(&[true]).await;
        let [first, second] = [free_port(), free_port()];
        stand.sync(&[("web", first, 1)]).await;
        stand.sync(&[("web", second, 1)]).await;
        for address in addresses() {
            assert!(is_closed(address, first).await);
            assert_eq!(get((address, second).into(), "/").await.0, 200);
        }
        // From one sync to the next, the port moves to another service.
        stand.sync(&[("api", second, 1), ("web", first, 1)]).await;
        for (port, name) in [(first, "web"), (second, "api")] {
            let (_, _, body) = get((addresses()[0], port).into(), "/").await;
            assert!(body.contains(&format!("\"name\":\"{name}\"")), "{body}");
        }
        assert_eq!(*stand.problems.borrow(), []);
        stand.sync(&[]).await;
        for address in addresses() {
            assert!(is_closed(address, first).await && is_closed(address, second).await);
        }
    }

    #[tokio::test]
    async fn a_port_in_use_is_reported_and_tried_again_at_the_next_sync() {
        let mut stand = Stand::start(&[true]).await;
        let [taken, free] = [free_port(), free_port()];
        let other = TcpListener::bind((addresses()[0], taken)).unwrap();
        let services = [("web", taken, 1), ("api", free, 1)];
        stand.sync(&services).await;
        let problems = stand.problems.borrow().clone();
        let [problem] = &problems[..] else {
            panic!("{problems:?}")
        };
        assert_eq!(problem.subject, "service shop/web");
        let place = format!("cannot listen on {}:{taken}: ", addresses()[0]);
        assert!(problem.problem.contains(&place), "{problem:?}");
        // The other family and the other service work.
        assert_eq!(get((addresses()[1], taken).into(), "/").await.0, 200);
        assert_eq!(get((addresses()[0], free).into(), "/").await.0, 200);

        drop(other);
        stand.sync(&services).await;
        assert_eq!(*stand.problems.borrow(), []);
        assert_eq!(get((addresses()[0], taken).into(), "/").await.0, 200);
    }
}
