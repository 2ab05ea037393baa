//! A connection to one member of an etcd cluster, and the requests to it.

use std::error::Error as _;
use std::time::Duration;

use etcd_client::{
    Client, Error, EventType, GetOptions, GetResponse, KeyValue, LeaseKeepAliveStream, LeaseKeeper,
    ResponseHeader, Txn, TxnResponse, WatchOptions, WatchResponse, WatchStream,
};
use tokio::time::timeout;

use super::config::{Access, Source};

/// Maximum wait for a response.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum number of keys per request.
const PAGE: i64 = 500;
/// Maximum length of a value in bytes.
const MAX_VALUE_LEN: usize = 512 * 1024;

/// Reason: the store's history does not go back far enough.
const COMPACTED: &str = "the store's history was compacted";
/// Reason: the store's history ends before the known position.
const WENT_BACK: &str = "the store's revision went backwards";

/// A request that the store did not fulfil.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot {attempt}: {reason}")]
pub(crate) struct StoreError {
    attempt: &'static str,
    reason: String,
}

impl StoreError {
    pub(crate) fn new(attempt: &'static str, reason: impl Into<String>) -> Self {
        Self {
            attempt,
            reason: reason.into(),
        }
    }

    fn from_client(attempt: &'static str, error: &Error) -> Self {
        Self::new(attempt, reason(error))
    }
}

/// A position in the store's history.
#[derive(Clone, Debug)]
pub(super) struct Position {
    cluster_id: u64,
    /// The first revision that may contain unknown changes.
    next: i64,
    /// The last known change. A store that lost its data, or was restored from a copy, may keep its cluster ID and have
    /// advanced its revisions since, but then has something else in place of this change.
    last: Option<Event>,
}

/// A change of a key, with its revision.
#[derive(Clone, Debug)]
struct Event {
    key: Vec<u8>,
    revision: i64,
    /// The pair that was put; `None` if the key was deleted.
    put: Option<KeyValue>,
}

impl Position {
    /// Advances the position to a change.
    fn note(&mut self, kv: &KeyValue, is_put: bool) {
        // The changes of one revision may arrive in several responses, so this revision may be incomplete.
        self.next = self.next.max(kv.mod_revision());
        self.last = Some(Event {
            key: kv.key().to_vec(),
            revision: kv.mod_revision(),
            put: is_put.then(|| kv.clone()),
        });
    }
}

/// The result of starting a watch.
pub(super) enum Watch {
    /// The watch continues from the position.
    From(Box<WatchStream>),
    /// The store's history does not go back to the position, or is a different history.
    HistoryGone(&'static str),
}

/// A change of a key. Changes come in the order in which they were made.
pub(crate) enum Change {
    Put(Pair),
    Delete(String),
}

/// A message of a watch.
pub(super) enum WatchMessage {
    Changes(Vec<Change>),
    HistoryGone(&'static str),
}

/// A key and its value, as stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pair {
    pub(crate) key: String,
    pub(crate) value: Value,
    /// The store's revision at the key's creation: the older the key, the lower.
    pub(crate) create_revision: i64,
    pub(crate) mod_revision: i64,
}

/// The value of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Value {
    /// The bytes.
    Bytes(Vec<u8>),
    /// More bytes than are read; their number, if known.
    TooLarge(Option<usize>),
}

impl Value {
    /// Returns the bytes, unless there are more than `most`.
    pub(crate) fn within(&self, most: usize) -> Result<&[u8], String> {
        let length = match self {
            Self::Bytes(bytes) if bytes.len() <= most => return Ok(bytes),
            Self::Bytes(bytes) => Some(bytes.len()),
            Self::TooLarge(length) => *length,
        };
        let length = length.map_or("too many".to_owned(), |length| length.to_string());
        Err(format!(
            "the value has {length} bytes; at most {most} are allowed"
        ))
    }
}

impl From<Vec<u8>> for Value {
    fn from(bytes: Vec<u8>) -> Self {
        if bytes.len() > MAX_VALUE_LEN {
            Self::TooLarge(Some(bytes.len()))
        } else {
            Self::Bytes(bytes)
        }
    }
}

/// A connection to the keys under one prefix. Connects on first use.
#[derive(Clone)]
pub(crate) struct Store {
    client: Client,
    /// The prefix, which ends with a slash.
    prefix: String,
}

impl Store {
    /// Prepares a connection to one of the members, a different one at each turn. Also returns the member's URL.
    pub(crate) async fn of_turn(
        source: &Source,
        turn: usize,
        prefix: &str,
    ) -> Result<(Self, String), StoreError> {
        let access = source
            .access()
            .map_err(|error| StoreError::new("use the settings", error.to_string()))?;
        let endpoint = &access.endpoints[turn % access.endpoints.len()];
        let store = Self::connect(&access, endpoint, prefix).await?;
        Ok((store, endpoint.clone()))
    }

