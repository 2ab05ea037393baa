//! Misbehaving servers, for tests of mechanisms.

use std::fs;
use std::net::SocketAddr;
use std::time::Duration;

use health_net::netns::NetNs;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use super::{Deadline, Host, Target};
use crate::{Outcome, RawResult};

/// Timeout for events that must happen, however busy the machine is.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
/// Timeout for events that never happen.
pub(super) const SHORT: Duration = Duration::from_millis(300);

pub(super) fn patience() -> Deadline {
    Deadline::after(PATIENCE)
}

pub(super) fn short() -> Deadline {
    Deadline::after(SHORT)
}

/// Returns the outcome of a probe that takes too long at a stage, which its message must name. On a busy machine the
/// probe may time out before that stage; it then gets more time.
pub(super) async fn late_at<F>(stage: &str, probe: impl Fn(Deadline) -> F) -> Outcome
where
    F: Future<Output = Outcome>,
{
    let mut timeout = SHORT;
    loop {
        let outcome = probe(Deadline::after(timeout)).await;
        assert_eq!(
            (outcome.result, outcome.errored),
            (RawResult::Failure, false),
            "{outcome:?}"
        );
        assert!(outcome.message.starts_with("timeout: "), "{outcome:?}");
        if outcome.message.starts_with(stage) {
            return outcome;
        }
        timeout *= 2;
        assert!(timeout < PATIENCE, "{outcome:?}");
    }
}

pub(super) fn target(address: SocketAddr) -> Target {
    Target {
        host: Host::Ip(address.ip()),
        port: address.port(),
        netns: None::<std::sync::Arc<NetNs>>,
        asker: "test".into(),
    }
}

/// A server that treats all connections alike. Dropping it stops it.
pub(super) struct Server {
    pub(super) address: SocketAddr,
    task: JoinHandle<()>,
}

impl Server {
    pub(super) async fn new<F>(serve: impl Fn(TcpStream) -> F + Send + 'static) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        Self::at("127.0.0.1:0", serve).await
    }

    pub(super) async fn at<F>(
        address: &str,
        serve: impl Fn(TcpStream) -> F + Send + 'static,
    ) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let task = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                tokio::spawn(serve(stream));
            }
        });
        Self { address, task }
    }

    pub(super) fn target(&self) -> Target {
        target(self.address)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Reads the head of an HTTP/1 request, or as much as arrives if the client leaves or speaks another protocol.
pub(super) async fn read_head(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read_buf(&mut head).await {
            Ok(0) | Err(_) => break,
            Ok(_) if !head.starts_with(b"G") => break,
            Ok(_) => {}
        }
    }
    String::from_utf8_lossy(&head).into_owned()
}

/// Writes the same piece repeatedly until the client leaves. Returns how many bytes were written.
pub(super) async fn write_forever(stream: &mut TcpStream, piece: &[u8], pause: Duration) -> usize {
    let mut written = 0;
    while stream.write_all(piece).await.is_ok() {
        written += piece.len();
        tokio::time::sleep(pause).await;
    }
    written
}

/// Closes a connection with a reset.
pub(super) fn reset(stream: TcpStream) {
    stream.set_zero_linger().unwrap();
}

/// Sends nothing until the client leaves.
pub(super) async fn say_nothing(mut stream: TcpStream) {
    let mut piece = [0; 1024];
    while matches!(stream.read(&mut piece).await, Ok(1..)) {}
}

/// Waits until the client has closed its side, and returns whether it closed in order, without a reset.
pub(super) async fn is_closed_politely(stream: &mut TcpStream) -> bool {
    let mut piece = [0; 1024];
    loop {
        match stream.read(&mut piece).await {
            Ok(0) => return true,
            Ok(_) => {}
            Err(_) => return false,
        }
    }
}

/// A port of the loopback address that nothing listens on.
pub(super) fn unused_port() -> SocketAddr {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap()
}

/// How many endpoints of connections with this port on either side are in TIME_WAIT.
pub(super) fn time_waits(port: u16) -> usize {
    ends(port, |state| state == TIME_WAIT)
}

/// How many endpoints of connections with this port on either side are open, or not yet closed by both sides.
pub(super) fn open_ends(port: u16) -> usize {
    ends(port, |state| state != TIME_WAIT && state != LISTEN)
}

/// The state TIME_WAIT in `/proc/net/tcp`.
const TIME_WAIT: &str = "06";
const LISTEN: &str = "0A";

fn ends(port: u16, wanted: impl Fn(&str) -> bool) -> usize {
    let port = format!(":{port:04X}");
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(|path| fs::read_to_string(path).unwrap());
    let lines = tables.iter().flat_map(|table| table.lines());
    lines
        .filter(|line| {
            let fields: Vec<_> = line.split_whitespace().collect();
            fields.get(3).is_some_and(|state| wanted(state))
                && (fields[1].ends_with(&port) || fields[2].ends_with(&port))
        })
        .count()
}
