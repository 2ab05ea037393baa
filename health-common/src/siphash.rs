//! SipHash-2-4 (Aumasson and Bernstein, 2012): a keyed hash of short inputs, cheap enough to compute per packet.

/// A secret key: two words, read from sixteen bytes in little-endian order.
pub type SipKey = [u64; 2];

/// SipHash-2-4 of an input of 8 to 15 bytes: the first eight as one little-endian word, the remaining `LEN - 8` as
/// another, zero-padded.
#[inline(always)]
pub const fn siphash24_two_words<const LEN: usize>(key: SipKey, first: u64, rest: u64) -> u64 {
    const { assert!(LEN >= 8 && LEN < 16) };
    let mut state = begin(key);
    // The last block carries the input's length in its highest byte.
    let last = rest | (LEN as u64) << 56;
    state = compress(state, first);
    state = compress(state, last);
    end(state)
}

/// SipHash-2-4 of fewer than 32 whole words, each holding its bytes in little-endian order.
#[inline(always)]
pub const fn siphash24_words<const WORDS: usize>(key: SipKey, words: &[u64; WORDS]) -> u64 {
    const { assert!(WORDS < 32) };
    let mut state = begin(key);
    let mut i = 0;
    while i < WORDS {
        state = compress(state, words[i]);
        i += 1;
    }
    state = compress(state, (WORDS as u64 * 8) << 56);
    end(state)
}

#[inline(always)]
const fn begin(key: SipKey) -> [u64; 4] {
    [
        key[0] ^ 0x736f_6d65_7073_6575,
        key[1] ^ 0x646f_7261_6e64_6f6d,
        key[0] ^ 0x6c79_6765_6e65_7261,
        key[1] ^ 0x7465_6462_7974_6573,
    ]
}

#[inline(always)]
const fn end(mut state: [u64; 4]) -> u64 {
    state[2] ^= 0xff;
    state = round(round(round(round(state))));
    state[0] ^ state[1] ^ state[2] ^ state[3]
}

#[inline(always)]
const fn compress(mut state: [u64; 4], block: u64) -> [u64; 4] {
    state[3] ^= block;
    state = round(round(state));
    state[0] ^= block;
    state
}

#[inline(always)]
const fn round([mut v0, mut v1, mut v2, mut v3]: [u64; 4]) -> [u64; 4] {
    v0 = v0.wrapping_add(v1);
    v1 = v1.rotate_left(13) ^ v0;
    v0 = v0.rotate_left(32);
    v2 = v2.wrapping_add(v3);
    v3 = v3.rotate_left(16) ^ v2;
    v0 = v0.wrapping_add(v3);
    v3 = v3.rotate_left(21) ^ v0;
    v2 = v2.wrapping_add(v1);
    v1 = v1.rotate_left(17) ^ v2;
    v2 = v2.rotate_left(32);
    [v0, v1, v2, v3]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The key of the paper's test vectors: bytes 0 to 15.
    const KEY: SipKey = [0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908];

    #[test]
    fn the_vectors_of_the_reference_implementation_hold() {
        let first = 0x0706_0504_0302_0100;
        let rest = |len: usize| {
            let mut bytes = [0; 8];
            for (i, byte) in bytes.iter_mut().take(len - 8).enumerate() {
                *byte = 8 + i as u8;
            }
            u64::from_le_bytes(bytes)
        };
        // `vectors_sip64` of github.com/veorq/SipHash, lengths 8, 12 and 15; the last is also in
        // appendix A of the paper.
        assert_eq!(
            siphash24_two_words::<8>(KEY, first, rest(8)),
            u64::from_le_bytes([0x62, 0x24, 0x93, 0x9a, 0x79, 0xf5, 0xf5, 0x93])
        );
        assert_eq!(
            siphash24_two_words::<12>(KEY, first, rest(12)),
            u64::from_le_bytes([0xfb, 0xe5, 0x0e, 0x86, 0xbc, 0x8f, 0x1e, 0x75])
        );
        assert_eq!(
            siphash24_two_words::<15>(KEY, first, rest(15)),
            0xa129_ca61_49be_45e5
        );
    }

    #[test]
    fn the_vectors_of_whole_words_hold() {
        fn words<const N: usize>() -> [u64; N] {
            let mut next = 0;
            [(); N].map(|()| {
                let bytes = [(); 8].map(|()| {
                    next += 1;
                    next - 1
                });
                u64::from_le_bytes(bytes)
            })
        }
        // As above, lengths 0, 16 and 56.
        let vector = |bytes: [u8; 8]| u64::from_le_bytes(bytes);
        assert_eq!(
            siphash24_words(KEY, &words::<0>()),
            vector([0x31, 0x0e, 0x0e, 0xdd, 0x47, 0xdb, 0x6f, 0x72])
        );
        assert_eq!(
            siphash24_words(KEY, &words::<2>()),
            vector([0xdb, 0x9b, 0xc2, 0x57, 0x7f, 0xcc, 0x2a, 0x3f])
        );
        assert_eq!(
            siphash24_words(KEY, &words::<7>()),
            vector([0xbd, 0x83, 0x8d, 0x3a, 0xaf, 0xbf, 0x8d, 0xb7])
        );
    }
}
