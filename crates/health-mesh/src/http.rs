//! HTTP probes: `GET /hello` over a new TCP connection each time.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use health_common::arrivals::{Arrivals, Prober};
use health_datapath::rtt_store::Connection;
use health_model::address::parse_ip;
use health_net::clock;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};

use super::connect::connect;
use super::exchange::{ARRIVALS_HEADER, PROBER_HEADER, parse_arrivals, prober_value};
use super::failure::Failure;
use super::hello::{HEALTH_ENDPOINT_HEADER, NO_ENDPOINT};
use super::proof::{
    self, AUTH_HEADER, Answer, HelloKeys, KeyAge, ProofError, REASON_CLOCK, REASON_HEADER, Request,
};

/// Maximum length of a response head in bytes.
const HEAD_LEN: usize = 2048;
/// `/hello` responses take about 350 bytes, requests about 330.
const USUAL_HEAD_LEN: usize = 512;
/// Maximum number of headers in a response.
const HEADERS: usize = 32;

/// The node that requests `/hello`.
#[derive(Debug)]
pub(super) struct Asker {
    /// Full name of this node.
    pub(super) name: String,
    /// Marks its echo probes.
    pub(super) prober: Prober,
    /// The keys of the mesh.
    pub(super) keys: Arc<HelloKeys>,
}

/// A good answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    /// Time until the connection was established.
    pub(super) connect: Duration,
    /// Time until the response head was read.
    pub(super) total: Duration,
    /// The connection it used; `None` if its address is unknown.
    pub(super) connection: Option<Connection>,
    /// What the peer reports about itself.
    pub(super) headers: HelloHeaders,
    /// Which of the peer's keys this node signs with.
    pub(super) key: KeyAge,
}

/// What a peer reports about itself in the headers of its `/hello` answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct HelloHeaders {
    /// Addresses of its health endpoint, empty if it has no endpoint; `None` if it reports nothing.
    pub(super) health_endpoint: Option<Vec<IpAddr>>,
    /// How many of this agent's echo probes arrived there; `None` if it reports nothing.
    pub(super) arrivals: Option<Arrivals>,
    /// One of its reports was malformed.
    pub(super) malformed: bool,
}

/// Requests `/hello` from the node with the full name `asked`; gives up at `deadline`.
pub(super) async fn get_hello(
    asker: &Asker,
    asked: &str,
    peer: SocketAddr,
    deadline: Instant,
) -> Result<Hello, Failure> {
    let begun_ns = clock::now_ns();
    let start = Instant::now();
    let mut stream = timeout_at(deadline, connect(peer))
        .await
        .map_err(|_| Failure::TimedOut)??;
    let connect = start.elapsed();
    let connection = stream.local_addr().ok().map(|local| Connection {
        local,
        peer_port: peer.port(),
        begun_ns,
    });
    // The connection ends with a reset, so neither side keeps a TIME_WAIT socket.
    stream.set_zero_linger()?;
    let (headers, key) = timeout_at(deadline, exchange(&mut stream, asker, asked, peer))
        .await
        .map_err(|_| Failure::ResponseTimedOut)??;
    Ok(Hello {
        connect,
        total: start.elapsed(),
        connection,
        headers,
        key,
    })
}

async fn exchange(
    stream: &mut TcpStream,
    asker: &Asker,
    asked: &str,
    peer: SocketAddr,
) -> Result<(HelloHeaders, KeyAge), Failure> {
    let nonce = rand::random();
    // Allocated on the heap, and only once connected: very many probes wait for a connection at the same time.
    let mut head = request(asker, asked, peer, nonce);
    stream.write_all(&head).await?;
    head.clear();
    loop {
        let rest = HEAD_LEN - head.len();
        let read = (&mut *stream).take(rest as u64).read_buf(&mut head).await?;
        if read == 0 {
            return Err(if rest == 0 {
                Failure::Malformed
            } else {
                Failure::Closed
            });
        }
        if let Some(answer) = parse_head(&head, &asker.keys, nonce, asked)? {
            return Ok(answer);
        }
    }
}

fn request(asker: &Asker, asked: &str, peer: SocketAddr, nonce: u128) -> Vec<u8> {
    let address = peer.to_string();
    let prober = prober_value(asker.prober);
    let mut head = Vec::with_capacity(USUAL_HEAD_LEN);
    for part in [
        "GET /hello HTTP/1.1\r\nHost: ",
        &address,
        "\r\nUser-Agent: health-agent\r\nConnection: close\r\n",
        PROBER_HEADER,
        ": ",
        &prober,
        "\r\n",
        AUTH_HEADER,
        ": ",
    ] {
        head.extend_from_slice(part.as_bytes());
    }
    let request = Request {
        nonce,
        time: proof::now(),
        asker: &asker.name,
        asked,
        address: &address,
    };
    let keys = &asker.keys;
    keys.write_request(&mut head, &request, prober.as_bytes());
    head.extend_from_slice(b"\r\n\r\n");
    head
}

