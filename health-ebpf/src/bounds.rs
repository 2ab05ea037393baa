//! Makes the bounds of values visible to the verifier.

use core::ptr;

use crate::frame::IP_AT_MAX;

/// Returns the same value, but makes LLVM forget what it knows about it. This preserves comparisons that LLVM considers
/// redundant but that tell the verifier the bounds.
#[inline(always)]
pub fn forgotten<T: Copy>(value: T) -> T {
    // SAFETY: a reference.
    unsafe { ptr::read_volatile(&raw const value) }
}

/// Returns `value` if it is between `min` and `max`. LLVM merges the two comparisons into one comparison of
/// `value - min`, from which verifiers before Linux 6.15 learn nothing about `value`. So this function adds `min` back
/// to the checked difference.
#[inline(always)]
pub fn within(value: u32, min: u32, max: u32) -> Option<u32> {
    let above = forgotten(value.wrapping_sub(min));
    (above <= max - min).then(|| above + min)
}

/// Bounds the offset of an IP header that was passed to a step, so that the verifier sees its range.
#[inline(always)]
pub fn header_at(at: u32) -> Option<usize> {
    // In Linux 6.1, bounds from a mask survive a spill to the stack; bounds from comparisons do not.
    const MASK: u32 = (IP_AT_MAX + 1).next_power_of_two() - 1;
    (at <= IP_AT_MAX).then(|| (forgotten(at) & MASK) as usize)
}
