//! HTTP probes: `GET /hello` over a new TCP connection each time.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use health_common::arrivals::{Arrivals, Prober};
use health_datapath::rtt_store::Connection;
use health_net::clock;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};

use super::connect::connect;
use super::exchange::{ARRIVALS_HEADER, PROBER_HEADER, parse_arrivals, prober_value};
use super::failure::Failure;
use super::hello::HEALTH_ENDPOINT_HEADER;

/// Longest response head that is read, bytes.
const HEAD_LEN: usize = 2048;
/// That of `/hello` has some 150.
const USUAL_HEAD_LEN: usize = 256;
/// Most headers in it.
const HEADERS: usize = 32;

/// A good answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    /// Until the connection stood.
    pub(super) connect: Duration,
    /// Until the response's head was read.
    pub(super) total: Duration,
    /// The connection that it came by; `None` if its address is not known.
    pub(super) connection: Option<Connection>,
    /// What the peer says of itself.
    pub(super) headers: HelloHeaders,
}

/// What a peer says of itself in the headers of its answer to `/hello`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct HelloHeaders {
    /// The addresses of its health endpoint; `None` when it says nothing.
    pub(super) health_endpoint: Option<Vec<IpAddr>>,
    /// What arrived there of this agent's echo probes; `None` when it says nothing.
    pub(super) arrivals: Option<Arrivals>,
    /// It said something that cannot be read.
    pub(super) malformed: bool,
}

/// Asks for `/hello` on behalf of `prober` and gives up at `deadline`.
pub(super) async fn get_hello(
    peer: SocketAddr,
    prober: Prober,
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
    // The connection ends with a reset, and leaves no TIME_WAIT behind on either side.
    stream.set_zero_linger()?;
    let headers = timeout_at(deadline, exchange(&mut stream, peer, prober))
        .await
        .map_err(|_| Failure::ResponseTimedOut)??;
    Ok(Hello {
        connect,
        total: start.elapsed(),
        connection,
        headers,
    })
}

async fn exchange(
    stream: &mut TcpStream,
    peer: SocketAddr,
    prober: Prober,
) -> Result<HelloHeaders, Failure> {
    let prober = prober_value(prober);
    let request = format!(
        "GET /hello HTTP/1.1\r\nHost: {peer}\r\nUser-Agent: health-agent\r\nConnection: close\r\n\
         {PROBER_HEADER}: {prober}\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await?;
    // On the heap, and only once there is a connection: very many wait for one at a time.
    let mut head = Vec::with_capacity(USUAL_HEAD_LEN);
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
        if let Some(headers) = parse_head(&head)? {
            return Ok(headers);
        }
    }
}

/// Reads a response's head; `None` while it is not whole.
fn parse_head(head: &[u8]) -> Result<Option<HelloHeaders>, Failure> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS];
    let mut response = httparse::Response::new(&mut headers);
    let status = response.parse(head).map_err(|_| Failure::Malformed)?;
    if status.is_partial() {
        return Ok(None);
    }
    match response.code {
        Some(200) => {}
        Some(code) => return Err(Failure::UnexpectedStatus(code)),
        None => return Err(Failure::Malformed),
    }
    let value = |name| {
        let mut headers = response.headers.iter();
        let header = headers.find(|header| header.name.eq_ignore_ascii_case(name))?;
        Some(header.value)
    };
    let arrivals = value(ARRIVALS_HEADER).map(parse_arrivals);
    Ok(Some(HelloHeaders {
        health_endpoint: value(HEALTH_ENDPOINT_HEADER)
            .and_then(|value| std::str::from_utf8(value).ok())
            .and_then(parse_addresses),
        arrivals: arrivals.flatten(),
        malformed: arrivals == Some(None),
    }))
}

/// A comma-separated list of addresses; `None` if any of them is none.
fn parse_addresses(list: &str) -> Option<Vec<IpAddr>> {
    list.split(',')
        .map(|item| item.trim().parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokio::net::TcpListener;

    use super::super::testing::PATIENCE;
    use super::*;

    const TIMEOUT: Duration = Duration::from_millis(300);
    const PROBER: Prober = Prober {
        session: 1,
        icmp_id_be: 2,
        pad: 0,
    };

    /// A server that answers one connection with the given bytes and keeps it open.
    async fn ask(response: &'static [u8], timeout: Duration) -> Result<Hello, Failure> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let peer = listener.local_addr().unwrap();
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = [0; 512];
            let len = stream.read(&mut request).await.unwrap();
            assert!(request[..len].starts_with(b"GET /hello HTTP/1.1\r\n"));
            stream.write_all(response).await.unwrap();
            // Until the client goes.
            let _ = stream.read(&mut request).await;
        });
        let answer = get_hello(peer, PROBER, Instant::now() + timeout).await;
        server.await.unwrap();
        answer
    }

    #[tokio::test]
    async fn answers_are_judged_by_their_status() {
        let hello = ask(
            b"HTTP/1.1 200 OK\r\nHealth-Endpoint: 10.1.0.7, fd00::7\r\n\r\n",
            PATIENCE,
        )
        .await
        .unwrap();
        let told = ["10.1.0.7", "fd00::7"].map(|ip| ip.parse().unwrap());
        assert_eq!(hello.headers.health_endpoint.as_deref(), Some(&told[..]));
        assert!(hello.connect > Duration::ZERO && hello.total > hello.connect);
        assert_eq!(
            ask(b"HTTP/1.1 200 OK\r\n\r\n", PATIENCE)
                .await
                .unwrap()
                .headers,
            HelloHeaders::default()
        );
        // What cannot be read costs the answer nothing.
        let hello = ask(
            b"HTTP/1.1 200 OK\r\nHealth-Arrivals: 1 2 3\r\n\r\n",
            PATIENCE,
        )
        .await;
        let headers = hello.unwrap().headers;
        assert!(headers.malformed && headers.arrivals.is_none());
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

    /// Ten thousand dead peers wait for a connection at a time.
    #[test]
    fn a_probe_that_waits_takes_little_memory() {
        let probe = get_hello(([127, 0, 0, 1], 1).into(), PROBER, Instant::now());
        let size = size_of_val(&probe);
        assert!(size <= 1024, "{size} bytes");
    }

    #[tokio::test]
    async fn a_refused_connection_says_so() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = listener.local_addr().unwrap();
        drop(listener);
        let answer = get_hello(peer, PROBER, Instant::now() + PATIENCE).await;
        assert_eq!(answer.unwrap_err().to_string(), "Connection refused");
    }

    proptest! {
        #[test]
        fn no_head_panics(head in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse_head(&head);
            let mut good = b"HTTP/1.1 200 OK\r\nHealth-Endpoint: ".to_vec();
            good.extend_from_slice(&head);
            good.extend_from_slice(b"\r\n\r\n");
            let _ = parse_head(&good);
        }
    }
}
