//! A raw ICMP socket of one family: sends and receives in batches, with the kernel's timestamps.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::time::Duration;

use health_common::probe::{Path, ProbeId};
use health_net::rawsock;
use nix::errno::Errno;
use nix::sys::socket::{
    ControlMessageOwned, MsgFlags, MultiHeaders, SockaddrStorage, recvmmsg, sendmmsg, sendto,
    setsockopt, sockopt,
};
use nix::time::{ClockId, clock_gettime};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::unix::AsyncFd;

use super::filter;
use super::wire::{self, Family, Mark, Message, REQUEST_LEN};

/// Packets per system call. The send time is taken once per batch; with more packets it would be too inaccurate for the
/// last ones.
const BATCH: usize = 16;
/// Maximum number of batches received at a time.
const DRAIN_BATCHES: usize = 4096;

/// Buffer space for replies that arrive while the agent is not scheduled, in bytes: about 5000 replies at the 768 bytes
/// that the kernel accounts for a small packet.
const RECEIVE_BUFFER: usize = 4 << 20;

/// Longest packet worth reading: an IPv4 header with options and an error that quotes a request.
const PACKET_LEN: usize = 256;

/// One request to send.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) address: IpAddr,
    pub(super) number: ProbeId,
    pub(super) path: Path,
}

/// A received message.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReceivedMessage {
    pub(super) from: IpAddr,
    pub(super) message: Message,
    /// When the kernel received it, `CLOCK_REALTIME`.
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
        socket.attach_filter(&filter::echo_filter(family, mark.icmp_id))?;
        socket.set_nonblocking(true)?;
        // The system-wide limit does not apply with CAP_NET_ADMIN.
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

    /// Sends the first of `requests`, at most [`BATCH`] of them. Returns the number sent and the `CLOCK_REALTIME` right
    /// before, or the error of the first one.
    pub(super) fn send(&self, requests: &[Request]) -> Result<(usize, Duration), Errno> {
        let requests = &requests[..requests.len().min(BATCH)];
        let mut packets = [[0; REQUEST_LEN]; BATCH];
        let mut addresses = [None; BATCH];
        for ((packet, address), request) in packets.iter_mut().zip(&mut addresses).zip(requests) {
            *packet = wire::request(self.family, self.mark, request.number, request.path);
            *address = Some(SockaddrStorage::from(SocketAddr::new(request.address, 0)));
        }
        let slices = packets.each_ref().map(|packet| [IoSlice::new(packet)]);
        let mut headers = MultiHeaders::preallocate(requests.len(), None);
        let before = realtime()?;
        // Without `IP_RECVERR` a raw socket hides `ENOBUFS` for a packet that the device or its queue drops
        // (`raw_sendmsg` in net/ipv4/raw.c): the packet counts as sent, and times out. With that option, an ICMP error
        // for any probe would fail the next send, whatever its destination (`raw_err`).
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

    /// Prevents fragmentation: requests of any size leave whole or not at all. See [`rawsock::probe_mtu`].
    pub(super) fn unfragmented(self) -> io::Result<Self> {
        rawsock::probe_mtu(self.socket.get_ref(), self.family == Family::V6)?;
        Ok(self)
    }

    /// Sends one request as an IP packet of `size` bytes.
    pub(super) fn send_sized(
        &self,
        address: IpAddr,
        sequence: u16,
        size: usize,
    ) -> Result<(), Errno> {
        let packet = wire::sized_request(self.family, self.mark, sequence, size);
        sendto(
            self.socket.as_raw_fd(),
            &packet,
            &SockaddrStorage::from(SocketAddr::new(address, 0)),
            MsgFlags::MSG_DONTWAIT,
        )
        .map(drop)
    }

    /// Waits for packets that arrived after the previous wait. The caller must then call [`Self::drain`].
    pub(super) async fn readable(&self) -> io::Result<()> {
        self.socket
            .readable()
            .await
            .map(|mut guard| guard.clear_ready())
    }

    /// Receives pending packets and passes on the messages about this agent's probes. In a flood, it handles only some
    /// of them and leaves the rest until the next packet arrives, so that the agent's other work is not starved.
    pub(super) fn drain(&self, mut handle: impl FnMut(ReceivedMessage)) -> io::Result<()> {
        for _ in 0..DRAIN_BATCHES {
            match self.receive(&mut handle) {
                Ok(BATCH) | Err(Errno::EINTR) => {}
                Ok(_) | Err(Errno::EAGAIN) => return Ok(()),
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Receives one batch and returns the number of packets in it.
    fn receive(&self, handle: &mut impl FnMut(ReceivedMessage)) -> Result<usize, Errno> {
        let mut packets = [[0; PACKET_LEN]; BATCH];
        let mut slices = packets.each_mut().map(|packet| [IoSliceMut::new(packet)]);
        // Not reused: the kernel overwrites the lengths in it, which the next call would then use.
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
        let mut count = 0;
        for message in messages {
            count += 1;
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
                handle(ReceivedMessage { from, message, at });
            }
        }
        Ok(count)
    }
}

fn ip_address(address: &SockaddrStorage) -> Option<IpAddr> {
    let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
    v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))
}

fn realtime() -> Result<Duration, Errno> {
    clock_gettime(ClockId::CLOCK_REALTIME).map(Duration::from)
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;
    use crate::testing::Namespace;

    #[test]
    fn a_socket_gets_the_replies_to_its_own_requests_alone() {
        let Some(namespace) = Namespace::new() else {
            return;
        };
        namespace.block_on(async || {
            for (family, address) in [(Family::V4, "127.0.0.1"), (Family::V6, "::1")] {
                let open = |icmp_id| {
                    let mark = Mark {
                        icmp_id,
                        session: 7,
                        key: [1, 2],
                        one_way: false,
                    };
                    IcmpSocket::open(family, mark).unwrap()
                };
                let (own, other) = (open(1), open(2));
                let requests: Vec<_> = (1..=40)
                    .map(|sequence| Request {
                        address: address.parse().unwrap(),
                        number: ProbeId {
                            session: 7,
                            round: 0,
                            sequence,
                        },
                        path: Path::Host,
                    })
                    .collect();
                let mut sent = 0;
                while sent < requests.len() {
                    sent += own.send(&requests[sent..]).unwrap().0;
                }
                own.readable().await.unwrap();
                let mut sequences = Vec::new();
                own.drain(|received| match received.message {
                    Message::Reply { number } => sequences.push(number.sequence),
                    _ => panic!("{received:?}"),
                })
                .unwrap();
                assert_eq!(sequences, (1..=40).collect::<Vec<_>>());
                let mut packets = [0; PACKET_LEN];
                let foreign = other.socket.get_ref().read(&mut packets);
                assert_eq!(foreign.unwrap_err().kind(), io::ErrorKind::WouldBlock);
            }
        });
    }
}
