//! HTTP/2 and gRPC servers that misbehave.

use std::io;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::Behaviour;
use super::tcp::{reset, write_forever, write_slowly};

const PREFACE_LEN: usize = 24;
const FRAME_HEADER_LEN: usize = 9;
/// Maximum size of a frame that clients accept by default, in bytes.
const FRAME_MAX: usize = 0x4000;

// Frame types.
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const CONTINUATION: u8 = 9;

// Flags.
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// Stream numbers: the connection itself and a client's first request.
const CONNECTION: u8 = 0;
const CALL: u8 = 1;

/// `INITIAL_WINDOW_SIZE` of 0.
const NO_WINDOW: [u8; 6] = [0, 4, 0, 0, 0, 0];
const INTERNAL_ERROR: [u8; 4] = [0, 0, 0, 2];

// Encoded headers (HPACK).
const STATUS_200: u8 = 0x88;
const GRPC_TYPE: &[u8] = b"\x0f\x10\x10application/grpc";
const OTHER_TYPE: &[u8] = b"\x0f\x10\x09text/html";
const GRPC_STATUS_OK: &[u8] = b"\x00\x0bgrpc-status\x010";
/// Header `x` with a value of 4000 bytes, which becomes entry 62 of the dynamic table.
const LARGE: &[u8] = b"\x40\x01x\x7f\xa1\x1e";
const LARGE_LEN: usize = 4000;
const LARGE_AGAIN: u8 = 0xbe;

pub(super) async fn serve(behaviour: Behaviour, stream: &mut TcpStream) -> io::Result<()> {
    let settings = frame(SETTINGS, 0, CONNECTION, &[]);
    match behaviour {
        Behaviour::H2Silence => return stream.write_all(&settings).await,
        Behaviour::H2Reset => {
            stream.read_exact(&mut [0; PREFACE_LEN]).await?;
            return reset(stream);
        }
        Behaviour::H2Slow => return write_slowly(stream, &settings).await,
        Behaviour::H2NoWindow => {
            let settings = frame(SETTINGS, 0, CONNECTION, &NO_WINDOW);
            return stream.write_all(&settings).await;
        }
        _ => stream.write_all(&settings).await?,
    }
    read_call(stream).await?;
    let head = |kind: &[u8]| frame(HEADERS, END_HEADERS, CALL, &[&[STATUS_200], kind].concat());
    let trailers = frame(HEADERS, END_STREAM | END_HEADERS, CALL, GRPC_STATUS_OK);
    match behaviour {
        Behaviour::H2GoAway => {
            let reason = [&[0; 4], &INTERNAL_ERROR[..]].concat();
            stream
                .write_all(&frame(GOAWAY, 0, CONNECTION, &reason))
                .await
        }
        Behaviour::H2ResetStream => {
            let reset = frame(RST_STREAM, 0, CALL, &INTERNAL_ERROR);
            stream.write_all(&reset).await
        }
        Behaviour::H2EndlessPings => {
            let ping = frame(PING, 0, CONNECTION, &[7; 8]);
            write_forever(stream, &ping.repeat(100)).await
        }
        Behaviour::H2EndlessSettings => write_forever(stream, &settings.repeat(100)).await,
        Behaviour::H2EndlessHeaders => {
            let first = frame(HEADERS, 0, CALL, &[STATUS_200]);
            stream.write_all(&first).await?;
            let more = frame(CONTINUATION, 0, CALL, &[STATUS_200; FRAME_MAX]);
            write_forever(stream, &more).await
        }
        Behaviour::H2PackedHeaders => {
            let mut packed = [&[STATUS_200], LARGE, &[b'x'; LARGE_LEN]].concat();
            packed.resize(FRAME_MAX, LARGE_AGAIN);
            let headers = frame(HEADERS, END_HEADERS, CALL, &packed);
            stream.write_all(&headers).await
        }
        Behaviour::GrpcOtherType => stream.write_all(&head(OTHER_TYPE)).await,
        Behaviour::GrpcNoStatus => {
            let message = frame(DATA, END_STREAM, CALL, &[0, 0, 0, 0, 2, 8, 1]);
            stream.write_all(&[head(GRPC_TYPE), message].concat()).await
        }
        Behaviour::GrpcGarbageMessage => {
            let message = frame(DATA, 0, CALL, &[0, 0, 0, 0, 4, 0xff, 0xff, 0xff, 0xff]);
            let answer = [head(GRPC_TYPE), message, trailers].concat();
            stream.write_all(&answer).await
        }
        _ => {
            let first = frame(DATA, 0, CALL, &[0, 0xff, 0xff, 0xff, 0xff]);
            stream.write_all(&[head(GRPC_TYPE), first].concat()).await?;
            write_forever(stream, &frame(DATA, 0, CALL, &[8; 1024])).await
        }
    }
}

fn frame(kind: u8, flags: u8, stream: u8, content: &[u8]) -> Vec<u8> {
    let [.., a, b, c] = content.len().to_be_bytes();
    let header = [a, b, c, kind, flags, 0, 0, 0, stream];
    [&header, content].concat()
}

/// Reads until the client has sent its first request completely.
async fn read_call(stream: &mut TcpStream) -> io::Result<()> {
    stream.read_exact(&mut [0; PREFACE_LEN]).await?;
    let mut header = [0; FRAME_HEADER_LEN];
    let mut content = [0; FRAME_MAX];
    while header[3..] != [DATA, END_STREAM, 0, 0, 0, CALL] {
        stream.read_exact(&mut header).await?;
        let [a, b, c, ..] = header;
        let len = u32::from_be_bytes([0, a, b, c]) as usize;
        let content = content.get_mut(..len);
        let content = content.ok_or(io::ErrorKind::InvalidData)?;
        stream.read_exact(content).await?;
    }
    Ok(())
}
