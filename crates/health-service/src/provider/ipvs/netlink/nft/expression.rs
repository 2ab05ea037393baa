//! Expressions of rules. If a match fails, the rule ends and the next rule is tried.

use health_model::ipam::Family;
use health_model::policy::Protocol;
use ipnet::IpNet;
use netlink_packet_core::DefaultNla;
use netlink_packet_netfilter::nftables::{
    Bitwise, Cmp, DataAttribute, Expressions, Immediate, Meta, MetaKey, Operator, Payload,
    Register, Verdict, VerdictAttribute,
};

use super::super::attributes::{octets, plain, text};

/// The register that matches use.
const REGISTER: Register = Register::Reg1;
/// `NFT_PAYLOAD_NETWORK_HEADER`.
const NETWORK_HEADER: u32 = 1;
/// `NFT_CT_STATE`.
const CT_STATE: u32 = 0;
/// The state of the first packets of a connection (`NF_CT_STATE_BIT(IP_CT_NEW)`).
const CT_NEW: u32 = 8;
/// `NFT_FIB_RESULT_ADDRTYPE`.
const FIB_ADDRTYPE: u32 = 3;
/// `RTN_LOCAL`: an address of this node.
const TYPE_LOCAL: u32 = 2;
/// `NF_NAT_RANGE_PROTO_RANDOM_FULLY`.
const RANDOM_FULLY: u32 = 1 << 4;
/// `NFT_REJECT_ICMP_UNREACH`.
const REJECT_UNREACHABLE: u32 = 0;

/// One of the addresses of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The source address.
    Source,
    /// The destination address.
    Destination,
}

fn number(kind: u16, number: u32) -> DefaultNla {
    plain(kind, number.to_be_bytes())
}

fn other(name: &str, attributes: Vec<DefaultNla>) -> Expressions {
    Expressions::Other {
        expression_type: name.to_owned(),
        attributes,
    }
}

fn register(register: Register) -> u32 {
    register.into()
}

fn compare(operator: Operator, value: &[u8]) -> Expressions {
    Expressions::Cmp(vec![
        Cmp::SourceRegister(REGISTER),
        Cmp::Op(operator),
        Cmp::Data(DataAttribute::Value(value.to_vec())),
    ])
}

/// Computes `register & mask ^ xor`.
fn combine(mask: &[u8], xor: &[u8]) -> Expressions {
    Expressions::Bitwise(vec![
        Bitwise::SourceRegister(REGISTER),
        Bitwise::DestinationRegister(REGISTER),
        Bitwise::Length(mask.len() as u32),
        Bitwise::Mask(DataAttribute::Value(mask.to_vec())),
        Bitwise::Xor(DataAttribute::Value(xor.to_vec())),
    ])
}

fn load(key: MetaKey) -> Expressions {
    Expressions::Meta(vec![Meta::Key(key), Meta::DestinationRegister(REGISTER)])
}

/// Matches packets in an ipset set; `parts` names the packet's address with which each part of an entry is compared
/// (net/netfilter/xt_set.c, `struct xt_set_info_match_v1`).
pub(crate) fn in_set(index: u16, parts: &[Side]) -> Vec<Expressions> {
    let sources = parts.iter().enumerate();
    let flags = sources
        .filter(|(_, side)| **side == Side::Source)
        .fold(0, |flags, (part, _)| flags | 1_u8 << (part + 1));
    let [low, high] = index.to_ne_bytes();
    // Padded to 8 bytes, the alignment of matches.
    let info = [low, high, parts.len() as u8, flags, 0, 0, 0, 0];
    vec![other(
        "match",
        vec![text(1, "set"), number(2, 1), plain(3, info)],
    )]
}

/// Matches packets of this protocol.
pub fn of_protocol(protocol: Protocol) -> Vec<Expressions> {
    vec![
        load(MetaKey::L4Proto),
        compare(Operator::Equal, &[protocol.0]),
    ]
}

