//! Netlink requests that block until the kernel's reply, which is immediate.

use std::io;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR, NetlinkBuffer, NetlinkSerializable,
};

/// Bytes of `struct nlmsghdr`.
const HEADER_LEN: usize = 16;

/// A connection to the kernel, in the network namespace of the thread that opened it.
#[derive(Debug)]
pub(crate) struct KernelSocket(netlink_sys::Socket);

impl KernelSocket {
    /// Opens a connection for this protocol, such as `NETLINK_ROUTE`.
    pub(crate) fn open(protocol: isize) -> io::Result<Self> {
        let mut socket = netlink_sys::Socket::new(protocol)?;
        socket.bind_auto()?;
        Ok(Self(socket))
    }

    /// Sends a request, and calls `each` with the flags and the payload of every object in the reply.
    pub(crate) fn request_message(
        &mut self,
        request: &impl NetlinkSerializable,
        flags: u16,
        each: &mut dyn FnMut(u16, &[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut payload = vec![0; request.buffer_len()];
        request.serialize(&mut payload);
        self.request(request.message_type(), flags, &payload, each)
    }

    /// Like [`request_message`](Self::request_message), with a payload of any type.
    pub(crate) fn request(
        &mut self,
        kind: u16,
        flags: u16,
        payload: &[u8],
        each: &mut dyn FnMut(u16, &[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let len = (HEADER_LEN + payload.len()) as u32;
        let mut bytes = len.to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend((NLM_F_REQUEST | NLM_F_ACK | flags).to_ne_bytes());
        // Sequence number and port are 0: only one request is pending at a time, and the kernel knows the sender.
        bytes.extend([0; 8]);
        bytes.extend(payload);
        self.0
            .send_to(&bytes, &netlink_sys::SocketAddr::new(0, 0), 0)?;
        loop {
            let (bytes, _) = self.0.recv_from_full()?;
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                let message = NetlinkBuffer::new_checked(rest).map_err(io::Error::other)?;
                let payload = message.payload();
                match message.message_type() {
                    NLMSG_ERROR | NLMSG_DONE => return answer(payload),
                    _ => each(message.flags(), payload)?,
                }
                let len = (message.length() as usize).next_multiple_of(4);
                rest = rest.get(len..).unwrap_or_default();
            }
        }
    }
}

/// Returns the error number at the end of a reply.
fn answer(payload: &[u8]) -> io::Result<()> {
    let code = payload
        .first_chunk()
        .map_or(0, |code| i32::from_ne_bytes(*code));
    match code {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(-code)),
    }
}
