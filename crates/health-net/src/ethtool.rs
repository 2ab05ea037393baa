//! Devices' drivers, read like `ethtool` (linux/ethtool.h). Works in the network namespace of the calling thread.

use std::ffi::CStr;
use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsRawFd as _;

/// `ETHTOOL_GDRVINFO`.
const GET_DRIVER_INFO: u32 = 3;

/// The start of `struct ethtool_drvinfo`, and its length.
#[repr(C)]
struct DriverInfo {
    command: u32,
    driver: [libc::c_char; 32],
    rest: [u8; 160],
}

const _: () = assert!(size_of::<DriverInfo>() == 196);

/// Returns the name of a device's driver: `veth`, `ixgbe`.
pub fn driver(device: &str) -> io::Result<String> {
    let mut info = DriverInfo {
        command: GET_DRIVER_INFO,
        driver: [0; 32],
        rest: [0; 160],
    };
    // SAFETY: the structure has only integers and pointers, for which zero is a valid value.
    let mut message: libc::ifreq = unsafe { std::mem::zeroed() };
    let name = device.as_bytes();
    // The last byte stays 0.
    if name.len() >= message.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in message.ifr_name.iter_mut().zip(name) {
        *to = *from as libc::c_char;
    }
    message.ifr_ifru.ifru_data = (&raw mut info).cast();
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    // SAFETY: an open socket, a terminated name, and the structure of this command; all live until the call returns.
    let result =
        unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL as _, &raw mut message) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    info.driver[31] = 0;
    // SAFETY: the string ends within its array.
    let driver = unsafe { CStr::from_ptr(info.driver.as_ptr()) };
    Ok(driver.to_string_lossy().into_owned())
}
