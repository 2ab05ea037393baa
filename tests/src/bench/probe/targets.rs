//! The probed servers: HTTP, TCP and gRPC on every address of a node, as cheap as a process can make them, so that the
//! measurement is about the prober.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::Context as _;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::oneshot;

use super::Mechanism;
use crate::Node;

const BACKLOG: i32 = 4096;
/// Pause after a failed accept.
const REST: Duration = Duration::from_millis(10);
const HTTP_ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok";
/// Length of an HTTP/2 client's preface (RFC 9113, 3.4).
const PREFACE: usize = 24;
/// HTTP/2 frames (RFC 9113, 4.1 and 6): length, type, flags, stream.
const FRAME_HEAD: usize = 9;
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const SETTINGS: [u8; 9] = [0, 0, 0, 4, 0, 0, 0, 0, 0];
const SETTINGS_TAKEN: [u8; 9] = [0, 0, 0, 4, 1, 0, 0, 0, 0];
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
/// The status of a successful gRPC call.
const STATUS: &str = "grpc-status";
const OK: &str = "0";

/// The servers, which run on a thread. They stop on drop.
#[derive(Debug)]
pub(super) struct Targets {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Targets {
    pub(super) fn start(node: &Node) -> anyhow::Result<Self> {
        let listeners: Vec<(Mechanism, TcpListener)> = Mechanism::ALL
            .into_iter()
            .map(|mechanism| {
                let listener = node
                    .run_in(|| listen(mechanism.port()))?
                    .with_context(|| format!("cannot listen on port {}", mechanism.port()))?;
                Ok((mechanism, listener))
            })
            .collect::<anyhow::Result<_>>()?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let (stop, stopped) = oneshot::channel();
        let serve = move || {
            runtime.block_on(async move {
                for (mechanism, listener) in listeners {
                    tokio::spawn(serve(mechanism, listener));
                }
                // Completes when the sender is dropped.
                let _ = stopped.await;
            });
        };
        let thread = thread::Builder::new().name("targets".to_owned());
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread.spawn(serve)?),
        })
    }
}

impl Drop for Targets {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // If the thread panicked, the panic was already printed.
            let _ = thread.join();
        }
    }
}

fn listen(port: u16) -> std::io::Result<TcpListener> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)).into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

async fn serve(mechanism: Mechanism, listener: TcpListener) {
    let Ok(listener) = tokio::net::TcpListener::from_std(listener) else {
        return;
    };
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            // The process may be out of file descriptors: one is freed when a connection closes.
            tokio::time::sleep(REST).await;
            continue;
        };
        tokio::spawn(async move {
            // A client may disconnect at any time.
            let _ = match mechanism {
                Mechanism::Http => answer_http(stream).await,
                Mechanism::Tcp => wait_for_end(stream).await,
                Mechanism::Grpc => answer_grpc(stream).await,
            };
        });
    }
}

async fn answer_http(mut stream: TcpStream) -> std::io::Result<()> {
    let mut request = Vec::with_capacity(1024);
    while !request.ends_with(b"\r\n\r\n") {
        if stream.read_buf(&mut request).await? == 0 {
            return Ok(());
        }
    }
    stream.write_all(HTTP_ANSWER).await?;
    stream.shutdown().await
}

async fn wait_for_end(mut stream: TcpStream) -> std::io::Result<()> {
    let mut buffer = [0; 64];
    while stream.read(&mut buffer).await? > 0 {}
    Ok(())
}

/// Responds with SERVING to the first call on a connection.
async fn answer_grpc(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    stream.write_all(&SETTINGS).await?;
    let mut request = Vec::with_capacity(1024);
    let mut answered = false;
    while stream.read_buf(&mut request).await? > 0 {
        if !answered && let Some(id) = called(&request) {
            stream.write_all(&grpc_answer(id)).await?;
            answered = true;
        }
    }
    Ok(())
}

/// Returns the stream whose request is complete.
fn called(request: &[u8]) -> Option<[u8; 4]> {
    let mut rest = request.get(PREFACE..)?;
    loop {
        let head = rest.get(..FRAME_HEAD)?;
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        let end = FRAME_HEAD + usize::try_from(length).ok()?;
        rest.get(..end)?;
        if head[3] == DATA && head[4] & END_STREAM != 0 {
            return Some([head[5], head[6], head[7], head[8]]);
        }
        rest = &rest[end..];
    }
}

/// Builds the response: headers, a `HealthCheckResponse` with SERVING, and trailers.
fn grpc_answer(id: [u8; 4]) -> Vec<u8> {
    // `:status: 200` has a static index (RFC 7541, appendix A).
    let mut headers = vec![0x88];
    headers.extend(literal("content-type", "application/grpc"));
    let mut answer = SETTINGS_TAKEN.to_vec();
    answer.extend(frame(id, HEADERS, END_HEADERS, &headers));
    answer.extend(frame(id, DATA, 0, &[0, 0, 0, 0, 2, 8, 1]));
    let trailers = literal(STATUS, OK);
    answer.extend(frame(id, HEADERS, END_HEADERS | END_STREAM, &trailers));
    answer
}

/// A `Check` call for the whole server, preceded by everything that a new connection requires.
pub(super) fn grpc_request() -> Vec<u8> {
    const STREAM: [u8; 4] = 1_u32.to_be_bytes();
    let fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/grpc.health.v1.Health/Check"),
        (":authority", "10.99.0.1:8082"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ];
    let headers: Vec<u8> = fields
        .iter()
        .flat_map(|(name, value)| literal(name, value))
        .collect();
    let mut request = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    request.extend(SETTINGS);
    request.extend(frame(STREAM, HEADERS, END_HEADERS, &headers));
    request.extend(frame(STREAM, DATA, END_STREAM, &[0; 5]));
    request
}

/// Whether the server's response is complete, that is, ends with the status of the call.
pub(super) fn is_grpc_answer(received: &[u8]) -> bool {
    received.ends_with(&literal(STATUS, OK))
}

/// Encodes a header field without indexing (RFC 7541, 6.2.2).
fn literal(name: &str, value: &str) -> Vec<u8> {
    let mut field = vec![0, name.len() as u8];
    field.extend(name.as_bytes());
    field.push(value.len() as u8);
    field.extend(value.as_bytes());
    field
}

fn frame(stream: [u8; 4], kind: u8, flags: u8, body: &[u8]) -> Vec<u8> {
    let mut frame = vec![0, 0, body.len() as u8, kind, flags];
    frame.extend(stream);
    frame.extend(body);
    frame
}
