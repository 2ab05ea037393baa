//! The numbers that identify service ports in the maps.

use std::collections::HashSet;
use std::io;

use health_common::service::NUMBER_MASK;

/// Allocates ascending numbers from 1. A number that flows or clients may still refer to is reused only after all
/// others have been used.
#[derive(Debug)]
pub(super) struct Numbers {
    last: u32,
    /// The numbers that entries referred to when the numbers last wrapped around to 1.
    named: HashSet<u32>,
}

impl Numbers {
    /// Numbers after `last`.
    pub(super) fn after(last: u32) -> Self {
        Self {
            last,
            named: HashSet::new(),
        }
    }

    /// Allocates an unused number. `named` returns the numbers that entries refer to; it is called when the numbers
    /// wrap around to 1.
    pub(super) fn allocate(
        &mut self,
        is_taken: impl Fn(u32) -> bool,
        named: impl Fn() -> io::Result<HashSet<u32>>,
    ) -> io::Result<u32> {
        loop {
            self.last = if self.last < NUMBER_MASK {
                self.last + 1
            } else {
                self.named = named()?;
                1
            };
            if !self.named.contains(&self.last) && !is_taken(self.last) {
                return Ok(self.last);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_begin_from_1_again_leave_out_what_is_named() {
        let mut numbers = Numbers::after(NUMBER_MASK - 1);
        let named = || Ok(HashSet::from([1, 3]));
        let mut next = || numbers.allocate(|number| number == 4, named).unwrap();
        assert_eq!([next(), next(), next()], [NUMBER_MASK, 2, 5]);
    }
}
