//! The choice of a backend for a flow.

use core::intrinsics::{AtomicOrdering, atomic_xadd};

use aya_ebpf::bindings::BPF_ANY;
use aya_ebpf::helpers::generated::bpf_get_prandom_u32;
use health_common::addr::Addr;
use health_common::masquerade::Address as _;
use health_common::metrics::Reason;
use health_common::service::choice::{flow_hash, ports_and_protocol, scaled, weighted};
use health_common::service::{
    ALGORITHM_LEAST_CONNECTION, ALGORITHM_MAGLEV, ALGORITHM_ROUND_ROBIN, Affinity, AffinityKey,
    FRONTEND_HOST_ONLY, FRONTEND_RESTRICTED, FRONTEND_WEIGHTED, Frontend, Pool, SourceRange,
};

use super::backend::{address, is_here};
use crate::clock::coarse_now_secs;
use crate::hook::Hook;
use crate::ip_version::Version;
use crate::ipcache::TrieKey;
use crate::maps::{
    HEALTH_AFFINITY, HEALTH_BACKENDS, HEALTH_MAGLEV, HEALTH_SLOTS, HEALTH_SOURCE_RANGES,
};

/// Length of a key of `HEALTH_SOURCE_RANGES`, bits.
const SOURCE_BITS: u32 = 8 * size_of::<SourceRange>() as u32;

/// The frontend that a packet is for, if any. Loopback frontends serve only sockets (CVE-2020-8558).
#[inline(always)]
pub(super) fn frontend_of_packets<T: Version>(flow: &T) -> Option<Frontend> {
    // SAFETY: entries are replaced as a whole.
    let frontend = unsafe { T::frontends().get(flow.frontend_key()) }?;
    (frontend.flags & FRONTEND_HOST_ONLY == 0).then_some(*frontend)
}

/// The client that opens a flow.
pub(super) struct Client {
    /// The address that source ranges check.
    pub(super) source: Addr,
    /// The address that affinity uses.
    pub(super) stays_as: Addr,
}

/// A backend for a new flow, its index first; on failure, why its packet is dropped. `attempt`: how many backends were
/// selected before and are taken.
#[inline(always)]
pub(super) fn elect<T: Version, P: Hook>(
    flow: &T,
    client: &Client,
    frontend: &Frontend,
    attempt: u32,
) -> Result<(u32, (T::Address, u16)), Reason> {
    if frontend.flags & FRONTEND_RESTRICTED != 0 && !is_in_range(client.source, frontend.service) {
        return Err(Reason::ServiceSourceRange);
    }
    let pool = frontend.pool(P::ORIGIN);
    if pool.len == 0 {
        return Err(if frontend.drops(P::ORIGIN) {
            Reason::ServiceNoLocal
        } else {
            Reason::ServiceRejected
        });
    }
    let index = match attempt {
        0 => match affine_backend(client.stays_as, frontend) {
            // The client may have got a remote backend at another frontend of the service.
            Some(index) if !frontend.is_local(P::ORIGIN) || is_here::<T>(index) => Some(index),
            _ => by_algorithm(flow, frontend, pool),
        },
        // The backend that the client has affinity to is taken, and the port cannot change.
        1 if frontend.affinity_secs != 0 => by_algorithm(flow, frontend, pool),
        // In sequence, so that a small pool is tried completely.
        _ => (hash(flow, false) + attempt)
            .checked_rem(pool.len)
            .and_then(|place| at_place(frontend, pool, place)),
    };
    let chosen = index.and_then(|index| Some((index, address::<T>(index, frontend.service)?)));
    chosen.ok_or(Reason::ServiceNoBackend)
}

/// Whether a client is within the source ranges of a service.
#[inline(always)]
fn is_in_range(client: Addr, service: u32) -> bool {
    let key = TrieKey {
        prefix_len: SOURCE_BITS,
        data: SourceRange {
            service_be: service.to_be(),
            addr: client,
        },
    };
    HEALTH_SOURCE_RANGES.get(key.as_key()).is_some()
}

