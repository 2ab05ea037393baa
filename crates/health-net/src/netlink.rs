//! Connections to the kernel's routing netlink. A connection always stays in the network namespace of the thread that
//! opened it.

#[cfg(test)]
mod interrupted;

use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use futures_util::StreamExt as _;
use netlink_packet_core::{
    NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::RouteNetlinkMessage;
use rtnetlink::proto::Connection;
use rtnetlink::sys::AsyncSocket;
use tokio::sync::Mutex;

use super::KernelError;

/// Maximum number of requests for a dump that changes interrupt.
const LIST_ATTEMPTS: u32 = 20;

/// A connection. Clones share it.
#[derive(Clone, Debug)]
pub struct Handle {
    requests: rtnetlink::Handle,
    listing: Arc<Mutex<()>>,
}

impl Handle {
    /// Wraps a connection. The caller must drive it, and nobody else may use it.
    pub(super) fn of<S: AsyncSocket>(
        connection: &mut Connection<RouteNetlinkMessage, S>,
        requests: rtnetlink::Handle,
    ) -> Self {
        // The final message of a dump says whether the dump is complete.
        connection.set_forward_done(true);
        Self {
            requests,
            listing: Arc::default(),
        }
    }

    /// Dumps the objects that a request selects; `take` converts each message. The kernel sends a dump in parts and
    /// marks it if something changed between two parts. Entries may then be missing, so the dump is requested again.
    pub(super) async fn list<T>(
        &self,
        request: RouteNetlinkMessage,
        take: impl Fn(RouteNetlinkMessage) -> Option<T>,
    ) -> io::Result<Vec<T>> {
        // A socket handles one dump at a time; the kernel rejects a second request with `EBUSY`
        // (net/netlink/af_netlink.c, `__netlink_dump_start`).
        let _turn = self.listing.lock().await;
        for _ in 0..LIST_ATTEMPTS {
            if let Some(listed) = self.list_once(request.clone(), &take).await? {
                return Ok(listed);
            }
        }
        Err(io::Error::other(format!(
            "changes interrupted the listing {LIST_ATTEMPTS} times"
        )))
    }

    /// Requests a dump once. Returns `None` if changes interrupted it.
    async fn list_once<T>(
        &self,
        request: RouteNetlinkMessage,
        take: impl Fn(RouteNetlinkMessage) -> Option<T>,
    ) -> io::Result<Option<Vec<T>>> {
        let mut message = NetlinkMessage::from(request);
        message.header.flags = NLM_F_REQUEST | NLM_F_DUMP;
        let mut answers = self.requests.clone().request(message).map_err(os_error)?;
        let (mut listed, mut is_whole) = (Vec::new(), true);
        // Reads to the end in any case, so that the next dump can start.
        while let Some(answer) = answers.next().await {
            is_whole &= answer.header.flags & NLM_F_DUMP_INTR == 0;
            match answer.payload {
                NetlinkPayload::InnerMessage(message) => listed.extend(take(message)),
                NetlinkPayload::Done(done) if done.code < 0 => {
                    return Err(io::Error::from_raw_os_error(-done.code));
                }
                NetlinkPayload::Done(_) => return Ok(is_whole.then_some(listed)),
                NetlinkPayload::Error(error) => return Err(error.to_io()),
                _ => {}
            }
        }
        Err(io::ErrorKind::UnexpectedEof.into())
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

/// Opens a connection in the calling thread's network namespace. Must be called inside a tokio runtime, which drives
/// the connection until the last clone of the handle is dropped.
pub fn open() -> Result<Handle, KernelError> {
    connect().map_err(|source| KernelError::new("open", "a netlink socket", source))
}

pub(super) fn connect() -> io::Result<Handle> {
    // Strict checking makes the kernel honour filters in dump requests.
    let (mut connection, requests, _) = rtnetlink::new_connection_with_strict_check()?;
    let handle = Handle::of(&mut connection, requests);
    tokio::spawn(connection);
    Ok(handle)
}

/// Returns the kernel's error inside an error of the library.
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

    /// Runs a test in its own namespace, which disappears with the thread.
    fn in_a_namespace(test: impl Future<Output = ()> + Send) {
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: needs root");
            return;
        }
        let run = || {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            tokio::runtime::Builder::new_multi_thread()
                .worker_threads(4)
                .enable_all()
                .build()
                .unwrap()
                .block_on(test);
        };
        std::thread::scope(|scope| scope.spawn(run).join().unwrap());
    }

    async fn make_pair(handle: &Handle, n: u8) {
        let pair = VethPair {
            name: &format!("a{n}"),
            mac: MacAddr([2, 0, 0, 0, n, 0]),
            peer_name: &format!("b{n}"),
            peer_mac: MacAddr([2, 0, 0, 0, n, 1]),
            mtu: 1500,
        };
        link::create_veth(handle, &pair).await.unwrap();
    }

    #[test]
    fn listings_at_the_same_time_all_succeed() {
        in_a_namespace(list_again_and_again());
    }

    #[test]
    fn listings_are_whole_while_devices_come_and_go() {
        in_a_namespace(list_while_devices_come_and_go());
    }

    async fn list_while_devices_come_and_go() {
        const STAYING: u8 = 100;
        let (handle, other) = (open().unwrap(), open().unwrap());
        for n in 0..STAYING {
            make_pair(&handle, n).await;
        }
        let churn = tokio::spawn(async move {
            loop {
                make_pair(&other, STAYING).await;
                let coming = link::by_name(&other, &format!("a{STAYING}")).await;
                link::delete(&other, &coming.unwrap().unwrap())
                    .await
                    .unwrap();
            }
        });
        let is_whole = |listed: &[link::Link]| {
            let stays = |link: &&link::Link| link.mac.is_some_and(|mac| mac.0[4] < STAYING);
            // The loopback's hardware address is all zeros.
            let staying = listed.iter().filter(|link| !link.loopback).filter(stays);
            staying.count() == 2 * usize::from(STAYING)
        };
        // If the changes do not stop, a dump may fail, but is never returned partially.
        for _ in 0..100 {
            if let Ok(listed) = link::list(&handle).await {
                assert!(is_whole(&listed), "{listed:?}");
            }
        }
        churn.abort();
        let _ = churn.await;
        assert!(is_whole(&link::list(&handle).await.unwrap()));
        link::addresses(&handle).await.unwrap();
    }

    async fn list_again_and_again() {
        let handle = open().unwrap();
        // More devices than fit into one message, so that a dump takes several.
        for n in 0..16 {
            make_pair(&handle, n).await;
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
