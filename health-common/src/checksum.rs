//! The Internet checksum (RFC 1071) and its incremental update (RFC 1624).
//!
//! Words are summed in memory order: the sum does not depend on byte order as long as all words and the result are read
//! and written the same way (RFC 1071 section 2.B).

/// Folds a sum of 16-bit words into 16 bits. The first fold may itself carry, so there are two.
#[inline(always)]
pub const fn fold(mut sum: u32) -> u16 {
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    sum as u16
}

/// The checksum field after one 16-bit word of the covered data changed from `old` to `new`
/// (RFC 1624 equation 3: `HC' = ~(~HC + ~m + m')`).
#[inline(always)]
pub const fn update(check: u16, old: u16, new: u16) -> u16 {
    !fold((!check) as u32 + (!old) as u32 + new as u32)
}

/// The unfolded sum of a whole number of 16-bit words.
#[inline(always)]
pub fn sum<const N: usize>(words: &[u16; N]) -> u32 {
    let mut total = 0;
    let mut i = 0;
    while i < N {
        total += words[i] as u32;
        i += 1;
    }
    total
}

/// The unfolded sum of 32-bit words. It equals the sum of their halves up to carries, which [`fold64`] folds back in.
#[inline(always)]
pub fn sum32(words: &[u32]) -> u64 {
    let mut total = 0;
    let mut i = 0;
    while i < words.len() {
        total += words[i] as u64;
        i += 1;
    }
    total
}

/// Folds a sum of fewer than 2^32 words of 32 bits into 16 bits, including all carries.
#[inline(always)]
pub const fn fold64(mut sum: u64) -> u16 {
    sum = (sum & 0xffff_ffff) + (sum >> 32);
    sum = (sum & 0xffff_ffff) + (sum >> 32);
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    sum as u16
}

/// The checksum field after 32-bit words of the covered data, at even offsets, changed from `old` to
/// `new` (RFC 1624 equation 3).
#[inline(always)]
pub fn replace<const N: usize>(check: u16, old: &[u32; N], new: &[u32; N]) -> u16 {
    let mut total = (!check) as u64 + sum32(new);
    let mut i = 0;
    while i < N {
        total += (!old[i]) as u64;
        i += 1;
    }
    !fold64(total)
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

    fn full(words: &[u16]) -> u16 {
        !fold(words.iter().map(|&w| u32::from(w)).sum())
    }

    /// 0x0000 and 0xffff are the same number in one's complement.
    fn normal(check: u16) -> u16 {
        if check == 0xffff { 0 } else { check }
    }

    fn halves(words: &[u32]) -> Vec<u16> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let pairs = bytes.chunks_exact(2);
        pairs
            .map(|pair| u16::from_ne_bytes([pair[0], pair[1]]))
            .collect()
    }

    proptest! {
        #[test]
        fn an_updated_checksum_is_the_recomputed_one(
            words in prop::collection::vec(any::<u16>(), 2..40),
            at in any::<prop::sample::Index>(),
            new in any::<u16>(),
        ) {
            let at = at.index(words.len());
            let mut changed: Vec<u16> = words.clone();
            changed[at] = new;
            prop_assert_eq!(normal(update(full(&words), words[at], new)), normal(full(&changed)));
        }

        #[test]
        fn the_sum_of_wide_words_is_that_of_their_halves(words in prop::collection::vec(any::<u32>(), 0..40)) {
            prop_assert_eq!(normal(fold64(sum32(&words))), normal(fold(halves(&words).iter().map(|&w| u32::from(w)).sum())));
        }

        #[test]
        fn a_replaced_checksum_is_the_recomputed_one(
            rest in prop::collection::vec(any::<u16>(), 0..40),
            old in any::<[u32; 4]>(),
            new in any::<[u32; 4]>(),
        ) {
            let with = |words: &[u32]| full(&[&rest[..], &halves(words)].concat());
            prop_assert_eq!(normal(replace(with(&old), &old, &new)), normal(with(&new)));
        }
    }
}
