//! Bounds that the verifier has to see.

use core::ptr;

/// The same value, of which LLVM has forgotten what it knows: a comparison that it holds to be needless, and
/// from which the verifier learns the bounds, stays in.
#[inline(always)]
pub fn forgotten<T: Copy>(value: T) -> T {
    // SAFETY: a reference.
    unsafe { ptr::read_volatile(&raw const value) }
}
