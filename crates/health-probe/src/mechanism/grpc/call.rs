//! One call on its own HTTP/2 connection (RFC 9113), separate from the connection: what to write, and how to interpret
//! the data read.
//!
//! A probe needs little of HTTP/2: one stream, all data sent in one piece, and responses far smaller than any window.
//! With the complete client of `h2`, a probe takes twice the CPU time (`cargo xtask bench probe --part grpc`).

use std::io;

use super::hpack::{Decoder, HpackError, pack, pack_known};
use crate::mechanism::dialogue::Dialogue;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// RFC 9113, 4.1: length, type, flags, stream.
const FRAME_HEAD: usize = 9;
/// Longest frame unless negotiated otherwise (RFC 9113, 6.5.2), in bytes.
const FRAME_MAX: usize = 16 * 1024;
/// Maximum number of bytes of a response's headers, compressed or not.
const HEADERS_LIMIT: usize = 16 * 1024;
/// Maximum number of bytes of a reply. A valid reply has seven.
const REPLY_LIMIT: usize = 4096;
const STREAM: u32 = 1;

/// Frame types (RFC 9113, 6).
mod frame {
    pub(super) const DATA: u8 = 0;
    pub(super) const HEADERS: u8 = 1;
    pub(super) const RST_STREAM: u8 = 3;
    pub(super) const SETTINGS: u8 = 4;
    pub(super) const PUSH_PROMISE: u8 = 5;
    pub(super) const PING: u8 = 6;
    pub(super) const GOAWAY: u8 = 7;
    pub(super) const CONTINUATION: u8 = 9;
}

/// Frame flags.
mod flag {
    pub(super) const ACK: u8 = 1;
    pub(super) const END_STREAM: u8 = 1;
    pub(super) const END_HEADERS: u8 = 4;
    pub(super) const PADDED: u8 = 8;
    pub(super) const PRIORITY: u8 = 0x20;
}

/// Settings (RFC 9113, 6.5.2).
mod setting {
    pub(super) const ENABLE_PUSH: u16 = 2;
    pub(super) const MAX_HEADER_LIST_SIZE: u16 = 6;
}

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum CallError {
    /// The data received is not HTTP/2.
    #[error("{0}")]
    Protocol(Violation),
    /// The server ended the call.
    #[error("the server reset the stream ({})", code(*.0))]
    Reset(u32),
    /// The server accepts no calls on this connection.
    #[error("the server sent GOAWAY ({})", code(*.0))]
    GoAway(u32),
    /// The server closed the connection.
    #[error("the server closed the connection")]
    Closed,
    /// The connection broke.
    #[error("{0}")]
    Broken(#[source] io::Error),
    /// More data came than a response can have.
    #[error("the response is too long")]
    TooLong,
}

/// Something that an HTTP/2 server must not do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Violation {
    #[error("the first frame is not SETTINGS")]
    Beginning,
    #[error("frame exceeds the maximum size")]
    FrameSize,
    #[error("invalid frame length for its type")]
    FrameLength,
    #[error("unexpected frame")]
    Unexpected,
    #[error("padding exceeds its frame")]
    Padding,
    #[error(transparent)]
    Headers(#[from] HpackError),
}

impl<V: Into<Violation>> From<V> for CallError {
    fn from(violation: V) -> Self {
        Self::Protocol(violation.into())
    }
}

/// Names an error code (RFC 9113, 7).
fn code(code: u32) -> String {
    const NAMES: [&str; 14] = [
        "NO_ERROR",
        "PROTOCOL_ERROR",
        "INTERNAL_ERROR",
        "FLOW_CONTROL_ERROR",
        "SETTINGS_TIMEOUT",
        "STREAM_CLOSED",
        "FRAME_SIZE_ERROR",
        "REFUSED_STREAM",
        "CANCEL",
        "COMPRESSION_ERROR",
        "CONNECT_ERROR",
        "ENHANCE_YOUR_CALM",
        "INADEQUATE_SECURITY",
        "HTTP_1_1_REQUIRED",
    ];
    match NAMES.get(code as usize) {
        Some(name) => (*name).to_owned(),
        None => format!("error {code}"),
    }
}

/// The request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request<'a> {
    pub(super) is_tls: bool,
    pub(super) path: &'a str,
    pub(super) authority: &'a str,
    pub(super) user_agent: &'a str,
    /// How long the server may take, in ms.
    pub(super) timeout_ms: u128,
    /// The message, with its prefix.
    pub(super) message: &'a [u8],
}

