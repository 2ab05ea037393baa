//! Benchmark programs: harnesses and baselines for the datapath's programs.

#![no_std]
#![no_main]
#![allow(
    missing_docs,
    reason = "the macro exports each program anew, without its comment"
)]

use aya_ebpf::bindings::xdp_action::{XDP_ABORTED, XDP_TX};
use aya_ebpf::bindings::{TC_ACT_OK, TC_ACT_SHOT};
use aya_ebpf::helpers::bpf_ktime_get_ns;
use aya_ebpf::macros::{classifier, map, xdp};
use aya_ebpf::maps::{Array, HashMap, ProgramArray};
use aya_ebpf::programs::{TcContext, XdpContext};
use health_common::addr::Addr;
use health_common::echo::Ipv4Header;
use health_common::endpoint::EndpointInfo;
use health_common::neighbour::ETHERTYPE_IPV4;
use health_common::probe::MESSAGE_LEN;
use health_common::rtt::AccountRequest;
use health_ebpf::endpoint::{self, Stateless};
use health_ebpf::frame::{Frame, IP_AT, L4_AT4, L4_AT6};
use health_ebpf::xdp::XdpFrame;

/// Number of bytes restored in each packet: an ICMPv6 probe with its Ethernet header.
const PACKET_LEN: usize = L4_AT6 + MESSAGE_LEN;
/// Like [`PACKET_LEN`], for the shorter test packets: an ICMP probe, a TCP segment with timestamps and no data, the
/// agent's request about a probe, and ARP.
const PROBE4_LEN: usize = L4_AT4 + MESSAGE_LEN;
const SEGMENT4_LEN: usize = L4_AT4 + 32;
const ACCOUNT_LEN: usize = size_of::<AccountRequest>();
const ARP_LEN: usize = 42;
/// Number of 32-bit words that cover the Ethernet, IPv6 and TCP headers and the two bytes after them.
const HEADER_WORDS: usize = (L4_AT6 + 20).div_ceil(4);
/// Maximum number of test packets, which are used in turn.
const PACKETS: u32 = 1_024;

/// The test packets. One of them is restored before each pass.
#[map]
static BENCH_PACKETS: Array<[u8; PACKET_LEN]> = Array::with_max_entries(PACKETS, 0);

/// Index of the next packet, and number of packets.
#[map]
static BENCH_TURN: Array<[u32; 2]> = Array::with_max_entries(1, 0);

/// Slot 0: the program under test.
#[map]
static BENCH_PROGRAM: ProgramArray = ProgramArray::with_max_entries(1, 0);

/// Endpoints that `bench_forward` redirects packets to, by address.
#[map]
static BENCH_ENDPOINTS: HashMap<Addr, EndpointInfo> = HashMap::with_max_entries(16, 0);

/// Like [`BENCH_PROGRAM`], for XDP: a map holds programs of one type only.
#[map]
static BENCH_XDP_PROGRAM: ProgramArray = ProgramArray::with_max_entries(1, 0);

/// Restores the next packet and tail-calls the program under test. A repeated test run reuses one buffer: without this,
/// each pass would see the previous pass's reply, and all passes would see the same probe.
#[classifier]
fn bench_front(ctx: TcContext) -> i32 {
    let frame = Frame::new(ctx);
    let Some(packet) = next_packet() else {
        return TC_ACT_SHOT;
    };
    let restored = restore::<PACKET_LEN>(&frame, packet)
        || restore::<PROBE4_LEN>(&frame, packet)
        || restore::<SEGMENT4_LEN>(&frame, packet)
        || restore::<ACCOUNT_LEN>(&frame, packet)
        || restore::<ARP_LEN>(&frame, packet);
    if !restored {
        return TC_ACT_SHOT;
    }
    frame.set_mark(0);
    // SAFETY: the map holds only classifiers; the kernel checks the program type.
    unsafe { BENCH_PROGRAM.tail_call(frame.ctx(), 0) };
    TC_ACT_SHOT
}

#[inline(always)]
fn next_packet() -> Option<&'static [u8; PACKET_LEN]> {
    let turn = BENCH_TURN.get_ptr_mut(0)?;
    // SAFETY: a map value stays valid while the program runs, and only one test run uses it.
    let [next, count] = unsafe { &mut *turn };
    let packet = BENCH_PACKETS.get(*next);
    *next += 1;
    if *next >= *count {
        *next = 0;
    }
    packet
}

/// Restores the first `N` bytes; `false` if the packet is shorter.
#[inline(always)]
fn restore<const N: usize>(frame: &Frame, packet: &[u8; PACKET_LEN]) -> bool {
    let (Some(bytes), Some(packet)) = (frame.at::<[u8; N]>(0), packet.first_chunk::<N>()) else {
        return false;
    };
    *bytes = *packet;
    true
}

/// Does nothing: the baseline.
#[classifier]
fn bench_empty(_ctx: TcContext) -> i32 {
    TC_ACT_OK
}

/// Restores the headers that XDP changes. As a separate function, it tells LLVM that its arguments do not overlap, so
/// that LLVM copies word by word.
#[inline(always)]
fn restore_headers(headers: &mut [u32; HEADER_WORDS], packet: &[u32; HEADER_WORDS]) {
    *headers = *packet;
}

/// Like [`bench_front`], for XDP.
#[xdp]
fn bench_xdp_front(ctx: XdpContext) -> u32 {
    let frame = XdpFrame::new(ctx);
    let (Some(headers), Some(packet)) = (frame.at::<[u32; HEADER_WORDS]>(0), next_packet()) else {
        return XDP_ABORTED;
    };
    // SAFETY: map values are aligned to eight bytes, and a packet is longer than the headers.
    restore_headers(headers, unsafe { &*packet.as_ptr().cast() });
    // SAFETY: the map holds only XDP programs; the kernel checks the program type.
    unsafe { BENCH_XDP_PROGRAM.tail_call(frame.ctx(), 0) };
    XDP_ABORTED
}

/// Like [`bench_empty`].
#[xdp]
fn bench_xdp_empty(_ctx: XdpContext) -> u32 {
    XDP_TX
}

/// Answers an echo request without conntrack or counters.
#[classifier]
fn bench_echo_stateless(ctx: TcContext) -> i32 {
    endpoint::to_endpoint::<Stateless>(&Frame::new(ctx)).code()
}

/// Redirects an endpoint's IPv4 packet straight into the destination's namespace: the baseline for host routing.
#[classifier]
fn bench_forward(ctx: TcContext) -> i32 {
    forward(&Frame::new(ctx)).unwrap_or(TC_ACT_OK)
}

#[inline(always)]
fn forward(frame: &Frame) -> Option<i32> {
    if frame.protocol() != ETHERTYPE_IPV4 || !frame.pull(L4_AT4) {
        return None;
    }
    let to = Addr::v4(frame.at::<Ipv4Header>(IP_AT)?.daddr_be);
    // SAFETY: no program changes the map.
    let endpoint = unsafe { BENCH_ENDPOINTS.get(to) }?;
    frame
        .store(0, &[endpoint.mac, endpoint.host_mac])
        .then(|| frame.redirect_to_peer(endpoint.ifindex) as i32)
}

/// Reads the clock, which is one step of handling a probe.
#[classifier]
fn bench_clock(_ctx: TcContext) -> i32 {
    // SAFETY: a helper without arguments.
    match unsafe { bpf_ktime_get_ns() } {
        0 => TC_ACT_SHOT,
        _ => TC_ACT_OK,
    }
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
