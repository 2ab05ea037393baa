use std::os::fd::AsRawFd as _;

use health_common::arrivals::{Arrivals, Prober, WayCounts};
use nix::sys::socket::{Shutdown, shutdown};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use super::slots::SLOTS_OF_ADDRESS;
use super::*;
use crate::failure::Failure;
use crate::http::{Asker, Hello, get_hello};
use crate::proof::KeyAge;
use crate::testing::PATIENCE;

const PROBER: Prober = Prober {
    session: 0x1a2b_3c4d,
    icmp_id_be: 0x5e6f_u16.to_be(),
    pad: 0,
};

/// Knows a single agent.
struct OneAgent(Arrivals);

impl ArrivalStore for OneAgent {
    fn arrivals(&self, prober: Prober) -> io::Result<Option<Arrivals>> {
        Ok((prober == PROBER).then_some(self.0))
    }
}

fn arrivals() -> Arc<dyn ArrivalStore> {
    let way = |arrived, replied| WayCounts { arrived, replied };
    Arc::new(OneAgent(Arrivals {
        since_ns: 7,
        ways: [way(60, 58), way(46, 46), way(0, 0), way(u32::MAX, 1)],
    }))
}

fn identity(keys: HelloKeys) -> Identity {
    Identity {
        node: "default/b".to_owned(),
        keys: Arc::new(keys),
        hosts_only: false,
    }
}

fn start(listener: TcpListener, keys: HelloKeys, reported: &[&str]) -> Responder {
    let reported = reported.iter().map(|ip| ip.parse().unwrap()).collect();
    let reported = watch::channel(reported).1;
    Responder::start(identity(keys), vec![listener], reported, arrivals()).unwrap()
}

async fn ask(
    address: SocketAddr,
    prober: Prober,
    keys: HelloKeys,
    asked: &str,
) -> Result<Hello, Failure> {
    let asker = Asker {
        name: "default/a".to_owned(),
        prober,
        keys: Arc::new(keys),
    };
    get_hello(&asker, asked, address, Instant::now() + PATIENCE).await
}

/// Asks `default/b` with the public key.
async fn ask_b(address: SocketAddr) -> Result<Hello, Failure> {
    ask(address, PROBER, HelloKeys::default(), "default/b").await
}

/// A request from `default/a` to `default/b`, with the clock at `time`.
fn request(keys: &HelloKeys, time: u64) -> String {
    let mut value = Vec::new();
    let request = proof::Request {
        nonce: 7,
        time,
        asker: "default/a",
        asked: "default/b",
        address: "127.0.0.1:4240",
    };
    keys.write_request(&mut value, &request, b"");
    let value = String::from_utf8(value).unwrap();
    format!("GET /hello HTTP/1.1\r\nHost: a\r\n{AUTH_HEADER}: {value}\r\n\r\n")
}

fn loopback() -> (TcpListener, SocketAddr) {
    let listener = bind(&[IpAddr::from([127, 0, 0, 1])], 0).unwrap().remove(0);
    let address = listener.local_addr().unwrap();
    (listener, address)
}

async fn raw(address: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).await.unwrap();
    response
}

#[tokio::test]
async fn a_node_without_a_health_endpoint_says_so() {
    let (listener, address) = loopback();
    let identity = Identity {
        hosts_only: true,
        ..identity(HelloKeys::default())
    };
    let unreported = watch::channel(Vec::new()).1;
    let _responder = Responder::start(identity, vec![listener], unreported, arrivals()).unwrap();
    let reported = ask_b(address).await.unwrap().headers.health_endpoint;
    assert_eq!(reported, Some(Vec::new()));
}

#[tokio::test]
async fn hello_is_answered_and_all_else_is_not_found() {
    let (listener, address) = loopback();
    let (sender, receiver) = watch::channel(Vec::new());
    let identity = identity(HelloKeys::default());
    let responder = Responder::start(identity, vec![listener], receiver, arrivals()).unwrap();
    assert_eq!(ask_b(address).await.unwrap().headers.health_endpoint, None);
    let reported: Vec<IpAddr> = vec!["10.1.0.7".parse().unwrap(), "fd00::7".parse().unwrap()];
    sender.send_replace(reported.clone());
    assert_eq!(
        ask_b(address).await.unwrap().headers.health_endpoint,
        Some(reported)
    );
    for request in [
        "GET / HTTP/1.1",
        "POST /hello HTTP/1.1",
        "GET /hello/x HTTP/1.1",
    ] {
        let response = raw(address, &format!("{request}\r\nHost: a\r\n\r\n")).await;
        assert!(response.starts_with("HTTP/1.1 404 "), "{response}");
    }
    let response = raw(address, "nonsense\r\n\r\n").await;
    assert!(response.starts_with("HTTP/1.1 400 "), "{response}");
    responder.shutdown().await;
    assert!(TcpStream::connect(address).await.is_err());
}

