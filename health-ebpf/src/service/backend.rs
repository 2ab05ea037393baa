//! The backends of services.

use core::intrinsics::{AtomicOrdering, atomic_xadd};

use health_common::masquerade::Address as _;
use health_common::service::outside::is_own;
use health_common::service::{Backend, FLOW_PLAIN};
use health_common::tuple::ServiceFlowParts;

use crate::ip_version::Version;
use crate::ipcache::{identity_of, is_endpoint};
use crate::maps::HEALTH_BACKENDS;

/// The address and port that a service's backend listens on.
#[inline(always)]
pub(super) fn address<T: Version>(index: u32, service: u32) -> Option<(T::Address, u16)> {
    let backend: &Backend = HEALTH_BACKENDS.get(index)?;
    let is_of_version = backend.addr.is_v4() == (T::IP_VERSION == 4);
    (backend.service == service && is_of_version)
        .then(|| (T::Address::of_addr(&backend.addr), backend.port_be))
}

/// Whether a flow's backend still serves its service.
#[inline(always)]
pub(super) fn is_serving<T: Version>(parts: &ServiceFlowParts<T::Address>) -> bool {
    parts.flags & FLOW_PLAIN != 0
        || address::<T>(parts.backend, parts.service).is_some_and(|to| to == parts.to)
}

/// Whether a backend is on this node.
#[inline(always)]
pub(super) fn is_here<T: Version>(index: u32) -> bool {
    HEALTH_BACKENDS.get(index).is_some_and(|backend| {
        let address = T::Address::of_addr(&backend.addr);
        is_own(is_endpoint(backend.addr), || identity_of(address))
    })
}

/// Increments the flow count of a backend.
#[inline(always)]
pub(super) fn count_flow(index: u32) {
    if let Some(backend) = HEALTH_BACKENDS.get_ptr_mut(index) {
        // SAFETY: an aligned word of a map value. For why an intrinsic see `conntrack::add`.
        unsafe {
            atomic_xadd::<u32, u32, { AtomicOrdering::Relaxed }>(&raw mut (*backend).flows, 1)
        };
    }
}

/// Decrements the flow count of a backend, unless the index holds another service's backend by now.
#[inline(always)]
pub(super) fn uncount_flow(index: u32, service: u32) {
    if let Some(backend) = HEALTH_BACKENDS.get_ptr_mut(index)
        // SAFETY: aligned words of a map value.
        && unsafe { (*backend).service == service && (*backend).flows > 0 }
    {
        // SAFETY: as above; adds -1.
        unsafe {
            atomic_xadd::<u32, u32, { AtomicOrdering::Relaxed }>(
                &raw mut (*backend).flows,
                u32::MAX,
            )
        };
    }
}