/// Parses a response head as node `asked`'s answer to the request with this nonce; `None` while it is incomplete.
/// Nothing is accepted unless the node proves it.
fn parse_head(
    head: &[u8],
    keys: &HelloKeys,
    nonce: u128,
    asked: &str,
) -> Result<Option<(HelloHeaders, KeyAge)>, Failure> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS];
    let mut response = httparse::Response::new(&mut headers);
    let status = response.parse(head).map_err(|_| Failure::Malformed)?;
    if status.is_partial() {
        return Ok(None);
    }
    let status = response.code.ok_or(Failure::Malformed)?;
    let value = |name| {
        let mut headers = response.headers.iter();
        let header = headers.find(|header| header.name.eq_ignore_ascii_case(name))?;
        Some(header.value)
    };
    let Some(auth) = value(AUTH_HEADER) else {
        return Err(match status {
            200 => Failure::NoProof,
            401 => Failure::KeyRefused,
            status => Failure::UnexpectedStatus(status),
        });
    };
    let [reason, endpoint, arrivals] =
        [REASON_HEADER, HEALTH_ENDPOINT_HEADER, ARRIVALS_HEADER].map(value);
    let covered = [reason, endpoint, arrivals].map(Option::unwrap_or_default);
    let (answer, key) = keys
        .verify_answer(nonce, auth, covered)
        .map_err(|error| match error {
            ProofError::Wrong => Failure::WrongProof,
            ProofError::Replayed => Failure::Replayed,
        })?;
    judge(&answer, status, reason, asked)?;
    let arrivals = arrivals.map(parse_arrivals);
    let headers = HelloHeaders {
        health_endpoint: endpoint
            .and_then(|value| std::str::from_utf8(value).ok())
            .and_then(parse_addresses),
        arrivals: arrivals.flatten(),
        malformed: arrivals == Some(None),
    };
    Ok(Some((headers, key)))
}

/// Checks that an authentic answer with this HTTP status and reason is a good answer from node `asked`.
fn judge(
    answer: &Answer<'_>,
    status: u16,
    reason: Option<&[u8]>,
    asked: &str,
) -> Result<(), Failure> {
    if answer.status != status {
        return Err(Failure::WrongProof);
    }
    if answer.node != asked {
        return Err(Failure::WrongNode(answer.node.into()));
    }
    match (status, reason) {
        (200, _) => Ok(()),
        (401, Some(reason)) if reason == REASON_CLOCK.as_bytes() => {
            let ahead = i128::from(answer.time) - i128::from(proof::now());
            Err(Failure::ClockDiffers {
                ahead: ahead.clamp(i64::MIN.into(), i64::MAX.into()) as i64,
            })
        }
        _ => Err(Failure::UnexpectedStatus(status)),
    }
}

