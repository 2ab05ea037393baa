//! Builds ARP frames, and frames that carry neither ARP nor IP directly.

use std::net::Ipv4Addr;

use super::maker::{Content, Maker};
use crate::packet::{ARP, IPV4, IPV6, arp};

/// The kernel's protocol numbers for frames with a length in place of a type (IEEE 802.3): one for raw 802.3 frames as
/// Netware used them, one for the rest.
const OF_LENGTHS: [u16; 2] = [1, 4];
/// EtherTypes of payloads.
const OF_CONTENTS: [u16; 43] = [
    0x0600, 0x0800, 0x0801, 0x0805, 0x0806, 0x0842, 0x22eb, 0x22f0, 0x22f3, 0x4305, 0x6003, 0x6558,
    0x8035, 0x809b, 0x80f3, 0x8137, 0x86dc, 0x86dd, 0x86de, 0x8808, 0x8809, 0x8847, 0x8848, 0x8863,
    0x8864, 0x888e, 0x8892, 0x88a2, 0x88a4, 0x88b5, 0x88be, 0x88cc, 0x88e5, 0x88e7, 0x88f7, 0x88f8,
    0x88fb, 0x8902, 0x8906, 0x892f, 0x9100, 0x9200, 0xffff,
];
/// EtherTypes of VLAN tags.
const OF_TAGS: [u16; 2] = [0x8100, 0x88a8];

/// All EtherTypes that frames can have, as the kernel distinguishes them.
pub(super) fn ethertypes() -> impl Iterator<Item = u16> {
    OF_LENGTHS.into_iter().chain(OF_CONTENTS).chain(OF_TAGS)
}

impl Maker<'_> {
    /// An ARP packet with any operation, whose sender address is the sender's own, another host's or unspecified.
    pub(super) fn arp(&mut self) -> Content {
        let scene = self.scene;
        let other = self.pick(&scene.others);
        let addresses = [
            scene.own.v4,
            scene.peer.v4,
            scene.gateway.0,
            other.v4,
            Ipv4Addr::UNSPECIFIED,
            Ipv4Addr::BROADCAST,
            Ipv4Addr::LOCALHOST,
        ];
        let sender = if self.one_in(3) {
            self.pick(&addresses)
        } else {
            scene.own.v4
        };
        let target = if self.one_in(3) {
            self.pick(&addresses)
        } else {
            scene.gateway.0
        };
        let mac = if self.one_in(6) {
            self.pick(&[other.mac, [0; 6], [0xff; 6]])
        } else {
            scene.own.mac
        };
        let operation = match self.rng.u8(0..8) {
            0..4 => 1,
            4..6 => 2,
            // Includes the operations of RARP and InARP.
            _ => self.rng.u16(0..26),
        };
        let mut bytes = arp(operation, (mac, sender), ([0; 6], target));
        if self.one_in(8) {
            // Another hardware type, protocol type or length.
            let at = self.rng.usize(0..6);
            bytes[at] = self.pick(&[0, 1, 4, 6, 8, 16, 0x86]);
        }
        if !self.one_in(6) {
            bytes.extend(self.marker);
        }
        (ARP, bytes)
    }

    /// Mostly an IP packet in an encapsulation that the stack or a device on the path might remove.
    pub(super) fn other_protocol(&mut self) -> Content {
        let (ethertype, packet) = self.inner();
        let is_v4 = ethertype == IPV4;
        let with = |header: &[u8]| [header, &packet].concat();
        match self.rng.u8(0..10) {
            0 => {
                // LLC and SNAP (IEEE 802.2).
                let header = [&[0xaa, 0xaa, 3, 0, 0, 0][..], &ethertype.to_be_bytes()].concat();
                (
                    (header.len() + packet.len()).min(1500) as u16,
                    with(&header),
                )
            }
            1 => {
                // Spanning tree, IP with its own LLC number, raw Netware, and the null SAP.
                let header: &[u8] = self.pick(&[
                    &[0x42, 0x42, 3, 0, 0, 0, 0][..],
                    &[6, 6, 3],
                    &[0xff, 0xff],
                    &[0, 1, 0xaf, 0],
                ]);
                ((header.len() + packet.len()).min(1500) as u16, with(header))
            }
            2 => (self.pick(&[0, 38, 0x05dc, 0x05ff]), packet),
            3 => {
                // PPPoE: discovery, or a session with IP in it.
                if self.one_in(3) {
                    return (0x8863, [&[0x11, 9, 0, 0, 0, 12][..], &self.marker].concat());
                }
                let [high, low] = (packet.len() as u16 + 2).to_be_bytes();
                let protocol = if is_v4 { 0x21 } else { 0x57 };
                (0x8864, with(&[0x11, 0, 0, 1, high, low, 0, protocol]))
            }
            4 => {
                // MPLS with a normal label or an explicit null.
                let label = self.pick(&[[0, 0, 1, 64], [0, 1, 1, 64], [0, 0x20, 1, 255]]);
                (self.pick(&[0x8847, 0x8848]), with(&label))
            }
            5 => {
                // A frame inside a frame.
                let inner = [
                    &self.scene.peer.mac[..],
                    &self.scene.own.mac,
                    &ethertype.to_be_bytes(),
                ];
                let header = [&[0; 6][..], &inner.concat()].concat();
                (self.pick(&[0x6558, 0x88e7, 0x22eb, 0x88be]), with(&header))
            }
            // A packet of one IP version under the other version's EtherType.
            6 => (if is_v4 { IPV6 } else { IPV4 }, packet),
            _ => (self.pick(&OF_CONTENTS), packet),
        }
    }
}
