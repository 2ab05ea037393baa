//! Differences between two persistent maps.

use imbl::OrdMap;
use imbl::ordmap::DiffItem;

/// A key, and its value in each of the two maps.
pub(crate) type Difference<'a, K, V> = (&'a K, Option<&'a V>, Option<&'a V>);

/// Returns the differences between two maps, in key order. Skips shared parts.
pub(crate) fn differences<'a, K: Ord, V: PartialEq>(
    before: &'a OrdMap<K, V>,
    now: &'a OrdMap<K, V>,
) -> impl Iterator<Item = Difference<'a, K, V>> {
    before.diff(now).map(|item| match item {
        DiffItem::Add(key, now) => (key, None, Some(now)),
        DiffItem::Update { old, new } => (new.0, Some(old.1), Some(new.1)),
        DiffItem::Remove(key, before) => (key, Some(before), None),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_came_went_or_changed_is_reported_and_nothing_else() {
        let before = OrdMap::from_iter([(1, "stays"), (2, "goes"), (3, "old")]);
        let now = OrdMap::from_iter([(0, "comes"), (1, "stays"), (3, "new")]);
        let found: Vec<_> = differences(&before, &now).collect();
        assert_eq!(
            found,
            [
                (&0, None, Some(&"comes")),
                (&2, Some(&"goes"), None),
                (&3, Some(&"old"), Some(&"new")),
            ]
        );
    }
}
