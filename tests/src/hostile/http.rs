//! HTTP/1 servers that misbehave.

use std::io;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::Behaviour;
use super::tcp::{reset, write_forever, write_slowly};

const GOOD: &[u8] = b"HTTP/1.1 200 OK\r\n";
/// A valid response, up to the first byte of a body of a hundred bytes.
const BEGUN: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nx";

pub(super) async fn serve(behaviour: Behaviour, stream: &mut TcpStream) -> io::Result<()> {
    read_head(stream).await?;
    match behaviour {
        Behaviour::HttpResetAfterRequest => reset(stream),
        Behaviour::HttpResetInHead => {
            stream.write_all(GOOD).await?;
            stream.write_all(b"X-").await?;
            reset(stream)
        }
        Behaviour::HttpResetInBody => {
            stream.write_all(BEGUN).await?;
            reset(stream)
        }
        Behaviour::HttpEndlessHead => {
            stream.write_all(GOOD).await?;
            write_forever(stream, &b"X-More: and more\r\n".repeat(100)).await
        }
        Behaviour::HttpEndlessBody => {
            stream.write_all(GOOD).await?;
            stream.write_all(b"\r\n").await?;
            write_forever(stream, &[b'x'; 4096]).await
        }
        Behaviour::HttpEndlessInterim => {
            write_forever(stream, &b"HTTP/1.1 100 Continue\r\n\r\n".repeat(100)).await
        }
        Behaviour::HttpSlowHead => write_slowly(stream, &GOOD.repeat(100)).await,
        Behaviour::HttpSlowBody => {
            stream.write_all(BEGUN).await?;
            write_slowly(stream, &[b'x'; 99]).await
        }
        Behaviour::HttpStalledBody => stream.write_all(BEGUN).await,
        Behaviour::HttpRedirectLoop => {
            let redirect = b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n";
            stream.write_all(redirect).await
        }
        _ => {
            let refusal = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n";
            stream.write_all(refusal).await
        }
    }
}

/// Reads the head of a request, or the start of something that is not HTTP.
async fn read_head(stream: &mut TcpStream) -> io::Result<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let read = stream.read_buf(&mut head).await?;
        if read == 0 || !head.starts_with(b"G") {
            break;
        }
    }
    Ok(())
}
