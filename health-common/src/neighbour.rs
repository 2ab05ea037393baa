//! ARP requests and neighbour solicitations that the kernel programs answer.

use network_types::arp::ArpHdr;
use network_types::eth::{EthHdr, EtherType};

use crate::checksum::{fold, sum};
use crate::echo::{Ipv6Header, PROTOCOL_ICMPV6, halves};

/// Ethernet type of ARP. All Ethernet types here are in host byte order.
pub const ETHERTYPE_ARP: u16 = number(EtherType::Arp);
/// Ethernet type of IPv4.
pub const ETHERTYPE_IPV4: u16 = number(EtherType::Ipv4);
/// Ethernet type of IPv6.
pub const ETHERTYPE_IPV6: u16 = number(EtherType::Ipv6);
/// Ethernet type of a VLAN tag (IEEE 802.1Q).
pub const ETHERTYPE_VLAN: u16 = number(EtherType::Ieee8021q);
/// Ethernet type of a service provider's VLAN tag (IEEE 802.1ad), in front of another.
pub const ETHERTYPE_VLAN_SERVICE: u16 = number(EtherType::Ieee8021ad);
/// ICMPv6 type of a router solicitation.
pub const ROUTER_SOLICITATION: u8 = 133;
/// ICMPv6 type of a router advertisement.
pub const ROUTER_ADVERTISEMENT: u8 = 134;
/// ICMPv6 type of a neighbour solicitation.
pub const NEIGHBOUR_SOLICITATION: u8 = 135;
/// ICMPv6 type of a neighbour advertisement.
pub const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
/// ICMPv6 type of a redirect.
pub const REDIRECT: u8 = 137;
/// ARP packet fields in memory order (RFC 826).
const ARP_ETHERNET: [u8; 2] = 1_u16.to_be_bytes();
const ARP_REQUEST: [u8; 2] = 1_u16.to_be_bytes();
const ARP_REPLY: [u8; 2] = 2_u16.to_be_bytes();
const SOURCE_LINK_LAYER_ADDRESS: u8 = 1;
const TARGET_LINK_LAYER_ADDRESS: u8 = 2;
const SOLICITED_AND_OVERRIDE: u32 = 0x6000_0000;
const SOLICITED_AND_ROUTER: u32 = 0xc000_0000;

/// Converts from network byte order, which `network_types` uses.
const fn number(ethertype: EtherType) -> u16 {
    u16::from_be(ethertype as u16)
}

/// Whether an ICMPv6 message of this type belongs to neighbour discovery (RFC 4861 section 4).
#[inline(always)]
pub const fn is_neighbour_discovery(kind: u8) -> bool {
    matches!(kind, ROUTER_SOLICITATION..=REDIRECT)
}

/// Whether only routers send ICMPv6 messages of this type (RFC 4861 section 4).
#[inline(always)]
pub const fn is_of_router(kind: u8) -> bool {
    matches!(kind, ROUTER_ADVERTISEMENT | REDIRECT)
}

/// Whether a frame is addressed to this hardware address or to a group.
#[inline(always)]
pub fn is_for(ethernet: &EthHdr, mac: [u8; 6]) -> bool {
    ethernet.dst_addr[0] & 1 != 0 || ethernet.dst_addr == mac
}

/// Neighbour solicitation or advertisement with one link-layer address option (RFC 4861 sections 4.3
/// and 4.4).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Neighbour {
    /// ICMPv6 type.
    pub kind: u8,
    /// ICMPv6 code, 0.
    pub code: u8,
    /// Checksum.
    pub check: u16,
    /// Router, solicited and override bits of an advertisement.
    pub flags_be: u32,
    /// The target address.
    pub target_be: [u32; 4],
    /// Type of the option.
    pub option: u8,
    /// Length of the option in units of eight bytes, 1.
    pub option_len: u8,
    /// Link-layer address.
    pub mac: [u8; 6],
}

const _: () = assert!(core::mem::size_of::<Neighbour>() == 32);

/// The role that an advertisement announces for the answering node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A gateway, advertised as a router.
    Gateway,
    /// An endpoint.
    Endpoint,
}

