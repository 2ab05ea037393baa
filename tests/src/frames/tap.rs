//! Packet sockets that send hostile frames, and packet sockets on which these frames must not arrive.

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

/// Receive buffer size for the frames of a batch, in bytes.
const RECEIVE_BUFFER: usize = 16 << 20;
/// Maximum frame size: a frame that is yet to be segmented (GSO).
const LONGEST: usize = 1 << 17;
/// The mark of packets that the programs have answered.
const MARK_ANSWERED: u32 = 0x6865_616c;
/// Maximum time to drain the kernel's queues, before it is multiplied by the machine's slowness.
const QUEUED: Duration = Duration::from_secs(20);
const LOST: &str = "the last frame of a batch did not arrive";
/// EtherType that matches all frames.
const ALL: u16 = libc::ETH_P_ALL as u16;

sockopt_impl!(
    /// Hides frames that the device sends.
    IgnoreOutgoing,
    SetOnly,
    libc::SOL_PACKET,
    libc::PACKET_IGNORE_OUTGOING,
    bool
);

sockopt_impl!(
    /// Puts a header before each sent frame that describes how to segment it.
    VnetHeader,
    SetOnly,
    libc::SOL_PACKET,
    libc::PACKET_VNET_HDR,
    bool
);

/// A socket that receives the frames that arrive at a device, either all of them or those of one EtherType.
#[derive(Debug)]
pub struct Tap(Socket);

impl Tap {
    /// Receives all frames that arrive at a device of the calling thread's namespace, before the device's programs see
    /// them.
    pub fn of_all(device: &str) -> anyhow::Result<Self> {
        Self::open(device, ALL)
    }

    /// Opens a tap for each EtherType of hostile frames. These taps receive only frames that passed the device's
    /// programs: the kernel delivers frames to them together with its own stack, and not before.
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
        // Discards frames that other devices received before the socket was bound to this one.
        tap.drain()?;
        Ok(tap)
    }

    /// Returns all frames received so far.
    pub fn drain(&self) -> anyhow::Result<Vec<Vec<u8>>> {
        let mut frames = Vec::new();
        let mut buffer = vec![0; LONGEST];
        while let Some(frame) = self.next(&mut buffer, MsgFlags::MSG_DONTWAIT)? {
            frames.push(frame);
        }
        Ok(frames)
    }

    /// Waits for the frame `last` and returns all frames received before it.
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

/// Sockets that send frames on a device's wire.
#[derive(Debug)]
pub struct Outlet {
    plain: Socket,
    marked: Socket,
    segmented: Socket,
}

impl Outlet {
    /// Opens the sockets on a device of the calling thread's namespace.
    pub fn on(device: &str) -> anyhow::Result<Self> {
        // None of the sockets receives anything.
        let outlet = Self {
            plain: open(device, 0)?,
            marked: open(device, 0)?,
            segmented: open(device, 0)?,
        };
        outlet.marked.set_mark(MARK_ANSWERED)?;
        setsockopt(&outlet.segmented, VnetHeader, &true)?;
        Ok(outlet)
    }

    /// Sends a frame. Returns false if the kernel rejects it.
    pub fn send(&self, frame: &Frame) -> anyhow::Result<bool> {
        let sent = match &frame.segmentation {
            Some(header) => self.segmented.send(&[header, &frame.bytes[..]].concat()),
            None if frame.is_marked => self.marked.send(&frame.bytes),
            None => self.plain.send(&frame.bytes),
        };
        match sent {
            Ok(_) => Ok(true),
            Err(error) => match error.raw_os_error() {
                // A program dropped the frame.
                Some(libc::ENOBUFS) => Ok(true),
                // The frame is too long, its headers do not fit, or it cannot be segmented.
                Some(libc::EMSGSIZE | libc::EINVAL | libc::ENOMEM) => Ok(false),
                _ => Err(error.into()),
            },
        }
    }

    /// Sends raw bytes as a frame.
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
