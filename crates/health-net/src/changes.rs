//! Reports that devices, addresses or routes of a network namespace have changed, but not which ones.

use std::io;
use std::os::fd::AsFd as _;

use netlink_sys::SocketAddr;
use netlink_sys::protocols::NETLINK_ROUTE;
use socket2::Socket;
use tokio::io::unix::AsyncFd;

use super::{KernelError, rawsock};

/// Devices, and the addresses and routes of both families (`RTMGRP_*` of rtnetlink(7)). Neighbour entries are left out,
/// because they change all the time.
const GROUPS: libc::c_int = libc::RTMGRP_LINK
    | libc::RTMGRP_IPV4_IFADDR
    | libc::RTMGRP_IPV6_IFADDR
    | libc::RTMGRP_IPV4_ROUTE
    | libc::RTMGRP_IPV6_ROUTE;
/// Maximum number of messages discarded at a time.
const BATCH: usize = 1_024;

/// A listener for such changes.
#[derive(Debug)]
pub struct Changes(AsyncFd<Socket>);

impl Changes {
    /// Listens in the calling thread's namespace. Must be called in a tokio runtime.
    pub fn listen() -> Result<Self, KernelError> {
        let open = || -> io::Result<AsyncFd<Socket>> {
            let mut socket = netlink_sys::Socket::new(NETLINK_ROUTE)?;
            socket.set_non_blocking(true)?;
            socket.bind(&SocketAddr::new(0, GROUPS.cast_unsigned()))?;
            rawsock::watch_readable(socket.as_fd().try_clone_to_owned()?.into())
        };
        let socket = open();
        socket
            .map(Self)
            .map_err(|source| KernelError::new("subscribe to", "device changes", source))
    }

    /// Waits for a change. Fails only if no more changes can be received.
    pub async fn next(&mut self) -> io::Result<()> {
        loop {
            let mut ready = self.0.readable().await?;
            match drain(ready.get_inner()) {
                0 => ready.clear_ready(),
                _ => return Ok(()),
            }
        }
    }
}

/// Discards pending messages and returns their number. Messages lost for lack of buffer space also count as a change.
fn drain(socket: &Socket) -> usize {
    // The contents do not matter, and the kernel truncates messages to the buffer.
    let mut room = [const { std::mem::MaybeUninit::uninit() }; 16];
    for taken in 0..BATCH {
        match socket.recv(&mut room) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return taken,
            Err(_) => return taken + 1,
        }
    }
    BATCH
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;
    use crate::testing::in_a_namespace;
    use crate::{link, netlink};

    #[test]
    fn a_change_of_a_device_is_news_once() {
        in_a_namespace(async || {
            let mut changes = Changes::listen().unwrap();
            let nothing = timeout(Duration::from_millis(20), changes.next());
            assert!(nothing.await.is_err());
            let handle = netlink::open().unwrap();
            let loopback = link::by_name(&handle, "lo").await.unwrap().unwrap();
            link::set_up(&handle, &loopback).await.unwrap();
            changes.next().await.unwrap();
            // IPv6 may take a moment to assign its address.
            while timeout(Duration::from_secs(1), changes.next())
                .await
                .is_ok()
            {}
            let nothing = timeout(Duration::from_millis(20), changes.next());
            assert!(nothing.await.is_err());
        });
    }
}
