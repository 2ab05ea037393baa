//! Dumps that a simulated kernel interrupts.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};

use netlink_packet_core::{DoneMessage, NLM_F_MULTIPART, NetlinkBuffer, NetlinkHeader};
use netlink_packet_route::link::{LinkAttribute, LinkMessage};
use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr};

use super::*;
use crate::link;

/// Part of a reply: an ifindex or the end, and whether the part is marked as interrupted.
#[derive(Clone, Copy)]
enum Part {
    Device(u32, bool),
    Done(bool),
    Failed(i32),
}

/// A socket whose other side answers each request with the next dump of a script. After the end of the script, it
/// repeats the last dump.
struct Kernel {
    /// Only used for its flags.
    socket: Socket,
    listings: Mutex<VecDeque<Vec<Part>>>,
    asked: Arc<AtomicU32>,
    answers: Mutex<VecDeque<Vec<u8>>>,
    reader: Mutex<Option<Waker>>,
}

impl Kernel {
    fn answer(&self, request: &[u8]) {
        let sequence = NetlinkBuffer::new_checked(request)
            .unwrap()
            .sequence_number();
        self.asked.fetch_add(1, Ordering::SeqCst);
        let mut listings = lock(&self.listings);
        let listing = match listings.len() {
            1 => listings[0].clone(),
            _ => listings.pop_front().unwrap(),
        };
        let mut answers = lock(&self.answers);
        answers.extend(listing.into_iter().map(|part| bytes_of(part, sequence)));
        if let Some(reader) = lock(&self.reader).take() {
            reader.wake();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap()
}

fn bytes_of(part: Part, sequence: u32) -> Vec<u8> {
    let (payload, is_interrupted) = match part {
        Part::Device(index, is_interrupted) => {
            let mut device = LinkMessage::default();
            device.header.index = index;
            device.attributes = vec![LinkAttribute::IfName(format!("d{index}"))];
            let device = RouteNetlinkMessage::NewLink(device);
            (NetlinkPayload::InnerMessage(device), is_interrupted)
        }
        Part::Done(is_interrupted) => {
            (NetlinkPayload::Done(DoneMessage::default()), is_interrupted)
        }
        Part::Failed(code) => {
            let mut done = DoneMessage::default();
            done.code = -code;
            (NetlinkPayload::Done(done), false)
        }
    };
    let mut header = NetlinkHeader::default();
    header.sequence_number = sequence;
    header.flags = NLM_F_MULTIPART | if is_interrupted { NLM_F_DUMP_INTR } else { 0 };
    let mut message = NetlinkMessage::new(header, payload);
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    bytes
}

impl AsyncSocket for Kernel {
    fn socket_ref(&self) -> &Socket {
        &self.socket
    }

    fn socket_mut(&mut self) -> &mut Socket {
        &mut self.socket
    }

    fn new(_: isize) -> io::Result<Self> {
        unreachable!("it is made by the test")
    }

    fn poll_send(&self, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.answer(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_send_to(
        &self,
        cx: &mut Context<'_>,
        bytes: &[u8],
        _: &SocketAddr,
    ) -> Poll<io::Result<usize>> {
        self.poll_send(cx, bytes)
    }

    fn poll_recv<B: bytes::BufMut>(
        &self,
        cx: &mut Context<'_>,
        buffer: &mut B,
    ) -> Poll<io::Result<()>> {
        match lock(&self.answers).pop_front() {
            Some(answer) => {
                buffer.put_slice(&answer);
                Poll::Ready(Ok(()))
            }
            None => {
                *lock(&self.reader) = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }

    fn poll_recv_from<B: bytes::BufMut>(
        &self,
        cx: &mut Context<'_>,
        buffer: &mut B,
    ) -> Poll<io::Result<SocketAddr>> {
        let received = self.poll_recv(cx, buffer);
        received.map_ok(|()| SocketAddr::new(0, 0))
    }

    fn poll_recv_from_full(&self, cx: &mut Context<'_>) -> Poll<io::Result<(Vec<u8>, SocketAddr)>> {
        let mut bytes = Vec::new();
        let received = self.poll_recv_from(cx, &mut bytes);
        received.map_ok(|from| (bytes, from))
    }
}

/// Returns the devices that such a kernel dumps, or the error, and the number of requests.
async fn listed(listings: &[&[Part]]) -> (Result<Vec<u32>, String>, u32) {
    let asked = Arc::new(AtomicU32::new(0));
    let kernel = Kernel {
        socket: Socket::new(NETLINK_ROUTE).unwrap(),
        listings: Mutex::new(listings.iter().map(|listing| listing.to_vec()).collect()),
        asked: asked.clone(),
        answers: Mutex::default(),
        reader: Mutex::default(),
    };
    let (mut connection, requests, _) = rtnetlink::from_socket(kernel);
    let handle = Handle::of(&mut connection, requests);
    tokio::spawn(connection);
    let listed = link::list(&handle).await;
    let indices = listed.map(|links| links.iter().map(|link| link.index).collect());
    (
        indices.map_err(|error| error.to_string()),
        asked.load(Ordering::SeqCst),
    )
}

#[tokio::test]
async fn an_interrupted_listing_is_asked_for_again() {
    use Part::{Device, Done};
    let whole = &[
        Device(1, false),
        Device(2, false),
        Device(3, false),
        Done(false),
    ][..];
    assert_eq!(listed(&[whole]).await, (Ok(vec![1, 2, 3]), 1));
    for torn in [
        // Marked in a later part; or at the end, when nothing was left.
        &[Device(1, false), Device(3, true), Done(false)][..],
        &[Device(1, false), Done(true)],
    ] {
        assert_eq!(listed(&[torn, torn, whole]).await, (Ok(vec![1, 2, 3]), 3));
    }
}

#[tokio::test]
async fn one_that_is_interrupted_again_and_again_is_reported_and_never_taken() {
    let torn = &[Part::Device(1, false), Part::Done(true)][..];
    let reported =
        format!("cannot list devices: changes interrupted the listing {LIST_ATTEMPTS} times");
    assert_eq!(listed(&[torn]).await, (Err(reported), LIST_ATTEMPTS));
}

#[tokio::test]
async fn one_that_the_kernel_broke_off_is_not_taken() {
    let broken = &[Part::Device(1, false), Part::Failed(libc::ENOMEM)][..];
    let (listed, asked) = listed(&[broken]).await;
    let error = listed.unwrap_err();
    assert!(error.contains("Cannot allocate memory"), "{error}");
    assert_eq!(asked, 1);
}
