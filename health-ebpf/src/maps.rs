//! The maps. Pinned by name, so they outlive the agent; layouts are in `health-common`.

use core::ptr;

use aya_ebpf::bindings::BPF_F_NO_PREALLOC;
use aya_ebpf::bindings::bpf_map_type::BPF_MAP_TYPE_HASH;
use aya_ebpf::helpers::bpf_map_lookup_elem;
use aya_ebpf::macros::{btf_map, map};
use aya_ebpf::maps::{Array, HashMap, LruHashMap, PerCpuArray};
use health_common::addr::Addr;
use health_common::config::DatapathConfig;
use health_common::ct::{CtEntry, Tuple4, Tuple6};
use health_common::endpoint::EndpointInfo;
use health_common::inflight::{INFLIGHT_SLOTS, Inflight};
use health_common::metrics::{Counter, METRICS_ENTRIES};
use health_common::nat::{NatEntry4, NatEntry6};
use health_common::rtt::{RttKey, RttRow};

const FLOWS: u32 = 65_536;
const PEER_PATHS: usize = 262_144;
const ENDPOINTS: u32 = 8_192;

/// IPv4 flows.
#[map]
pub static HEALTH_CT4: LruHashMap<Tuple4, CtEntry> = LruHashMap::pinned(FLOWS, 0);

/// IPv6 flows.
#[map]
pub static HEALTH_CT6: LruHashMap<Tuple6, CtEntry> = LruHashMap::pinned(FLOWS, 0);

/// IPv4 translations.
#[map]
pub static HEALTH_NAT4: LruHashMap<Tuple4, NatEntry4> = LruHashMap::pinned(FLOWS, 0);

/// IPv6 translations.
#[map]
pub static HEALTH_NAT6: LruHashMap<Tuple6, NatEntry6> = LruHashMap::pinned(FLOWS, 0);

/// Round-trip times by peer. Rows are large and made by the agent, so memory is taken as they come.
#[btf_map]
pub static HEALTH_RTT: RttMap = RttMap::new();

/// Probes by IP version and sequence number.
#[map]
pub static HEALTH_INFLIGHT: Array<Inflight> = Array::pinned(INFLIGHT_SLOTS, 0);

/// Endpoints of this node, by address.
#[map]
pub static HEALTH_ENDPOINTS: HashMap<Addr, EndpointInfo> =
    HashMap::pinned(ENDPOINTS, BPF_F_NO_PREALLOC);

/// Packet counters.
#[map]
pub static HEALTH_METRICS: PerCpuArray<Counter> = PerCpuArray::pinned(METRICS_ENTRIES, 0);

/// Settings.
#[map]
pub static HEALTH_CONFIG: Array<DatapathConfig> = Array::pinned(1, 0);

/// A hash map with type information, in which the kernel finds the lock of the rows, and pinned by name,
/// which the definitions of aya are not. The loader reads what the fields point to; nothing else does.
#[repr(C)]
pub struct RttMap {
    r#type: *const [i32; BPF_MAP_TYPE_HASH as usize],
    key: *const RttKey,
    value: *const RttRow,
    max_entries: *const [i32; PEER_PATHS],
    map_flags: *const [i32; BPF_F_NO_PREALLOC as usize],
    pinning: *const [i32; LIBBPF_PIN_BY_NAME],
}

/// `enum libbpf_pin_type` of libbpf.
const LIBBPF_PIN_BY_NAME: usize = 1;

// SAFETY: the pointers are null and never followed.
unsafe impl Sync for RttMap {}

impl RttMap {
    const fn new() -> Self {
        Self {
            r#type: ptr::null(),
            key: ptr::null(),
            value: ptr::null(),
            max_entries: ptr::null(),
            map_flags: ptr::null(),
            pinning: ptr::null(),
        }
    }

    /// The row under a key.
    #[inline(always)]
    pub fn get_ptr_mut(&self, key: &RttKey) -> Option<*mut RttRow> {
        // SAFETY: the loader puts the map's own reference in place of this one's address.
        let row = unsafe {
            bpf_map_lookup_elem(
                ptr::from_ref(self).cast_mut().cast(),
                ptr::from_ref(key).cast(),
            )
        };
        (!row.is_null()).then_some(row.cast())
    }
}
