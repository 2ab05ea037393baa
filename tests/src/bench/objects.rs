//! The benchmarks' own eBPF programs.

/// Harnesses and baselines for the datapath's programs. Agents never load them.
pub(super) static BENCH_PROGRAMS: &[u8] =
    aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/bench"));
