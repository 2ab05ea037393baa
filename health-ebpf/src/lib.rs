//! The kernel side, one module per concern. The programs themselves are in the binaries `datapath` (loaded by the
//! agent) and `bench` (benchmarks).

#![no_std]
#![feature(
    asm_experimental_arch,
    core_intrinsics,
    macro_attr,
    stmt_expr_attributes
)]
#![allow(
    internal_features,
    reason = "the only way to an atomic addition on this target"
)]

pub mod arrivals;
pub mod bounds;
pub mod clock;
pub mod collect;
pub mod conntrack;
pub mod delivery;
pub mod early;
pub mod endpoint;
pub mod endpoint_flow;
pub mod events;
pub mod fib;
pub mod fragment;
pub mod frame;
pub mod hook;
pub mod ip_version;
pub mod ipcache;
pub mod link;
pub mod maps;
pub mod metrics;
pub mod nat;
pub mod netdev;
pub mod packet;
pub mod policy;
pub mod probe_flow;
pub mod rewrite;
pub mod ring;
pub mod rtt;
pub mod service;
pub mod source;
pub mod subprogram;
pub mod table;
pub mod tcp;
pub mod turnround;
pub mod xdp;

/// Never reached: the verifier proves that no program panics.
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo) -> ! {
    loop {}
}
