//! What conntrack knows about connections between clients and backends.

use health_common::ct::{CT_RX_CLOSING, TUPLE_IN};

use crate::clock::coarse_now_secs;
use crate::conntrack::is_known;
use crate::hook::Hook;
use crate::ip_version::Version;

/// Whether an open connection is known, whichever side opened it. From outside to an endpoint or this host, it has
/// direction in.
#[inline(always)]
pub(super) fn is_open<T: Version, P: Hook>(mut flow: T) -> bool {
    if goes_on(&flow) == Some(true) || goes_on(&flow.reply()) == Some(true) {
        return true;
    }
    if !P::IS_UPLINK {
        return false;
    }
    flow = flow.with_direction(TUPLE_IN);
    goes_on(&flow) == Some(true) || goes_on(&flow.reply()) == Some(true)
}

/// Like [`is_open`], for protocols other than TCP.
#[inline(always)]
pub(super) fn is_tracked<T: Version, P: Hook>(flow: &mut T) -> bool {
    if is_known(T::flows(), flow) {
        return true;
    }
    if !P::IS_UPLINK {
        return false;
    }
    *flow = flow.with_direction(TUPLE_IN);
    is_known(T::flows(), flow)
}

/// Whether the client of a connection from outside, which its backend answers directly, has closed its side.
#[inline(always)]
pub(super) fn is_closed_by_client<T: Version>(mut flow: T) -> bool {
    if goes_on(&flow) == Some(true) {
        return false;
    }
    flow = flow.with_direction(TUPLE_IN);
    let Some(tracked) = T::flows().tcp.map.get_ptr(flow) else {
        return false;
    };
    // SAFETY: a value of that map.
    unsafe { (*tracked).state().has(CT_RX_CLOSING) && (*tracked).tx_packets == 0 }
}

/// Whether the connection under this key is still open; `None` if it is not known.
#[inline(always)]
pub(super) fn goes_on<T: Version>(key: &T) -> Option<bool> {
    let tracked = T::flows().tcp.map.get_ptr(key)?;
    // SAFETY: a value of that map.
    Some(unsafe { !(*tracked).state().is_closed() && !(*tracked).has_expired(coarse_now_secs()) })
}