#[tokio::test]
async fn a_requester_learns_which_of_its_probes_arrived() {
    let (listener, address) = loopback();
    let responder = start(listener, HelloKeys::default(), &[]);
    let hello = ask_b(address).await.unwrap();
    let reported = hello.headers.arrivals.unwrap();
    assert_eq!((reported.since_ns, reported.ways[1].arrived), (7, 46));
    assert_eq!(reported.ways[3].arrived, u32::MAX);
    // An agent from which nothing arrived.
    let other = Prober {
        session: 1,
        ..PROBER
    };
    let hello = ask(address, other, HelloKeys::default(), "default/b")
        .await
        .unwrap();
    assert_eq!(hello.headers.arrivals, None);
    assert_eq!(responder.requests().counts().malformed, 0);

    for rubbish in ["", "x", "1a2b3c4d-5e6f, 1a2b3c4d-5e6f"] {
        let head = format!("Host: a\r\nHealth-Prober: {rubbish}\r\n\r\n");
        let response = raw(address, &format!("GET /hello HTTP/1.1\r\n{head}")).await;
        assert!(response.starts_with("HTTP/1.1 200 "), "{response}");
        assert!(!response.contains("arrivals"), "{response}");
    }
    assert_eq!(responder.requests().counts().malformed, 3);
}

#[tokio::test]
async fn with_a_key_nobody_else_learns_anything() {
    let (listener, address) = loopback();
    let keys = || HelloKeys::new(&[7; 16], None);
    let responder = start(listener, keys(), &["10.1.0.7"]);
    let hello = ask(address, PROBER, keys(), "default/b").await.unwrap();
    assert!(hello.headers.health_endpoint.is_some() && hello.headers.arrivals.is_some());

    assert_eq!(ask_b(address).await, Err(Failure::KeyRefused));
    let prober = "health-prober: 1a2b3c4d-5e6f";
    for request in [
        "GET /hello HTTP/1.1\r\nHost: a\r\n\r\n".to_owned(),
        format!("GET /hello HTTP/1.1\r\nHost: a\r\n{prober}\r\n\r\n"),
        "GET /hello HTTP/1.1\r\nHost: a\r\nhealth-auth: x\r\n\r\n".to_owned(),
        request(&HelloKeys::default(), proof::now()),
        // The code covers the header that says whose probes to count.
        request(&keys(), proof::now()).replace("Host: a", &format!("Host: a\r\n{prober}")),
    ] {
        let response = raw(address, &request).await;
        assert!(response.starts_with("HTTP/1.1 401 "), "{response}");
        assert!(!response.contains("health-"), "{response}");
    }
    assert_eq!(responder.requests().counts().no_proof, 6);
}

#[tokio::test]
async fn a_time_stamp_out_of_the_window_is_refused_with_the_time() {
    let (listener, address) = loopback();
    let keys = HelloKeys::new(&[7; 16], None);
    let responder = start(listener, keys.clone(), &["10.1.0.7"]);
    let now = proof::now();
    for (time, status) in [
        (now, 200),
        (now - 86_400, 401),
        (now + 86_400, 401),
        (0, 401),
    ] {
        let response = raw(address, &request(&keys, time)).await;
        let header = |name| {
            let mut lines = response.lines().filter_map(|line| line.split_once(": "));
            lines.find(|(n, _)| *n == name).map(|(_, value)| value)
        };
        let is_refused = status == 401;
        let reason = header(REASON_HEADER);
        assert_eq!(reason, is_refused.then_some(REASON_CLOCK), "{response}");
        let endpoint = header(HEALTH_ENDPOINT_HEADER);
        assert_eq!(endpoint.is_none(), is_refused, "{response}");
        let covered = [reason, endpoint, None].map(|v| v.unwrap_or_default().as_bytes());
        let auth = header(AUTH_HEADER).unwrap();
        let (answer, _) = keys.verify_answer(7, auth.as_bytes(), covered).unwrap();
        assert_eq!((answer.status, answer.node), (status, "default/b"));
        assert!(answer.time.abs_diff(now) < 600);
    }
    assert_eq!(responder.requests().counts().clock, 3);
}

