//! The programs that an agent loads. Their names are stable: `bpftool prog` shows them.

#![no_std]
#![no_main]
#![allow(
    missing_docs,
    reason = "the macro exports each program anew, without its comment"
)]

use aya_ebpf::macros::{cgroup_sock, cgroup_sock_addr, classifier, xdp};
use aya_ebpf::programs::{SockAddrContext, SockContext, TcContext, XdpContext};
use health_common::rtt::{AccountRequest, UNKNOWN_PEER};
use health_common::tcp::ConnectionRequest;
use health_ebpf::endpoint::Stateful;
use health_ebpf::frame::Frame;
use health_ebpf::service::socket::{self, Call4, Call6};
use health_ebpf::xdp::XdpFrame;
use health_ebpf::{collect, delivery, endpoint, nat, netdev, rtt, service, tcp};

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

/// Where `from_endpoint` and `to_service` go on with packets that may be for an endpoint of this node.
#[classifier]
fn deliver(ctx: TcContext) -> i32 {
    delivery::deliver(&ctx).code()
}

/// XDP, uplinks.
#[xdp]
fn xdp_netdev(ctx: XdpContext) -> u32 {
    health_ebpf::xdp::xdp_netdev(&XdpFrame::new(&ctx)).code()
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

/// cgroup: a socket connects to an IPv4 address.
#[cgroup_sock_addr(connect4)]
fn sock_connect4(ctx: SockAddrContext) -> i32 {
    socket::connect(&Call4::new(ctx.sock_addr))
}

/// cgroup: a socket connects to an IPv6 address, or to an IPv4 one mapped into it.
#[cgroup_sock_addr(connect6)]
fn sock_connect6(ctx: SockAddrContext) -> i32 {
    socket::connect(&Call6::new(ctx.sock_addr))
}

/// cgroup: a datagram is sent to an IPv4 address, by a socket that is not connected.
#[cgroup_sock_addr(sendmsg4)]
fn sock_sendmsg4(ctx: SockAddrContext) -> i32 {
    socket::send(&Call4::new(ctx.sock_addr))
}

/// cgroup: the same to an IPv6 address.
#[cgroup_sock_addr(sendmsg6)]
fn sock_sendmsg6(ctx: SockAddrContext) -> i32 {
    socket::send(&Call6::new(ctx.sock_addr))
}

/// cgroup: a process is told from which IPv4 address a datagram came.
#[cgroup_sock_addr(recvmsg4)]
fn sock_recvmsg4(ctx: SockAddrContext) -> i32 {
    socket::receive(&Call4::new(ctx.sock_addr))
}

/// cgroup: the same of an IPv6 address, or of an IPv4 one mapped into it.
#[cgroup_sock_addr(recvmsg6)]
fn sock_recvmsg6(ctx: SockAddrContext) -> i32 {
    socket::receive(&Call6::new(ctx.sock_addr))
}

/// cgroup: a process asks to which IPv4 address a socket is connected.
#[cgroup_sock_addr(getpeername4)]
fn sock_getpeername4(ctx: SockAddrContext) -> i32 {
    socket::tell_peer(&Call4::new(ctx.sock_addr))
}

/// cgroup: the same of an IPv6 address, or of an IPv4 one mapped into it.
#[cgroup_sock_addr(getpeername6)]
fn sock_getpeername6(ctx: SockAddrContext) -> i32 {
    socket::tell_peer(&Call6::new(ctx.sock_addr))
}

/// cgroup: a socket is closed.
#[cgroup_sock(sock_release)]
fn sock_release(ctx: SockContext) -> i32 {
    socket::release(&ctx)
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
