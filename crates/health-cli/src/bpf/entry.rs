//! Map entries in listings and dumps.

use std::fmt;

use serde::Serialize;

/// One entry of a map.
#[derive(Debug, Serialize)]
pub(super) struct Entry<K, V> {
    pub(super) key: K,
    pub(super) value: V,
}

impl<K: fmt::Display, V: fmt::Display> fmt::Display for Entry<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.key, self.value)
    }
}

/// A row of a listing: key and value as fields of one object, or on one line.
#[derive(Debug, Serialize)]
pub(super) struct Row<K, V> {
    #[serde(flatten)]
    pub(super) key: K,
    #[serde(flatten)]
    pub(super) value: V,
}

impl<K, V> From<Entry<K, V>> for Row<K, V> {
    fn from(Entry { key, value }: Entry<K, V>) -> Self {
        Self { key, value }
    }
}

impl<K: fmt::Display, V: fmt::Display> fmt::Display for Row<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.key, self.value)
    }
}

/// One line per item.
pub(super) fn lines<T: fmt::Display>(items: &[T]) -> String {
    items.iter().map(|item| format!("{item}\n")).collect()
}