    /// Prepares a connection to one of the members.
    pub(crate) async fn connect(
        access: &Access,
        endpoint: &str,
        prefix: &str,
    ) -> Result<Self, StoreError> {
        let options = Some(access.options(endpoint));
        let client = answered("log in", Client::connect([endpoint], options)).await?;
        Ok(Self {
            client,
            prefix: prefix.to_owned(),
        })
    }

    /// Lists all keys at one revision. Also returns the position after that revision.
    pub(super) async fn list(&mut self) -> Result<(Vec<Pair>, Position), StoreError> {
        let end = end_of(&self.prefix);
        let mut from = self.prefix.as_bytes().to_vec();
        let mut position: Option<Position> = None;
        let mut limit = PAGE;
        let mut pairs = Vec::new();
        let mut newest: Option<KeyValue> = None;
        loop {
            let mut options = GetOptions::new().with_range(end.clone()).with_limit(limit);
            if let Some(position) = &position {
                options = options.with_revision(position.next - 1);
            }
            let page = match self.get(&from, options.clone()).await? {
                Some(page) => page,
                // A value is very large. Find it, and read the others.
                None if limit > 1 => {
                    limit = (limit / 8).max(1);
                    continue;
                }
                None => {
                    let page = self.get(&from, options.with_keys_only()).await?;
                    let page = page.ok_or_else(|| too_large("list the keys"))?;
                    let Some(kv) = page.kvs().first() else { break };
                    check_page(&[kv.key()], false, &from, &end)?;
                    from = behind(kv.key());
                    pairs.push(pair(kv, Value::TooLarge(None)));
                    continue;
                }
            };
            let at_end = position_behind(page.header())?;
            let at = position.get_or_insert(at_end);
            if page
                .header()
                .is_some_and(|h| h.cluster_id() != at.cluster_id)
            {
                return Err(StoreError::new(
                    "list the keys",
                    "the answer is from another cluster",
                ));
            }
            let keys: Vec<&[u8]> = page.kvs().iter().map(KeyValue::key).collect();
            check_page(&keys, page.more(), &from, &end)?;
            let newest_here = page.kvs().iter().max_by_key(|kv| kv.mod_revision());
            if let Some(kv) = newest_here
                && newest
                    .as_ref()
                    .is_none_or(|known| known.mod_revision() < kv.mod_revision())
            {
                newest = Some(kv.clone());
            }
            pairs.extend(
                page.kvs()
                    .iter()
                    .map(|kv| pair(kv, kv.value().to_vec().into())),
            );
            match page.kvs().last() {
                Some(last) if page.more() => from = behind(last.key()),
                _ => break,
            }
            limit = (limit * 2).min(PAGE);
        }
        let mut position = position
            .ok_or_else(|| StoreError::new("list the keys", "the answer has no revision"))?;
        if let Some(newest) = &newest {
            position.note(newest, true);
        }
        Ok((pairs, position))
    }

    /// Reads a range of keys; `None` if the response exceeds the size limit for responses.
    async fn get(
        &mut self,
        from: &[u8],
        options: GetOptions,
    ) -> Result<Option<GetResponse>, StoreError> {
        match timeout(REQUEST_TIMEOUT, self.client.get(from, Some(options))).await {
            Ok(Ok(page)) => Ok(Some(page)),
            Ok(Err(error)) if is_too_large(&error) => Ok(None),
            Ok(Err(error)) => Err(StoreError::from_client("list the keys", &error)),
            Err(_) => Err(unanswered("list the keys")),
        }
    }

    /// Starts to watch all keys after the listing that returned the position.
    pub(super) async fn watch(&mut self, position: &Position) -> Result<Watch, StoreError> {
        self.watch_from(position.next, position).await
    }

    /// Watches all keys again, starting with the last known change, because only that change identifies the store.
    pub(super) async fn resume(&mut self, position: &Position) -> Result<Watch, StoreError> {
        let Some(last) = &position.last else {
            return Ok(Watch::HistoryGone(
                "no earlier change to the store is known",
            ));
        };
        let begun = self.watch_from(last.revision, position).await?;
        if matches!(begun, Watch::HistoryGone(_)) {
            return Ok(begun);
        }
        // Check this only once the watch has started: then the watch ends together with the store that is queried here.
        let recalled = self.recall(last).await?;
        Ok(recalled.map_or_else(Watch::HistoryGone, |()| begun))
    }

