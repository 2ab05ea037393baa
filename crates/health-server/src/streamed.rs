//! Response bodies that are sent while they are written. They need memory for only a few pieces, and the first piece is
//! sent before the last one is written.

use std::io::{self, Write};
use std::mem;

use axum::body::{Body, Bytes};
use futures_util::{StreamExt as _, stream};
use tokio::sync::mpsc;

/// Size of a piece in bytes: large enough that the cost of waking the other side is negligible.
const PIECE: usize = 256 << 10;
/// How far a piece may exceed [`PIECE`], in bytes.
const SLACK: usize = 16 << 10;
/// Number of pieces that may wait to be sent.
const PIECES: usize = 1;

/// A part of a body.
enum Piece {
    /// A piece that others follow.
    More(Bytes),
    /// The last piece.
    Last(Bytes),
}

/// Creates a body from the output of `write`, which runs on a thread where it may block. A short body has a content
/// length. An error after the first piece of a long body cuts the connection, so that the client does not mistake a
/// part for the whole.
pub(super) async fn body(
    write: impl FnOnce(&mut Pieces) -> io::Result<()> + Send + 'static,
) -> io::Result<Body> {
    let (sender, mut pieces) = mpsc::channel(PIECES);
    tokio::task::spawn_blocking(move || {
        let mut out = Pieces {
            next: Vec::with_capacity(PIECE + SLACK),
            sender,
        };
        let written = write(&mut out);
        let last = written.map(|()| Piece::Last(out.next.into()));
        // Without a reader, nobody needs the result.
        let _ = out.sender.blocking_send(last);
    });
    let first = match received(pieces.recv().await)? {
        Piece::Last(whole) => return Ok(whole.into()),
        Piece::More(first) => first,
    };
    let rest = stream::try_unfold(Some(pieces), async |pieces| {
        let Some(mut pieces) = pieces else {
            return Ok(None);
        };
        Ok(Some(match received(pieces.recv().await)? {
            Piece::More(piece) => (piece, Some(pieces)),
            Piece::Last(piece) => (piece, None),
        }))
    });
    let first = stream::once(async { Ok::<_, io::Error>(first) });
    Ok(Body::from_stream(first.chain(rest)))
}

/// A writer that panics sends no result.
fn received(piece: Option<io::Result<Piece>>) -> io::Result<Piece> {
    piece.unwrap_or_else(|| Err(io::Error::other("the writer stopped halfway")))
}

/// Passes on, in pieces, whatever is written to it.
pub(super) struct Pieces {
    next: Vec<u8>,
    sender: mpsc::Sender<io::Result<Piece>>,
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

    // Inlined because JSON is written in many small parts.
    #[inline]
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write(bytes).map(|_| ())
    }

    fn flush(&mut self) -> io::Result<()> {
        let next = mem::replace(&mut self.next, Vec::with_capacity(PIECE + SLACK));
        let sent = self.sender.blocking_send(Ok(Piece::More(next.into())));
        sent.map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

#[cfg(test)]
mod tests {
    use axum::body::HttpBody as _;

    use super::*;

    async fn bytes(
        write: impl FnOnce(&mut Pieces) -> io::Result<()> + Send + 'static,
    ) -> Result<Bytes, axum::Error> {
        let body = body(write).await.map_err(axum::Error::new)?;
        axum::body::to_bytes(body, usize::MAX).await
    }

    #[tokio::test]
    async fn a_body_is_what_was_written() {
        for length in [0, 1, PIECE - 1, PIECE, PIECE + 1, 10 * PIECE + 1] {
            let written: Vec<u8> = (0..length).map(|i| i as u8).collect();
            let parts = written.clone();
            let received = bytes(move |out| parts.chunks(999).try_for_each(|c| out.write_all(c)));
            assert!(received.await.unwrap() == written, "{length}");
        }
    }

    #[tokio::test]
    async fn a_short_body_reports_its_length() {
        let short = body(|out| out.write_all(&[1; 1000])).await.unwrap();
        assert_eq!(short.size_hint().exact(), Some(1000));
    }

    #[tokio::test]
    async fn an_error_before_the_first_piece_is_reported() {
        let error = body(|out| {
            out.write_all(b"not yet a piece")?;
            Err(io::Error::other("no maps"))
        });
        assert_eq!(error.await.unwrap_err().to_string(), "no maps");
    }

    #[tokio::test]
    async fn no_part_is_taken_for_the_whole() {
        for length in [1, 2 * PIECE] {
            let failed = bytes(move |out| {
                out.write_all(&vec![0; length])?;
                Err(io::Error::other("no more"))
            });
            failed.await.unwrap_err();
            let panicked = bytes(move |out| {
                out.write_all(&vec![0; length])?;
                panic!("in the middle")
            });
            panicked.await.unwrap_err();
        }
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
        drop(body.await.unwrap());
        assert_eq!(end.await.unwrap(), io::ErrorKind::BrokenPipe);
    }
}
