//! Backend selection: the arithmetic, without the maps.

/// Scales 32 random bits to a number below `count`.
#[inline(always)]
pub const fn scaled(random: u32, count: u32) -> u32 {
    ((random as u64 * count as u64) >> 32) as u32
}

/// Selects an index of a weighted pool by Walker's alias method. `first`: a uniformly chosen index; `threshold` and
/// `alias`: the pool's entries at that index; `random`: another random number.
///
/// Vose, "A linear algorithm for generating random numbers with a given distribution", 1991.
#[inline(always)]
pub const fn weighted(first: u32, threshold: u32, alias: u32, random: u32) -> u32 {
    // A threshold of all ones means always: 2^32 does not fit into 32 bits.
    if random < threshold || threshold == u32::MAX {
        first
    } else {
        alias
    }
}

/// Packs a flow's ports, in network byte order, and protocol for [`flow_hash`]. With affinity (`is_by_client`) the
/// ports are 0.
#[inline(always)]
pub const fn ports_and_protocol(
    source_be: u16,
    destination_be: u16,
    protocol: u8,
    is_by_client: bool,
) -> u64 {
    if is_by_client {
        return protocol as u64;
    }
    let (source, destination) = (u16::from_be(source_be), u16::from_be(destination_be));
    (source as u64) << 24 | (destination as u64) << 40 | protocol as u64
}

/// Hashes a flow for Maglev, with the same result on all nodes.
///
/// Words are multiplied and folded as in wyhash (Wang Yi). Each bit of the result depends on each bit of the input.
#[inline(always)]
pub const fn flow_hash(
    source_be: &[u32; 4],
    destination_be: &[u32; 4],
    ports_and_protocol: u64,
) -> u32 {
    let a = mix(
        pair(source_be[0], source_be[1]) ^ SECRET[0],
        pair(source_be[2], source_be[3]) ^ SECRET[1],
    );
    let b = mix(
        pair(destination_be[0], destination_be[1]) ^ SECRET[1],
        pair(destination_be[2], destination_be[3]) ^ SECRET[2],
    );
    let all = mix(a ^ ports_and_protocol ^ SECRET[2], b ^ SECRET[0]);
    (all ^ (all >> 32)) as u32
}

const SECRET: [u64; 3] = [
    0xa076_1d64_78bd_642f,
    0xe703_7ed1_a0b4_28db,
    0x8ebc_6af0_9c88_c6e3,
];

#[inline(always)]
const fn pair(high: u32, low: u32) -> u64 {
    (high as u64) << 32 | low as u64
}

/// Mixes two words without 128-bit multiplication, which BPF lacks.
#[inline(always)]
const fn mix(a: u64, b: u64) -> u64 {
    let product = (a ^ a >> 32).wrapping_mul(SECRET[0] | 1).wrapping_add(b);
    let folded = (product ^ product >> 29).wrapping_mul(SECRET[1]);
    folded ^ folded >> 32
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use std::vec;
    use std::vec::Vec;

    fn hash(client: u32, port: u64) -> u32 {
        flow_hash(
            &[0, 0, 0xffff, client],
            &[0, 0, 0xffff, 0x0a60_0001],
            port << 24 | 6,
        )
    }

    #[test]
    fn flows_of_neighbours_spread_evenly() {
        const BACKENDS: u32 = 101;
        let mut counts = vec![0_u32; BACKENDS as usize];
        for client in 0..100_u32 {
            for port in 0..10_000_u64 {
                counts[(hash(client.to_be(), port) % BACKENDS) as usize] += 1;
            }
        }
        let even = 1_000_000 / BACKENDS;
        let far: Vec<_> = counts
            .iter()
            .filter(|&&count| count.abs_diff(even) > even / 20)
            .collect();
        assert!(far.is_empty(), "{far:?} of {even}");
    }

    #[test]
    fn each_bit_of_a_flow_turns_about_half_of_the_hash() {
        for bit in 0..32 {
            let turned: u32 = (0..1_000_u32)
                .map(|client| {
                    let client = client.wrapping_mul(0x9e37_79b9);
                    (hash(client, 7) ^ hash(client ^ 1 << bit, 7)).count_ones()
                })
                .sum();
            assert!((14_000..18_000).contains(&turned), "bit {bit}: {turned}");
        }
    }

    #[test]
    fn a_scaled_number_is_below_its_bound_and_reaches_it() {
        assert_eq!(scaled(u32::MAX, 7), 6);
        assert_eq!(scaled(0, 7), 0);
        assert_eq!(scaled(u32::MAX, u32::MAX), u32::MAX - 1);
    }

    #[test]
    fn a_certain_index_is_never_left() {
        assert_eq!(weighted(3, u32::MAX, 5, u32::MAX), 3);
        assert_eq!(weighted(3, 0, 5, 0), 5);
    }
}