#[tokio::test]
async fn a_request_to_another_node_is_misdirected() {
    let (listener, address) = loopback();
    let responder = start(listener, HelloKeys::default(), &["10.1.0.7"]);
    let answer = ask(address, PROBER, HelloKeys::default(), "default/c").await;
    assert_eq!(answer, Err(Failure::WrongNode("default/b".into())));
    assert_eq!(responder.requests().counts().wrong_node, 1);
}

#[tokio::test]
async fn keys_are_rotated_in_any_order() {
    let [old, new] = [[1; 16], [2; 16]];
    let first = HelloKeys::new(&old, None);
    let both = HelloKeys::new(&old, Some((KeyAge::Next, &new)));
    let swapped = HelloKeys::new(&new, Some((KeyAge::Previous, &old)));
    let last = HelloKeys::new(&new, None);
    // Before and after each of the three steps.
    for [a, b] in [[&first, &both], [&both, &swapped], [&swapped, &last]] {
        for [asker, asked] in [[a, a], [a, b], [b, a], [b, b]] {
            let (listener, address) = loopback();
            let _responder = start(listener, asked.clone(), &[]);
            let hello = ask(address, PROBER, asker.clone(), "default/b").await;
            assert!(hello.is_ok(), "{hello:?}");
        }
    }
    let (listener, address) = loopback();
    let _responder = start(listener, first, &[]);
    let answer = ask(address, PROBER, last, "default/b").await;
    assert_eq!(answer, Err(Failure::KeyRefused));
}

#[tokio::test]
async fn a_source_with_all_its_places_gets_no_more() {
    let (listener, address) = loopback();
    let responder = start(listener, HelloKeys::default(), &[]);
    let mut silent = Vec::new();
    for _ in 0..=SLOTS_OF_ADDRESS {
        silent.push(TcpStream::connect(address).await.unwrap());
    }
    let mut last = silent.pop().unwrap();
    let mut rest = Vec::new();
    // Closed immediately, not by a time-out; a reset proves that too.
    let _ = timeout(PATIENCE, last.read_to_end(&mut rest))
        .await
        .unwrap();
    assert_eq!(responder.requests().counts().too_many, 1);
}

#[tokio::test]
async fn a_slow_client_loses_its_connection() {
    let (listener, address) = loopback();
    let _responder = start(listener, HelloKeys::default(), &[]);
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(b"GET /hello HT").await.unwrap();
    let mut rest = Vec::new();
    let closed = timeout(PATIENCE, stream.read_to_end(&mut rest)).await;
    assert!(closed.is_ok(), "still open");
}

#[tokio::test]
async fn listeners_can_be_replaced() {
    let (first, first_address) = loopback();
    let (second, second_address) = loopback();
    let responder = start(first, HelloKeys::default(), &[]);
    assert!(ask_b(first_address).await.is_ok());
    responder.replace(vec![second]).unwrap();
    assert!(ask_b(second_address).await.is_ok());
    // The old listener closes once its task is notified.
    timeout(PATIENCE, async {
        while ask_b(first_address).await.is_ok() {
            tokio::task::yield_now().await;
        }
    })
    .await
    .unwrap();
}

#[test]
fn a_port_in_use_is_named() {
    let (_listener, address) = loopback();
    let error = bind(&[address.ip()], address.port())
        .unwrap_err()
        .to_string();
    assert!(error.contains(&address.to_string()), "{error}");
    assert!(error.contains("in use"), "{error}");
    let error = bind(&[IpAddr::from([192, 0, 2, 1])], 0).unwrap_err();
    assert!(matches!(error, BindError::NotLocal(_)), "{error}");
}

#[tokio::test]
async fn a_socket_that_does_not_listen_any_more_is_reported() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let same = listener.try_clone().unwrap();
    let responder = start(listener, HelloKeys::default(), &[]);
    let state = responder.state();
    assert_eq!(state.problem(), None);
    ask_b(address).await.unwrap();
    assert_eq!(state.problem(), None);

    // Like `ss --kill`.
    shutdown(same.as_raw_fd(), Shutdown::Both).unwrap();
    let problem = state.problem().unwrap();
    assert!(problem.contains(&address.to_string()), "{problem}");
    assert!(ask_b(address).await.is_err());

    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    responder.replace(vec![other]).unwrap();
    assert_eq!(state.problem(), None);
}
