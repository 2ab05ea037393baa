//! Packet sockets: where hostile frames are sent, and where they may not arrive.

use std::io::ErrorKind;
use std::os::fd::AsRawFd as _;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use nix::ifaddrs::getifaddrs;
use nix::libc;
use nix::sys::socket::{MsgFlags, bind, recv, setsockopt, sockopt};
use nix::{setsockopt_impl, sockopt_impl};
use socket2::{Domain, Socket, Type};

use super::Frame;
use super::link::ethertypes;
use crate::slowness;

/// Room for the frames of a batch, bytes.
const RECEIVE_BUFFER: usize = 16 << 20;
/// The longest frame: one that is still to be cut into segments.
const LONGEST: usize = 1 << 17;
/// The mark of a packet that the programs have answered.
const MARK_ANSWERED: u32 = 0x6865_616c;
/// The longest time for what the kernel has queued, on a machine that is not slow.
const QUEUED: Duration = Duration::from_secs(20);
const LOST: &str = "the last frame of a batch does not come";
/// All types of frames.
const ALL: u16 = libc::ETH_P_ALL as u16;

sockopt_impl!(
    /// Not to see what the device sends.
    IgnoreOutgoing,
    SetOnly,
    libc::SOL_PACKET,
    libc::PACKET_IGNORE_OUTGOING,
    bool
);

sockopt_impl!(
    /// Frames are sent with a header that tells how to cut them.
    VnetHeader,
    SetOnly,
    libc::SOL_PACKET,
    libc::PACKET_VNET_HDR,
    bool
);

/// A socket that gets frames of one type, or all, that come by a device.
#[derive(Debug)]
pub struct Tap(Socket);

impl Tap {
    /// Of all that a device of the calling thread's namespace receives, before the device's programs see it.
    pub fn of_all(device: &str) -> anyhow::Result<Self> {
        Self::open(device, ALL)
    }

    /// For each Ethernet type that a hostile frame can have, of what the device's programs have let pass: the kernel
    /// hands these out with what goes to its own stack, and not before.
    pub fn behind_programs(device: &str) -> anyhow::Result<Vec<(u16, Self)>> {
        ethertypes()
            .map(|ethertype| Ok((ethertype, Self::open(device, ethertype)?)))
            .collect()
    }

    fn open(device: &str, ethertype: u16) -> anyhow::Result<Self> {
        let tap = Self(open(device, ethertype)?);
        if ethertype == ALL {
            setsockopt(&tap.0, IgnoreOutgoing, &true)?;
        }
        setsockopt(&tap.0, sockopt::RcvBufForce, &RECEIVE_BUFFER)?;
        tap.0.set_read_timeout(Some(QUEUED * slowness()))?;
        // What other devices received before this one was named.
        tap.drain()?;
        Ok(tap)
    }

    /// All that has come.
    pub fn drain(&self) -> anyhow::Result<Vec<Vec<u8>>> {
        let mut frames = Vec::new();
        let mut buffer = vec![0; LONGEST];
        while let Some(frame) = self.next(&mut buffer, MsgFlags::MSG_DONTWAIT)? {
            frames.push(frame);
        }
        Ok(frames)
    }

    /// All that has come before this frame, which is waited for.
    pub fn until(&self, last: &[u8]) -> anyhow::Result<Vec<Vec<u8>>> {
        let start = Instant::now();
        let mut frames = Vec::new();
        let mut buffer = vec![0; LONGEST];
        loop {
            ensure!(start.elapsed() < QUEUED * slowness(), "{LOST}");
            let frame = self.next(&mut buffer, MsgFlags::empty())?;
            let frame = frame.context(LOST)?;
            if frame == last {
                return Ok(frames);
            }
            frames.push(frame);
        }
    }

    fn next(&self, buffer: &mut [u8], flags: MsgFlags) -> anyhow::Result<Option<Vec<u8>>> {
        match recv(self.0.as_raw_fd(), buffer, flags).map_err(std::io::Error::from) {
            Ok(len) => Ok(Some(buffer[..len].to_vec())),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

/// Sockets by which frames are put on a device's wire.
#[derive(Debug)]
pub struct Outlet {
    plain: Socket,
    marked: Socket,
    segmented: Socket,
}

impl Outlet {
    /// On a device of the calling thread's namespace.
    pub fn on(device: &str) -> anyhow::Result<Self> {
        // None of them receives anything.
        let outlet = Self {
            plain: open(device, 0)?,
            marked: open(device, 0)?,
            segmented: open(device, 0)?,
        };
        outlet.marked.set_mark(MARK_ANSWERED)?;
        setsockopt(&outlet.segmented, VnetHeader, &true)?;
        Ok(outlet)
    }

    /// Sends a frame; `false` if the kernel does not take it.
    pub fn send(&self, frame: &Frame) -> anyhow::Result<bool> {
        let sent = match &frame.segmentation {
            Some(header) => self.segmented.send(&[header, &frame.bytes[..]].concat()),
            None if frame.is_marked => self.marked.send(&frame.bytes),
            None => self.plain.send(&frame.bytes),
        };
        match sent {
            Ok(_) => Ok(true),
            Err(error) => match error.raw_os_error() {
                // A program has dropped it.
                Some(libc::ENOBUFS) => Ok(true),
                // It is too long, its headers do not fit, or it cannot be cut.
                Some(libc::EMSGSIZE | libc::EINVAL | libc::ENOMEM) => Ok(false),
                _ => Err(error.into()),
            },
        }
    }

    /// Sends bytes as they are.
    pub fn send_plain(&self, bytes: &[u8]) -> anyhow::Result<()> {
        self.plain.send(bytes)?;
        Ok(())
    }
}

fn open(device: &str, ethertype: u16) -> anyhow::Result<Socket> {
    let protocol = i32::from(ethertype.to_be());
    let socket = Socket::new(Domain::PACKET, Type::RAW, Some(protocol.into()))?;
    let address = getifaddrs()?
        .filter(|entry| entry.interface_name == device)
        .find_map(|entry| entry.address?.as_link_addr().copied());
    let address = address.with_context(|| format!("there is no device {device}"))?;
    bind(socket.as_raw_fd(), &address)?;
    Ok(socket)
}