    async fn watch_from(
        &mut self,
        revision: i64,
        position: &Position,
    ) -> Result<Watch, StoreError> {
        const ATTEMPT: &str = "watch the keys";
        let options = WatchOptions::new()
            .with_prefix()
            .with_start_revision(revision)
            .with_fragment();
        let prefix = self.prefix.as_str();
        let mut stream = answered(ATTEMPT, self.client.watch(prefix, Some(options))).await?;
        let created = answered(ATTEMPT, stream.message()).await?;
        let created =
            created.ok_or_else(|| StoreError::new(ATTEMPT, "the store ended the watch"))?;
        let behind = position_behind(created.header())?;
        Ok(if behind.cluster_id != position.cluster_id {
            Watch::HistoryGone("it is a different store")
        } else if behind.next < position.next {
            Watch::HistoryGone(WENT_BACK)
        } else if created.canceled() {
            Watch::HistoryGone(canceled(&created))
        } else {
            Watch::From(Box::new(stream))
        })
    }

    /// Finds a change in the store's history. The inner error says why the change is not there.
    async fn recall(&mut self, event: &Event) -> Result<Result<(), &'static str>, StoreError> {
        let then = match self.key_at(&event.key, event.revision).await? {
            Ok(then) => then,
            Err(reason) => return Ok(Err(reason)),
        };
        let is_there = match (&event.put, then.kvs().first()) {
            (Some(put), Some(kv)) => {
                let version =
                    |kv: &KeyValue| (kv.create_revision(), kv.mod_revision(), kv.version());
                version(put) == version(kv) && put.value() == kv.value()
            }
            (None, None) => match self.key_at(&event.key, event.revision - 1).await? {
                Ok(before) => !before.kvs().is_empty(),
                Err(reason) => return Ok(Err(reason)),
            },
            _ => false,
        };
        Ok(if is_there {
            Ok(())
        } else {
            Err("the store has a different history")
        })
    }

    /// Reads a key at a revision. The inner error says why the store cannot provide the value.
    async fn key_at(
        &mut self,
        key: &[u8],
        revision: i64,
    ) -> Result<Result<GetResponse, &'static str>, StoreError> {
        const ATTEMPT: &str = "read an earlier value of a key";
        let options = GetOptions::new().with_revision(revision);
        match timeout(REQUEST_TIMEOUT, self.client.get(key, Some(options))).await {
            Ok(Ok(answer)) => Ok(Ok(answer)),
            Ok(Err(error)) if is_too_large(&error) => Ok(Err("the last change is too large")),
            Ok(Err(error)) => match out_of_history(&error) {
                Some(reason) => Ok(Err(reason)),
                None => Err(StoreError::from_client(ATTEMPT, &error)),
            },
            Err(_) => Err(unanswered(ATTEMPT)),
        }
    }

    /// Creates a lease and returns its ID.
    pub(crate) async fn grant(&mut self, ttl: Duration) -> Result<i64, StoreError> {
        let seconds = ttl.as_secs().cast_signed();
        let granted = answered("create a lease", self.client.lease_grant(seconds, None)).await?;
        Ok(granted.id())
    }

    /// Starts to keep a lease alive.
    pub(crate) async fn keep(&mut self, lease: i64) -> Result<LeaseHold, StoreError> {
        let kept = answered("extend the lease", self.client.lease_keep_alive(lease)).await;
        // Opening the stream fails if the lease no longer exists.
        let (keeper, answers) = kept?;
        Ok(LeaseHold { keeper, answers })
    }

    /// Runs a transaction: one of two lists of operations, depending on the contents of keys.
    pub(crate) async fn transact(
        &mut self,
        attempt: &'static str,
        transaction: Txn,
    ) -> Result<TxnResponse, StoreError> {
        answered(attempt, self.client.txn(transaction)).await
    }
}

/// A lease that is being kept alive.
pub(crate) struct LeaseHold {
    keeper: LeaseKeeper,
    answers: LeaseKeepAliveStream,
}

impl LeaseHold {
    /// Extends the lease. Returns whether it still existed.
    pub(crate) async fn extend(&mut self) -> Result<bool, StoreError> {
        const ATTEMPT: &str = "extend the lease";
        answered(ATTEMPT, self.keeper.keep_alive()).await?;
        let answer = answered(ATTEMPT, self.answers.message()).await?;
        Ok(answer.is_some_and(|answer| answer.ttl() > 0))
    }
}

/// Parses a watch response, and advances the position.
pub(super) fn read(response: &WatchResponse, position: &mut Position) -> WatchMessage {
    if response.canceled() {
        return WatchMessage::HistoryGone(canceled(response));
    }
    let events = response.events().iter();
    let changes = events
        .filter_map(|event| {
            let kv = event.kv()?;
            position.note(kv, event.event_type() == EventType::Put);
            Some(match event.event_type() {
                EventType::Put => Change::Put(pair(kv, kv.value().to_vec().into())),
                EventType::Delete => Change::Delete(text(kv.key())),
            })
        })
        .collect();
    WatchMessage::Changes(changes)
}

