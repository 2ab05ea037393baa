//! What devices do in place of the host's stack, as `ethtool -K` sets it.

use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsRawFd as _;

use anyhow::Context as _;
use health_net::netns::NetNs;
use nix::errno::Errno;

/// Something that a device does, or leaves to the stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Offload {
    /// Checksums of what it sends. Without it, segments are not cut by it either.
    Checksums = 0x17,
    /// Merging of segments that it receives (GRO).
    Merging = 0x2c,
}

/// `struct ethtool_value`.
#[repr(C)]
struct Value {
    command: u32,
    data: u32,
}

/// Sets it for a device of a named namespace.
pub fn set(namespace: &str, device: &str, offload: Offload, is_on: bool) -> anyhow::Result<()> {
    NetNs::open(namespace)?
        .run_in(|| set_here(device, offload, is_on))?
        .with_context(|| format!("{offload:?} of {device} in {namespace}"))
}

fn set_here(device: &str, offload: Offload, is_on: bool) -> io::Result<()> {
    let mut value = Value {
        command: offload as u32,
        data: is_on.into(),
    };
    // SAFETY: integers and pointers, for which zero is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let name = device.as_bytes();
    // The last byte stays 0.
    if name.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name) {
        *to = *from as libc::c_char;
    }
    request.ifr_ifru.ifru_data = (&raw mut value).cast();
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    // SAFETY: an open socket, a request with a name that ends, and the structure that its command is for, which live
    // until the call returns.
    Errno::result(unsafe {
        libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL as _, &raw mut request)
    })?;
    Ok(())
}
