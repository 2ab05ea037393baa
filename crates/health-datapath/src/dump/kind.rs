//! The kinds of maps.

use aya_obj::generated::bpf_map_type::{
    self, BPF_MAP_TYPE_ARRAY, BPF_MAP_TYPE_HASH, BPF_MAP_TYPE_LPM_TRIE, BPF_MAP_TYPE_LRU_HASH,
    BPF_MAP_TYPE_PERCPU_ARRAY, BPF_MAP_TYPE_PROG_ARRAY, BPF_MAP_TYPE_RINGBUF,
};

/// The kinds of the agent's maps, as bpftool names them.
const NAMES: [(bpf_map_type, &str); 7] = [
    (BPF_MAP_TYPE_HASH, "hash"),
    (BPF_MAP_TYPE_ARRAY, "array"),
    (BPF_MAP_TYPE_PROG_ARRAY, "prog_array"),
    (BPF_MAP_TYPE_PERCPU_ARRAY, "percpu_array"),
    (BPF_MAP_TYPE_LRU_HASH, "lru_hash"),
    (BPF_MAP_TYPE_LPM_TRIE, "lpm_trie"),
    (BPF_MAP_TYPE_RINGBUF, "ringbuf"),
];

/// The kind of one of the agent's maps; `None` for other kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapKind(Option<(bpf_map_type, &'static str)>);

impl MapKind {
    /// By its number in `enum bpf_map_type`.
    pub(super) fn of(number: u32) -> Self {
        Self(NAMES.into_iter().find(|(kind, _)| *kind as u32 == number))
    }

    /// The name that bpftool uses (`lru_hash`, `array`).
    pub fn name(self) -> &'static str {
        self.0.map_or("unknown", |(_, name)| name)
    }

    /// Whether each CPU has its own value.
    pub(super) fn is_per_cpu(self) -> bool {
        self.is(BPF_MAP_TYPE_PERCPU_ARRAY)
    }

    /// Whether all entries exist from the start.
    pub(super) fn is_array(self) -> bool {
        self.is(BPF_MAP_TYPE_ARRAY) || self.is_per_cpu()
    }

    /// Whether the entries can be listed.
    pub(super) fn is_listable(self) -> bool {
        self.0.is_some() && !self.is(BPF_MAP_TYPE_RINGBUF)
    }

    fn is(self, kind: bpf_map_type) -> bool {
        self.0.is_some_and(|(own, _)| own == kind)
    }
}
