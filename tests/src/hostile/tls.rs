//! Servers that misbehave before TLS is established.

use std::io;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::Behaviour;
use super::tcp::{reset, write_forever, write_slowly};

/// The header of a handshake record with 16 KiB of content.
const RECORD: [u8; 5] = [22, 3, 3, 0x40, 0];
const RECORD_LEN: usize = 0x4000;

pub(super) async fn serve(behaviour: Behaviour, stream: &mut TcpStream) -> io::Result<()> {
    // Any part of the ClientHello is enough.
    let _ = stream.read(&mut [0; 4096]).await?;
    match behaviour {
        Behaviour::TlsReset => reset(stream),
        Behaviour::TlsHugeHandshake => {
            // A ServerHello of 2^24 - 1 bytes.
            let mut first = RECORD.to_vec();
            first.extend([2, 0xff, 0xff, 0xff]);
            first.resize(RECORD.len() + RECORD_LEN, 0);
            stream.write_all(&first).await?;
            let mut more = RECORD.to_vec();
            more.resize(RECORD.len() + RECORD_LEN, 0);
            write_forever(stream, &more).await
        }
        Behaviour::TlsSlow => write_slowly(stream, &RECORD.repeat(20)).await,
        _ => write_forever(stream, &[22, 3, 1, 0xff, 0xff, 0x80]).await,
    }
}
