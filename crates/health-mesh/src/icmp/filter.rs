//! The socket filter that keeps unrelated ICMP out of the agent's sockets: otherwise a raw socket receives a copy of
//! every ICMP packet that reaches this host.

use socket2::SockFilter;

use super::wire::Family;

// Classic BPF, `linux/filter.h` and `linux/bpf_common.h`. Loads past the end of the packet make the filter return 0, so
// it drops truncated packets.
const LD_BYTE_ABS: u16 = 0x30;
const LD_HALF_ABS: u16 = 0x28;
const LD_BYTE_IND: u16 = 0x50;
const LD_HALF_IND: u16 = 0x48;
const LDX_IPV4_HEADER_LEN: u16 = 0xb1;
const AND: u16 = 0x54;
const SHIFT_LEFT: u16 = 0x64;
const ADD_X: u16 = 0x0c;
const TAX: u16 = 0x07;
const JUMP_IF_EQUAL: u16 = 0x15;
const JUMP: u16 = 0x05;
const RETURN: u16 = 0x06;

const ACCEPT: u32 = u32::MAX;
const DROP: u32 = 0;

/// Accepts echo replies with the identifier `id`, and errors that quote a request with it.
pub(super) fn echo_filter(family: Family, id: u16) -> Vec<SockFilter> {
    let mut program = Vec::new();
    let mut push = |code, jt, jf, k| program.push(SockFilter::new(code, jt, jf, k));
    let id = u32::from(id);

    // X becomes the offset of the ICMP header, A the type. An IPv4 raw socket sees the IP header, an IPv6 raw socket
    // does not.
    match family {
        Family::V4 => {
            push(LDX_IPV4_HEADER_LEN, 0, 0, 0);
            push(LD_BYTE_IND, 0, 0, 0);
        }
        Family::V6 => push(LD_BYTE_ABS, 0, 0, 0),
    }
    push(JUMP_IF_EQUAL, 0, 1, u32::from(family.echo_reply()));
    let errors = family.errors();
    // Jumps past the error tests and the drop after them, to the load of the reply's identifier.
    push(JUMP, 0, 0, errors.len() as u32 + 1);
    let load_reply_len = 2;
    for (index, &kind) in errors.iter().enumerate() {
        let tests_left = errors.len() - 1 - index;
        push(
            JUMP_IF_EQUAL,
            (tests_left + 1 + load_reply_len) as u8,
            0,
            u32::from(kind),
        );
    }
    push(RETURN, 0, 0, DROP);

    let quoted_len = match family {
        Family::V4 => 6,
        Family::V6 => 1,
    };
    match family {
        Family::V4 => push(LD_HALF_IND, 0, 0, 4),
        Family::V6 => push(LD_HALF_ABS, 0, 0, 4),
    }
    push(JUMP, 0, 0, quoted_len);

    match family {
        Family::V4 => {
            // The quoted packet starts 8 bytes after X; its own header length gives the offset of its ICMP header.
            push(LD_BYTE_IND, 0, 0, 8);
            push(AND, 0, 0, 0xf);
            push(SHIFT_LEFT, 0, 0, 2);
            push(ADD_X, 0, 0, 0);
            push(TAX, 0, 0, 0);
            push(LD_HALF_IND, 0, 0, 8 + 4);
        }
        Family::V6 => push(LD_HALF_ABS, 0, 0, 8 + 40 + 4),
    }
    push(JUMP_IF_EQUAL, 0, 1, id);
    push(RETURN, 0, 0, ACCEPT);
    push(RETURN, 0, 0, DROP);
    program
}