fn canceled(response: &WatchResponse) -> &'static str {
    match response.compact_revision() {
        0 => "the store ended the watch",
        _ => COMPACTED,
    }
}

async fn answered<T>(
    attempt: &'static str,
    request: impl Future<Output = Result<T, Error>>,
) -> Result<T, StoreError> {
    match timeout(REQUEST_TIMEOUT, request).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(StoreError::from_client(attempt, &error)),
        Err(_) => Err(unanswered(attempt)),
    }
}

fn unanswered(attempt: &'static str) -> StoreError {
    StoreError::new(attempt, format!("no answer for {REQUEST_TIMEOUT:?}"))
}

/// Fails unless a page contains the requested keys in order, and makes progress if there are more pages; otherwise the
/// listing might never end.
fn check_page(keys: &[&[u8]], more: bool, from: &[u8], end: &[u8]) -> Result<(), StoreError> {
    let is_inside = keys.iter().all(|key| (from..end).contains(key));
    if is_inside && keys.is_sorted_by(|one, next| one < next) && !(more && keys.is_empty()) {
        return Ok(());
    }
    let why = "the answer has keys that were not requested, or that are out of order";
    Err(StoreError::new("list the keys", why))
}

fn too_large(attempt: &'static str) -> StoreError {
    StoreError::new(attempt, "the answer is too large")
}

fn is_too_large(error: &Error) -> bool {
    matches!(error, Error::GRpcStatus(status) if status.message().contains("message length too large"))
}

/// Returns why the history lacks a revision; `None` for other errors.
fn out_of_history(error: &Error) -> Option<&'static str> {
    let Error::GRpcStatus(status) = error else {
        return None;
    };
    // `ErrCompacted` and `ErrFutureRev` in etcd's server/storage/mvcc/kvstore.go.
    match status.message() {
        message if message.contains("required revision has been compacted") => Some(COMPACTED),
        message if message.contains("required revision is a future revision") => Some(WENT_BACK),
        _ => None,
    }
}

/// Whether the error lies in the data that the store sent, so that repeating the request is useless.
pub(super) fn is_unreadable(error: &Error) -> bool {
    is_too_large(error)
        || matches!(error, Error::GRpcStatus(status) if status.message().contains("decode"))
}

pub(super) fn watch_failed(error: &Error) -> StoreError {
    StoreError::from_client("watch the keys", error)
}

/// Returns the error with its innermost cause on one line: "transport error" alone is meaningless.
fn reason(error: &Error) -> String {
    let (mut text, mut cause) = match error {
        Error::GRpcStatus(status) => (status.message().to_owned(), status.source()),
        Error::TransportError(error) => (error.to_string(), error.source()),
        error => (error.to_string(), error.source()),
    };
    while let Some(error) = cause {
        let inner = error.to_string();
        if !text.contains(&inner) {
            text = format!("{text}: {inner}");
        }
        cause = error.source();
    }
    text.replace('\n', " ")
}

fn position_behind(header: Option<&ResponseHeader>) -> Result<Position, StoreError> {
    let header = header.ok_or_else(|| StoreError::new("read an answer", "it has no header"))?;
    Ok(Position {
        cluster_id: header.cluster_id(),
        next: header.revision() + 1,
        last: None,
    })
}

fn pair(kv: &KeyValue, value: Value) -> Pair {
    Pair {
        key: text(kv.key()),
        value,
        create_revision: kv.create_revision(),
        mod_revision: kv.mod_revision(),
    }
}

/// Converts a key to a string. Escapes keys that are not UTF-8 so that no two of them become equal.
fn text(key: &[u8]) -> String {
    let text = std::str::from_utf8(key).map(str::to_owned);
    text.unwrap_or_else(|_| key.escape_ascii().to_string())
}

/// Returns the first key after this one.
fn behind(key: &[u8]) -> Vec<u8> {
    [key, &[0]].concat()
}

/// Returns the first key after all keys with this prefix. Prefixes end with a slash.
fn end_of(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_leads_nowhere_or_elsewhere_is_an_error() {
        let check = |keys: &[&[u8]], more| check_page(keys, more, b"/p/b", b"/p0").is_ok();
        assert!(check(&[], false));
        assert!(check(&[b"/p/b", b"/p/c"], true));
        assert!(!check(&[], true), "there is more, and nothing came");
        assert!(!check(&[b"/p/a"], true), "a key of the page before");
        assert!(!check(&[b"/p/c", b"/p/b"], false), "not in order");
        assert!(!check(&[b"/q/a"], false), "of nobody who was asked for");
    }

    #[test]
    fn keys_that_are_no_utf8_stay_apart() {
        assert_eq!(text("/p/ü".as_bytes()), "/p/ü");
        assert_eq!(text(b"/p/\xfe"), r"/p/\xfe");
        assert_ne!(text(b"/p/\xfe"), text(b"/p/\xff"));
    }
}
