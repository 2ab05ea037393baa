//! `ExecSync`, whose response is parsed as it arrives. Runtimes pass on up to 16 MiB of a command's output, of which
//! probes keep a few KiB: the rest never takes memory, however many commands write at once.

use std::future::poll_fn;
use std::pin::Pin;

use bytes::{BufMut as _, Bytes, BytesMut};
use http_body_util::Full;
use hyper::body::Body as _;
use hyper::header::{CONTENT_TYPE, TE};
use hyper::{HeaderMap, Request, StatusCode};
use prost::Message as _;
use tonic::body::Body;
use tonic::{Code, Status};
use tower::ServiceExt as _;

use super::messages::ExecSyncRequest;
use super::{ANSWER_LIMIT, Runtime};
use crate::mechanism::{OUTPUT_LIMIT, chain};

const METHOD: &str = "http://localhost/runtime.v1.RuntimeService/ExecSync";

/// The parts of `runtime.v1.ExecSyncResponse` that are kept.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Executed {
    pub(crate) exit_code: i32,
    /// The first [`OUTPUT_LIMIT`] bytes of the command's standard output followed by its standard error.
    pub(crate) output: Vec<u8>,
}

impl Runtime {
    /// Runs a command in a container. Sets no time limit of its own.
    pub(crate) async fn exec_sync(&self, request: &ExecSyncRequest) -> Result<Executed, Status> {
        let request = Request::post(METHOD)
            .header(CONTENT_TYPE, "application/grpc")
            .header(TE, "trailers")
            .body(Body::new(Full::new(framed(request))))
            .map_err(|error| Status::internal(error.to_string()))?;
        let sent = self.commands.clone().oneshot(request).await;
        let response = sent.map_err(|error| Status::unavailable(chain(&error)))?;
        refused(response.headers())?;
        if response.status() != StatusCode::OK {
            return Err(Status::unknown(format!("HTTP {}", response.status())));
        }
        let mut body = response.into_body();
        let mut answer = Answer::default();
        let mut is_good = false;
        while let Some(frame) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
            match frame?.into_data() {
                Ok(data) => answer.read(&data)?,
                Err(frame) => {
                    let trailers = frame.into_trailers().unwrap_or_default();
                    is_good = refused(&trailers)?;
                }
            }
        }
        match is_good {
            true => answer.end(),
            false => Err(Status::unknown("the answer ends without a status")),
        }
    }
}

/// Adds gRPC's prefix to a message.
fn framed(message: &ExecSyncRequest) -> Bytes {
    let mut framed = BytesMut::new();
    framed.put_u8(0);
    framed.put_u32(message.encoded_len() as u32);
    framed.extend_from_slice(&message.encode_to_vec());
    framed.freeze()
}

/// Whether headers report success; an error if they report failure.
fn refused(headers: &HeaderMap) -> Result<bool, Status> {
    match Status::from_header_map(headers) {
        Some(status) if status.code() != Code::Ok => Err(status),
        status => Ok(status.is_some()),
    }
}

/// `runtime.v1.ExecSyncResponse` after gRPC's prefix, as far as it has been read.
#[derive(Debug, Default)]
struct Answer {
    step: Step,
    /// Bytes of the message still to come.
    left: u32,
    outputs: [Vec<u8>; 2],
    exit_code: i32,
}

/// The part of the response that comes next.
#[derive(Debug)]
enum Step {
    /// The prefix: the compression flag and the message's length. With the number of bytes read so far.
    Prefix([u8; 5], usize),
    /// A varint: its purpose, the value so far, and the number of bits read so far.
    Number(Number, u64, u32),
    /// The content of the field with this number, and how many bytes of it are left.
    Content(u64, u64),
}

/// The purpose of a varint. Fields are given by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Number {
    Tag,
    LengthOf(u64),
    ValueOf(u64),
}

/// The `stdout` and `stderr` fields, in this order.
const OUTPUTS: [u64; 2] = [1, 2];
/// The `exit_code` field.
const EXIT_CODE: u64 = 3;
const BETWEEN_FIELDS: Step = Step::Number(Number::Tag, 0, 0);

impl Default for Step {
    fn default() -> Self {
        Self::Prefix([0; 5], 0)
    }
}

