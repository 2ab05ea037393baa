//! A raw ICMP socket of one family: sends and receives in batches, with the kernel's timestamps.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{
    ControlMessageOwned, MsgFlags, MultiHeaders, SockaddrStorage, recvmmsg, sendmmsg, setsockopt,
    sockopt,
};
use nix::time::{ClockId, clock_gettime};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::filter;
use super::wire::{self, Family, Mark, Message, REQUEST_LEN};
use crate::net::rawsock;
use health_common::probe::Path;

/// Packets for one system call. More would make the send time of the last ones in the batch, which
/// is taken once for all, too wrong.
const BATCH: usize = 16;

/// Room for replies that come while the agent does not run, bytes: some 5000 of them at the 768
/// bytes that the kernel accounts for a small packet.
const RECEIVE_BUFFER: usize = 4 << 20;

/// Longest packet worth reading: an IPv4 header with options and an error that quotes a request.
const PACKET_LEN: usize = 256;

/// One request to send.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) address: IpAddr,
    pub(super) sequence: u16,
    pub(super) path: Path,
}

/// One message received.
#[derive(Clone, Copy, Debug)]
pub(super) struct Received {
    pub(super) from: IpAddr,
    pub(super) message: Message,
    /// When the kernel got it, `CLOCK_REALTIME`.
    pub(super) at: Duration,
}

/// A raw ICMP socket.
#[derive(Debug)]
pub(super) struct IcmpSocket {
    family: Family,
    mark: Mark,
    socket: AsyncFd<Socket>,
}

impl IcmpSocket {
    /// Opens a socket for one family; needs `CAP_NET_RAW`.
    pub(super) fn open(family: Family, mark: Mark) -> io::Result<Self> {
        let (domain, protocol) = match family {
            Family::V4 => (Domain::IPV4, Protocol::ICMPV4),
            Family::V6 => (Domain::IPV6, Protocol::ICMPV6),
        };
        let socket = Socket::new(domain, Type::RAW, Some(protocol))?;
        socket.attach_filter(&filter::echo_filter(family, mark.id))?;
        socket.set_nonblocking(true)?;
        // The limit for everybody does not bind those with CAP_NET_ADMIN.
        if setsockopt(&socket, sockopt::RcvBufForce, &RECEIVE_BUFFER).is_err() {
            socket.set_recv_buffer_size(RECEIVE_BUFFER)?;
        }
        setsockopt(&socket, sockopt::ReceiveTimestampns, &true)?;
        Ok(Self {
            family,
            mark,
            socket: rawsock::watch_readable(socket)?,
        })
    }

    /// Sends the first of `requests`, at most [`BATCH`] of them. Returns how many went out and the
    /// `CLOCK_REALTIME` right before, or the error that the first one met.
    pub(super) fn send(&self, requests: &[Request]) -> Result<(usize, Duration), Errno> {
        let requests = &requests[..requests.len().min(BATCH)];
        let mut packets = [[0; REQUEST_LEN]; BATCH];
        let mut addresses = [None; BATCH];
        for ((packet, address), request) in packets.iter_mut().zip(&mut addresses).zip(requests) {
            *packet = wire::request(self.family, self.mark, request.sequence, request.path);
            *address = Some(SockaddrStorage::from(SocketAddr::new(request.address, 0)));
        }
        let slices = packets.each_ref().map(|packet| [IoSlice::new(packet)]);
        let mut headers = MultiHeaders::preallocate(requests.len(), None);
        let before = realtime()?;
        let sent = sendmmsg(
            self.socket.as_raw_fd(),
            &mut headers,
            &slices[..requests.len()],
            &addresses[..requests.len()],
            [],
            MsgFlags::MSG_DONTWAIT,
        )?;
        Ok((sent.count(), before))
    }

    /// Waits until there may be something to receive.
    pub(super) async fn readable(&self) -> io::Result<()> {
        self.socket
            .readable()
            .await
            .map(|mut guard| guard.retain_ready())
    }

    /// Receives all that is there and hands over what concerns this agent's probes.
    pub(super) fn drain(&self, mut handle: impl FnMut(Received)) -> io::Result<()> {
        loop {
            let received = self.socket.try_io(Interest::READABLE, |_| {
                self.receive(&mut handle).map_err(io::Error::from)
            });
            match received {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn receive(&self, handle: &mut impl FnMut(Received)) -> Result<(), Errno> {
        let mut packets = [[0; PACKET_LEN]; BATCH];
        let mut slices = packets.each_mut().map(|packet| [IoSliceMut::new(packet)]);
        // Not kept: the kernel overwrites the lengths in it, which a next call would go by.
        let mut headers = MultiHeaders::<SockaddrStorage>::preallocate(
            BATCH,
            Some(nix::cmsg_space!(nix::sys::time::TimeSpec)),
        );
        let messages = recvmmsg(
            self.socket.as_raw_fd(),
            &mut headers,
            &mut slices,
            MsgFlags::MSG_DONTWAIT,
            None,
        )?;
        for message in messages {
            let Some(from) = message.address.as_ref().and_then(ip_address) else {
                continue;
            };
            let stamp = message.cmsgs()?.find_map(|control| match control {
                ControlMessageOwned::ScmTimestampns(at) => Some(Duration::from(at)),
                _ => None,
            });
            let at = match stamp {
                Some(at) => at,
                None => realtime()?,
            };
            let Some(packet) = message.iovs().next() else {
                continue;
            };
            if let Some(message) = wire::parse(self.family, self.mark, from, packet) {
                handle(Received { from, message, at });
            }
        }
        Ok(())
    }
}

fn ip_address(address: &SockaddrStorage) -> Option<IpAddr> {
    let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
    v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))
}

fn realtime() -> Result<Duration, Errno> {
    clock_gettime(ClockId::CLOCK_REALTIME).map(Duration::from)
}
