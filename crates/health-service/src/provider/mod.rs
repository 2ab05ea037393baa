//! Providers: each writes a [`State`](crate::state::State) into the kernel, through eBPF maps ([`ebpf`]) or IPVS
//! ([`ipvs`]).

pub mod ebpf;
pub mod ipvs;
