//! Thresholds and aliases of a weighted pool, for [`weighted`](health_common::service::choice::weighted).

/// Returns, for each index of a pool, the threshold below which a random 32-bit number keeps the index, and the alias
/// used otherwise. At least one weight must not be 0. Each index is chosen in proportion to its weight, to within
/// 2^-32.
///
/// Follows Vose, "A linear algorithm for generating random numbers with a given distribution", 1991, but in integers,
/// so that only the thresholds are rounded.
pub(super) fn table(weights: &[u16]) -> (Vec<u32>, Vec<u32>) {
    let count = weights.len() as u64;
    let total: u64 = weights.iter().map(|weight| u64::from(*weight)).sum();
    // Share of each index, in units in which an even share is `total`.
    let mut shares: Vec<u64> = weights
        .iter()
        .map(|weight| u64::from(*weight) * count)
        .collect();
    let indexes = 0..weights.len();
    let (mut small, mut large): (Vec<usize>, Vec<usize>) =
        indexes.partition(|index| shares[*index] < total);
    let mut thresholds = vec![u32::MAX; weights.len()];
    let mut aliases: Vec<u32> = (0..weights.len() as u32).collect();
    while let (Some(&one), Some(&other)) = (small.last(), large.last()) {
        small.pop();
        thresholds[one] = threshold(shares[one], total);
        aliases[one] = other as u32;
        shares[other] -= total - shares[one];
        if shares[other] < total {
            large.pop();
            small.push(other);
        }
    }
    (thresholds, aliases)
}

/// Returns a share in units of 2^-32, rounded; all ones means always.
fn threshold(share: u64, total: u64) -> u32 {
    let (share, total) = (u128::from(share), u128::from(total));
    let scaled = ((share << 32) + total / 2) / total;
    u32::try_from(scaled).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use health_common::service::choice::weighted;
    use proptest::prelude::*;

    use super::*;

    /// Returns how many of `count` x 2^32 choices fall on each index.
    fn chosen((thresholds, aliases): &(Vec<u32>, Vec<u32>)) -> Vec<u64> {
        let mut chosen = vec![0; thresholds.len()];
        for (index, (threshold, alias)) in thresholds.iter().zip(aliases).enumerate() {
            let kept = match threshold {
                &u32::MAX => 1 << 32,
                below => u64::from(*below),
            };
            chosen[index] += kept;
            chosen[*alias as usize] += (1 << 32) - kept;
        }
        chosen
    }

    proptest! {
        #[test]
        fn each_backend_has_the_share_of_its_weight(
            weights in prop::collection::vec(prop_oneof![1..=3_u16, 1..=u16::MAX], 1..300),
        ) {
            let chosen = chosen(&table(&weights));
            let total: u64 = weights.iter().map(|weight| u64::from(*weight)).sum();
            let all = (weights.len() as u128) << 32;
            for (weight, chosen) in weights.iter().zip(chosen) {
                let exact = u128::from(*weight) * all;
                let error = exact.abs_diff(u128::from(chosen) * u128::from(total));
                // 2^-32 of 2^32 x count x total.
                prop_assert!(error <= weights.len() as u128 * u128::from(total));
            }
        }

        #[test]
        fn equal_weights_are_certain(weight in 1..=u16::MAX, count in 1..50_usize) {
            let (thresholds, _) = table(&vec![weight; count]);
            prop_assert_eq!(thresholds, vec![u32::MAX; count]);
        }
    }

    #[test]
    fn a_table_leads_to_the_heavier_backend_more_often() {
        let (thresholds, aliases) = table(&[1, 3]);
        let pick = |first: u32, random| {
            let index = first as usize;
            weighted(first, thresholds[index], aliases[index], random)
        };
        assert_eq!(pick(0, 0), 0);
        assert_eq!(pick(0, (1 << 31) - 1), 0);
        assert_eq!(pick(0, 1 << 31), 1);
        assert_eq!(pick(1, u32::MAX), 1);
    }
}
