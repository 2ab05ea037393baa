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
    endpoint::to_endpoint::<Stateful>(&Frame::new(ctx)).code()
}

/// tc ingress, host side of an endpoint's veth pair.
#[classifier]
fn from_endpoint(ctx: TcContext) -> i32 {
    endpoint::from_endpoint(&Frame::new(ctx)).code()
}

/// tc egress, uplinks.
#[classifier]
fn to_netdev(ctx: TcContext) -> i32 {
    netdev::to_netdev(&Frame::new(ctx)).code()
}

/// tc ingress, uplinks.
#[classifier]
fn from_netdev(ctx: TcContext) -> i32 {
    netdev::from_netdev(&Frame::new(ctx)).code()
}

/// Tail call from `to_netdev` for packets that may need masquerading.
#[classifier]
fn masquerade(ctx: TcContext) -> i32 {
    nat::masquerade(&Frame::new(ctx)).code()
}

/// Tail call from `from_netdev` for packets that may belong to masqueraded flows.
#[classifier]
fn unmasquerade(ctx: TcContext) -> i32 {
    nat::unmasquerade(&Frame::new(ctx)).code()
}

/// Tail call from `from_netdev` and `unmasquerade` for packets that may be for a service.
#[classifier]
fn to_service(ctx: TcContext) -> i32 {
    service::to_service(&Frame::new(ctx)).code()
}

/// Tail call from `to_netdev` for packets that may be a service's answers.
#[classifier]
fn from_service(ctx: TcContext) -> i32 {
    service::from_service(&Frame::new(ctx)).code()
}

/// Tail call from `from_endpoint` and `to_service` for packets that may be for an endpoint of this node.
#[classifier]
fn deliver(ctx: TcContext) -> i32 {
    delivery::deliver(&Frame::new(ctx)).code()
}

/// XDP, uplinks.
#[xdp]
fn xdp_netdev(ctx: XdpContext) -> u32 {
    health_ebpf::xdp::xdp_netdev(&XdpFrame::new(ctx)).code()
}

/// Never attached: the agent runs it with `BPF_PROG_TEST_RUN` to add its own observations to a row of `HEALTH_RTT`,
/// so that only the kernel writes rows.
#[classifier]
fn rtt_account(ctx: TcContext) -> i32 {
    let frame = Frame::new(ctx);
    match frame.at::<AccountRequest>(0) {
        Some(request) => rtt::account(request) as i32,
        None => UNKNOWN_PEER as i32,
    }
}

/// Never attached: the agent runs it to ask about the connection of an answered probe.
#[classifier]
fn tcp_account(ctx: TcContext) -> i32 {
    let frame = Frame::new(ctx);
    match frame.at::<ConnectionRequest>(0) {
        Some(request) => tcp::account(request) as i32,
        None => UNKNOWN_PEER as i32,
    }
}

/// Never attached: the agent runs it to remove expired flows and translations. Each is checked again just before it
/// is removed.
#[classifier]
fn ct_collect(ctx: TcContext) -> i32 {
    collect::collect(&Frame::new(ctx)) as i32
}

/// cgroup: a socket connects to an IPv4 address.
#[cgroup_sock_addr(connect4)]
fn sock_connect4(ctx: SockAddrContext) -> i32 {
    socket::connect(&Call4::new(ctx.sock_addr))
}

/// cgroup: a socket connects to an IPv6 address, or to an IPv4-mapped one.
#[cgroup_sock_addr(connect6)]
fn sock_connect6(ctx: SockAddrContext) -> i32 {
    socket::connect(&Call6::new(ctx.sock_addr))
}

/// cgroup: an unconnected socket sends a datagram to an IPv4 address.
#[cgroup_sock_addr(sendmsg4)]
fn sock_sendmsg4(ctx: SockAddrContext) -> i32 {
    socket::send(&Call4::new(ctx.sock_addr))
}

/// cgroup: the same for an IPv6 address.
#[cgroup_sock_addr(sendmsg6)]
fn sock_sendmsg6(ctx: SockAddrContext) -> i32 {
    socket::send(&Call6::new(ctx.sock_addr))
}

/// cgroup: a process learns the IPv4 source address of a datagram.
#[cgroup_sock_addr(recvmsg4)]
fn sock_recvmsg4(ctx: SockAddrContext) -> i32 {
    socket::receive(&Call4::new(ctx.sock_addr))
}

/// cgroup: the same for an IPv6 address, or for an IPv4-mapped one.
#[cgroup_sock_addr(recvmsg6)]
fn sock_recvmsg6(ctx: SockAddrContext) -> i32 {
    socket::receive(&Call6::new(ctx.sock_addr))
}

/// cgroup: a process asks which IPv4 address a socket is connected to.
#[cgroup_sock_addr(getpeername4)]
fn sock_getpeername4(ctx: SockAddrContext) -> i32 {
    socket::report_peer(&Call4::new(ctx.sock_addr))
}

/// cgroup: the same for an IPv6 address, or for an IPv4-mapped one.
#[cgroup_sock_addr(getpeername6)]
fn sock_getpeername6(ctx: SockAddrContext) -> i32 {
    socket::report_peer(&Call6::new(ctx.sock_addr))
}

/// cgroup: a socket is closed: `service/socket.rs` removes its record.
#[cgroup_sock(sock_release)]
fn sock_release(ctx: SockContext) -> i32 {
    socket::release(&ctx)
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
