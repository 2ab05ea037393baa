//! Policy: which packets an endpoint may send and receive.

use core::ptr;

use health_common::ct::TUPLE_IN;
use health_common::endpoint::{
    ENDPOINT_ENFORCE_EGRESS, ENDPOINT_ENFORCE_INGRESS, ENDPOINT_UNTRACKED, EndpointInfo,
    is_enforced,
};
use health_common::masquerade::Address;
use health_common::metrics::Reason;
use health_common::policy::{
    ANY_IDENTITY, POLICY_EGRESS, POLICY_INGRESS, PREFIX_PORT, PolicyEntry, PolicyKey,
    VERDICT_ALLOW, VERDICT_DENY, VERDICT_NONE,
};

use crate::ipcache::{TrieKey, identity_of};
use crate::maps::{HEALTH_POLICY, HEALTH_POLICY_COUNTERS};

/// How the policy of an endpoint is enforced.
#[derive(Clone, Copy, Default)]
pub struct Enforcement {
    /// Flags from [`EndpointInfo`].
    flags: u32,
    /// Number of the policy's table.
    table: u32,
}

impl Enforcement {
    /// The enforcement for an endpoint; without one, nothing is enforced, and packets are tracked.
    ///
    /// Reads each field only once: the agent may replace the value in the meantime, and the kernel reuses its memory
    /// immediately. The table that is recorded must be the one that was consulted.
    #[inline(always)]
    pub fn of(endpoint: Option<&EndpointInfo>) -> Self {
        endpoint.map_or(Self::default(), |endpoint| {
            // SAFETY: fields of a reference. Volatile: the compiler must not read them again.
            unsafe {
                Self {
                    flags: ptr::read_volatile(&raw const endpoint.flags),
                    table: ptr::read_volatile(&raw const endpoint.policy),
                }
            }
        })
    }

    /// Whether the endpoint's packets get conntrack entries.
    #[inline(always)]
    pub fn is_tracked(self) -> bool {
        self.flags & ENDPOINT_UNTRACKED == 0
    }

    /// The table for packets to the endpoint (`direction` as in a tuple: in) or from it (out). `None` if policy is not
    /// enforced in that direction.
    #[inline(always)]
    pub fn table(self, direction: u8) -> Option<u32> {
        let enforced = if direction == TUPLE_IN {
            ENDPOINT_ENFORCE_INGRESS
        } else {
            ENDPOINT_ENFORCE_EGRESS
        };
        is_enforced(self.flags, enforced).then_some(self.table)
    }
}

/// Applies the policy in `table` to a packet that comes from `peer` (`direction` as in a tuple: in) or goes to it
/// (out). `length` is in bytes from the Ethernet header on. `port_be` is the destination port; for ICMP, the type.
#[inline(always)]
pub fn admit<A: Address>(
    table: u32,
    direction: u8,
    peer: A,
    protocol: u8,
    port_be: u16,
    length: u32,
) -> Result<(), Reason> {
    let direction = if direction == TUPLE_IN {
        POLICY_INGRESS
    } else {
        POLICY_EGRESS
    };
    let what = u32::from(direction) << 24 | u32::from(protocol) << 16 | u32::from(port_be);
    match policy_verdict(table, identity_of(peer), what, length) as u8 {
        VERDICT_ALLOW => Ok(()),
        VERDICT_DENY => Err(Reason::PolicyDeniedByRule),
        _ => Err(Reason::PolicyDenied),
    }
}

/// Looks up the verdict for a direction (bits 24 to 31 of `what`), protocol (16 to 23) and port (0 to 15, network byte
/// order). Also counts the packet.
///
/// A separate function in the kernel as well: the verifier checks it once, and it has its own stack.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn policy_verdict(table: u32, peer: u32, what: u32, length: u32) -> u32 {
    let mut key = TrieKey {
        prefix_len: PREFIX_PORT,
        data: PolicyKey {
            table,
            direction: (what >> 24) as u8,
            pad: [0; 3],
            identity: peer,
            protocol: (what >> 16) as u8,
            pad2: 0,
            port_be: what as u16,
        },
    };
    let entry = HEALTH_POLICY.get(key.as_key()).or_else(|| {
        key.data.identity = ANY_IDENTITY;
        HEALTH_POLICY.get(key.as_key())
    });
    match entry {
        Some(entry) => {
            note(entry, length);
            entry.verdict.into()
        }
        None => VERDICT_NONE.into(),
    }
}

#[inline(always)]
fn note(entry: &PolicyEntry, length: u32) {
    if let Some(counter) = HEALTH_POLICY_COUNTERS.get_ptr_mut(entry.counter) {
        // SAFETY: a valid pointer into this CPU's slot; programs on one CPU do not interrupt each other here, as both
        // tc hooks run with bottom halves disabled.
        unsafe {
            (*counter).packets += 1;
            (*counter).bytes += u64::from(length);
        }
    }
}
