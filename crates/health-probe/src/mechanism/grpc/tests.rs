use std::net::SocketAddr;

use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tonic::transport::Server as TonicServer;
use tonic_health::ServingStatus;

use super::super::testing::*;
use super::*;
use crate::RawResult;
use crate::mechanism::Host;

/// A health server that reports itself and the service `well` as serving, and `ill` as not serving.
struct HealthServer {
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl HealthServer {
    async fn new() -> Self {
        let (reporter, service) = tonic_health::server::health_reporter();
        for (name, status) in [
            ("", ServingStatus::Serving),
            ("well", ServingStatus::Serving),
            ("ill", ServingStatus::NotServing),
            ("odd", ServingStatus::Unknown),
        ] {
            reporter.set_service_status(name, status).await;
        }
        Self::serving(TonicServer::builder().add_service(service)).await
    }

    async fn serving(router: tonic::transport::server::Router) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let incoming = tonic::transport::server::TcpIncoming::from(listener);
        let task = tokio::spawn(async move {
            router.serve_with_incoming(incoming).await.unwrap();
        });
        Self { address, task }
    }
}

impl Drop for HealthServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn grpc(address: SocketAddr, service: &str) -> GrpcProbe {
    GrpcProbe {
        target: target(address),
        service: service.to_owned(),
        tls: None,
    }
}

fn failed(outcome: &Outcome) -> &str {
    assert_eq!(
        (outcome.result, outcome.errored),
        (RawResult::Failure, false),
        "{outcome:?}"
    );
    &outcome.message
}

#[tokio::test]
async fn g1_nobody_listening_is_a_dial_timeout() {
    let address = unused_port();
    let outcome = probe(&grpc(address, ""), short()).await;
    let start = format!("timeout: failed to connect service \"{address}\" within 300ms: ");
    assert!(failed(&outcome).starts_with(&start), "{outcome:?}");
}

#[tokio::test]
async fn g1_a_server_that_comes_in_time_is_found() {
    let address = unused_port();
    let probed = grpc(address, "");
    let probing = probe(&probed, patience());
    let serving = async {
        tokio::time::sleep(SHORT).await;
        let listener = TcpListener::bind(address).await.unwrap();
        let (_reporter, service) = tonic_health::server::health_reporter();
        let incoming = tonic::transport::server::TcpIncoming::from(listener);
        let router = TonicServer::builder().add_service(service);
        router.serve_with_incoming(incoming).await.unwrap();
    };
    tokio::select! {
        outcome = probing => assert_eq!(outcome, success("SERVING")),
        () = serving => panic!("the server ended"),
    }
}

#[tokio::test]
async fn g2_a_server_of_http_1_is_a_failure() {
    let server = Server::new(|mut stream| async move {
        let _ = stream
            .write_all(b"HTTP/1.1 400 Bad Request\r\n\r\nsecret")
            .await;
        say_nothing(stream).await;
    })
    .await;
    let outcome = probe(&grpc(server.address, ""), patience()).await;
    let message = failed(&outcome);
    assert!(
        message.starts_with("failed to connect service"),
        "{outcome:?}"
    );
    assert!(!message.contains("secret"));
}

#[tokio::test]
async fn g3_the_status_decides() {
    let server = HealthServer::new().await;
    for service in ["", "well"] {
        let outcome = probe(&grpc(server.address, service), patience()).await;
        assert_eq!(outcome, success("SERVING"), "{service:?}");
    }
    for (service, status) in [("ill", "NOT_SERVING"), ("odd", "UNKNOWN")] {
        let outcome = probe(&grpc(server.address, service), patience()).await;
        let expected = format!("service unhealthy (responded with \"{status}\")");
        assert_eq!(failed(&outcome), expected);
    }
    let outcome = probe(&grpc(server.address, "none"), patience()).await;
    assert_eq!(failed(&outcome), "health rpc ended with NotFound");
}

