//! Follows the keys under a prefix from any position in the store's history. Detects a store that falls silent.

use std::time::Duration;

use etcd_client::WatchStream;
use tokio::time::Instant;
use tracing::info;

use super::store::{self, Change, Pair, Position, Store, StoreError, Watch, WatchMessage};
use crate::nodes::LastHeard;

/// Interval at which a silent store is asked for its progress.
const QUESTION_PERIOD: Duration = Duration::from_secs(3);
/// A store that stays silent for this long despite being asked counts as gone.
const LONGEST_SILENCE: Duration = Duration::from_secs(7);

/// Number of listings that may follow each other immediately when the history is gone; each further listing waits. A
/// store that keeps losing its history, or claims so, must not be listed endlessly.
const RELISTINGS: u32 = 3;
const RELIST_PAUSE: Duration = Duration::from_millis(2500);
/// A watch of at least this duration ends such a series.
const LASTING: Duration = Duration::from_secs(10);

/// The known position in a store's history. Outlives connections.
#[derive(Debug)]
pub(crate) struct Cursor {
    /// `None` if all keys must be listed.
    position: Option<Position>,
    /// How many consecutive times the history was gone.
    gone: u32,
    /// When the store was last heard.
    pub(crate) heard: LastHeard,
}

impl Default for Cursor {
    /// Returns a cursor without a position.
    fn default() -> Self {
        Self {
            position: None,
            gone: 0,
            heard: LastHeard::now(),
        }
    }
}

impl Cursor {
    /// Records that the history after the position is gone. `lasted` is the duration of the last watch.
    fn lose(&mut self, lasted: Duration) {
        if lasted >= LASTING {
            self.gone = 0;
        }
        self.gone = self.gone.saturating_add(1);
        self.position = None;
    }

    /// How long to wait before the next listing.
    fn pause(&self) -> Duration {
        match self.gone > RELISTINGS {
            true => RELIST_PAUSE,
            false => Duration::ZERO,
        }
    }
}

/// A watch of all keys under the prefix.
pub(crate) struct Feed {
    stream: Box<WatchStream>,
    begun: Instant,
    heard: Instant,
    question_at: Instant,
}

/// A view built from the keys. Times count from any fixed moment.
pub(crate) trait Mirror {
    /// Replaces the whole view with the contents of the store.
    fn replace(&mut self, pairs: Vec<Pair>, now: Duration);
    /// Notes that the store is back after an interruption.
    fn resume(&mut self, now: Duration);
}

/// How a feed started.
pub(crate) enum FeedStart {
    /// Continues where the last feed ended.
    Resumed,
    /// Starts with a listing of all keys.
    Listed(Vec<Pair>),
}

impl FeedStart {
    /// Updates the mirror.
    pub(crate) fn take_up(self, mirror: &mut impl Mirror, now: Duration) {
        if let Self::Listed(pairs) = self {
            mirror.replace(pairs, now);
        }
        mirror.resume(now);
    }
}

/// Why a feed ended.
pub(crate) enum FeedEnd {
    /// All keys must be listed again, which is possible on the same connection.
    HistoryGone(&'static str),
    /// The connection is unusable.
    Failed(StoreError),
}

impl FeedEnd {
    /// Succeeds if another feed can start on the same connection.
    pub(crate) fn or_again(self) -> Result<(), StoreError> {
        match self {
            Self::HistoryGone(reason) => {
                info!(reason, "listing the keys again");
                Ok(())
            }
            Self::Failed(error) => Err(error),
        }
    }
}

impl Feed {
    /// Starts after the last known change, or lists all keys if that is not possible.
    pub(crate) async fn begin(
        store: &mut Store,
        cursor: &mut Cursor,
    ) -> Result<(Self, FeedStart), StoreError> {
        let mut begun = FeedStart::Resumed;
        loop {
            let watch = match &cursor.position {
                Some(position) => store.resume(position).await?,
                None => {
                    tokio::time::sleep(cursor.pause()).await;
                    let (pairs, position) = store.list().await?;
                    let watch = store.watch(&position).await?;
                    begun = FeedStart::Listed(pairs);
                    cursor.position = Some(position);
                    watch
                }
            };
            match watch {
                Watch::From(stream) => {
                    let now = Instant::now();
                    let feed = Self {
                        stream,
                        begun: now,
                        heard: now,
                        question_at: now + QUESTION_PERIOD,
                    };
                    cursor.heard.note();
                    return Ok((feed, begun));
                }
                Watch::HistoryGone(reason) => {
                    info!(reason, "listing the keys again");
                    cursor.lose(Duration::ZERO);
                }
            }
        }
    }

    /// Returns the next changes, at least one. Cancel safe: may be dropped while waiting.
    pub(crate) async fn next(&mut self, cursor: &mut Cursor) -> Result<Vec<Change>, FeedEnd> {
        const ATTEMPT: &str = "watch the keys";
        loop {
            tokio::select! {
                message = self.stream.message() => {
                    let response = match message {
                        Ok(Some(response)) => response,
                        Ok(None) => {
                            return Err(FeedEnd::Failed(StoreError::new(ATTEMPT, "the store ended the watch")));
                        }
                        Err(error) => {
                            if store::is_unreadable(&error) {
                                cursor.position = None;
                            }
                            return Err(FeedEnd::Failed(store::watch_failed(&error)));
                        }
                    };
                    self.heard = Instant::now();
                    cursor.heard.note();
                    let Some(position) = &mut cursor.position else {
                        return Err(FeedEnd::HistoryGone("the watch position was lost"));
                    };
                    match store::read(&response, position) {
                        WatchMessage::HistoryGone(reason) => {
                            cursor.lose(self.begun.elapsed());
                            return Err(FeedEnd::HistoryGone(reason));
                        }
                        WatchMessage::Changes(changes) if changes.is_empty() => {}
                        WatchMessage::Changes(changes) => return Ok(changes),
                    }
                }
                () = tokio::time::sleep_until(self.question_at) => {
                    let now = Instant::now();
                    self.question_at = now + QUESTION_PERIOD;
                    if now - self.heard > LONGEST_SILENCE {
                        let reason = format!("no answer for {LONGEST_SILENCE:?}");
                        return Err(FeedEnd::Failed(StoreError::new(ATTEMPT, reason)));
                    }
                    // A reply to an earlier request may be on its way. A failed request shows up as silence.
                    let _ = self.stream.request_progress().await;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listings_slow_down_while_the_history_is_gone_each_time() {
        let mut cursor = Cursor::default();
        let mut pauses = Vec::new();
        for _ in 0..5 {
            cursor.lose(LASTING / 2);
            pauses.push(cursor.pause());
        }
        let (none, long) = (Duration::ZERO, RELIST_PAUSE);
        assert_eq!(pauses, [none, none, none, long, long]);
        cursor.lose(LASTING);
        assert_eq!(cursor.pause(), none);
    }
}