/// Parses a comma-separated list of addresses; `None` if any of them is invalid.
fn parse_addresses(list: &str) -> Option<Vec<IpAddr>> {
    if list == NO_ENDPOINT {
        return Some(Vec::new());
    }
    list.split(',')
        .map(|item| parse_ip(item.trim()).ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokio::net::TcpListener;

    use super::super::testing::PATIENCE;
    use super::*;

    const TIMEOUT: Duration = Duration::from_millis(300);
    const ASKED: &str = "default/b";
    const ENDPOINTS: &str = "10.1.0.7, fd00::7";

    fn asker(keys: HelloKeys) -> Asker {
        Asker {
            name: "default/a".to_owned(),
            prober: Prober {
                session: 1,
                icmp_id_be: 2,
                pad: 0,
            },
            keys: Arc::new(keys),
        }
    }

    fn secret() -> HelloKeys {
        HelloKeys::new(&[7; 16], None)
    }

    /// The server's response to a request.
    type Respond = Box<dyn FnOnce(&[u8]) -> Vec<u8> + Send>;

    /// A server that answers on one connection and keeps it open.
    async fn ask_by(
        keys: HelloKeys,
        respond: Respond,
        timeout: Duration,
    ) -> Result<Hello, Failure> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let peer = listener.local_addr().unwrap();
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = [0; 1024];
            let len = stream.read(&mut request).await.unwrap();
            assert!(request[..len].starts_with(b"GET /hello HTTP/1.1\r\n"));
            stream.write_all(&respond(&request[..len])).await.unwrap();
            // Until the client disconnects.
            let _ = stream.read(&mut request).await;
        });
        let answer = get_hello(&asker(keys), ASKED, peer, Instant::now() + timeout).await;
        server.await.unwrap();
        answer
    }

    async fn ask(response: &'static [u8], timeout: Duration) -> Result<Hello, Failure> {
        let respond = Box::new(|_: &[u8]| response.to_vec());
        ask_by(HelloKeys::default(), respond, timeout).await
    }

    fn value<'a>(request: &'a [u8], name: &str) -> &'a [u8] {
        let request = std::str::from_utf8(request).unwrap();
        let mut lines = request.split("\r\n").filter_map(|l| l.split_once(": "));
        lines.find(|(n, _)| *n == name).unwrap().1.as_bytes()
    }

    /// An answer signed with `keys` to a request that is also signed with them.
    fn signed(keys: &HelloKeys, request: &[u8], answer: &Answer<'_>, reason: &str) -> Vec<u8> {
        let prober = value(request, PROBER_HEADER);
        let verified = keys.verify_request(value(request, AUTH_HEADER), prober);
        let covered = [reason.as_bytes(), ENDPOINTS.as_bytes(), b""];
        let auth = keys.answer(&verified.unwrap(), answer, covered);
        let reason = match reason {
            "" => String::new(),
            reason => format!("{REASON_HEADER}: {reason}\r\n"),
        };
        let status = answer.status;
        let head = format!(
            "HTTP/1.1 {status} x\r\nHealth-Endpoint: {ENDPOINTS}\r\n{reason}Health-Auth: {auth}\r\n\r\n"
        );
        head.into_bytes()
    }

    fn good() -> Answer<'static> {
        Answer {
            time: proof::now(),
            status: 200,
            node: ASKED,
        }
    }

    async fn ask_signed(
        keys: HelloKeys,
        of: HelloKeys,
        answer: Answer<'static>,
        reason: &'static str,
    ) -> Result<Hello, Failure> {
        let respond = Box::new(move |request: &[u8]| signed(&of, request, &answer, reason));
        ask_by(keys, respond, PATIENCE).await
    }

    #[tokio::test]
    async fn answers_are_judged_by_their_status() {
        let hello = ask_signed(HelloKeys::default(), HelloKeys::default(), good(), "")
            .await
            .unwrap();
        let reported = ["10.1.0.7", "fd00::7"].map(|ip| ip.parse().unwrap());
        assert_eq!(
            hello.headers.health_endpoint.as_deref(),
            Some(&reported[..])
        );
        assert!(hello.connect > Duration::ZERO && hello.total > hello.connect);
        assert_eq!(hello.key, KeyAge::Current);
        assert_eq!(
            ask(b"HTTP/1.1 503 Service Unavailable\r\n\r\n", PATIENCE).await,
            Err(Failure::UnexpectedStatus(503))
        );
        assert_eq!(
            ask(b"SSH-2.0-OpenSSH\r\n", PATIENCE).await,
            Err(Failure::Malformed)
        );
        assert_eq!(
            ask(b"HTTP/1.1 200 OK\r\n", TIMEOUT).await,
            Err(Failure::ResponseTimedOut)
        );
        assert_eq!(ask(&[b'x'; 4096], PATIENCE).await, Err(Failure::Malformed));
    }

    #[tokio::test]
    async fn what_cannot_be_read_costs_the_answer_nothing() {
        let respond = |request: &[u8]| {
            let keys = HelloKeys::default();
            let prober = value(request, PROBER_HEADER);
            let verified = keys.verify_request(value(request, AUTH_HEADER), prober);
            let auth = keys.answer(&verified.unwrap(), &good(), [b"", b"", b"1 2 3"]);
            format!("HTTP/1.1 200 OK\r\nHealth-Arrivals: 1 2 3\r\nHealth-Auth: {auth}\r\n\r\n")
                .into_bytes()
        };
        let hello = ask_by(HelloKeys::default(), Box::new(respond), PATIENCE).await;
        let headers = hello.unwrap().headers;
        assert!(headers.malformed && headers.arrivals.is_none());
    }

    #[tokio::test]
    async fn a_plain_answer_is_of_one_without_a_key() {
        const PLAIN: &[u8] = b"HTTP/1.1 200 OK\r\nHealth-Endpoint: 10.1.0.7\r\n\r\n";
        for keys in [HelloKeys::default(), secret()] {
            let respond = Box::new(|_: &[u8]| PLAIN.to_vec());
            let answer = ask_by(keys, respond, PATIENCE).await;
            assert_eq!(answer, Err(Failure::NoProof));
        }
    }

    #[tokio::test]
    async fn a_wrong_key_is_reported() {
        assert_eq!(
            ask(b"HTTP/1.1 401 Unauthorized\r\n\r\n", PATIENCE).await,
            Err(Failure::KeyRefused)
        );
        // A server that signs with a foreign key.
        let respond = |request: &[u8]| {
            let nonce = std::str::from_utf8(value(request, AUTH_HEADER)).unwrap();
            let nonce = nonce.split(' ').nth(1).unwrap();
            let now = proof::now();
            format!(
                "HTTP/1.1 200 OK\r\nHealth-Endpoint: {ENDPOINTS}\r\nHealth-Auth: answer/1 {nonce} {now} \
                 current 200 {ASKED} {nonce}\r\n\r\n"
            )
            .into_bytes()
        };
        let answer = ask_by(secret(), Box::new(respond), PATIENCE).await;
        assert_eq!(answer, Err(Failure::WrongProof));
    }

    #[tokio::test]
    async fn an_altered_answer_is_not_believed() {
        for (from, to) in [
            ("10.1.0.7", "10.1.0.8"),
            ("Health-Endpoint", "Health-Endpoind"),
            (" 200 x", " 201 x"),
            ("current", "next"),
        ] {
            let respond = move |request: &[u8]| {
                let answer = signed(&secret(), request, &good(), "");
                let answer = String::from_utf8(answer).unwrap();
                assert!(answer.contains(from));
                answer.replacen(from, to, 1).into_bytes()
            };
            let answer = ask_by(secret(), Box::new(respond), PATIENCE).await;
            assert_eq!(answer, Err(Failure::WrongProof), "{from}");
        }
    }

    #[tokio::test]
    async fn a_recorded_answer_is_reported() {
        let peer = ([127, 0, 0, 1], 4240).into();
        let earlier = request(&asker(secret()), ASKED, peer, 1);
        let recorded = signed(&secret(), &earlier, &good(), "");
        let respond = Box::new(move |_: &[u8]| recorded);
        let answer = ask_by(secret(), respond, PATIENCE).await;
        assert_eq!(answer, Err(Failure::Replayed));
    }

    #[tokio::test]
    async fn a_clock_a_day_off_is_reported() {
        const DAY: u64 = 86_400;
        for (time, expected) in [
            (proof::now() + DAY, DAY as i64),
            (proof::now() - DAY, -(DAY as i64)),
        ] {
            let answer = Answer {
                time,
                status: 401,
                node: ASKED,
            };
            let answer = ask_signed(secret(), secret(), answer, REASON_CLOCK).await;
            let Err(Failure::ClockDiffers { ahead }) = answer else {
                panic!("{answer:?}")
            };
            // The test may be delayed.
            assert!((ahead - expected).abs() < 600, "{ahead}");
        }
    }

    #[tokio::test]
    async fn another_node_that_answers_is_named() {
        for status in [200, 421] {
            let answer = Answer {
                node: "default/c",
                status,
                ..good()
            };
            let answer = ask_signed(secret(), secret(), answer, "").await;
            assert_eq!(answer, Err(Failure::WrongNode("default/c".into())));
        }
    }

    #[tokio::test]
    async fn a_peer_with_an_older_current_key_is_reported() {
        let new = HelloKeys::new(&[2; 16], Some((KeyAge::Previous, &[1; 16])));
        let old = HelloKeys::new(&[1; 16], Some((KeyAge::Next, &[2; 16])));
        let hello = ask_signed(new.clone(), old.clone(), good(), "")
            .await
            .unwrap();
        assert_eq!(hello.key, KeyAge::Next);
        let hello = ask_signed(old, new, good(), "").await.unwrap();
        assert_eq!(hello.key, KeyAge::Previous);
    }

    /// Ten thousand dead peers wait for a connection at the same time.
    #[test]
    fn a_probe_that_waits_takes_little_memory() {
        let asker = asker(HelloKeys::default());
        let peer = ([127, 0, 0, 1], 1).into();
        let probe = get_hello(&asker, ASKED, peer, Instant::now());
        let size = size_of_val(&probe);
        assert!(size <= 1024, "{size} bytes");
    }

    #[tokio::test]
    async fn a_refused_connection_says_so() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = listener.local_addr().unwrap();
        drop(listener);
        let asker = asker(HelloKeys::default());
        let answer = get_hello(&asker, ASKED, peer, Instant::now() + PATIENCE).await;
        assert_eq!(answer.unwrap_err().to_string(), "Connection refused");
    }

    proptest! {
        #[test]
        fn no_head_panics(head in prop::collection::vec(any::<u8>(), 0..300)) {
            let keys = HelloKeys::default();
            let _ = parse_head(&head, &keys, 1, ASKED);
            let mut good = b"HTTP/1.1 200 OK\r\nHealth-Auth: answer/1 ".to_vec();
            good.extend_from_slice(&head);
            good.extend_from_slice(b"\r\n\r\n");
            let _ = parse_head(&good, &keys, 1, ASKED);
        }
    }
}
