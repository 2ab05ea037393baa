//! Connected sockets of the host: their packets, if their port is also a service's, and clients of services between
//! the same ports.

use aya_ebpf::bindings::bpf_sock_tuple;
use aya_ebpf::helpers::generated::{bpf_sk_lookup_tcp, bpf_sk_lookup_udp, bpf_sk_release};
use health_common::ct::IP_PROTOCOL_UDP;
use health_common::masquerade::Address as _;
use health_common::metrics::Reason;
use health_common::tcp::IP_PROTOCOL_TCP;

use super::flow::{answer_key, is_of_flow};
use super::new_flow::{Attempt, move_on};
use super::request::Request;
use crate::clock::coarse_now_secs;
use crate::frame::Frame;
use crate::hook::{AtUplink, Hook};
use crate::ip_version::Version;
use crate::subprogram::subprogram;

/// The network namespace of the packet's device (`BPF_F_CURRENT_NETNS`).
const CURRENT_NETNS: u64 = u64::MAX;
/// Length of `struct bpf_sock_tuple` for IPv4 and IPv6, in bytes.
const TUPLE_LEN4: u32 = 12;
const TUPLE_LEN6: u32 = 36;

const _: () = assert!(size_of::<bpf_sock_tuple>() == TUPLE_LEN6 as usize);

/// Whether a packet is for a socket of the host that is connected to its source: the answer to a process that uses
/// this port as its own is not a request.
#[subprogram(
    service4_is_answer,
    service6_is_answer,
    uplink4_is_answer,
    uplink6_is_answer
)]
pub(super) fn is_answer<T: Version, P: Hook>(frame: &Frame, request: &mut Request<T>) -> bool {
    is_for_socket(frame, &request.tuple)
}

/// Makes the caller try another port for a flow to a process of this host that has its own connection with the client
/// between the same ports: conntrack does not know those. If the flow began earlier and lost an entry, the socket is
/// the flow's own.
#[subprogram(uplink4_avoid_socket, uplink6_avoid_socket)]
pub(super) fn avoid_socket<T: Version>(
    frame: &Frame,
    request: &mut Request<T>,
) -> Result<Attempt, Reason> {
    let sent = request.moved();
    if !began_before(request, &sent)
        && is_for_socket(frame, &sent.with_destination(request.backend()))
    {
        move_on(request)
    } else {
        Ok(Attempt::Done)
    }
}

/// Whether a packet continues a flow whose reply entry still exists and, unless the flow is TCP, has not expired.
/// `sent` is the packet's tuple, with the source port as the backend sees it.
#[inline(always)]
fn began_before<T: Version>(request: &Request<T>, sent: &T) -> bool {
    // Keys must be on the stack.
    let answer = answer_key::<T, AtUplink>(sent, request.backend());
    let Some(entry) = T::service_flows().get_ptr(&answer) else {
        return false;
    };
    // SAFETY: a value of that map.
    let parts = T::service_flow_parts(unsafe { &*entry });
    let goes_on = if sent.protocol() == IP_PROTOCOL_TCP {
        !request.opens()
    } else {
        coarse_now_secs() < parts.expires
    };
    goes_on && is_of_flow(&parts, &request.tuple, sent)
}

/// Whether a packet with this tuple is for a socket of the host that is connected to its source.
#[inline(always)]
fn is_for_socket<T: Version>(frame: &Frame, flow: &T) -> bool {
    let ((source, sport_be), (destination, dport_be)) = (flow.source(), flow.destination());
    let (from, to) = (source.to_addr().words_be, destination.to_addr().words_be);
    let ([a, b], [c, d]) = (sport_be.to_ne_bytes(), dport_be.to_ne_bytes());
    let ports = u32::from_ne_bytes([a, b, c, d]);
    let (mut words, len) = if T::IP_VERSION == 4 {
        ([from[3], to[3], ports, 0, 0, 0, 0, 0, 0], TUPLE_LEN4)
    } else {
        (
            [
                from[0], from[1], from[2], from[3], to[0], to[1], to[2], to[3], ports,
            ],
            TUPLE_LEN6,
        )
    };
    let (skb, tuple) = (frame.skb().cast(), (&raw mut words).cast());
    // Not `bpf_skc_lookup_tcp`, whose sockets the verifier treats as another type: LLVM uses one load for both.
    // SAFETY: a valid context, and the layout that the helpers expect.
    let socket = unsafe {
        match flow.protocol() {
            IP_PROTOCOL_TCP => bpf_sk_lookup_tcp(skb, tuple, len, CURRENT_NETNS, 0),
            IP_PROTOCOL_UDP => bpf_sk_lookup_udp(skb, tuple, len, CURRENT_NETNS, 0),
            _ => return false,
        }
    };
    if socket.is_null() {
        return false;
    }
    // SAFETY: a socket that is held until it is released. A listening or unconnected socket has no other end.
    unsafe {
        let is_connected = (*socket).dst_port != 0;
        bpf_sk_release(socket.cast());
        is_connected
    }
}
