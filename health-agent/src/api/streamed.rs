//! Bodies that are sent while they are written: they take the memory of a few pieces, and their first
//! piece leaves before the last one is made.

use std::io::{self, Write};
use std::mem;

use axum::body::{Body, Bytes};
use futures_util::stream::{self, Stream, StreamExt as _};
use tokio::sync::mpsc;

/// What is handed over at once, bytes: so much that to wake the other side costs little beside it.
const PIECE: usize = 256 << 10;
/// What a piece may have on top.
const SLACK: usize = 16 << 10;
/// Pieces that may wait for the client.
const PIECES: usize = 1;

/// A piece; `None` behind the last one.
type Piece = io::Result<Option<Bytes>>;

/// The body that `write` makes, on a thread where it may take its time. An error cuts the connection
/// off, so that nobody takes a part for the whole. Must be called in a tokio runtime.
pub(super) fn body(write: impl FnOnce(&mut Pieces) -> io::Result<()> + Send + 'static) -> Body {
    Body::from_stream(stream_of(start(write)))
}

/// The same, once there is something of it: the error of a `write` that fails before.
pub(super) async fn begun(
    write: impl FnOnce(&mut Pieces) -> io::Result<()> + Send + 'static,
) -> io::Result<Body> {
    let mut pieces = start(write);
    let Some(first) = next(&mut pieces).await? else {
        return Ok(Body::empty());
    };
    let first = stream::once(async { Ok(first) });
    Ok(Body::from_stream(first.chain(stream_of(pieces))))
}

fn start(
    write: impl FnOnce(&mut Pieces) -> io::Result<()> + Send + 'static,
) -> mpsc::Receiver<Piece> {
    let (sender, pieces) = mpsc::channel(PIECES);
    tokio::task::spawn_blocking(move || {
        let mut out = Pieces {
            next: Vec::with_capacity(PIECE + SLACK),
            sender,
        };
        let written = write(&mut out).and_then(|()| out.flush());
        // Without a reader there is nobody to tell.
        let _ = out.sender.blocking_send(written.map(|()| None));
    });
    pieces
}

/// The next piece; `None` when there are no more.
async fn next(pieces: &mut mpsc::Receiver<Piece>) -> Piece {
    // Whoever writes ends without a word when it panics.
    let ended = || Err(io::ErrorKind::UnexpectedEof.into());
    pieces.recv().await.unwrap_or_else(ended)
}

fn stream_of(pieces: mpsc::Receiver<Piece>) -> impl Stream<Item = io::Result<Bytes>> {
    stream::try_unfold(pieces, async |mut pieces| {
        let piece = next(&mut pieces).await?;
        Ok(piece.map(|piece| (piece, pieces)))
    })
}

/// Hands over what is written to it.
pub(super) struct Pieces {
    next: Vec<u8>,
    sender: mpsc::Sender<Piece>,
}

impl Write for Pieces {
    #[inline]
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.next.extend_from_slice(bytes);
        if self.next.len() >= PIECE {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    // JSON is written in many small parts.
    #[inline]
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write(bytes).map(|_| ())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.next.is_empty() {
            return Ok(());
        }
        let next = mem::replace(&mut self.next, Vec::with_capacity(PIECE + SLACK));
        let sent = self.sender.blocking_send(Ok(Some(next.into())));
        sent.map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_body_is_what_was_written() {
        let written: Vec<u8> = (0..1_000_000_u32).flat_map(u32::to_ne_bytes).collect();
        let body = body({
            let written = written.clone();
            move |out| {
                written
                    .chunks(1_000)
                    .try_for_each(|chunk| out.write_all(chunk))
            }
        });
        let received = axum::body::to_bytes(body, usize::MAX).await.unwrap();
        assert!(received == written);
    }

    #[tokio::test]
    async fn an_error_before_the_first_piece_is_told_and_a_later_one_cuts_the_body_off() {
        let error = begun(|out| {
            out.write_all(b"not yet a piece")?;
            Err(io::Error::other("no maps"))
        });
        assert_eq!(error.await.unwrap_err().to_string(), "no maps");
        let whole = begun(|out| out.write_all(&[7; 3 * PIECE])).await.unwrap();
        let received = axum::body::to_bytes(whole, usize::MAX).await.unwrap();
        assert!(received == vec![7; 3 * PIECE]);
        let cut = begun(|out| {
            out.write_all(&[0; PIECE])?;
            Err(io::Error::other("no more"))
        });
        let cut = cut.await.unwrap();
        axum::body::to_bytes(cut, usize::MAX).await.unwrap_err();
    }

    #[tokio::test]
    async fn no_part_is_taken_for_the_whole() {
        let failed = body(|out| {
            out.write_all(&[0; PIECE])?;
            Err(io::Error::other("no more"))
        });
        axum::body::to_bytes(failed, usize::MAX).await.unwrap_err();
        let panicked = body(|out| {
            out.write_all(&[0; PIECE])?;
            panic!("in the middle")
        });
        axum::body::to_bytes(panicked, usize::MAX)
            .await
            .unwrap_err();
    }

    #[tokio::test]
    async fn writing_ends_when_the_reader_is_gone() {
        let (ended, end) = tokio::sync::oneshot::channel();
        let body = body(|out| {
            let error = loop {
                if let Err(error) = out.write_all(&[0; PIECE]) {
                    break error;
                }
            };
            ended.send(error.kind()).unwrap();
            Err(error)
        });
        drop(body);
        assert_eq!(end.await.unwrap(), io::ErrorKind::BrokenPipe);
    }
}
