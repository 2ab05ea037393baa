//! Bounds that the verifier has to see.

use core::ptr;

use crate::frame::IP_AT_MAX;

/// The same value, of which LLVM has forgotten what it knows: a comparison that it holds to be needless, and
/// from which the verifier learns the bounds, stays in.
#[inline(always)]
pub fn forgotten<T: Copy>(value: T) -> T {
    // SAFETY: a reference.
    unsafe { ptr::read_volatile(&raw const value) }
}

/// `value` where it is from `min` to `max`. LLVM makes one comparison out of two, of `value - min`; from which
/// verifiers before Linux 6.15 learn nothing about `value`, so this counts up again from there.
#[inline(always)]
pub fn within(value: u32, min: u32, max: u32) -> Option<u32> {
    let above = forgotten(value.wrapping_sub(min));
    (above <= max - min).then(|| above + min)
}

/// Where an IP header begins, which a step was told, in bounds that the verifier sees.
#[inline(always)]
pub fn header_at(at: u32) -> Option<usize> {
    // A mask's bounds stay with the value where it is put away; those of comparisons do not in Linux 6.1.
    const MASK: u32 = (IP_AT_MAX + 1).next_power_of_two() - 1;
    (at <= IP_AT_MAX).then(|| (forgotten(at) & MASK) as usize)
}
