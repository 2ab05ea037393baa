//! Reads an HTTP/1.1 response piece by piece: its head, and how its body is delimited.

use crate::mechanism::OUTPUT_LIMIT;

/// Maximum number of bytes of a head.
pub(super) const HEAD_LIMIT: usize = 64 * 1024;
/// Maximum number of headers in a head.
const HEADERS: usize = 100;
/// A head of up to this many bytes is parsed again with each piece, so that data that is not HTTP is detected before
/// its first line ends.
const LOOK_ALWAYS: usize = 512;

/// An error in a head.
#[derive(Debug, thiserror::Error)]
pub(super) enum HeadError {
    #[error("it is not HTTP/1")]
    Version,
    #[error("invalid HTTP status")]
    Status,
    #[error("a header cannot be read: {0}")]
    Header(httparse::Error),
    #[error("the response head is too large")]
    TooLarge,
    #[error("invalid Content-Length")]
    Length,
    #[error("the body has an unsupported transfer coding")]
    Coding,
}

impl From<httparse::Error> for HeadError {
    fn from(error: httparse::Error) -> Self {
        match error {
            httparse::Error::Version => Self::Version,
            httparse::Error::Status => Self::Status,
            httparse::Error::TooManyHeaders => Self::TooLarge,
            error => Self::Header(error),
        }
    }
}

/// An error in a body.
#[derive(Debug, thiserror::Error)]
pub(super) enum BodyError {
    #[error("invalid chunk size")]
    ChunkSize,
    #[error("a chunk is longer than its declared size")]
    ChunkEnd,
}

/// The head of a response.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) status: u16,
    /// The redirect's target, if the response is a redirect.
    pub(super) location: Option<String>,
}

/// Reads a head that arrives in pieces.
#[derive(Debug, Default)]
pub(super) struct HeadReader {
    /// The incomplete head.
    pending: Vec<u8>,
}

impl HeadReader {
    /// Handles a piece. Once the head is complete, returns it, its body, and the piece's part of the body.
    pub(super) fn receive(
        &mut self,
        piece: &[u8],
    ) -> Result<Option<(Head, Body, Vec<u8>)>, HeadError> {
        let mut pending = std::mem::take(&mut self.pending);
        // An empty line may be split between pieces.
        let unseen = pending.len().saturating_sub(2);
        let mut bytes = if pending.is_empty() {
            piece
        } else {
            pending.extend_from_slice(piece);
            &pending
        };
        if bytes.len() <= LOOK_ALWAYS || has_empty_line(&bytes[unseen..]) {
            while let Some((head, body, len)) = parse(bytes)? {
                bytes = &bytes[len..];
                // Informational responses come before the final one (RFC 9110, 15.2). After status 101, no more HTTP
                // follows.
                if !(100..200).contains(&head.status) || head.status == 101 {
                    return Ok(Some((head, body, bytes.to_vec())));
                }
            }
        }
        if bytes.len() > HEAD_LIMIT {
            return Err(HeadError::TooLarge);
        }
        let taken = pending.len().checked_sub(bytes.len());
        self.pending = match taken {
            Some(taken) => {
                pending.drain(..taken);
                pending
            }
            None => bytes.to_vec(),
        };
        Ok(None)
    }
}

/// Whether a head may end in `bytes`. Avoids parsing a head again and again while it arrives.
fn has_empty_line(bytes: &[u8]) -> bool {
    bytes.windows(2).any(|two| two == b"\n\n") || bytes.windows(3).any(|three| three == b"\n\r\n")
}

