//! Services that follow a test's script, and a client that reads their pages.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use health_model::ipam::Family;
use health_service::choice::Topology;
use health_service::runner::Intervals;
use health_service::services::{Handle, Provider, Services, SyncSettings, View, Work};
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::{HeaderMap, Request};
use hyper_util::rt::TokioIo;
use jiff::Timestamp;
use tokio::net::TcpStream;
use tokio::sync::watch;

/// No test waits for a periodic sync.
const NEVER: Duration = Duration::from_secs(3600);

/// Services without any objects. Their syncs end as scripted, one after the other; the last result repeats.
pub(super) struct Bed {
    pub(super) handle: Handle,
    view: watch::Receiver<Arc<View>>,
    topology: watch::Sender<Topology>,
    _services: Services,
}

impl Bed {
    /// Starts the services. Must be called in a tokio runtime.
    pub(super) fn start(results: &[bool]) -> Self {
        let (topology, place) = watch::channel(Topology {
            node: "here".into(),
            zone: None,
        });
        let settings = SyncSettings {
            intervals: Intervals {
                min: Duration::ZERO,
                retry: NEVER,
                max: NEVER,
            },
            families: Family::ALL.to_vec(),
            // Any waiting at all is too long.
            health_timeout: Duration::ZERO,
            clock: Timestamp::now,
        };
        let provider = Scripted(results.to_vec());
        let services = Services::start(settings, place, Vec::new(), provider).unwrap();
        Self {
            view: services.handle().view(),
            handle: services.handle(),
            topology,
            _services: services,
        }
    }

    /// Triggers a sync.
    pub(super) fn change(&self) {
        self.topology.send_modify(|_| {});
    }

    /// Waits until the view meets a condition.
    pub(super) async fn until(&mut self, is_so: impl FnMut(&Arc<View>) -> bool) {
        self.view.wait_for(is_so).await.unwrap();
    }

    /// Waits until syncs have made the services healthy or unhealthy.
    pub(super) async fn until_healthy(&self, is_healthy: bool) {
        while self.handle.livez().healthy != is_healthy {
            tokio::task::yield_now().await;
        }
    }
}

struct Scripted(Vec<bool>);

impl Provider for Scripted {
    type Error = &'static str;

    async fn sync(&mut self, _: Work<'_>) -> Result<(), &'static str> {
        let is_success = match self.0.len() {
            1 => self.0[0],
            _ => self.0.remove(0),
        };
        is_success.then_some(()).ok_or("no room")
    }
}

/// Status, headers and body of a response.
pub(super) async fn get(address: SocketAddr, path: &str) -> (u16, HeaderMap, String) {
    let stream = TcpStream::connect(address).await.unwrap();
    let (mut client, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
    let connection = tokio::spawn(connection);
    let request = Request::get(path).header("host", "node");
    let request = request.body(Empty::<Bytes>::new()).unwrap();
    let response = client.send_request(request).await.unwrap();
    let (code, headers) = (response.status().as_u16(), response.headers().clone());
    let body = response.into_body().collect().await.unwrap().to_bytes();
    connection.abort();
    (code, headers, String::from_utf8(body.into()).unwrap())
}
