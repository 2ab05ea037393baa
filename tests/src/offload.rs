//! Sets offloads of devices in other namespaces, like `ethtool -K` (linux/ethtool.h).

use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsRawFd as _;

use anyhow::{Context as _, ensure};
use health_net::netns::NetNs;

/// A task that either the device or the stack performs. The discriminant is the ethtool command that sets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Offload {
    /// Checksums of sent packets (`ETHTOOL_STXCSUM`). Without it, the device does not segment either.
    TxChecksums = 0x17,
    /// Merging of received segments (`ETHTOOL_SGRO`).
    Gro = 0x2c,
}

/// `struct ethtool_value`.
#[repr(C)]
struct Value {
    command: u32,
    data: u32,
}

/// Sets an offload of a device in a named namespace.
pub fn set(namespace: &str, device: &str, offload: Offload, is_on: bool) -> anyhow::Result<()> {
    let value = Value {
        command: offload as u32,
        data: is_on.into(),
    };
    NetNs::open(namespace)?
        .run_in(|| ask(device, value))?
        .with_context(|| format!("{offload:?} of {device} in {namespace}"))
}

/// Sends an ethtool request in the calling thread's namespace.
fn ask(device: &str, mut value: Value) -> anyhow::Result<()> {
    // SAFETY: the struct consists of integers and pointers, for which zero is a valid value.
    let mut message: libc::ifreq = unsafe { std::mem::zeroed() };
    let name = device.as_bytes();
    // The last byte stays 0 to terminate the name.
    ensure!(name.len() < message.ifr_name.len(), "the name is too long");
    for (to, from) in message.ifr_name.iter_mut().zip(name) {
        *to = *from as libc::c_char;
    }
    message.ifr_ifru.ifru_data = (&raw mut value).cast();
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    // SAFETY: the socket is open, the name is null-terminated, and the data is the struct that these commands expect;
    // all of them live until the call returns.
    let result =
        unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL as _, &raw mut message) };
    ensure!(result >= 0, io::Error::last_os_error());
    Ok(())
}