/// The backend that a client has affinity to.
#[inline(always)]
fn affine_backend(client: Addr, frontend: &Frontend) -> Option<u32> {
    if frontend.affinity_secs == 0 {
        return None;
    }
    let key = AffinityKey {
        client,
        service: frontend.service,
    };
    // SAFETY: entries are replaced as a whole.
    let affinity = unsafe { HEALTH_AFFINITY.get(key) }?;
    let is_fresh = affinity.is_fresh(coarse_now_secs(), frontend.affinity_secs);
    let backend = HEALTH_BACKENDS.get(affinity.backend)?;
    (is_fresh && backend.gets_flows(frontend.service)).then_some(affinity.backend)
}

/// Gives a client affinity to a backend.
#[inline(always)]
pub(super) fn stay(client: Addr, service: u32, backend: u32) {
    let affinity = Affinity {
        backend,
        last_used: coarse_now_secs(),
    };
    // If there is no space, the next flow may go elsewhere.
    let _ = HEALTH_AFFINITY.insert(
        AffinityKey { client, service },
        affinity,
        u64::from(BPF_ANY),
    );
}

#[inline(always)]
fn by_algorithm<T: Version>(flow: &T, frontend: &Frontend, pool: Pool) -> Option<u32> {
    match frontend.algorithm {
        ALGORITHM_MAGLEV => {
            let place = hash(flow, frontend.affinity_secs != 0).checked_rem(pool.len)?;
            HEALTH_MAGLEV.get(pool.at + place).copied()
        }
        ALGORITHM_ROUND_ROBIN if frontend.flags & FRONTEND_WEIGHTED == 0 => {
            let turn = HEALTH_SLOTS.get_ptr_mut(pool.at)?;
            // SAFETY: an aligned word of a map value. For why an intrinsic see `conntrack::add`; with relaxed ordering,
            // LLVM would emit an add that does not return the old value.
            let turn = unsafe { atomic_xadd::<u32, u32, { AtomicOrdering::SeqCst }>(turn, 1) };
            slot(pool, turn.checked_rem(pool.len)?)
        }
        ALGORITHM_LEAST_CONNECTION => {
            let (one, other) = (by_chance(frontend, pool)?, by_chance(frontend, pool)?);
            // Two CPUs that remove the last flow at once leave -1.
            let flows = |index| Some(HEALTH_BACKENDS.get(index)?.flows as i32);
            Some(if flows(one)? > flows(other)? {
                other
            } else {
                one
            })
        }
        _ => by_chance(frontend, pool),
    }
}

/// A random backend. For a Maglev table, the one in a random slot.
#[inline(always)]
fn by_chance(frontend: &Frontend, pool: Pool) -> Option<u32> {
    let first = scaled(random(), pool.len);
    if frontend.algorithm == ALGORITHM_MAGLEV || frontend.flags & FRONTEND_WEIGHTED == 0 {
        return at_place(frontend, pool, first);
    }
    let threshold = *HEALTH_SLOTS.get(pool.at + 1 + pool.len + first)?;
    let alias = *HEALTH_SLOTS.get(pool.at + 1 + 2 * pool.len + first)?;
    slot(pool, weighted(first, threshold, alias, random()))
}

/// The backend in a slot of a Maglev table or of the list.
#[inline(always)]
fn at_place(frontend: &Frontend, pool: Pool, place: u32) -> Option<u32> {
    if frontend.algorithm == ALGORITHM_MAGLEV {
        return HEALTH_MAGLEV.get(pool.at + place).copied();
    }
    slot(pool, place)
}

#[inline(always)]
fn slot(pool: Pool, place: u32) -> Option<u32> {
    HEALTH_SLOTS.get(pool.at + 1 + place).copied()
}

#[inline(always)]
pub(super) fn hash<T: Version>(flow: &T, is_by_client: bool) -> u32 {
    let (source, destination) = (flow.source(), flow.destination());
    flow_hash(
        &source.0.to_addr().words_be,
        &destination.0.to_addr().words_be,
        ports_and_protocol(source.1, destination.1, flow.protocol(), is_by_client),
    )
}

#[inline(always)]
fn random() -> u32 {
    // SAFETY: a helper without arguments.
    unsafe { bpf_get_prandom_u32() }
}
