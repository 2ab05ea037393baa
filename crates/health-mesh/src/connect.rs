//! Connections for HTTP probes. If an ICMP error ends an attempt, the result is that error and its sender.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsRawFd;

use nix::cmsg_space;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg, setsockopt, sockopt};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::TcpStream;

use super::failure::{Failure, IcmpError};

/// Connects to a peer. Takes as long as the kernel keeps trying; the caller must limit the time.
pub(super) async fn connect(peer: SocketAddr) -> Result<TcpStream, Failure> {
    let kind = Type::STREAM.nonblocking();
    let socket = Socket::new(Domain::for_address(peer), kind, Some(Protocol::TCP))?;
    // Without this option, the kernel holds back an error that arrives while it is still sending, until it retransmits
    // a second later.
    match peer {
        SocketAddr::V4(_) => setsockopt(&socket, sockopt::Ipv4RecvErr, &true),
        SocketAddr::V6(_) => setsockopt(&socket, sockopt::Ipv6RecvErr, &true),
    }
    .map_err(Failure::Os)?;
    match socket.connect(&peer.into()) {
        Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => return Err(error.into()),
        _ => {}
    }
    let stream = TcpStream::from_std(socket.into())?;
    stream.writable().await?;
    match stream.take_error()? {
        None => Ok(stream),
        Some(error) => Err(icmp_error(&stream).map_or_else(|| error.into(), Failure::Icmp)),
    }
}

/// The first ICMP error received for packets of this socket (ip(7), `IP_RECVERR`).
fn icmp_error(socket: &impl AsRawFd) -> Option<IcmpError> {
    let mut control = cmsg_space!((libc::sock_extended_err, libc::sockaddr_in6));
    let queue = MsgFlags::MSG_ERRQUEUE;
    let message = recvmsg::<()>(socket.as_raw_fd(), &mut [], Some(&mut control), queue).ok()?;
    let (error, from) = message.cmsgs().ok()?.find_map(|message| match message {
        ControlMessageOwned::Ipv4RecvErr(error, Some(from)) => {
            let address = Ipv4Addr::from_bits(u32::from_be(from.sin_addr.s_addr));
            Some((error, address.into()))
        }
        ControlMessageOwned::Ipv6RecvErr(error, Some(from)) => {
            let address = Ipv6Addr::from(from.sin6_addr.s6_addr);
            Some((error, address.into()))
        }
        _ => None,
    })?;
    let origins = [libc::SO_EE_ORIGIN_ICMP, libc::SO_EE_ORIGIN_ICMP6];
    origins.contains(&error.ee_origin).then_some(IcmpError {
        kind: error.ee_type,
        code: error.ee_code,
        from,
    })
}
