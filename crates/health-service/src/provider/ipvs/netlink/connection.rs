//! A netlink connection: sends requests and reads the replies.

use std::fmt;
use std::io;
use std::os::fd::AsFd as _;
use std::time::Duration;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_ACK_TLVS, NLM_F_CAPPED, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST,
    NLMSG_DONE, NLMSG_ERROR, NetlinkBuffer, NetlinkHeader, NetlinkMessage, NetlinkPayload,
    NetlinkSerializable,
};
use netlink_sys::{Socket, SocketAddr};

use super::attributes::{Malformed, each, text_of};

/// How long to wait for a reply. The kernel is never that slow, but a missing reply must not block forever.
const PATIENCE: Duration = Duration::from_secs(60);
/// Number of requests sent before reading their replies; the socket has space for that many replies.
const BATCH: usize = 64;
/// How often a dump is attempted if changes interrupt it.
const LIST_ATTEMPTS: u32 = 20;
/// `NLMSGERR_ATTR_MSG` (include/uapi/linux/netlink.h).
const ERROR_TEXT: u16 = 1;
/// Bytes of the error number and the request's header in a reply.
const ERROR_HEADER: usize = 20;

/// An error that the kernel returned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The error number: positive, from errno or the subsystem's own range.
    pub code: i32,
    /// The kernel's message, if any.
    pub text: Option<String>,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (super::ipset::error_text(self.code), &self.text) {
            (Some(meaning), _) => f.write_str(meaning),
            (None, Some(text)) => {
                write!(f, "{}: {text}", io::Error::from_raw_os_error(self.code))
            }
            (None, None) => io::Error::from_raw_os_error(self.code).fmt(f),
        }
    }
}