/// Parses a head. Returns the head with its length if it is complete. Accepts the same oddities as the kubelet.
fn parse(bytes: &[u8]) -> Result<Option<(Head, Body, usize)>, HeadError> {
    // The parser would skip any number of empty lines before a head.
    if matches!(bytes.first(), Some(b'\r' | b'\n')) {
        return Err(HeadError::Version);
    }
    let mut headers = [httparse::EMPTY_HEADER; HEADERS];
    let mut response = httparse::Response::new(&mut headers);
    let parsed = httparse::ParserConfig::default()
        .allow_multiple_spaces_in_response_status_delimiters(true)
        .allow_obsolete_multiline_headers_in_responses(true)
        .allow_spaces_after_header_name_in_responses(true)
        .parse_response(&mut response, bytes)?;
    let httparse::Status::Complete(len) = parsed else {
        return Ok(None);
    };
    if len > HEAD_LIMIT {
        return Err(HeadError::TooLarge);
    }
    let status = response.code.ok_or(HeadError::Status)?;
    let values = |name: &'static str| {
        let named = response.headers.iter();
        let named = named.filter(move |header| header.name.eq_ignore_ascii_case(name));
        named.map(|header| header.value)
    };
    let location = match status {
        301 | 302 | 303 | 307 | 308 => values("location").next(),
        _ => None,
    };
    // An empty location leads nowhere.
    let location = location.filter(|location| !location.is_empty());
    let location = location.map(|location| String::from_utf8_lossy(location).into_owned());
    // RFC 9112, 6.3. HTTP/1.0 has no transfer codings.
    let body = match (status, response.version) {
        (100..200 | 204 | 304, _) => Body::Length(0),
        (_, Some(1)) if is_chunked(values("transfer-encoding"))? => {
            Body::Chunked(Chunk::Size(None))
        }
        _ => length(values("content-length"))?.map_or(Body::UntilEnd, Body::Length),
    };
    Ok(Some((Head { status, location }, body, len)))
}

/// Whether a body is chunked. Other transfer codings are errors, as for the kubelet.
fn is_chunked<'a>(mut codings: impl Iterator<Item = &'a [u8]>) -> Result<bool, HeadError> {
    match (codings.next(), codings.next()) {
        (None, _) => Ok(false),
        (Some(coding), None) if coding.trim_ascii().eq_ignore_ascii_case(b"chunked") => Ok(true),
        _ => Err(HeadError::Coding),
    }
}

/// The length of a body. Several values are accepted if they are all equal.
fn length<'a>(values: impl Iterator<Item = &'a [u8]>) -> Result<Option<u64>, HeadError> {
    let mut length = None;
    for value in values.flat_map(|value| value.split(|byte| *byte == b',')) {
        let value = decimal(value).ok_or(HeadError::Length)?;
        if length.replace(value).is_some_and(|other| other != value) {
            return Err(HeadError::Length);
        }
    }
    Ok(length)
}

fn decimal(text: &[u8]) -> Option<u64> {
    let text = text.trim_ascii();
    let is_number = !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    let text = std::str::from_utf8(text).ok().filter(|_| is_number)?;
    // No body has a length beyond 64 bits.
    text.parse().ok()
}

/// How a body is delimited, and how much of it is still to come.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Body {
    /// This many more bytes follow.
    Length(u64),
    Chunked(Chunk),
    /// Everything until the connection ends.
    UntilEnd,
}

/// The position in a chunked body (RFC 9112, 7.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Chunk {
    /// In the chunk size; its value so far.
    Size(Option<u64>),
    /// After the size, in the rest of its line.
    Extension(u64),
    /// In the data; this many bytes are still to come.
    Data(u64),
    /// At the line break after the data.
    DataEnd,
    /// In a line of the trailer; the line's length so far in bytes.
    Trailer(usize),
}

/// The progress of reading a body.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Progress {
    More,
    /// The body is complete, or as much of it as we want was read.
    Done,
}

impl Body {
    /// Handles a piece, and keeps none of it. `read` counts the bytes of the body read so far.
    pub(super) fn receive(
        &mut self,
        piece: &[u8],
        read: &mut usize,
    ) -> Result<Progress, BodyError> {
        let is_whole = match self {
            Self::Length(left) => {
                let len = piece
                    .len()
                    .min(usize::try_from(*left).unwrap_or(usize::MAX));
                *left -= len as u64;
                *read += len;
                *left == 0
            }
            Self::UntilEnd => {
                *read += piece.len();
                false
            }
            Self::Chunked(chunk) => chunk.receive(piece, read)?,
        };
        Ok(match is_whole || *read >= OUTPUT_LIMIT {
            true => Progress::Done,
            false => Progress::More,
        })
    }

    /// Whether the body may end with the connection.
    pub(super) fn may_end(&self) -> bool {
        *self == Self::UntilEnd
    }
}

