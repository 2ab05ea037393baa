//! The documents under a prefix. No connection and no clock: receives keys and times, and returns documents.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use imbl::OrdMap;

use super::Text;
use crate::etcd::{Mirror, Pair};

/// Maximum length of a document in bytes. A slice with the maximum number of endpoints in Kubernetes takes a third of
/// that.
const MAX_TEXT_LEN: usize = 512 * 1024;
/// How long a document that is missing from a new listing stays while other documents exist. The store may have lost
/// its data, and the writers of the documents may still be rewriting them.
const SETTLE: Duration = Duration::from_secs(120);

/// Minimum time that a missing document stays once the store is back after an outage.
const SETTLE_AGAIN: Duration = Duration::from_secs(10);

/// The documents under a prefix. Times count from any fixed moment.
pub(super) struct View<T, R> {
    prefix: String,
    read: R,
    /// The documents by key without the prefix.
    documents: OrdMap<String, Arc<T>>,
    /// Documents that were not in the last listing.
    missing: BTreeSet<String>,
    /// When the missing documents are removed. Not set while no other documents exist.
    missing_until: Option<Duration>,
    is_complete: bool,
}

impl<T: PartialEq, R: FnMut(&str, Text<'_>, Option<&T>) -> T> View<T, R> {
    pub(super) fn new(prefix: &str, read: R) -> Self {
        Self {
            prefix: prefix.to_owned(),
            read,
            documents: OrdMap::new(),
            missing: BTreeSet::new(),
            missing_until: None,
            is_complete: false,
        }
    }

    /// Prefix of all keys.
    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    pub(super) fn documents(&self) -> &OrdMap<String, Arc<T>> {
        &self.documents
    }

    /// Whether the documents have been listed.
    pub(super) fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// Why the documents may be wrong.
    pub(super) fn distrust(&self) -> Option<&'static str> {
        (!self.missing.is_empty() && self.missing_until.is_none())
            .then_some("it no longer has any documents; its data may have been lost")
    }

    /// Records a document that was written.
    pub(super) fn put(&mut self, pair: &Pair, now: Duration) {
        self.take(pair);
        self.note_missing();
        if !self.missing.is_empty() {
            self.missing_until.get_or_insert(now + SETTLE);
        }
    }

    fn take(&mut self, pair: &Pair) {
        let Some(key) = pair.key.strip_prefix(&self.prefix) else {
            return;
        };
        let before = self.documents.get(key).map(Arc::as_ref);
        let document = (self.read)(key, pair.value.within(MAX_TEXT_LEN), before);
        self.missing.remove(key);
        // An unchanged document keeps its allocation.
        if before != Some(&document) {
            self.documents.insert(key.to_owned(), Arc::new(document));
        }
    }

    /// Records a document that was deleted.
    pub(super) fn delete(&mut self, key: &str) {
        if let Some(key) = key.strip_prefix(&self.prefix) {
            self.documents.remove(key);
            self.missing.remove(key);
            self.note_missing();
        }
    }

    fn note_missing(&mut self) {
        if self.missing.is_empty() {
            self.missing_until = None;
        }
    }

    /// Removes expired documents. Returns whether there were any.
    pub(super) fn expire(&mut self, now: Duration) -> bool {
        if self.missing_until.is_none_or(|until| until > now) {
            return false;
        }
        self.missing_until = None;
        for key in std::mem::take(&mut self.missing) {
            self.documents.remove(&key);
        }
        true
    }

    /// When [`expire`](Self::expire) next has anything to do.
    pub(super) fn next_expiry(&self) -> Option<Duration> {
        self.missing_until
    }
}