/// Why a request has no result.
#[derive(Debug, thiserror::Error)]
pub enum NetlinkError {
    /// The request could not be sent, or the reply could not be received.
    #[error("{0}")]
    Socket(#[from] io::Error),
    /// The kernel refused.
    #[error("{0}")]
    Refused(Refusal),
    /// The reply cannot be parsed.
    #[error("the kernel's answer cannot be read: {0}")]
    Malformed(&'static str),
}

impl NetlinkError {
    /// Whether the kernel refused the request with this code.
    pub fn is(&self, code: i32) -> bool {
        matches!(self, Self::Refused(refusal) if refusal.code == code)
    }
}

impl From<Malformed> for NetlinkError {
    fn from(malformed: Malformed) -> Self {
        Self::Malformed(malformed.0)
    }
}

/// A connection to a subsystem.
#[derive(Debug)]
pub(super) struct Connection {
    socket: Socket,
    sequence: u32,
}

impl Connection {
    /// Opens a connection in the calling thread's network namespace.
    pub(super) fn open(protocol: isize) -> io::Result<Self> {
        let mut socket = Socket::new(protocol)?;
        socket.bind_auto()?;
        socket.set_cap_ack(true)?;
        socket.set_ext_ack(true)?;
        socket2::SockRef::from(&socket.as_fd()).set_read_timeout(Some(PATIENCE))?;
        Ok(Self {
            socket,
            sequence: 0,
        })
    }

    /// Sends requests with these flags in order, continuing after failures. Returns the result of each.
    pub(super) fn execute<M: NetlinkSerializable>(
        &mut self,
        requests: Vec<(M, u16)>,
    ) -> Result<Vec<Result<(), Refusal>>, NetlinkError> {
        let mut results = Vec::with_capacity(requests.len());
        let mut requests = requests.into_iter().peekable();
        while requests.peek().is_some() {
            let mut bytes = Vec::new();
            let first = self.sequence.wrapping_add(1);
            let batch = requests.by_ref().take(BATCH);
            let sent = batch.map(|(message, flags)| {
                self.write(message, flags | NLM_F_ACK, &mut bytes);
            });
            let sent = sent.count();
            self.send(&bytes)?;
            for number in 0..sent {
                let sequence = first.wrapping_add(number as u32);
                results.push(self.answer(sequence, &mut |_| Ok(()))?);
            }
        }
        Ok(results)
    }

    /// Sends one request, and calls `take` with each object in the reply.
    pub(super) fn request<M: NetlinkSerializable>(
        &mut self,
        message: M,
        flags: u16,
        take: &mut dyn FnMut(&[u8]) -> Result<(), Malformed>,
    ) -> Result<(), NetlinkError> {
        let mut bytes = Vec::new();
        let sequence = self.write(message, flags | NLM_F_ACK, &mut bytes);
        self.send(&bytes)?;
        let result = self.answer(sequence, take)?;
        result.map_err(NetlinkError::Refused)
    }

    /// Dumps objects. The kernel flags a dump during which something changed, as entries may then be missing; the
    /// request is repeated in this case.
    pub(super) fn list<M: NetlinkSerializable + Clone, T>(
        &mut self,
        message: &M,
        read: impl Fn(&[u8]) -> Result<Option<T>, Malformed>,
    ) -> Result<Vec<T>, NetlinkError> {
        for _ in 0..LIST_ATTEMPTS {
            let mut bytes = Vec::new();
            let sequence = self.write(message.clone(), NLM_F_DUMP, &mut bytes);
            self.send(&bytes)?;
            let mut listed = Vec::new();
            let (result, is_whole) = self.parts(sequence, &mut |object| {
                listed.extend(read(object)?);
                Ok(())
            })?;
            result.map_err(NetlinkError::Refused)?;
            if is_whole {
                return Ok(listed);
            }
        }
        let text = format!("changes interrupted the listing {LIST_ATTEMPTS} times");
        Err(io::Error::other(text).into())
    }

    /// Sends messages as one transaction. The first and the last message only delimit the batch
    /// (net/netfilter/nfnetlink.c, `nfnetlink_rcv_batch`).
    pub(super) fn transact<M: NetlinkSerializable>(
        &mut self,
        messages: Vec<(M, u16)>,
    ) -> Result<(), NetlinkError> {
        let mut bytes = Vec::new();
        let first = self.sequence.wrapping_add(1);
        // The acknowledgement of the last request comes when all requests are done.
        let asks = messages.len().saturating_sub(2);
        let mut last = first;
        for (at, (message, flags)) in messages.into_iter().enumerate() {
            if at == asks {
                last = self.write(message, flags | NLM_F_ACK, &mut bytes);
            } else {
                self.write(message, flags, &mut bytes);
            }
        }
        self.send(&bytes)?;
        loop {
            let datagram = self.receive()?;
            for message in messages_of(&datagram) {
                let message = message?;
                let sequence = message.sequence_number();
                let is_ours = sequence.wrapping_sub(first) <= last.wrapping_sub(first);
                if !is_ours || message.message_type() != NLMSG_ERROR {
                    continue;
                }
                let result = result_of(message.flags(), message.payload())?;
                result.map_err(NetlinkError::Refused)?;
                if sequence == last {
                    return Ok(());
                }
            }
        }
    }

    /// Appends a message, and returns its sequence number.
    fn write<M: NetlinkSerializable>(
        &mut self,
        message: M,
        flags: u16,
        bytes: &mut Vec<u8>,
    ) -> u32 {
        self.sequence = self.sequence.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags;
        header.sequence_number = self.sequence;
        let mut message = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(message));
        message.finalize();
        let (begin, len) = (bytes.len(), message.buffer_len());
        bytes.resize(begin + len.next_multiple_of(4), 0);
        message.serialize(&mut bytes[begin..begin + len]);
        self.sequence
    }

    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        self.socket.send_to(bytes, &SocketAddr::new(0, 0), 0)?;
        Ok(())
    }