/// Whether this is a well-formed ARP request that can be answered for its target: its sender has an address, and the
/// sender's hardware address is the source of the frame. Announcements and duplicate address probes (RFC 5227) do not
/// qualify.
#[inline(always)]
pub fn is_arp_request(ethernet: &EthHdr, arp: &ArpHdr) -> bool {
    arp.htype == ARP_ETHERNET
        && arp.ptype == ETHERTYPE_IPV4.to_be_bytes()
        && arp.hlen == 6
        && arp.plen == 4
        && arp.oper == ARP_REQUEST
        && arp.sha == ethernet.src_addr
        && arp.sha[0] & 1 == 0
        && u32::from_ne_bytes(arp.spa) != 0
        && arp.spa != arp.tpa
}

/// Turns an ARP request into a reply: the target's address is at `mac`.
#[inline(always)]
pub fn turn_arp(ethernet: &mut EthHdr, arp: &mut ArpHdr, mac: [u8; 6]) {
    ethernet.dst_addr = arp.sha;
    ethernet.src_addr = mac;
    arp.oper = ARP_REPLY;
    core::mem::swap(&mut arp.spa, &mut arp.tpa);
    arp.tha = arp.sha;
    arp.sha = mac;
}

/// Whether this is a valid neighbour solicitation (RFC 4861 section 7.1.1) from a sender with an address, whose only
/// option is the sender's link-layer address. No other solicitations are answered, in particular no duplicate address
/// probes (RFC 4862). `frame_len` counts from the Ethernet header on.
#[inline(always)]
pub fn is_solicitation(ip: &Ipv6Header, neighbour: &Neighbour, frame_len: u32) -> bool {
    ip.is_version_6()
        && ip.next_header == PROTOCOL_ICMPV6
        && ip.hop_limit == 255
        && u16::from_be(ip.payload_len_be) as usize == core::mem::size_of::<Neighbour>()
        && frame_len == 14 + 40 + 32
        && neighbour.kind == NEIGHBOUR_SOLICITATION
        && neighbour.code == 0
        && neighbour.option == SOURCE_LINK_LAYER_ADDRESS
        && neighbour.option_len == 1
        && crate::addr::v6_source_is_possible(&ip.saddr_be)
        && neighbour_sum(ip, neighbour) == 0xffff
}

/// Turns a solicitation into an advertisement: the target's address is at `mac`.
#[inline(always)]
pub fn turn_solicitation(
    ethernet: &mut EthHdr,
    ip: &mut Ipv6Header,
    neighbour: &mut Neighbour,
    mac: [u8; 6],
    role: Role,
) {
    ethernet.dst_addr = ethernet.src_addr;
    ethernet.src_addr = mac;
    ip.daddr_be = ip.saddr_be;
    ip.saddr_be = neighbour.target_be;
    neighbour.kind = NEIGHBOUR_ADVERTISEMENT;
    neighbour.flags_be = match role {
        Role::Gateway => SOLICITED_AND_ROUTER | SOLICITED_AND_OVERRIDE,
        Role::Endpoint => SOLICITED_AND_OVERRIDE,
    }
    .to_be();
    neighbour.option = TARGET_LINK_LAYER_ADDRESS;
    neighbour.mac = mac;
    neighbour.check = 0;
    neighbour.check = !neighbour_sum(ip, neighbour);
}

/// One's complement sum over the message and its pseudo header (RFC 8200 section 8.1).
#[inline(always)]
fn neighbour_sum(ip: &Ipv6Header, neighbour: &Neighbour) -> u16 {
    let words32 = |words: &[u32; 4]| {
        let mut total = 0;
        let mut i = 0;
        while i < 4 {
            total += sum(&halves(words[i]));
            i += 1;
        }
        total
    };
    let pair = |a: u8, b: u8| u16::from_ne_bytes([a, b]) as u32;
    let mac = &neighbour.mac;
    fold(
        words32(&ip.saddr_be)
            + words32(&ip.daddr_be)
            + ip.payload_len_be as u32
            + (PROTOCOL_ICMPV6 as u16).to_be() as u32
            + pair(neighbour.kind, neighbour.code)
            + neighbour.check as u32
            + sum(&halves(neighbour.flags_be))
            + words32(&neighbour.target_be)
            + pair(neighbour.option, neighbour.option_len)
            + pair(mac[0], mac[1])
            + pair(mac[2], mac[3])
            + pair(mac[4], mac[5]),
    )
}
