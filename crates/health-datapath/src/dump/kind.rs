//! The kinds of maps.

/// A number of `enum bpf_map_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapKind(u32);

impl MapKind {
    const ARRAY: Self = Self(2);
    const PER_CPU: [Self; 4] = [Self(5), Self(6), Self(10), Self(21)];

    /// Names as bpftool writes them, by number (`include/uapi/linux/bpf.h`).
    const NAMES: [&str; 35] = [
        "unspec",
        "hash",
        "array",
        "prog_array",
        "perf_event_array",
        "percpu_hash",
        "percpu_array",
        "stack_trace",
        "cgroup_array",
        "lru_hash",
        "lru_percpu_hash",
        "lpm_trie",
        "array_of_maps",
        "hash_of_maps",
        "devmap",
        "sockmap",
        "cpumap",
        "xskmap",
        "sockhash",
        "cgroup_storage",
        "reuseport_sockarray",
        "percpu_cgroup_storage",
        "queue",
        "stack",
        "sk_storage",
        "devmap_hash",
        "struct_ops",
        "ringbuf",
        "inode_storage",
        "task_storage",
        "bloom_filter",
        "user_ringbuf",
        "cgrp_storage",
        "arena",
        "insn_array",
    ];

    /// Kinds whose entries cannot be listed: streams, sets that do not reveal their members, and storage that is looked
    /// up by its owning object.
    const WITHOUT_LISTING: [&str; 13] = [
        "perf_event_array",
        "cgroup_array",
        "xskmap",
        "queue",
        "stack",
        "sk_storage",
        "ringbuf",
        "inode_storage",
        "task_storage",
        "bloom_filter",
        "user_ringbuf",
        "cgrp_storage",
        "arena",
    ];

    pub(super) const fn of(number: u32) -> Self {
        Self(number)
    }

    /// As bpftool names it (`lru_hash`, `array`).
    pub fn name(self) -> &'static str {
        Self::NAMES
            .get(self.0 as usize)
            .copied()
            .unwrap_or("unknown")
    }

    /// Whether each CPU has its own value.
    pub fn is_per_cpu(self) -> bool {
        Self::PER_CPU.contains(&self)
    }

    /// Whether all entries exist from the start.
    pub(super) fn is_array(self) -> bool {
        self == Self::ARRAY || self.name() == "percpu_array"
    }

    /// Whether its entries can be listed.
    pub(super) fn is_listable(self) -> bool {
        !Self::WITHOUT_LISTING.contains(&self.name())
    }
}
