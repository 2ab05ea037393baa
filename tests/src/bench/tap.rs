//! Captures the packets of a node's namespace with the kernel's timestamps.

use std::io::{ErrorKind, IoSliceMut};
use std::os::fd::AsRawFd as _;
use std::time::Duration;

use anyhow::Context as _;
use nix::errno::Errno;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg, setsockopt, sockopt};
use nix::sys::time::TimeSpec;
use socket2::{Domain, Socket, Type};

use crate::Node;

/// Captured bytes per packet, and size of the receive buffer.
const SNAP_LEN: usize = 256;
const RECEIVE_BUFFER: usize = 8 << 20;
/// How long [`Tap::receive`] waits for a packet.
const PAUSE: Duration = Duration::from_millis(100);

/// A packet socket that receives all packets that a namespace sends or receives.
#[derive(Debug)]
pub(super) struct Tap(Socket);

impl Tap {
    /// Opens a tap in the namespace of `node`.
    pub(super) fn open(node: &Node) -> anyhow::Result<Self> {
        let open = || {
            let all = i32::from((libc::ETH_P_ALL as u16).to_be());
            let socket = Socket::new(Domain::PACKET, Type::DGRAM, Some(all.into()))?;
            setsockopt(&socket, sockopt::RcvBufForce, &RECEIVE_BUFFER)?;
            setsockopt(&socket, sockopt::ReceiveTimestampns, &true)?;
            socket.set_read_timeout(Some(PAUSE))?;
            std::io::Result::Ok(Self(socket))
        };
        node.run_in(open)?
            .with_context(|| format!("cannot capture packets of {}", node.name()))
    }

    /// Returns the next packet, starting with its IP header, and the time since the epoch at which the kernel saw it.
    /// Returns `None` if no packet arrives for a while.
    pub(super) fn receive(&self) -> Result<Option<(Duration, Vec<u8>)>, Errno> {
        let mut buffer = [0; SNAP_LEN];
        let mut slices = [IoSliceMut::new(&mut buffer)];
        let mut control = nix::cmsg_space!(TimeSpec);
        let received = recvmsg::<()>(
            self.0.as_raw_fd(),
            &mut slices,
            Some(&mut control),
            MsgFlags::empty(),
        );
        let message = match received {
            Ok(message) => message,
            Err(errno) if std::io::Error::from(errno).kind() == ErrorKind::WouldBlock => {
                return Ok(None);
            }
            Err(Errno::EINTR) => return Ok(None),
            Err(errno) => return Err(errno),
        };
        let stamp = message.cmsgs()?.find_map(|control| match control {
            ControlMessageOwned::ScmTimestampns(at) => Some(Duration::from(at)),
            _ => None,
        });
        let len = message.bytes;
        Ok(stamp.map(|at| (at, buffer[..len].to_vec())))
    }
}
