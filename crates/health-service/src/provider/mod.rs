//! Providers: each writes a [`State`](crate::state::State) into the kernel, by eBPF maps ([`ebpf`]) or by IPVS ([`ipvs`]).

pub mod ebpf;
pub mod ipvs;
