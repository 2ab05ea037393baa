//! Lookup tables for consistent choice of a backend (Eisenbud et al., "Maglev: A Fast and Reliable Software Network
//! Load Balancer", NSDI 2016, §3.4).
//!
//! Each backend has its own order of the table's slots, and takes the next free slot when it is its turn. All backends
//! thus get equal shares, and few slots change hands when a backend is added or removed. Nodes with the same backends
//! and the same seed have the same table.

#[cfg(test)]
mod tests;

use std::net::{IpAddr, SocketAddr};

/// Default size, in slots. When one of up to 128 backends is removed, at most as many slots move between the other
/// backends as the removed one had; with 20 backends, a tenth of that. Twice the backends need four times the slots.
/// The size does not depend on the number of backends, because all slots would move with another size.
pub const SIZE: u32 = 65_537;
/// Default seed. Nodes with different seeds choose different backends.
pub const SEED: u64 = 0x6865_616c_7468_2d61;
/// Largest size.
pub(crate) const SIZE_MAX: u32 = 1 << 24;

/// A size that a table cannot have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a Maglev table of {0} slots: the size must be a prime between 3 and {SIZE_MAX}")]
pub struct SizeError(pub u32);

/// A backend of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The value of the slots that the backend gets.
    pub id: u32,
    /// Determines the backend's order of slots: [`hash`], or any other value that is the same on every node.
    pub hash: u64,
    /// The backend's share of the slots, relative to the others. With weight 0, the backend gets none.
    pub weight: u16,
}

/// Fills tables of one size. Reuses its memory for each table.
#[derive(Clone, Debug)]
pub struct Maglev {
    size: u32,
    seed: u64,
    turns: Vec<Turn>,
    /// Which slots are taken, one bit per slot: small enough to stay in the CPU's cache.
    taken: Vec<u64>,
}

/// A backend's progress in its order of slots.
#[derive(Clone, Copy, Debug)]
struct Turn {
    id: u32,
    hash: u64,
    next: u32,
    skip: u32,
    weight: u32,
    /// The part of its next slot that the backend has accumulated, in units of weight.
    credit: u32,
}

impl Maglev {
    /// Creates a filler for tables with this many slots, which must be a prime.
    pub fn new(size: u32, seed: u64) -> Result<Self, SizeError> {
        if !(3..=SIZE_MAX).contains(&size) || !is_prime(size) {
            return Err(SizeError(size));
        }
        Ok(Self {
            size,
            seed,
            turns: Vec::new(),
            taken: vec![0; size.div_ceil(u64::BITS) as usize],
        })
    }

    /// Returns the number of slots in a table.
    pub fn size(&self) -> u32 {
        self.size
    }

    /// Fills a table. The order of the backends does not matter. Without backends, or if all weights are 0, every slot
    /// is 0. With equal weights, shares differ by at most one slot.
    ///
    /// # Panics
    ///
    /// If the length of `table` is not the size.
    pub fn fill(&mut self, backends: &[Entry], table: &mut [u32]) {
        assert_eq!(table.len(), self.size as usize, "slots of a Maglev table");
        let heaviest = backends
            .iter()
            .map(|backend| u32::from(backend.weight))
            .max();
        let heaviest = heaviest.unwrap_or_default();
        if heaviest == 0 {
            return table.fill(0);
        }
        self.prepare(backends);
        let mut free = self.size;
        loop {
            for turn in &mut self.turns {
                turn.credit += turn.weight;
                if turn.credit < heaviest {
                    continue;
                }
                turn.credit -= heaviest;
                let slot = turn.take(self.size, &mut self.taken);
                table[slot as usize] = turn.id;
                free -= 1;
                if free == 0 {
                    return;
                }
            }
        }
    }

    fn prepare(&mut self, backends: &[Entry]) {
        self.taken.fill(0);
        self.turns.clear();
        let (size, seed) = (u64::from(self.size), self.seed);
        let weighty = backends.iter().filter(|backend| backend.weight > 0);
        self.turns.extend(weighty.map(|backend| {
            let offset = mix(backend.hash ^ seed);
            let skip = mix(offset);
            Turn {
                id: backend.id,
                hash: backend.hash,
                next: (offset % size) as u32,
                skip: (skip % (size - 1)) as u32 + 1,
                weight: backend.weight.into(),
                credit: 0,
            }
        }));
        self.turns.sort_unstable_by_key(|turn| (turn.hash, turn.id));
    }
}

impl Turn {
    /// Takes the next free slot in the backend's order; there must be one.
    fn take(&mut self, size: u32, taken: &mut [u64]) -> u32 {
        loop {
            let slot = self.next;
            self.next += self.skip;
            if self.next >= size {
                self.next -= size;
            }
            let word = &mut taken[(slot / u64::BITS) as usize];
            let bit = 1 << (slot % u64::BITS);
            if *word & bit == 0 {
                *word |= bit;
                return slot;
            }
        }
    }
}

/// Returns a hash of a backend that is the same on every node and in every version of the agent.
pub fn hash(address: SocketAddr) -> u64 {
    let (high, low) = match address.ip() {
        IpAddr::V4(ip) => (0, u64::from(u32::from(ip))),
        IpAddr::V6(ip) => ((u128::from(ip) >> 64) as u64, u128::from(ip) as u64),
    };
    let is_v6 = u64::from(address.is_ipv6()) << 16;
    mix(mix(mix(is_v6 | u64::from(address.port())) ^ high) ^ low)
}

/// One step of splitmix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
const fn mix(value: u64) -> u64 {
    let mut value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

fn is_prime(number: u32) -> bool {
    let divisors = (2..).take_while(|divisor| divisor * divisor <= number);
    number > 1
        && divisors
            .into_iter()
            .all(|divisor: u32| !number.is_multiple_of(divisor))
}
