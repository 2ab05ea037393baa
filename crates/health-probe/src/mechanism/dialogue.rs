//! What is said on a connection, apart from the connection: protocols are plain state machines that take bytes and give
//! bytes, and one loop serves them all.

use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::ready;

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf};

/// Most that is read at a time, bytes. Nearly all answers are shorter.
const PIECE: usize = 4 * 1024;

thread_local! {
    /// What was read last on this thread. Nothing stays in it, so that connections that wait hold no buffer.
    static LAST: RefCell<[u8; PIECE]> = const { RefCell::new([0; PIECE]) };
}

/// One side of what is said on a connection.
pub(super) trait Dialogue {
    /// What it comes to.
    type End;

    /// What to write next; nothing if it is the other side's turn.
    fn to_write(&mut self) -> Vec<u8>;

    /// Takes what the other side said. Returns what the dialogue comes to, if that is known now.
    fn receive(&mut self, piece: &[u8]) -> Option<Self::End>;

    /// What it comes to if the other side says no more: it closed the connection, or that broke.
    fn end(&mut self, because: Option<io::Error>) -> Self::End;
}

/// Has a dialogue on a connection.
pub(super) async fn hold<D: Dialogue>(
    dialogue: &mut D,
    connection: &mut (impl AsyncRead + AsyncWrite + Unpin),
) -> D::End {
    loop {
        let bytes = dialogue.to_write();
        if !bytes.is_empty() {
            let mut written = connection.write_all(&bytes).await;
            // TLS may keep what there was no room for.
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

    /// Says one thing, and ends with the first thing that it hears.
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
        // The clock runs only when nobody has anything to do.
        let held = tokio::time::timeout(Duration::from_secs(1), holding).await;
        assert_eq!(held.as_deref(), Ok(&b"hello"[..]));
    }
}
