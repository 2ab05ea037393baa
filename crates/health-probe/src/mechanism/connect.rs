//! Connections for probes: bounded in time, and closed without leaving TIME_WAIT.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use health_net::netns::{NetNs, NetNsError};
use health_net::tcp::{acknowledge_by_first_write, forget_after_fin};
use nix::errno::Errno;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::Instant;

use super::lookup::LOOKUPS;
use super::{Deadline, Host, Target, failure, own_error};
use crate::Outcome;

/// Maximum number of a name's addresses that are tried.
const ADDRESSES: usize = 8;
/// Maximum number of bytes of a TLS handshake.
pub(super) const HANDSHAKE_MAX: usize = 64 * 1024;
/// Maximum number of bytes read without a pause. A server that never stops sending must not hold up other probes.
const READ_AT_ONCE: usize = 8 * 1024;

/// Why a connection failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectError {
    /// No answer came in time.
    #[error("timed out")]
    TimedOut,
    /// The name did not resolve in time.
    #[error("the name lookup of {0} timed out")]
    LookupTimedOut(String),
    /// The name has no address.
    #[error("cannot resolve {0}: {1}")]
    Lookup(String, #[source] io::Error),
    /// Every lookup slot is waiting for a reply.
    #[error("too many name lookups are in progress")]
    LookupsBusy,
    /// The target or the network refused the connection.
    #[error("{0}")]
    Refused(#[source] io::Error),
    /// This host cannot open another connection.
    #[error("cannot open a socket: {0}")]
    Socket(#[source] io::Error),
    /// The network namespace cannot be entered.
    #[error(transparent)]
    Namespace(#[from] NetNsError),
}

impl ConnectError {
    fn new(error: io::Error) -> Self {
        // EADDRNOTAVAIL: this host has no free port, or no address to connect from.
        const OWN: [Errno; 5] = [
            Errno::EMFILE,
            Errno::ENFILE,
            Errno::ENOBUFS,
            Errno::ENOMEM,
            Errno::EADDRNOTAVAIL,
        ];
        let code = error.raw_os_error().map(Errno::from_raw);
        if code.is_some_and(|code| OWN.contains(&code)) {
            Self::Socket(error)
        } else {
            Self::Refused(error)
        }
    }

    /// Whether the cause is on this host, so that the error says nothing about the target.
    pub(super) fn is_own(&self) -> bool {
        match self {
            Self::LookupsBusy | Self::Socket(_) | Self::Namespace(_) => true,
            Self::TimedOut | Self::LookupTimedOut(_) | Self::Lookup(..) | Self::Refused(_) => false,
        }
    }

    /// The outcome of a probe of `target` that fails with this error.
    pub(super) fn outcome(&self, target: &impl std::fmt::Display, deadline: Deadline) -> Outcome {
        let message = match self {
            Self::TimedOut => {
                format!(
                    "timeout: no connection to {target} within {:?}",
                    deadline.timeout()
                )
            }
            Self::LookupTimedOut(_) => format!("timeout: {self}"),
            _ => format!("cannot connect to {target}: {self}"),
        };
        if self.is_own() {
            own_error(message)
        } else {
            failure(message)
        }
    }
}

/// Connects to a target, trying each of its addresses in turn.
pub(super) async fn connect(
    target: &Target,
    usage: Usage,
    deadline: Deadline,
) -> Result<Connection, ConnectError> {
    let netns = target.netns.as_deref();
    let name = match &target.host {
        Host::Ip(ip) => {
            let address = SocketAddr::new(*ip, target.port);
            return attempt(address, netns, usage, deadline, deadline.at()).await;
        }
        Host::Name(name) => name,
    };
    let addresses = resolve(name, target.port, &target.asker, deadline).await?;
    let mut left = addresses.len() as u32;
    let mut last = ConnectError::TimedOut;
    for address in addresses {
        // Share the remaining time, so that a silent address leaves some for the other addresses.
        let share = deadline.at().saturating_duration_since(Instant::now()) / left;
        let until = Instant::now() + share;
        match attempt(address, netns, usage, deadline, until).await {
            Ok(connection) => return Ok(connection),
            Err(error) => last = error,
        }
        left -= 1;
    }
    Err(last)
}

async fn resolve(
    name: &str,
    port: u16,
    asker: &Arc<str>,
    deadline: Deadline,
) -> Result<Vec<SocketAddr>, ConnectError> {
    let slot = deadline
        .bound(LOOKUPS.slot(asker))
        .await
        .ok_or(ConnectError::LookupsBusy)?;
    let owned = name.to_owned();
    let lookup = tokio::task::spawn_blocking(move || {
        let _slot = slot;
        let addresses = (owned.as_str(), port).to_socket_addrs()?;
        Ok(addresses.take(ADDRESSES).collect::<Vec<_>>())
    });
    let addresses = deadline
        .bound(lookup)
        .await
        .ok_or_else(|| ConnectError::LookupTimedOut(name.to_owned()))?
        .unwrap_or_else(|panicked| Err(io::Error::other(panicked)))
        .map_err(|error| ConnectError::Lookup(name.to_owned(), error))?;
    if addresses.is_empty() {
        let error = io::Error::new(io::ErrorKind::NotFound, "no address");
        return Err(ConnectError::Lookup(name.to_owned(), error));
    }
    Ok(addresses)
}

async fn attempt(
    address: SocketAddr,
    netns: Option<&NetNs>,
    usage: Usage,
    deadline: Deadline,
    until: Instant,
) -> Result<Connection, ConnectError> {
    let open = || match address {
        SocketAddr::V4(_) => TcpSocket::new_v4(),
        SocketAddr::V6(_) => TcpSocket::new_v6(),
    };
    // A socket stays in the namespace that it was opened in, so only this step enters the namespace.
    let socket = match netns {
        None => open(),
        Some(netns) => netns.run_in(open)?,
    };
    let socket = socket.map_err(ConnectError::Socket)?;
    if usage.writes_first {
        acknowledge_by_first_write(&socket).map_err(ConnectError::Socket)?;
    }
    let connected = deadline.bound_until(until, socket.connect(address));
    let stream = connected
        .await
        .ok_or(ConnectError::TimedOut)?
        .map_err(ConnectError::new)?;
    Connection::new(stream, usage).map_err(ConnectError::new)
}

/// How a connection is used.
#[derive(Clone, Copy, Debug)]
pub(super) struct Usage {
    /// How the connection ends.
    pub(super) ending: Ending,
    /// Maximum number of bytes to read from the connection. Reading more is an error.
    pub(super) read_max: usize,
    /// Whether the client writes as soon as the connection is established.
    pub(super) writes_first: bool,
    /// Whether there are several writes (TCP_NODELAY): none may wait until the previous one is acknowledged.
    pub(super) no_delay: bool,
}

/// How a connection ends. Neither way leaves TIME_WAIT on either side, which would cost a port and a conntrack entry
/// for 60 s per probe. `SO_LINGER` with a nonzero time does not shorten TIME_WAIT, and makes `close` block.
#[derive(Clone, Copy, Debug)]
pub(super) enum Ending {
    /// With a FIN, so that the server reads an end of stream and not an error. Our socket is forgotten once the
    /// server's kernel has the FIN; anything that the server sends after that is answered with a reset.
    Fin,
    /// With a reset. For servers that were asked to close the connection themselves: a FIN after the server's FIN would
    /// complete an orderly close, with TIME_WAIT on the server's side.
    Reset,
}

#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    /// Maximum number of bytes to read, and how many were read.
    read_max: usize,
    read: usize,
    /// Bytes read since the last pause.
    read_at_once: usize,
}

impl Connection {
    fn new(stream: TcpStream, usage: Usage) -> io::Result<Self> {
        match usage.ending {
            Ending::Fin => forget_after_fin(&stream)?,
            Ending::Reset => stream.set_zero_linger()?,
        }
        if usage.no_delay {
            stream.set_nodelay(true)?;
        }
        Ok(Self {
            stream,
            read_max: usage.read_max,
            read: 0,
            read_at_once: 0,
        })
    }

    /// Writes as much as fits, without waiting.
    pub(super) fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.try_write(bytes)
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.read >= self.read_max {
            let error = format!("more than {} KiB received", self.read_max / 1024);
            return Poll::Ready(Err(io::Error::other(error)));
        }
        if self.read_at_once >= READ_AT_ONCE {
            self.read_at_once = 0;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(cx, buf);
        let read = buf.filled().len() - before;
        self.read += read;
        self.read_at_once = match polled {
            Poll::Ready(_) => self.read_at_once + read,
            Poll::Pending => 0,
        };
        polled
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// Does nothing: an orderly shutdown would leave a TIME_WAIT. Dropping the connection closes it.
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