/// The response to a call, as far as gRPC uses it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Answer {
    /// `:status`.
    pub(super) status: Vec<u8>,
    pub(super) content_type: Option<Vec<u8>>,
    /// `grpc-status`, from the trailers if there are any.
    pub(super) grpc_status: Option<Vec<u8>>,
    /// The messages, with their prefixes.
    pub(super) reply: Vec<u8>,
}

impl Answer {
    /// Whether the response's first headers are those of gRPC.
    pub(super) fn is_grpc(&self) -> bool {
        let kind = self.content_type.as_deref().unwrap_or_default();
        self.status == b"200" && kind.starts_with(b"application/grpc")
    }
}

/// A call under way.
#[derive(Debug)]
pub(super) struct Call {
    /// Data to write.
    output: Vec<u8>,
    /// An incomplete frame.
    pending: Vec<u8>,
    decoder: Decoder,
    answer: Answer,
    /// Headers that continue in the next frame, and whether they end the stream.
    block: Option<(Vec<u8>, bool)>,
    place: Place,
    /// Why the server accepts no more calls. It may still respond to this one.
    goes_away: Option<u32>,
    /// Whether the server has sent anything.
    has_heard: bool,
}

/// The current position in the response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// The server's settings come first.
    Settings,
    Head,
    Body,
}

impl Call {
    pub(super) fn new(request: &Request<'_>) -> Self {
        let mut headers = Vec::with_capacity(128);
        pack_known(&mut headers, 3); // POST
        pack_known(&mut headers, if request.is_tls { 7 } else { 6 });
        pack(&mut headers, Ok(4), request.path);
        pack(&mut headers, Ok(1), request.authority);
        pack(&mut headers, Ok(31), "application/grpc");
        pack(&mut headers, Err("te"), "trailers");
        pack(&mut headers, Ok(58), request.user_agent);
        // gRPC allows at most eight digits.
        let timeout = format!("{}m", request.timeout_ms.clamp(1, 99_999_999));
        pack(&mut headers, Err("grpc-timeout"), &timeout);

        let mut settings = [0; 12];
        for (place, (id, value)) in settings.chunks_exact_mut(6).zip([
            (setting::ENABLE_PUSH, 0),
            (setting::MAX_HEADER_LIST_SIZE, HEADERS_LIMIT as u32),
        ]) {
            place[..2].copy_from_slice(&id.to_be_bytes());
            place[2..].copy_from_slice(&value.to_be_bytes());
        }
        let mut output = Vec::with_capacity(256 + request.message.len());
        output.extend_from_slice(PREFACE);
        push(&mut output, frame::SETTINGS, 0, 0, &settings);
        push_all(
            &mut output,
            (frame::HEADERS, frame::CONTINUATION),
            flag::END_HEADERS,
            &headers,
        );
        push_all(
            &mut output,
            (frame::DATA, frame::DATA),
            flag::END_STREAM,
            request.message,
        );
        Self {
            output,
            pending: Vec::new(),
            decoder: Decoder::default(),
            answer: Answer::default(),
            block: None,
            place: Place::Settings,
            goes_away: None,
            has_heard: false,
        }
    }

    /// Whether the server has sent anything.
    pub(super) fn has_heard(&self) -> bool {
        self.has_heard
    }