impl Chunk {
    /// Handles a piece. Returns whether the body is complete.
    fn receive(&mut self, mut piece: &[u8], read: &mut usize) -> Result<bool, BodyError> {
        while let Some((&byte, rest)) = piece.split_first() {
            if let Self::Data(left) = *self {
                let len = piece.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                *read += len;
                piece = &piece[len..];
                *self = match left - len as u64 {
                    0 => Self::DataEnd,
                    left => Self::Data(left),
                };
                continue;
            }
            piece = rest;
            *self = match (*self, byte) {
                (Self::Size(size), _) if byte.is_ascii_hexdigit() => {
                    let digit = char::from(byte).to_digit(16).map_or(0, u64::from);
                    let size = size.unwrap_or(0).checked_mul(16);
                    Self::Size(Some(size.ok_or(BodyError::ChunkSize)? | digit))
                }
                (Self::Size(Some(0)) | Self::Extension(0), b'\n') => Self::Trailer(0),
                (Self::Size(Some(size)) | Self::Extension(size), b'\n') => Self::Data(size),
                (Self::Size(Some(size)), b'\r' | b';' | b' ' | b'\t')
                | (Self::Extension(size), _) => Self::Extension(size),
                (Self::Size(_), _) => return Err(BodyError::ChunkSize),
                (Self::DataEnd, b'\r') => Self::DataEnd,
                (Self::DataEnd, b'\n') => Self::Size(None),
                (Self::DataEnd, _) => return Err(BodyError::ChunkEnd),
                (Self::Trailer(0), b'\n') => return Ok(true),
                (Self::Trailer(_), b'\n') => Self::Trailer(0),
                (Self::Trailer(len), b'\r') => Self::Trailer(len),
                (Self::Trailer(len), _) => Self::Trailer(len.saturating_add(1)),
                (Self::Data(_), _) => continue,
            };
        }
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The result for a response in these pieces: the head, how many bytes of the body were read, and whether the body
    /// is complete.
    fn read(pieces: &[&[u8]]) -> Result<Option<(Head, usize, bool)>, String> {
        let mut reader = HeadReader::default();
        let mut pieces = pieces.iter();
        for piece in pieces.by_ref() {
            let received = reader.receive(piece).map_err(|error| error.to_string())?;
            let Some((head, mut body, rest)) = received else {
                continue;
            };
            let mut count = 0;
            let mut piece = rest.as_slice();
            loop {
                let progress = body.receive(piece, &mut count);
                if progress.map_err(|error| error.to_string())? == Progress::Done {
                    return Ok(Some((head, count, true)));
                }
                match pieces.next() {
                    None => return Ok(Some((head, count, body.may_end()))),
                    Some(next) => piece = next,
                }
            }
        }
        Ok(None)
    }

    fn whole(status: u16, count: usize) -> Result<Option<(Head, usize, bool)>, String> {
        let location = None;
        Ok(Some((Head { status, location }, count, true)))
    }

    #[test]
    fn bodies_end_where_their_heads_say() {
        let long = format!(
            "HTTP/1.1 200 OK\r\nA: {}\r\nContent-Length: 2\r\n\r\nok",
            "b".repeat(2 * LOOK_ALWAYS)
        );
        for (answer, expected) in [
            (
                "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokmore",
                whole(200, 2),
            ),
            (
                "HTTP/1.1 200 OK\r\ncontent-length: 2, 2\r\n\r\nok",
                whole(200, 2),
            ),
            ("HTTP/1.0 200 OK\r\n\r\nuntil the end", whole(200, 13)),
            ("HTTP/1.1 200\n\nok", whole(200, 2)),
            ("HTTP/1.1 204 x\r\nContent-Length: 9\r\n\r\n", whole(204, 0)),
            ("HTTP/1.1 304 x\r\n\r\n", whole(304, 0)),
            (
                "HTTP/1.1 100 x\r\n\r\nHTTP/1.1 103 x\r\nA: b\r\n\r\nHTTP/1.1 200 x\r\nContent-Length: 0\r\n\r\n",
                whole(200, 0),
            ),
            (
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\nContent-Length: x\r\n\r\n3;a=b\r\nabc\r\nA \r\n0123456789\r\n0\r\nT: x\r\n\r\n",
                whole(200, 13),
            ),
            (
                "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nabc",
                whole(200, 3),
            ),
            ("HTTP/1.1 204 x\r\nContent-Length: x\r\n\r\n", whole(204, 0)),
            ("HTTP/1.1 099 x\r\n\r\n", whole(99, 0)),
            (
                "HTTP/1.1  200 OK\r\nA: b\r\n c\r\nD : e\r\nContent-Length: 2\r\n\r\nok",
                whole(200, 2),
            ),
            (long.as_str(), whole(200, 2)),
        ] {
            assert_eq!(read(&[answer.as_bytes()]), expected, "{answer}");
            // The result is the same however the response is split.
            for cut in 1..answer.len() {
                let (a, b) = answer.as_bytes().split_at(cut);
                assert_eq!(read(&[a, b]), expected, "{answer} cut at {cut}");
            }
            let bytes: Vec<&[u8]> = answer.as_bytes().chunks(1).collect();
            assert_eq!(read(&bytes), expected, "{answer}");
        }
    }

    #[test]
    fn what_is_missing_is_waited_for() {
        assert_eq!(read(&[b"HTTP/1.1 200 OK\r\nA: "]), Ok(None));
        for answer in [
            "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nokay",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nokay\r\n",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nokay\r\n0\r\n",
        ] {
            let read = read(&[answer.as_bytes()]).unwrap();
            assert!(matches!(read, Some((_, 4, false))), "{answer}");
        }
    }

    #[test]
    fn what_is_no_answer_is_an_error() {
        for (answer, expected) in [
            ("SSH-2.0-OpenSSH_9.2\r\n", "it is not HTTP/1"),
            ("\x16\x03\x01", "it is not HTTP/1"),
            ("HTTP/2 200 OK\r\n\r\n", "it is not HTTP/1"),
            ("\r\n\r\n", "it is not HTTP/1"),
            (
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
                "the body has an unsupported transfer coding",
            ),
            (
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
                "the body has an unsupported transfer coding",
            ),
            ("HTTP/1.1 -1 x\r\n\r\n", "invalid HTTP status"),
            (
                "HTTP/1.1 200 OK\r\nbad header\r\n\r\n",
                "a header cannot be read: invalid header name",
            ),
            (
                "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
                "invalid Content-Length",
            ),
            (
                "HTTP/1.1 200 OK\r\nContent-Length: +1\r\n\r\n",
                "invalid Content-Length",
            ),
            (
                "HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n",
                "invalid Content-Length",
            ),
            (
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx",
                "invalid chunk size",
            ),
            (
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n11111111111111111\r\n",
                "invalid chunk size",
            ),
            (
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab",
                "a chunk is longer than its declared size",
            ),
        ] {
            assert_eq!(
                read(&[answer.as_bytes()]),
                Err(expected.to_owned()),
                "{answer}"
            );
        }
        let many = format!("HTTP/1.1 200 OK\r\n{}\r\n", "A: b\r\n".repeat(101));
        assert_eq!(
            read(&[many.as_bytes()]),
            Err("the response head is too large".to_owned())
        );
        let long = format!("HTTP/1.1 200 OK\r\nA: {}", "b".repeat(HEAD_LIMIT));
        assert_eq!(
            read(&[long.as_bytes()]),
            Err("the response head is too large".to_owned())
        );
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(start in "(HTTP/1.1 200 x\r\n(Transfer-Encoding: chunked\r\n)?\r\n)?", rest in prop::collection::vec(any::<u8>(), 0..200), cut in 0_usize..200) {
            let bytes = [start.as_bytes(), &rest].concat();
            let (a, b) = bytes.split_at(cut.min(bytes.len()));
            // The result is the same with or without the split, except for data that was not parsed because nothing
            // followed.
            let cut = read(&[a, b]);
            let uncut = read(&[&bytes]);
            if let (Ok(Some(cut)), Ok(Some(uncut))) = (cut, uncut) {
                prop_assert_eq!(cut, uncut);
            }
        }
    }
}
