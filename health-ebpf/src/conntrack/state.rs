//! The TCP state of conntrack entries.

use core::intrinsics::{AtomicOrdering, atomic_cxchg};
use core::ptr;

use health_common::ct::{CT_STATE_OFFSET, CtEntry, CtState, Outcome, Side, tcp};
use health_common::events::{EVENT_CT_CLOSED, EVENT_CT_REOPENED};
use health_common::tuple::Tuple;

use crate::events::report_flow;

/// Maximum number of attempts to change an entry's flags while other CPUs change them too. Flags that are missed now
/// will be recorded with the next packet.
const STATE_ATTEMPTS: u32 = 4;

/// Records a segment in the state of its connection. `false` if it cannot be part of the connection.
///
/// # Safety
///
/// `entry` must point to a value of a conntrack map.
#[inline(always)]
pub(crate) unsafe fn advance<K: Tuple>(
    entry: *mut CtEntry,
    tuple: &K,
    side: Side,
    tcp_flags: u8,
) -> bool {
    // SAFETY: the caller's promise; the word is aligned and inside the entry.
    let word = unsafe { entry.cast::<u8>().add(CT_STATE_OFFSET).cast::<u32>() };
    for _ in 0..STATE_ATTEMPTS {
        // SAFETY: as above. Volatile: read in one piece, and again on each attempt.
        let last = unsafe { ptr::read_volatile(word) };
        let step = tcp_step(
            last,
            tuple.direction().into(),
            (side == Side::Reply).into(),
            tcp_flags.into(),
        );
        if step & REFUSED != 0 {
            return false;
        }
        if step as u32 == last {
            return true;
        }
        // SAFETY: as above. See `conntrack::add` for why this is an intrinsic.
        let (seen, _) = unsafe {
            atomic_cxchg::<u32, { AtomicOrdering::SeqCst }, { AtomicOrdering::SeqCst }>(
                word,
                last,
                step as u32,
            )
        };
        if seen == last {
            // SAFETY: as above.
            report_transition(last, step as u32, tuple, unsafe { &*entry });
            return true;
        }
    }
    true
}

/// Notifies monitors that a segment closed a connection, or reopened a closed one.
#[inline(always)]
fn report_transition<K: Tuple>(before: u32, after: u32, tuple: &K, entry: &CtEntry) {
    let was_closed = CtState::from_word(before).is_closed();
    let is_closed = CtState::from_word(after).is_closed();
    if is_closed != was_closed {
        let kind = if is_closed {
            EVENT_CT_CLOSED
        } else {
            EVENT_CT_REOPENED
        };
        report_flow(kind, tuple, entry);
    }
}

/// Bit of [`tcp_step`]'s result: the segment cannot be part of the connection.
pub(super) const REFUSED: u64 = 1 << 32;

/// The state of a connection, as a word, after a segment; see [`tcp::next`].
///
/// A separate function in the kernel as well: the verifier checks its many paths once, not once per path that leads
/// here.
#[unsafe(no_mangle)]
#[inline(never)]
pub(super) extern "C" fn tcp_step(word: u32, opened: u32, is_reply: u32, tcp_flags: u32) -> u64 {
    let side = if is_reply == 0 {
        Side::Original
    } else {
        Side::Reply
    };
    let step = tcp::next(
        CtState::from_word(word),
        opened as u8,
        side,
        tcp_flags as u8,
    );
    let refused = if step.outcome == Outcome::Invalid {
        REFUSED
    } else {
        0
    };
    u64::from(step.state.word()) | refused
}
