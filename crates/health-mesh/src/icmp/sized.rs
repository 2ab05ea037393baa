//! Echo requests of chosen sizes that must not be fragmented: the probes of a path's MTU.
//!
//! They have their own identifier and key, so no programs on uplinks, here or at the peer, mistake them for
//! reachability probes: neither their round-trip times nor their losses are counted.

use std::io;
use std::net::IpAddr;

use nix::errno::Errno;

use super::socket::IcmpSocket;
use super::wire::{Family, Mark, Message};
use crate::failure::IcmpError;

/// Response to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SizedEvent {
    /// The reply arrived.
    Answered {
        /// Its source address.
        from: IpAddr,
        /// Its sequence number, host byte order.
        sequence: u16,
    },
    /// A reply without the payload of a request.
    Unmarked,
    /// An error that quotes the request.
    Error {
        /// Destination of the request.
        destination: IpAddr,
        /// Its sequence number, host byte order.
        sequence: u16,
        /// The error.
        error: IcmpError,
        /// If it was too big: the MTU of the next hop as the error's sender reports it, in bytes; 0 if not reported.
        next_hop_mtu: Option<u32>,
    },
}

/// The sockets that send such requests and receive their replies.
#[derive(Debug)]
pub(crate) struct SizedSockets {
    v4: Option<IcmpSocket>,
    v6: Option<IcmpSocket>,
}

impl SizedSockets {
    /// Opens the sockets; needs `CAP_NET_RAW`. `icmp_id` is in host byte order. A family that this host lacks is left
    /// out.
    pub(crate) fn open(icmp_id: u16) -> io::Result<Self> {
        let mark = Mark {
            icmp_id,
            session: rand::random(),
            key: rand::random(),
            one_way: false,
        };
        let open = |family| {
            let opened = IcmpSocket::open(family, mark);
            match opened.and_then(IcmpSocket::unfragmented) {
                Ok(socket) => Ok(Some(socket)),
                Err(error) if error.raw_os_error() == Some(libc::EAFNOSUPPORT) => Ok(None),
                Err(error) => Err(error),
            }
        };
        Ok(Self {
            v4: open(Family::V4)?,
            v6: open(Family::V6)?,
        })
    }

    /// Sends a request as an IP packet of `size` bytes. `EMSGSIZE`: the device has a smaller MTU.
    pub(crate) fn send(&self, address: IpAddr, sequence: u16, size: u32) -> Result<(), Errno> {
        let socket = match Family::of(address) {
            Family::V4 => &self.v4,
            Family::V6 => &self.v6,
        };
        let socket = socket.as_ref().ok_or(Errno::EAFNOSUPPORT)?;
        socket.send_sized(address, sequence, size as usize)
    }

    /// Waits for packets that arrived after the previous wait. The caller must then call [`Self::receive`].
    pub(crate) async fn readable(&self) -> io::Result<()> {
        let wait = async |socket: &Option<IcmpSocket>| match socket {
            Some(socket) => socket.readable().await,
            None => std::future::pending().await,
        };
        tokio::select! {
            ready = wait(&self.v4) => ready,
            ready = wait(&self.v6) => ready,
        }
    }

    /// Receives all pending packets.
    pub(crate) fn receive(&self, mut handle: impl FnMut(SizedEvent)) -> io::Result<()> {
        for socket in [&self.v4, &self.v6].into_iter().flatten() {
            socket.drain(|received| match received.message {
                Message::Reply { number } => handle(SizedEvent::Answered {
                    from: received.from,
                    sequence: number.sequence,
                }),
                Message::Unmarked => handle(SizedEvent::Unmarked),
                Message::Error {
                    sequence,
                    destination,
                    error,
                    next_hop_mtu,
                } => handle(SizedEvent::Error {
                    destination,
                    sequence,
                    error,
                    next_hop_mtu,
                }),
            })?;
        }
        Ok(())
    }
}