/// Matches packets with a source in this network.
pub(crate) fn from_network(network: IpNet) -> Vec<Expressions> {
    let (offset, len) = match Family::of(network.addr()) {
        Family::V4 => (12, 4),
        Family::V6 => (8, 16),
    };
    let mask = octets(network.netmask());
    vec![
        Expressions::Payload(vec![
            Payload::DestinationRegister(REGISTER),
            Payload::Base(NETWORK_HEADER),
            Payload::Offset(offset),
            Payload::Len(len),
        ]),
        combine(&mask, &vec![0; mask.len()]),
        compare(Operator::Equal, &octets(network.network())),
    ]
}

/// Matches packets that do not start a connection.
pub(crate) fn not_new() -> Vec<Expressions> {
    vec![
        other(
            "ct",
            vec![number(2, CT_STATE), number(1, register(REGISTER))],
        ),
        combine(&CT_NEW.to_ne_bytes(), &[0; 4]),
        compare(Operator::Equal, &[0; 4]),
    ]
}

/// Matches packets whose source or destination address belongs to this node.
pub fn is_local(side: Side) -> Vec<Expressions> {
    let flag = match side {
        Side::Source => 1,
        Side::Destination => 2,
    };
    let attributes = vec![
        number(1, register(REGISTER)),
        number(2, FIB_ADDRTYPE),
        number(3, flag),
    ];
    vec![
        other("fib", attributes),
        compare(Operator::Equal, &TYPE_LOCAL.to_ne_bytes()),
    ]
}

/// Matches packets whose mark has none of these bits.
pub(crate) fn lacks_mark(bits: u32) -> Vec<Expressions> {
    vec![
        load(MetaKey::Mark),
        combine(&bits.to_ne_bytes(), &[0; 4]),
        compare(Operator::Equal, &[0; 4]),
    ]
}

/// Sets these bits in the packet's mark, or clears them.
pub fn set_mark(bits: u32, is_set: bool) -> Vec<Expressions> {
    let xor = if is_set { bits } else { 0 };
    vec![
        load(MetaKey::Mark),
        combine(&(!bits).to_ne_bytes(), &xor.to_ne_bytes()),
        Expressions::Meta(vec![
            Meta::Key(MetaKey::Mark),
            Meta::SourceRegister(REGISTER),
        ]),
    ]
}

/// Replaces the connection's source with an address of this node and a free port.
pub fn masquerade() -> Vec<Expressions> {
    vec![other("masq", vec![number(1, RANDOM_FULLY)])]
}

/// Drops the packet, and reports to the sender that the port is unreachable.
pub fn reject(family: Family) -> Vec<Expressions> {
    let code = match family {
        // `ICMP_PORT_UNREACH`, `ICMPV6_PORT_UNREACH`.
        Family::V4 => 3,
        Family::V6 => 4,
    };
    vec![other(
        "reject",
        vec![number(1, REJECT_UNREACHABLE), plain(2, [code])],
    )]
}

/// Drops the packet.
pub fn drop() -> Vec<Expressions> {
    verdict(vec![VerdictAttribute::Code(Verdict::Other(0))])
}

/// Leaves the chain.
pub fn leave() -> Vec<Expressions> {
    verdict(vec![VerdictAttribute::Code(Verdict::Return)])
}

/// Runs another chain, and then continues after this rule.
pub fn jump(chain: &str) -> Vec<Expressions> {
    verdict(vec![
        VerdictAttribute::Code(Verdict::Jump),
        VerdictAttribute::Chain(chain.to_owned()),
    ])
}

fn verdict(attributes: Vec<VerdictAttribute>) -> Vec<Expressions> {
    vec![Expressions::Immediate(vec![
        Immediate::DestinationRegister(Register::Verdict),
        Immediate::Data(DataAttribute::Verdict(attributes)),
    ])]
}
