//! Behaviours that servers of all protocols share.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpStream as StdStream};
use std::time::Duration;

use anyhow::Context as _;
use socket2::{Domain, Socket, Type};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use super::Behaviour;

const BACKLOG: i32 = 4096;
/// Size of the send buffer for endless streams, in bytes. Small, so that the load is on the clients' CPUs rather than
/// on this process's.
const SEND_BUFFER: usize = 16 * 1024;
/// Time per byte in slow streams.
const SLOW: Duration = Duration::from_secs(1);
/// Time after which a connection attempt on the loopback address will not be accepted any more.
const UNTAKEN: Duration = Duration::from_secs(1);

/// Starts a server on a port of the loopback address, which runs as long as this process. Returns the port. Must be
/// called inside a tokio runtime.
pub fn listen(behaviour: Behaviour) -> anyhow::Result<u16> {
    if behaviour == Behaviour::HalfOpen {
        return half_open();
    }
    let (socket, address) = bind(BACKLOG)?;
    let listener = TcpListener::from_std(socket.into())?;
    tokio::spawn(async move {
        loop {
            // An error concerns only one connection, which is gone.
            if let Ok((stream, _)) = listener.accept().await {
                // Send each piece immediately, without Nagle's algorithm.
                let _ = stream.set_nodelay(true);
                tokio::spawn(behaviour.serve(stream));
            }
        }
    });
    Ok(address.port())
}

fn bind(backlog: i32) -> anyhow::Result<(Socket, SocketAddr)> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    // Accepted connections inherit this size.
    socket.set_send_buffer_size(SEND_BUFFER)?;
    socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into())?;
    socket.listen(backlog)?;
    let address = socket.local_addr()?.as_socket();
    let address = address.context("a socket has no address")?;
    Ok((socket, address))
}

/// Opens a listener whose accept queue is full.
fn half_open() -> anyhow::Result<u16> {
    let (socket, address) = bind(0)?;
    let mut queued = Vec::new();
    while let Ok(stream) = StdStream::connect_timeout(&address, UNTAKEN) {
        queued.push(stream);
    }
    // The sockets stay open until this process exits.
    std::mem::forget((socket, queued));
    Ok(address.port())
}

/// Closes the connection with a reset on drop. Always returns an error, so that the caller stops serving.
pub(super) fn reset(stream: &TcpStream) -> io::Result<()> {
    stream.set_zero_linger()?;
    Err(io::ErrorKind::ConnectionReset.into())
}

/// Writes `piece` repeatedly until the client closes the connection. Meanwhile, reads and discards the client's data.
pub(super) async fn write_forever(stream: &mut TcpStream, piece: &[u8]) -> io::Result<()> {
    let (mut from, mut to) = stream.split();
    let write = async {
        loop {
            to.write_all(piece).await?;
        }
    };
    tokio::select! {
        failed = write => failed,
        () = wait_for_end(&mut from) => Ok(()),
    }
}

/// Writes one byte per second until the client closes the connection or all bytes are sent.
pub(super) async fn write_slowly(stream: &mut TcpStream, bytes: &[u8]) -> io::Result<()> {
    for byte in bytes {
        stream.write_all(&[*byte]).await?;
        if timeout(SLOW, wait_for_end(stream)).await.is_ok() {
            break;
        }
    }
    Ok(())
}

/// Reads until the client closes the connection.
pub(super) async fn wait_for_end(stream: &mut (impl AsyncRead + Unpin)) {
    let mut piece = [0; 4096];
    while matches!(stream.read(&mut piece).await, Ok(1..)) {}
}