impl<T: PartialEq, R: FnMut(&str, Text<'_>, Option<&T>) -> T> Mirror for View<T, R> {
    fn replace(&mut self, pairs: Vec<Pair>, now: Duration) {
        let is_empty = pairs.is_empty();
        self.missing = self.documents.keys().cloned().collect();
        for pair in &pairs {
            self.take(pair);
        }
        // Another listing does not restart the timer.
        self.missing_until = match self.missing_until {
            _ if is_empty || self.missing.is_empty() => None,
            known => known.or(Some(now + SETTLE)),
        };
        self.is_complete = true;
    }

    /// Notes that the store is back after an interruption: the writers of documents may have been cut off too.
    fn resume(&mut self, now: Duration) {
        let until = self.missing_until;
        self.missing_until = until.map(|until| until.max(now + SETTLE_AGAIN));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::etcd::Value;

    const SECOND: Duration = Duration::from_secs(1);

    /// Returns the document. If it cannot be read, returns the previous document and the problem.
    fn read(_key: &str, text: Text<'_>, before: Option<&String>) -> String {
        match text {
            Ok(text) => String::from_utf8_lossy(text).into_owned(),
            Err(problem) => format!("{}!{problem}", before.map_or("", |text| text)),
        }
    }

    type Texts = View<String, fn(&str, Text<'_>, Option<&String>) -> String>;

    fn view() -> Texts {
        View::new("/p/", read)
    }

    fn pair(key: &str, value: impl Into<Vec<u8>>) -> Pair {
        Pair {
            key: format!("/p/{key}"),
            value: Value::from(value.into()),
            create_revision: 1,
            mod_revision: 1,
        }
    }

    fn shown(view: &Texts) -> Vec<String> {
        let documents = view.documents().iter();
        documents
            .map(|(key, text)| format!("{key}={text}"))
            .collect()
    }

    #[test]
    fn documents_come_change_and_go_by_their_keys() {
        let mut view = view();
        assert!(!view.is_complete());
        view.replace(vec![pair("a", "1"), pair("b", "1")], SECOND);
        assert!(view.is_complete());
        view.put(&pair("b", "2"), SECOND);
        view.put(&pair("c/d", "1"), SECOND);
        view.delete("/p/a");
        view.delete("/elsewhere/b");
        assert_eq!(shown(&view), ["b=2", "c/d=1"]);
        assert_eq!((view.next_expiry(), view.distrust()), (None, None));
    }

    #[test]
    fn a_value_that_is_too_large_is_named_and_its_former_one_stays() {
        let mut view = view();
        view.replace(vec![pair("a", "1")], SECOND);
        view.put(&pair("a", vec![b'x'; MAX_TEXT_LEN + 1]), SECOND);
        assert_eq!(
            shown(&view),
            ["a=1!the value has 524289 bytes; at most 524288 are allowed"]
        );
    }

    #[test]
    fn what_a_new_list_misses_stays_for_a_while() {
        let mut view = view();
        view.replace(vec![pair("a", "1"), pair("b", "1"), pair("c", "1")], SECOND);
        view.replace(vec![pair("a", "2")], SECOND * 10);
        assert_eq!(shown(&view), ["a=2", "b=1", "c=1"]);
        assert_eq!(view.distrust(), None);
        // A second listing does not restart the timer, and a document that is written again stays.
        view.replace(vec![pair("a", "2")], SECOND * 60);
        view.put(&pair("b", "1"), SECOND * 70);
        let end = SECOND * 10 + SETTLE;
        view.resume(SECOND * 70);
        assert_eq!(view.next_expiry(), Some(end));
        assert!(!view.expire(end - SECOND));
        view.resume(end);
        assert!(!view.expire(end));
        assert!(view.expire(end + SETTLE_AGAIN));
        assert_eq!(shown(&view), ["a=2", "b=1"]);
        assert_eq!(view.next_expiry(), None);
    }

    #[test]
    fn a_store_that_comes_back_empty_takes_nothing_away_until_it_is_filled() {
        let mut view = view();
        view.replace(vec![pair("a", "1"), pair("b", "1")], SECOND);
        view.replace(Vec::new(), SECOND * 2);
        assert!(!view.expire(SECOND * 1_000_000));
        assert_eq!(shown(&view), ["a=1", "b=1"]);
        assert!(view.distrust().is_some());
        view.put(&pair("a", "2"), SECOND * 1_000_000);
        assert_eq!(view.distrust(), None);
        assert!(view.expire(SECOND * 1_000_000 + SETTLE));
        assert_eq!(shown(&view), ["a=2"]);
        // Deleting the last document is accepted.
        view.delete("/p/a");
        assert_eq!((shown(&view).len(), view.distrust()), (0, None));
    }
}