    fn take(&mut self, mut bytes: &[u8]) -> Result<(Option<Answer>, usize), CallError> {
        let len = bytes.len();
        while let Some((head, rest)) = bytes.split_at_checked(FRAME_HEAD) {
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
            let (kind, flags) = (head[3], head[4]);
            let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]) & !(1 << 31);
            if self.place == Place::Settings && (kind != frame::SETTINGS || flags & flag::ACK != 0)
            {
                return Err(Violation::Beginning.into());
            }
            if length > FRAME_MAX {
                return Err(Violation::FrameSize.into());
            }
            let Some((payload, rest)) = rest.split_at_checked(length) else {
                break;
            };
            bytes = rest;
            if self.frame(kind, flags, stream, payload)? {
                return Ok((Some(std::mem::take(&mut self.answer)), len));
            }
        }
        Ok((None, len - bytes.len()))
    }

    /// Handles a frame. Returns whether the response is complete.
    fn frame(
        &mut self,
        kind: u8,
        flags: u8,
        stream: u32,
        payload: &[u8],
    ) -> Result<bool, CallError> {
        if self.block.is_some() && (kind != frame::CONTINUATION || stream != STREAM) {
            return Err(Violation::Unexpected.into());
        }
        match (kind, stream) {
            (frame::DATA, STREAM) => self.data(flags, payload),
            (frame::HEADERS, STREAM) => self.headers(flags, payload),
            (frame::CONTINUATION, STREAM) => self.continuation(flags, payload),
            (frame::RST_STREAM, STREAM) => {
                let reset = payload.try_into().map_err(|_| Violation::FrameLength)?;
                Err(CallError::Reset(u32::from_be_bytes(reset)))
            }
            (frame::SETTINGS, 0) => {
                if !payload.len().is_multiple_of(6) {
                    return Err(Violation::FrameLength.into());
                }
                if self.place == Place::Settings {
                    self.place = Place::Head;
                }
                if flags & flag::ACK == 0 {
                    // No setting affects the data already sent.
                    push(&mut self.output, frame::SETTINGS, flag::ACK, 0, &[]);
                }
                Ok(false)
            }
            (frame::PING, 0) => {
                if payload.len() != 8 {
                    return Err(Violation::FrameLength.into());
                }
                if flags & flag::ACK == 0 {
                    push(&mut self.output, frame::PING, flag::ACK, 0, payload);
                }
                Ok(false)
            }
            (frame::GOAWAY, 0) => {
                let (last, rest) = payload.split_first_chunk().ok_or(Violation::FrameLength)?;
                let (code, _) = rest.split_first_chunk().ok_or(Violation::FrameLength)?;
                let is_taken = u32::from_be_bytes(*last) & !(1 << 31) >= STREAM;
                let code = u32::from_be_bytes(*code);
                if !is_taken {
                    return Err(CallError::GoAway(code));
                }
                self.goes_away = Some(code);
                Ok(false)
            }
            (frame::DATA | frame::HEADERS | frame::RST_STREAM | frame::CONTINUATION, _)
            | (frame::SETTINGS | frame::PING | frame::GOAWAY, _)
            | (frame::PUSH_PROMISE, _) => Err(Violation::Unexpected.into()),
            // WINDOW_UPDATE, PRIORITY, and unknown types (RFC 9113, 5.5).
            _ => Ok(false),
        }
    }

    fn data(&mut self, flags: u8, payload: &[u8]) -> Result<bool, CallError> {
        if self.place != Place::Body {
            return Err(Violation::Unexpected.into());
        }
        let data = unpadded(flags, payload)?;
        if self.answer.reply.len() + data.len() > REPLY_LIMIT {
            return Err(CallError::TooLong);
        }
        self.answer.reply.extend_from_slice(data);
        Ok(flags & flag::END_STREAM != 0)
    }

    fn headers(&mut self, flags: u8, payload: &[u8]) -> Result<bool, CallError> {
        let mut block = unpadded(flags, payload)?;
        if flags & flag::PRIORITY != 0 {
            block = block.get(5..).ok_or(Violation::FrameLength)?;
        }
        let is_end = flags & flag::END_STREAM != 0;
        if flags & flag::END_HEADERS == 0 {
            self.block = Some((block.to_vec(), is_end));
            return Ok(false);
        }
        self.take_headers(block, is_end)
    }

    fn continuation(&mut self, flags: u8, payload: &[u8]) -> Result<bool, CallError> {
        let (mut block, is_end) = self.block.take().ok_or(Violation::Unexpected)?;
        block.extend_from_slice(payload);
        if block.len() > HEADERS_LIMIT {
            return Err(Violation::Headers(HpackError::TooLarge).into());
        }
        if flags & flag::END_HEADERS == 0 {
            self.block = Some((block, is_end));
            return Ok(false);
        }
        self.take_headers(&block, is_end)
    }

    /// Handles a complete header block: the response's headers, informational ones before them, or trailers. Returns
    /// whether the response is complete.
    fn take_headers(&mut self, block: &[u8], is_end: bool) -> Result<bool, CallError> {
        let mut reported = Answer::default();
        self.decoder
            .decode(block, HEADERS_LIMIT, |name, value| match name {
                b":status" => reported.status = value.to_vec(),
                b"content-type" => reported.content_type = Some(value.to_vec()),
                b"grpc-status" => reported.grpc_status = Some(value.to_vec()),
                _ => {}
            })?;
        match self.place {
            Place::Body if !is_end => Err(Violation::Unexpected.into()),
            Place::Body => {
                self.answer.grpc_status = reported.grpc_status;
                Ok(true)
            }
            // Informational headers (RFC 9113, 8.1).
            _ if reported.status.starts_with(b"1") && !is_end => Ok(false),
            _ => {
                // The status of a call comes at the end of the stream.
                let grpc_status = reported.grpc_status.take().filter(|_| is_end);
                self.answer = Answer {
                    grpc_status,
                    ..reported
                };
                self.place = Place::Body;
                // What follows is not gRPC either, and may never end.
                Ok(is_end || !self.answer.is_grpc())
            }
        }
    }
}

