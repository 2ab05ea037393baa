//! The programs that an agent loads. Their names are stable: `bpftool prog` shows them.

#![no_std]
#![no_main]
#![allow(
    missing_docs,
    reason = "the macro exports each program anew, without its comment"
)]

use aya_ebpf::macros::classifier;
use aya_ebpf::programs::TcContext;
use health_common::rtt::{AccountRequest, UNKNOWN_PEER};
use health_common::tcp::ConnectionRequest;
use health_ebpf::endpoint::Stateful;
use health_ebpf::frame::Frame;
use health_ebpf::{collect, endpoint, nat, netdev, rtt, service, tcp};

/// tc egress, host side of an endpoint's veth pair.
#[classifier]
fn to_endpoint(ctx: TcContext) -> i32 {
    endpoint::to_endpoint::<Stateful>(&Frame::new(&ctx)).code()
}

/// tc ingress, host side of an endpoint's veth pair.
#[classifier]
fn from_endpoint(ctx: TcContext) -> i32 {
    endpoint::from_endpoint(&Frame::new(&ctx)).code()
}

/// tc egress, uplinks.
#[classifier]
fn to_netdev(ctx: TcContext) -> i32 {
    netdev::to_netdev(&Frame::new(&ctx)).code()
}

/// tc ingress, uplinks.
#[classifier]
fn from_netdev(ctx: TcContext) -> i32 {
    netdev::from_netdev(&Frame::new(&ctx)).code()
}

/// Where `to_netdev` goes on with packets that may have to be masqueraded.
#[classifier]
fn masquerade(ctx: TcContext) -> i32 {
    nat::masquerade(&Frame::new(&ctx)).code()
}

/// Where `from_netdev` goes on with packets that may be for masqueraded flows.
#[classifier]
fn unmasquerade(ctx: TcContext) -> i32 {
    nat::unmasquerade(&Frame::new(&ctx)).code()
}

/// Where `from_netdev` and `unmasquerade` go on with packets that may be for a service.
#[classifier]
fn to_service(ctx: TcContext) -> i32 {
    service::to_service(&Frame::new(&ctx)).code()
}

/// Where `to_netdev` goes on with packets that may answer one.
#[classifier]
fn from_service(ctx: TcContext) -> i32 {
    service::from_service(&Frame::new(&ctx)).code()
}

/// Never attached: the agent runs it with `BPF_PROG_TEST_RUN` to add what it observed itself to a row of
/// `HEALTH_RTT`, so that all writing of rows happens in the kernel.
#[classifier]
fn rtt_account(ctx: TcContext) -> i32 {
    let frame = Frame::new(&ctx);
    match frame.at::<AccountRequest>(0) {
        Some(request) => rtt::account(request) as i32,
        None => UNKNOWN_PEER as i32,
    }
}

/// Never attached: the agent runs it to ask about the connection of a probe that was answered.
#[classifier]
fn tcp_account(ctx: TcContext) -> i32 {
    let frame = Frame::new(&ctx);
    match frame.at::<ConnectionRequest>(0) {
        Some(request) => tcp::account(request) as i32,
        None => UNKNOWN_PEER as i32,
    }
}

/// Never attached: the agent runs it to remove flows and translations whose time is over, each looked at once
/// more right before.
#[classifier]
fn ct_collect(ctx: TcContext) -> i32 {
    collect::collect(&Frame::new(&ctx)) as i32
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
