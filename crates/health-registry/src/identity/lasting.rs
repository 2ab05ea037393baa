//! A map whose entries remain for a while after removal, so that a mistake or a loss at the store can be repaired
//! before it takes effect. Times count from any fixed moment.

use std::collections::BTreeMap;
use std::time::Duration;

/// A map with delayed removal.
#[derive(Debug)]
pub(super) struct LastingMap<K, V> {
    entries: BTreeMap<K, Entry<V>>,
}

#[derive(Debug)]
struct Entry<V> {
    value: V,
    /// When the entry expires; `None` if it has not been removed.
    leaves_at: Option<Duration>,
    /// Whether the removed entry was already given more time.
    is_prolonged: bool,
}

impl<K, V> Default for LastingMap<K, V> {
    fn default() -> Self {
        Self {
            entries: BTreeMap::new(),
        }
    }
}

impl<K: Ord, V> LastingMap<K, V> {
    /// Inserts a value, which stays until it is removed.
    pub(super) fn put(&mut self, key: K, value: V) {
        let entry = Entry {
            value,
            leaves_at: None,
            is_prolonged: false,
        };
        self.entries.insert(key, entry);
    }

    /// Removes an entry. The entry expires at `at`, or earlier if it was already due to expire.
    pub(super) fn remove(&mut self, key: &K, at: Duration) {
        if let Some(entry) = self.entries.get_mut(key) {
            entry.leaves_at = Some(entry.leaves_at.map_or(at, |before| before.min(at)));
        }
    }

    /// Removes all unwanted entries, as [`Self::remove`] does.
    pub(super) fn retain(&mut self, at: Duration, is_wanted: impl Fn(&K) -> bool) {
        for (key, entry) in &mut self.entries {
            if !is_wanted(key) {
                entry.leaves_at = Some(entry.leaves_at.unwrap_or(at));
            }
        }
    }

    /// Keeps all removed entries at least until `at`. Each entry gets more time only once, so that
    /// repeated outages do not keep it forever.
    pub(super) fn prolong(&mut self, at: Duration) {
        for entry in self.entries.values_mut() {
            if !entry.is_prolonged && entry.leaves_at.is_some_and(|before| before < at) {
                entry.leaves_at = Some(at);
                entry.is_prolonged = true;
            }
        }
    }

    /// Drops expired entries. Returns whether there were any.
    pub(super) fn expire(&mut self, now: Duration) -> bool {
        let before = self.entries.len();
        self.entries
            .retain(|_, entry| entry.leaves_at.is_none_or(|at| at > now));
        self.entries.len() != before
    }

    /// When [`Self::expire`] next has anything to do.
    pub(super) fn next_expiry(&self) -> Option<Duration> {
        self.entries.values().filter_map(|e| e.leaves_at).min()
    }

    /// Returns the value unless it was removed.
    pub(super) fn present(&self, key: &K) -> Option<&V> {
        let entry = self.entries.get(key)?;
        entry.leaves_at.is_none().then_some(&entry.value)
    }

    /// Whether the entry exists, even if it was removed but has not expired yet.
    pub(super) fn contains(&self, key: &K) -> bool {
        self.entries.contains_key(key)
    }

    /// Returns the value, even if it was removed but has not expired yet.
    pub(super) fn get(&self, key: &K) -> Option<&V> {
        self.entries.get(key).map(|entry| &entry.value)
    }

    /// Returns all entries, including those that were removed but have not expired yet.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.entries.iter().map(|(key, entry)| (key, &entry.value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn what_is_taken_away_stays_for_its_time_unless_it_is_put_back() {
        let mut map = LastingMap::default();
        map.put("a", 1);
        map.put("b", 2);
        map.remove(&"a", SECOND * 10);
        map.retain(SECOND * 100, |key| *key == "c");
        assert_eq!(map.next_expiry(), Some(SECOND * 10));
        assert_eq!((map.present(&"a"), map.contains(&"a")), (None, true));
        map.put("a", 3);
        assert!(!map.expire(SECOND * 50));
        map.prolong(SECOND * 200);
        assert!(!map.expire(SECOND * 100));
        assert!(map.expire(SECOND * 200));
        assert_eq!(map.iter().collect::<Vec<_>>(), [(&"a", &3)]);
    }

    #[test]
    fn one_outage_after_another_keeps_nothing_that_was_taken_away() {
        let mut map = LastingMap::default();
        map.put("a", 1);
        map.remove(&"a", SECOND * 10);
        map.prolong(SECOND * 15);
        for outage in 1..10 {
            map.prolong(SECOND * (15 + outage));
        }
        assert!(map.expire(SECOND * 15));
        // An entry that comes back and goes again gets more time again.
        map.put("a", 1);
        map.remove(&"a", SECOND * 30);
        map.prolong(SECOND * 40);
        assert!(!map.expire(SECOND * 30));
    }
}
