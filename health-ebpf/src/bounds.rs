//! Bounds that the verifier must see.

use core::ptr;

use crate::frame::IP_AT_MAX;

/// The same value, but LLVM forgets what it knows about it. This keeps comparisons that LLVM considers redundant, but
/// from which the verifier learns the bounds.
#[inline(always)]
pub fn forgotten<T: Copy>(value: T) -> T {
    // SAFETY: a reference.
    unsafe { ptr::read_volatile(&raw const value) }
}

/// `value` if it is between `min` and `max`. LLVM merges the two comparisons into one of `value - min`, from which
/// verifiers before Linux 6.15 learn nothing about `value`. So this adds `min` back to the checked difference.
#[inline(always)]
pub fn within(value: u32, min: u32, max: u32) -> Option<u32> {
    let above = forgotten(value.wrapping_sub(min));
    (above <= max - min).then(|| above + min)
}

/// Offset of an IP header as passed to a step, with bounds that the verifier sees.
#[inline(always)]
pub fn header_at(at: u32) -> Option<usize> {
    // A mask's bounds survive a spill to the stack; those of comparisons do not in Linux 6.1.
    const MASK: u32 = (IP_AT_MAX + 1).next_power_of_two() - 1;
    (at <= IP_AT_MAX).then(|| (forgotten(at) & MASK) as usize)
}
