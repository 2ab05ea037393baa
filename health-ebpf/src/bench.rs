//! Programs for benchmarks: what the datapath's programs are measured with and against.

#![no_std]
#![no_main]
#![allow(
    missing_docs,
    reason = "the macro exports each program anew, without its comment"
)]

use aya_ebpf::bindings::{TC_ACT_OK, TC_ACT_SHOT};
use aya_ebpf::macros::{classifier, map};
use aya_ebpf::maps::{Array, ProgramArray};
use aya_ebpf::programs::TcContext;
use health_ebpf::endpoint::{self, Stateless};
use health_ebpf::frame::Frame;

/// Bytes of a packet that the programs under test change: Ethernet, IPv6 and echo header.
const HEADERS: usize = 62;

/// The first bytes of the packet under test, restored before each pass.
#[map]
static BENCH_HEADERS: Array<[u8; HEADERS]> = Array::with_max_entries(1, 0);

/// Slot 0: the program under test.
#[map]
static BENCH_PROGRAM: ProgramArray = ProgramArray::with_max_entries(1, 0);

/// Restores the packet and goes on to the program under test. A repeated test run reuses one buffer,
/// so without this each pass would see the last one's reply.
#[classifier]
fn bench_front(ctx: TcContext) -> i32 {
    let frame = Frame::new(&ctx);
    let (Some(headers), Some(bytes)) = (BENCH_HEADERS.get(0), frame.at::<[u8; HEADERS]>(0)) else {
        return TC_ACT_SHOT;
    };
    *bytes = *headers;
    frame.set_mark(0);
    // SAFETY: the map holds classifiers only; the kernel checks their kind.
    unsafe { BENCH_PROGRAM.tail_call(&ctx, 0) };
    TC_ACT_SHOT
}

/// Does nothing: the floor.
#[classifier]
fn bench_empty(_ctx: TcContext) -> i32 {
    TC_ACT_OK
}

/// The echo answer without conntrack and counters.
#[classifier]
fn bench_echo_stateless(ctx: TcContext) -> i32 {
    endpoint::to_endpoint::<Stateless>(&Frame::new(&ctx)).code()
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
