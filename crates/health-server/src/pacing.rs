//! How long clients make the server wait, and streams that end when it is too long.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

/// The sender of a request.
#[derive(Clone, Debug)]
pub(super) struct Client(pub(super) Arc<Waits>);

impl Client {
    /// Lets the client stay and read as slowly as it likes, for a response that lasts until the client disconnects.
    /// Frees the client's slot; the caller must limit the number of clients that stay.
    pub(super) fn stay(&self) {
        let mut state = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.stays = true;
    }
}

/// How long a client has made the server wait.
#[derive(Debug, Default)]
pub(super) struct Waits(Mutex<WaitState>);

#[derive(Debug, Default)]
struct WaitState {
    before: Duration,
    since: Option<Instant>,
    /// Whether the client may make the server wait without limit.
    stays: bool,
}

impl Waits {
    pub(super) fn begin(&self) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.since.get_or_insert_with(Instant::now);
    }

    pub(super) fn end(&self) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(since) = state.since.take() {
            state.before += since.elapsed();
        }
    }

    /// The remaining part of `patience`.
    fn left(&self, patience: Duration) -> Duration {
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.stays {
            Duration::MAX
        } else {
            patience.saturating_sub(state.before)
        }
    }

    pub(super) fn stays(&self) -> bool {
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.stays
    }

    pub(super) fn is_waiting(&self) -> bool {
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.since.is_some()
    }

    pub(super) fn total(&self) -> Duration {
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.before + state.since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}

/// A stream whose writes fail once its client has made the server wait too long in total.
pub(super) struct PacedStream<S> {
    stream: S,
    waits: Arc<Waits>,
    patience: Duration,
    /// When the pending write fails.
    deadline: Option<Pin<Box<Sleep>>>,
}

impl<S> PacedStream<S> {
    /// Paces a stream; `patience` is the longest total wait.
    pub(super) const fn new(stream: S, waits: Arc<Waits>, patience: Duration) -> Self {
        Self {
            stream,
            waits,
            patience,
            deadline: None,
        }
    }

    fn pace<T>(&mut self, cx: &mut Context<'_>, write: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if write.is_ready() {
            if self.deadline.take().is_some() {
                self.waits.end();
            }
            return write;
        }
        let deadline = self.deadline.get_or_insert_with(|| {
            self.waits.begin();
            Box::pin(tokio::time::sleep(self.waits.left(self.patience)))
        });
        ready!(deadline.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for PacedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for PacedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let write = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.pace(cx, write)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let write = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.pace(cx, write)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    /// TLS takes data that it cannot send yet, so that the flush waits for the client. Hyper flushes only when all is
    /// written: no write is pending.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flush = Pin::new(&mut self.stream).poll_flush(cx);
        self.pace(cx, flush)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shutdown = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.pace(cx, shutdown)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt as _;
    use tokio::time::timeout;

    use super::*;

    /// How long the test waits for something that must happen, however busy the machine is.
    const PATIENCE: Duration = Duration::from_secs(120);

    /// Takes all that is written, and never sends it on: TLS to a client that has stopped reading.
    struct Hoard;

    impl AsyncWrite for Hoard {
        fn poll_write(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
            buf: &[u8],
        ) -> Poll<io::Result<usize>> {
            Poll::Ready(Ok(buf.len()))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Pending
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Pending
        }
    }

    #[tokio::test]
    async fn clients_that_take_in_nothing_more_of_a_written_answer_give_way_too() {
        for is_shutdown in [false, true] {
            let mut paced = PacedStream::new(Hoard, Arc::default(), Duration::from_millis(10));
            paced.write_all(b"the answer").await.unwrap();
            let ended = timeout(PATIENCE, async {
                match is_shutdown {
                    true => paced.shutdown().await,
                    false => paced.flush().await,
                }
            });
            let error = ended.await.unwrap().unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
            assert!(paced.waits.is_waiting());
        }
    }
}
