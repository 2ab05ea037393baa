use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

fn backends(count: u32, salt: u64) -> Vec<Entry> {
    (1..=count)
        .map(|id| Entry {
            id,
            hash: mix(salt.wrapping_mul(1_000_003).wrapping_add(id.into())),
            weight: 1,
        })
        .collect()
}

fn filled(size: u32, backends: &[Entry]) -> Vec<u32> {
    let mut table = vec![u32::MAX; size as usize];
    Maglev::new(size, SEED).unwrap().fill(backends, &mut table);
    table
}

fn shares(table: &[u32]) -> HashMap<u32, u32> {
    let mut shares = HashMap::new();
    for id in table {
        *shares.entry(*id).or_default() += 1;
    }
    shares
}

#[test]
fn a_size_must_be_a_prime() {
    for size in [0, 1, 2, 4, 9, 16_383, SIZE_MAX + 43, u32::MAX] {
        assert_eq!(Maglev::new(size, SEED).unwrap_err(), SizeError(size));
    }
    for size in [3, 5, 251, 16_381, SIZE, 131_071] {
        assert_eq!(Maglev::new(size, SEED).unwrap().size(), size);
    }
}

#[test]
fn a_hundred_equal_backends_get_shares_that_differ_by_one_place() {
    // Backends take turns, so each gets the integer part of size / count, and at most one slot of the remainder (§3.4
    // of the paper). For a backend with 100 slots, that is within 1 in 100.
    for size in [16_381, SIZE] {
        let shares = shares(&filled(size, &backends(100, 7)));
        assert_eq!(shares.len(), 100);
        let even = size / 100;
        for share in shares.values() {
            assert!((even..=even + 1).contains(share), "{share} of {size}");
            assert!(f64::from(*share) / (f64::from(size) / 100.0) - 1.0 < 0.02);
        }
    }
}

#[test]
fn an_empty_set_of_backends_leaves_no_place_to_one() {
    assert!(filled(251, &[]).iter().all(|id| *id == 0));
    let mut none = backends(3, 1);
    none.iter_mut().for_each(|backend| backend.weight = 0);
    assert!(filled(251, &none).iter().all(|id| *id == 0));
}

#[test]
fn one_backend_has_all_places_and_more_backends_than_places_are_not_all_there() {
    assert!(filled(251, &backends(1, 3)).iter().all(|id| *id == 1));
    assert_eq!(shares(&filled(3, &backends(10, 3))).len(), 3);
}

#[test]
fn a_table_is_the_same_in_each_version() {
    let address = |text: &str| hash(text.parse().unwrap());
    let backends =
        [("10.0.0.1:80", 1), ("10.0.0.2:80", 2), ("[fd00::3]:80", 3)].map(|(text, id)| Entry {
            id,
            hash: address(text),
            weight: 1,
        });
    assert_eq!(filled(13, &backends), TABLE);
}

/// Nodes of different versions in one cluster must choose the same backends.
const TABLE: [u32; 13] = [1, 2, 2, 2, 1, 1, 3, 3, 3, 2, 3, 3, 1];

#[test]
fn one_filler_fills_many_tables_as_a_new_one_does() {
    let mut maglev = Maglev::new(251, SEED).unwrap();
    let mut table = vec![0; 251];
    for count in [5, 1, 9, 2] {
        maglev.fill(&backends(count, 11), &mut table);
        assert_eq!(table, filled(251, &backends(count, 11)));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn few_places_move_when_a_backend_goes(
        (size, count) in prop_oneof![
            (Just(16_381), 2_u32..=64),
            (Just(SIZE), 2_u32..=128),
        ],
        gone in any::<prop::sample::Index>(),
        salt in any::<u64>(),
    ) {
        let before = backends(count, salt);
        let mut after = before.clone();
        after.remove(gone.index(before.len()));
        let (before, after) = (filled(size, &before), filled(size, &after));
        let moved = before.iter().zip(&after).filter(|(before, after)| before != after).count();
        prop_assert!(moved <= 2 * size as usize / count as usize, "{} of {} moved", moved, count);
    }

    #[test]
    fn weights_are_shares(
        weights in prop::collection::vec(1_u16..=20, 2..40),
        salt in any::<u64>(),
    ) {
        let mut all = backends(weights.len() as u32, salt);
        for (backend, weight) in all.iter_mut().zip(&weights) {
            backend.weight = *weight;
        }
        let shares = shares(&filled(SIZE, &all));
        let total: u32 = weights.iter().map(|weight| u32::from(*weight)).sum();
        for backend in &all {
            let due = f64::from(SIZE) * f64::from(backend.weight) / f64::from(total);
            let share = f64::from(shares.get(&backend.id).copied().unwrap_or_default());
            // In the turn in which the table fills up, each backend is within one slot of its due, and all dues
            // together differ from the size of the table by at most as many slots as there are backends.
            let bound = 2.0 + weights.len() as f64 * f64::from(backend.weight) / f64::from(total);
            prop_assert!((share - due).abs() <= bound, "{} for {}", share, due);
        }
    }

    #[test]
    fn the_order_of_the_backends_does_not_matter(
        (count, order) in (1_u32..30).prop_flat_map(|count| {
            (Just(count), Just((0..count as usize).collect::<Vec<_>>()).prop_shuffle())
        }),
        salt in any::<u64>(),
    ) {
        let all = backends(count, salt);
        let shuffled: Vec<_> = order.iter().map(|i| all[*i]).collect();
        prop_assert_eq!(filled(1021, &all), filled(1021, &shuffled));
    }
}