impl Answer {
    fn read(&mut self, mut data: &[u8]) -> Result<(), Status> {
        while let Some((byte, rest)) = data.split_first() {
            match &mut self.step {
                Step::Prefix(prefix, have) => {
                    prefix[*have] = *byte;
                    *have += 1;
                    data = rest;
                    if *have == prefix.len() {
                        let [is_compressed, length @ ..] = *prefix;
                        self.left = u32::from_be_bytes(length);
                        if is_compressed != 0 || self.left as usize > ANSWER_LIMIT {
                            return Err(invalid("it is compressed or too long"));
                        }
                        self.step = BETWEEN_FIELDS;
                    }
                }
                _ if self.left == 0 => return Err(invalid("more than one message")),
                Step::Number(purpose, number, bits) => {
                    *number |= u64::from(byte & 0x7f) << *bits;
                    *bits += 7;
                    data = rest;
                    self.left -= 1;
                    if byte & 0x80 == 0 {
                        let (purpose, number) = (*purpose, *number);
                        self.step = self.after(purpose, number)?;
                    } else if *bits > 63 {
                        return Err(invalid("a number is too long"));
                    }
                }
                Step::Content(field, length) => {
                    let there = data.len().min(self.left as usize);
                    let count = u64::min(*length, there as u64) as usize;
                    let (content, rest) = data.split_at(count);
                    if let Some(at) = OUTPUTS.iter().position(|output| output == field) {
                        let room = OUTPUT_LIMIT - self.outputs[at].len();
                        self.outputs[at].extend_from_slice(&content[..room.min(count)]);
                    }
                    data = rest;
                    self.left -= count as u32;
                    *length -= count as u64;
                    if *length == 0 {
                        self.step = BETWEEN_FIELDS;
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns the step that follows a varint (`https://protobuf.dev/programming-guides/encoding/`).
    fn after(&mut self, purpose: Number, number: u64) -> Result<Step, Status> {
        Ok(match purpose {
            Number::Tag => match (number >> 3, number & 7) {
                (field, 0) => Step::Number(Number::ValueOf(field), 0, 0),
                (field, 1) => Step::Content(field, 8),
                (field, 2) => Step::Number(Number::LengthOf(field), 0, 0),
                (field, 5) => Step::Content(field, 4),
                _ => return Err(invalid("a field has an unknown type")),
            },
            Number::LengthOf(_) if number == 0 => BETWEEN_FIELDS,
            Number::LengthOf(field) => Step::Content(field, number),
            Number::ValueOf(field) => {
                if field == EXIT_CODE {
                    // Negative exit codes are encoded in 64 bits.
                    self.exit_code = number as i32;
                }
                BETWEEN_FIELDS
            }
        })
    }

    fn end(self) -> Result<Executed, Status> {
        if self.left > 0 || !matches!(self.step, Step::Number(Number::Tag, _, 0)) {
            return Err(invalid("it is truncated"));
        }
        let [mut output, errors] = self.outputs;
        output.extend_from_slice(&errors);
        Ok(Executed {
            exit_code: self.exit_code,
            output,
        })
    }
}

fn invalid(problem: &str) -> Status {
    Status::internal(format!("the answer cannot be read: {problem}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::testing::ExecSyncResponse;

    /// Encodes a response that includes fields unknown to this version.
    fn answer(stdout: &[u8], stderr: &[u8], exit_code: i32) -> Vec<u8> {
        let message = ExecSyncResponse {
            stdout: stdout.to_vec(),
            stderr: stderr.to_vec(),
            exit_code,
        };
        let mut encoded = message.encode_to_vec();
        encoded.extend_from_slice(&[9 << 3 | 2, 3, b'n', b'e', b'w', 10 << 3 | 5, 1, 2, 3, 4]);
        let mut framed = vec![0];
        framed.extend_from_slice(&(encoded.len() as u32).to_be_bytes());
        framed.extend_from_slice(&encoded);
        framed
    }

    fn read(bytes: &[u8], at_once: usize) -> Result<Executed, Status> {
        let mut answer = Answer::default();
        bytes
            .chunks(at_once)
            .try_for_each(|chunk| answer.read(chunk))?;
        answer.end()
    }

    #[test]
    fn an_answer_is_read_whatever_pieces_it_comes_in() {
        for (stdout, stderr, exit_code) in [
            (&b"well"[..], &b""[..], 0),
            (b"out", b"err", 1),
            (b"", b"", -1),
            (&[b'x'; 300], b"y", 255),
        ] {
            let bytes = answer(stdout, stderr, exit_code);
            let wanted = Executed {
                exit_code,
                output: [stdout, stderr].concat(),
            };
            for at_once in [1, 2, 7, bytes.len()] {
                assert_eq!(read(&bytes, at_once).unwrap(), wanted);
            }
        }
    }

    #[test]
    fn of_much_output_no_more_is_kept_than_is_shown() {
        let bytes = answer(&vec![b'x'; 16 << 20], &vec![b'y'; 100_000], 3);
        let executed = read(&bytes, 16_384).unwrap();
        assert_eq!(executed.exit_code, 3);
        assert_eq!(executed.output.len(), 2 * OUTPUT_LIMIT);
        assert!(executed.output.capacity() <= 4 * OUTPUT_LIMIT);
    }

    #[test]
    fn what_is_no_answer_is_an_error_and_takes_no_memory() {
        let whole = answer(b"out", b"err", 1);
        for length in 0..whole.len() {
            assert!(read(&whole[..length], 5).is_err(), "{length} bytes");
        }
        let mut longer = whole.clone();
        longer.push(0);
        for bytes in [
            longer,
            vec![1, 0, 0, 0, 0],
            vec![0, 0xff, 0xff, 0xff, 0xff],
            vec![0, 0, 0, 0, 1, 3],
            [&[0, 0, 0, 0, 11][..], &[0xff; 11]].concat(),
            // A field that is longer than its message.
            vec![0, 0, 0, 0, 3, 1 << 3 | 2, 100, b'x'],
        ] {
            assert!(read(&bytes, 3).is_err(), "{bytes:?}");
        }
    }
}
