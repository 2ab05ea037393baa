//! Connections to the kernel's routing netlink. One is bound for life to the network namespace of
//! the thread that opened it.

use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use tokio::sync::{Mutex, MutexGuard};

use super::KernelError;

/// A connection. Clones share it.
#[derive(Clone, Debug)]
pub struct Handle {
    requests: rtnetlink::Handle,
    listing: Arc<Mutex<()>>,
}

impl Handle {
    /// One that nobody else has.
    pub(super) fn new(requests: rtnetlink::Handle) -> Self {
        Self {
            requests,
            listing: Arc::default(),
        }
    }

    /// To be held while a listing is read, to its end: a socket has one at a time, and the kernel
    /// answers a request for a second one with `EBUSY` (net/netlink/af_netlink.c,
    /// `__netlink_dump_start`).
    pub(super) async fn turn_to_list(&self) -> MutexGuard<'_, ()> {
        self.listing.lock().await
    }
}

impl Deref for Handle {
    type Target = rtnetlink::Handle;

    fn deref(&self) -> &Self::Target {
        &self.requests
    }
}

impl DerefMut for Handle {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.requests
    }
}

/// Opens a connection in the calling thread's network namespace. Must be called inside a tokio
/// runtime, which then drives it until the last clone of the handle is dropped.
pub fn open() -> Result<Handle, KernelError> {
    connect().map_err(|source| KernelError::new("open", "a netlink socket", source))
}

pub(super) fn connect() -> io::Result<Handle> {
    // Strict checking makes the kernel honour filters in dump requests.
    let (connection, handle, _) = rtnetlink::new_connection_with_strict_check()?;
    tokio::spawn(connection);
    Ok(Handle::new(handle))
}

/// The kernel's answer behind an error of the library.
pub(super) fn os_error(error: rtnetlink::Error) -> io::Error {
    match error {
        rtnetlink::Error::NetlinkError(message) => message.to_io(),
        other => io::Error::other(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use nix::sched::{CloneFlags, unshare};

    use super::*;
    use crate::link::{self, VethPair};
    use crate::mac::MacAddr;
    use crate::route;

    #[test]
    fn listings_at_the_same_time_all_succeed() {
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: needs root");
            return;
        }
        // In a namespace of its own, which ends with the thread.
        let run = || {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            tokio::runtime::Builder::new_multi_thread()
                .worker_threads(4)
                .enable_all()
                .build()
                .unwrap()
                .block_on(list_again_and_again());
        };
        std::thread::spawn(run).join().unwrap();
    }

    async fn list_again_and_again() {
        let handle = open().unwrap();
        // More than the kernel writes into one answer, so that a listing takes several.
        for n in 0..16 {
            let pair = VethPair {
                name: &format!("a{n}"),
                mac: MacAddr([2, 0, 0, 0, 0, 2 * n]),
                peer_name: &format!("b{n}"),
                peer_mac: MacAddr([2, 0, 0, 0, 0, 2 * n + 1]),
                mtu: 1500,
            };
            link::create_veth(&handle, &pair).await.unwrap();
        }
        let lists = (0..4).map(|_| {
            let handle = handle.clone();
            tokio::spawn(async move {
                for _ in 0..50 {
                    assert_eq!(link::list(&handle).await?.len(), 33);
                    link::addresses(&handle).await?;
                    route::list_ours(&handle).await.unwrap();
                }
                Ok::<_, KernelError>(())
            })
        });
        for result in futures_util::future::join_all(lists).await {
            result.unwrap().unwrap();
        }
    }
}