#[tokio::test]
async fn g4_a_silent_service_is_an_rpc_timeout() {
    // The server only sends settings.
    let server = Server::new(|mut stream| async move {
        let _ = stream.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await;
        say_nothing(stream).await;
    })
    .await;
    let probed = grpc(server.address, "");
    let stage = "timeout: health rpc did not complete within ";
    late_at(stage, |deadline| probe(&probed, deadline)).await;
    // The server does not even send settings.
    let server = Server::new(say_nothing).await;
    let outcome = probe(&grpc(server.address, ""), short()).await;
    assert!(
        failed(&outcome).starts_with("timeout: failed to connect service"),
        "{outcome:?}"
    );
}

#[tokio::test]
async fn a_server_without_the_service_is_reported() {
    let router = TonicServer::builder().add_routes(tonic::service::Routes::default());
    let server = HealthServer::serving(router).await;
    let outcome = probe(&grpc(server.address, ""), patience()).await;
    assert!(failed(&outcome).contains("Unimplemented"), "{outcome:?}");
}

#[tokio::test]
async fn resets_and_garbage_are_failures() {
    let at_once = Server::new(|stream| async move { reset(stream) }).await;
    let garbage = Server::new(|mut stream| async move {
        write_forever(&mut stream, &[0xff; 100], Duration::ZERO).await;
    })
    .await;
    // Endless headers: a HEADERS frame, and then CONTINUATION frames.
    let headers = Server::new(|mut stream| async move {
        let _ = stream.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await;
        let _ = stream.write_all(&[0, 0, 1, 1, 0, 0, 0, 0, 1, 0x88]).await;
        let mut more = vec![0, 0x40, 0, 9, 0, 0, 0, 0, 1];
        more.extend(std::iter::repeat_n(0x88, 0x4000));
        write_forever(&mut stream, &more, Duration::ZERO).await;
    })
    .await;
    for server in [at_once, garbage, headers] {
        failed(&probe(&grpc(server.address, ""), patience()).await);
        let mut over_tls = grpc(server.address, "");
        over_tls.tls = Some(TlsClient::default());
        failed(&probe(&over_tls, patience()).await);
    }
}

#[tokio::test]
async fn pings_without_an_end_are_a_failure() {
    let server = Server::new(|mut stream| async move {
        let _ = stream.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await;
        let ping = [0, 0, 8, 6, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];
        let (mut from, mut to) = stream.split();
        let pings = ping.repeat(100);
        let write = async { while to.write_all(&pings).await.is_ok() {} };
        // The client waits until the server reads its replies.
        let mut sink = tokio::io::sink();
        let (_, _) = tokio::join!(write, tokio::io::copy(&mut from, &mut sink));
    })
    .await;
    let outcome = probe(&grpc(server.address, ""), patience()).await;
    assert!(
        failed(&outcome).contains("more than 32 KiB received"),
        "{outcome:?}"
    );
}

#[test]
fn replies_are_read() {
    let frame = |bytes: &[u8]| {
        let mut reply = vec![0, 0, 0, 0, bytes.len() as u8];
        reply.extend_from_slice(bytes);
        reply
    };
    assert!(matches!(health(&frame(&[8, 1])), Ok(Health::Serving)));
    assert!(matches!(health(&frame(&[8, 2])), Ok(Health::NotServing)));
    assert!(matches!(health(&frame(&[8, 77])), Ok(Health::Unknown)));
    assert!(matches!(health(&frame(&[])), Ok(Health::Unknown)));
    for bad in [
        &[][..],
        &[0, 0, 0],
        &[1, 0, 0, 0, 0],
        &[0, 0, 0, 0, 9, 8],
        &[0, 0, 0, 0, 1, 0xff],
    ] {
        assert!(
            matches!(health(bad), Err(NoStatus::Malformed(_))),
            "{bad:?}"
        );
    }
}

#[tokio::test]
async fn nothing_stays_open_or_in_time_wait() {
    const PROBES: usize = 300;
    let server = HealthServer::new().await;
    let mut probed = grpc(server.address, "");
    for _ in 0..PROBES {
        assert_eq!(probe(&probed, patience()).await, success("SERVING"));
    }
    assert!(open_ends(server.address.port()) <= 32);
    let left = time_waits(server.address.port());
    assert!(
        left <= PROBES / 100,
        "{left} of {PROBES} connections are in TIME_WAIT"
    );
    probed.target.host = Host::Name("localhost".to_owned());
    assert_eq!(probe(&probed, patience()).await, success("SERVING"));
}