    /// Receives the next datagram from the kernel, ignoring datagrams from other senders.
    fn receive(&self) -> io::Result<Vec<u8>> {
        loop {
            match self.socket.recv_from_full() {
                Ok((bytes, from)) if from.port_number() == 0 => return Ok(bytes),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let text = format!("no answer within {} s", PATIENCE.as_secs());
                    return Err(io::Error::new(io::ErrorKind::TimedOut, text));
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn answer(
        &self,
        sequence: u32,
        take: &mut dyn FnMut(&[u8]) -> Result<(), Malformed>,
    ) -> Result<Result<(), Refusal>, NetlinkError> {
        self.parts(sequence, take).map(|(result, _)| result)
    }

    /// Reads all parts of a reply, and returns whether it was complete, that is, not interrupted by a change. Skips
    /// leftovers of earlier replies.
    fn parts(
        &self,
        sequence: u32,
        take: &mut dyn FnMut(&[u8]) -> Result<(), Malformed>,
    ) -> Result<(Result<(), Refusal>, bool), NetlinkError> {
        let mut is_whole = true;
        loop {
            let datagram = self.receive()?;
            for message in messages_of(&datagram) {
                let message = message?;
                if message.sequence_number() != sequence {
                    continue;
                }
                is_whole &= message.flags() & NLM_F_DUMP_INTR == 0;
                match message.message_type() {
                    NLMSG_ERROR | NLMSG_DONE => {
                        let result = result_of(message.flags(), message.payload())?;
                        return Ok((result, is_whole));
                    }
                    _ => take(message.payload())?,
                }
            }
        }
    }
}

/// Returns the messages in a datagram.
fn messages_of(bytes: &[u8]) -> impl Iterator<Item = Result<NetlinkBuffer<&[u8]>, Malformed>> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let Ok(message) = NetlinkBuffer::new_checked(rest) else {
            rest = &[];
            return Some(Err(Malformed("a message is cut off")));
        };
        let len = (message.length() as usize).next_multiple_of(4);
        rest = rest.get(len..).unwrap_or_default();
        Some(Ok(message))
    })
}

/// Parses the result at the end of a reply (include/uapi/linux/netlink.h, `struct nlmsgerr`; at the end of a dump, the
/// header of the request is missing).
fn result_of(flags: u16, payload: &[u8]) -> Result<Result<(), Refusal>, Malformed> {
    let code = match payload.first_chunk() {
        Some(code) => i32::from_ne_bytes(*code),
        // The end of a dump may be empty.
        None if payload.is_empty() => 0,
        None => return Err(Malformed("the end of an answer is cut off")),
    };
    if code == 0 {
        return Ok(Ok(()));
    }
    let has_text = flags & NLM_F_ACK_TLVS != 0 && flags & NLM_F_CAPPED != 0;
    let details = payload.get(ERROR_HEADER..).filter(|_| has_text);
    let mut text = None;
    for attribute in each(details.unwrap_or_default()) {
        let (kind, value) = attribute?;
        if kind == ERROR_TEXT {
            text = Some(text_of(value, "the text of an error")?);
        }
    }
    Ok(Err(Refusal {
        code: code.saturating_neg(),
        text,
    }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_kernels_reason_is_reported() {
        let mut payload = (-22_i32).to_ne_bytes().to_vec();
        payload.extend([0; 16]);
        payload.extend([9, 0, 1, 0]);
        payload.extend(b"cold\0");
        let reported = result_of(NLM_F_ACK_TLVS | NLM_F_CAPPED, &payload).unwrap();
        assert_eq!(
            reported.unwrap_err().to_string(),
            "Invalid argument (os error 22): cold"
        );
        let reported = result_of(0, &(-4103_i32).to_ne_bytes()).unwrap();
        assert_eq!(
            reported.unwrap_err().to_string(),
            "the entry is already in the set"
        );
        assert_eq!(result_of(0, &[0; 4]), Ok(Ok(())));
        assert_eq!(result_of(0, &[]), Ok(Ok(())));
        assert!(result_of(0, &[1]).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes: Vec<u8>, flags: u16) {
            for message in messages_of(&bytes).flatten() {
                let _ = result_of(message.flags(), message.payload());
            }
            let _ = result_of(flags, &bytes);
        }
    }
}