impl Dialogue for Call {
    type End = Result<Answer, CallError>;

    fn to_write(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.output)
    }

    fn receive(&mut self, piece: &[u8]) -> Option<Self::End> {
        self.has_heard = true;
        let mut pending = std::mem::take(&mut self.pending);
        let taken = if pending.is_empty() {
            self.take(piece).map(|(answer, taken)| {
                pending.extend_from_slice(&piece[taken..]);
                answer
            })
        } else {
            pending.extend_from_slice(piece);
            self.take(&pending).map(|(answer, taken)| {
                pending.drain(..taken);
                answer
            })
        };
        self.pending = pending;
        taken.transpose()
    }

    fn end(&mut self, because: Option<io::Error>) -> Self::End {
        Err(match (self.goes_away, because) {
            (Some(code), _) => CallError::GoAway(code),
            (None, Some(error)) => CallError::Broken(error),
            (None, None) => CallError::Closed,
        })
    }
}

/// Appends a frame.
fn push(output: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
    let [_, length @ ..] = (payload.len() as u32).to_be_bytes();
    output.extend_from_slice(&length);
    output.extend_from_slice(&[kind, flags]);
    output.extend_from_slice(&stream.to_be_bytes());
    output.extend_from_slice(payload);
}

/// Appends as many frames of the stream as needed: the first one of type `first`, all others of type `next`. The last
/// one has the flags `last_flags`.
fn push_all(output: &mut Vec<u8>, (first, next): (u8, u8), last_flags: u8, payload: &[u8]) {
    let mut pieces = payload.chunks(FRAME_MAX).peekable();
    let mut kind = first;
    while let Some(piece) = pieces.next() {
        let flags = match pieces.peek() {
            None => last_flags,
            Some(_) => 0,
        };
        push(output, kind, flags, STREAM, piece);
        kind = next;
    }
}

/// Removes padding (RFC 9113, 6.1).
fn unpadded(flags: u8, payload: &[u8]) -> Result<&[u8], CallError> {
    if flags & flag::PADDED == 0 {
        return Ok(payload);
    }
    let (padding, rest) = payload.split_first().ok_or(Violation::FrameLength)?;
    let len = rest.len().checked_sub(usize::from(*padding));
    Ok(&rest[..len.ok_or(Violation::Padding)?])
}

#[cfg(test)]
mod tests;
