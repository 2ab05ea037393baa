//! What brings a state into the kernel.

pub mod ebpf;
