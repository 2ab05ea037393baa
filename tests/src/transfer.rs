//! Transfers between two namespaces. All data is counted and must come back, however long that takes on a busy machine:
//! the data in flight never exceeds the sockets' buffers.

use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use health_net::netns::NetNs;

use crate::{PATIENCE, wait_for};

/// Maximum number of datagrams in flight. The smallest default buffer (`net.core.rmem_default`) holds more.
const WINDOW: u64 = 32;
/// Bytes per write.
const CHUNK: usize = 16 << 10;

/// A path from one namespace to an address in another.
pub struct Path {
    from: NetNs,
    to: NetNs,
    address: SocketAddr,
}

impl Path {
    /// Opens a path from one named namespace to an address and port in another.
    pub fn open(from: &str, to: &str, address: IpAddr, port: u16) -> anyhow::Result<Self> {
        Ok(Self {
            from: NetNs::open(from)?,
            to: NetNs::open(to)?,
            address: SocketAddr::new(address, port),
        })
    }

    /// Sends this many bytes over a TCP connection in both directions at once. Returns the client's address as the
    /// server sees it.
    pub fn stream(&self, bytes: u64) -> anyhow::Result<IpAddr> {
        let listener = self.to.run_in(|| TcpListener::bind(self.address))??;
        let client = self
            .from
            .run_in(|| TcpStream::connect_timeout(&self.address, PATIENCE))?
            .with_context(|| format!("connect to {}", self.address))?;
        let (server, peer) = listener.accept()?;
        let (sent, received) = thread::scope(|scope| {
            let ends = [&client, &server].map(|end| {
                (
                    scope.spawn(move || send(end, bytes)),
                    scope.spawn(move || receive(end)),
                )
            });
            let mut counts = (Ok(()), Vec::new());
            for (sender, receiver) in ends {
                counts.0 = counts.0.and(sender.join().expect("no panic"));
                counts.1.push(receiver.join().expect("no panic"));
            }
            counts
        });
        sent.context("send")?;
        for received in received {
            let received = received.context("receive")?;
            ensure!(received == bytes, "{received} of {bytes} bytes arrived");
        }
        Ok(peer.ip())
    }

    /// Sends datagrams, at most one per `interval`, while `go_on` returns true for the number sent so far. The server
    /// echoes each. Returns the number of datagrams and the client's address as the server sees it. Fails if one was
    /// lost.
    pub fn datagrams(
        &self,
        interval: Duration,
        go_on: impl Fn(u64) -> bool,
    ) -> anyhow::Result<(u64, IpAddr)> {
        let server = self.to.run_in(|| UdpSocket::bind(self.address))??;
        let client = self.from.run_in(|| {
            let client = UdpSocket::bind(SocketAddr::new(unspecified(self.address.ip()), 0))?;
            client.connect(self.address)?;
            io::Result::Ok(client)
        })??;
        for socket in [&server, &client] {
            socket.set_read_timeout(Some(PATIENCE))?;
        }
        let returned = AtomicU64::new(0);
        thread::scope(|scope| {
            let echo = scope.spawn(|| echo(&server));
            let count = scope.spawn(|| count(&client, &returned));
            let mut sent = 0;
            let outcome = (|| -> anyhow::Result<()> {
                while go_on(sent) {
                    wait_until_back(&returned, (sent + 1).saturating_sub(WINDOW))?;
                    client.send(&sent.to_be_bytes())?;
                    sent += 1;
                    thread::sleep(interval);
                }
                wait_until_back(&returned, sent)
            })();
            // Both threads stop at an empty datagram or at their timeouts.
            let ended = client.send(&[]);
            let peer = echo.join().expect("no panic");
            let count = count.join().expect("no panic");
            let back = returned.load(Ordering::Relaxed);
            outcome.with_context(|| format!("{back} of {sent} datagrams came back"))?;
            ended?;
            count?;
            Ok((sent, peer?))
        })
    }
}

fn unspecified(like: IpAddr) -> IpAddr {
    match like {
        IpAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
    }
}

fn send(mut stream: &TcpStream, bytes: u64) -> io::Result<()> {
    stream.set_write_timeout(Some(PATIENCE))?;
    let chunk = [0x5a; CHUNK];
    let mut left = bytes;
    while left > 0 {
        let length = chunk.len().min(usize::try_from(left).unwrap_or(CHUNK));
        stream.write_all(&chunk[..length])?;
        left -= length as u64;
    }
    stream.shutdown(Shutdown::Write)
}

fn receive(mut stream: &TcpStream) -> io::Result<u64> {
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut chunk = [0; CHUNK];
    let mut received = 0;
    loop {
        match stream.read(&mut chunk)? {
            0 => return Ok(received),
            length => received += length as u64,
        }
    }
}

/// Echoes datagrams until an empty one arrives. Returns the sender of the empty one.
fn echo(server: &UdpSocket) -> anyhow::Result<IpAddr> {
    let mut buffer = [0; 16];
    loop {
        let (length, peer) = server.recv_from(&mut buffer).context("serve")?;
        server.send_to(&buffer[..length], peer)?;
        if length == 0 {
            return Ok(peer.ip());
        }
    }
}

/// Counts returned datagrams until an empty one arrives. Fails on a duplicate.
fn count(client: &UdpSocket, returned: &AtomicU64) -> anyhow::Result<()> {
    let mut seen = std::collections::HashSet::new();
    let mut buffer = [0; 16];
    loop {
        let length = client.recv(&mut buffer).context("receive")?;
        if length == 0 {
            return Ok(());
        }
        ensure!(
            seen.insert(buffer[..length].to_vec()),
            "a datagram came back twice"
        );
        returned.fetch_add(1, Ordering::Relaxed);
    }
}

fn wait_until_back(returned: &AtomicU64, wanted: u64) -> anyhow::Result<()> {
    if returned.load(Ordering::Relaxed) >= wanted {
        return Ok(());
    }
    wait_for("datagrams to come back", PATIENCE, || {
        Ok((returned.load(Ordering::Relaxed) >= wanted).then_some(()))
    })
}
