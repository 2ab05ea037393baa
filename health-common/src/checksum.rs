//! The Internet checksum (RFC 1071) and its incremental update (RFC 1624).
//!
//! Words are taken as they lie in memory: the sum is independent of byte order as long as all words
//! and the result are read and written the same way (RFC 1071 section 2.B).

/// Adds the two carries that a sum of many 16-bit words can leave.
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

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

    fn full(words: &[u16]) -> u16 {
        !fold(words.iter().map(|&w| u32::from(w)).sum())
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
            // 0x0000 and 0xffff are the same number in one's complement.
            let normal = |c: u16| if c == 0xffff { 0 } else { c };
            prop_assert_eq!(normal(update(full(&words), words[at], new)), normal(full(&changed)));
        }
    }
}
