//! The conversation on a connection, separate from the connection: protocols are plain state machines that take and
//! return bytes, and one loop serves them all.

use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::ready;

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf};

/// Maximum number of bytes to read at a time. Nearly all responses are shorter.
const PIECE: usize = 4 * 1024;

thread_local! {
    /// This thread's read buffer. No data stays in it, so waiting connections hold no buffer.
    static LAST: RefCell<[u8; PIECE]> = const { RefCell::new([0; PIECE]) };
}

/// One side of the conversation on a connection.
pub(super) trait Dialogue {
    /// The result of the dialogue.
    type End;

    /// What to write next; empty if it is the other side's turn.
    fn to_write(&mut self) -> Vec<u8>;

    /// Handles data from the other side. Returns the result once it is known.
    fn receive(&mut self, piece: &[u8]) -> Option<Self::End>;

    /// The result when the other side sends nothing more: it closed the connection, or the connection broke.
    fn end(&mut self, because: Option<io::Error>) -> Self::End;
}

/// Runs a dialogue on a connection.
pub(super) async fn hold<D: Dialogue>(
    dialogue: &mut D,
    connection: &mut (impl AsyncRead + AsyncWrite + Unpin),
) -> D::End {
    loop {
        let bytes = dialogue.to_write();
        if !bytes.is_empty() {
            let mut written = connection.write_all(&bytes).await;
            // TLS may have buffered data that the socket did not take.
            if written.is_ok() {
                written = connection.flush().await;
            }
            if let Err(error) = written {
                return dialogue.end(Some(error));
            }
        }
        let read = poll_fn(|cx| {
            LAST.with_borrow_mut(|piece| {
                let mut piece = ReadBuf::new(piece);
                ready!(Pin::new(&mut *connection).poll_read(cx, &mut piece))?;
                let received = match piece.filled() {
                    [] => Some(dialogue.end(None)),
                    piece => dialogue.receive(piece),
                };
                Ok(received).into()
            })
        });
        match read.await {
            Ok(None) => {}
            Ok(Some(end)) => return end,
            Err(error) => return dialogue.end(Some(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncReadExt as _, BufStream, duplex};

    use super::*;

    /// Sends one message, and ends with the first piece of the response.
    struct Greeting(Vec<u8>);

    impl Dialogue for Greeting {
        type End = Vec<u8>;

        fn to_write(&mut self) -> Vec<u8> {
            std::mem::take(&mut self.0)
        }

        fn receive(&mut self, piece: &[u8]) -> Option<Vec<u8>> {
            Some(piece.to_vec())
        }

        fn end(&mut self, _: Option<io::Error>) -> Vec<u8> {
            Vec::new()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_written_does_not_stay_in_a_buffer() {
        let (ours, mut theirs) = duplex(64);
        let mut greeting = Greeting(b"hello".to_vec());
        let mut ours = BufStream::new(ours);
        let answering = async {
            let mut heard = [0; 5];
            theirs.read_exact(&mut heard).await.unwrap();
            theirs.write_all(&heard).await.unwrap();
        };
        let holding = async { tokio::join!(hold(&mut greeting, &mut ours), answering).0 };
        // The clock only advances when there is nothing to do.
        let held = tokio::time::timeout(Duration::from_secs(1), holding).await;
        assert_eq!(held.as_deref(), Ok(&b"hello"[..]));
    }
}
