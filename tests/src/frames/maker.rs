//! Builds frames: a packet, its encapsulation, and errors in both.

use fastrand::Rng;

use super::{Frame, MARKER_LEN, Scene, Segmentation};
use crate::packet::{IPV4, IPV6, ethernet, tagged};

/// EtherTypes of VLAN tags: both standards (802.1Q, 802.1ad), and older ones.
const TAGS: [u16; 4] = [0x8100, 0x88a8, 0x9100, 0x9200];
/// Byte values that have a meaning in headers: lengths, protocols, types, offsets.
const INTERESTING_BYTES: [u8; 20] = [
    0, 1, 2, 3, 4, 5, 6, 8, 11, 17, 43, 44, 58, 60, 0x45, 0x60, 127, 128, 135, 255,
];
/// Multicast addresses and others that no network card has (IEEE 802.1D, RFC 1112, RFC 2464).
const ODD_MACS: [[u8; 6]; 9] = [
    [0xff; 6],
    [0; 6],
    [1, 0x80, 0xc2, 0, 0, 0],
    [1, 0x80, 0xc2, 0, 0, 1],
    [1, 0x80, 0xc2, 0, 0, 0x0e],
    [1, 0, 0x5e, 0, 0, 1],
    [0x33, 0x33, 0, 0, 0, 1],
    [0x33, 0x33, 0xff, 0, 0, 1],
    [1, 0, 0x0c, 0xcc, 0xcc, 0xcc],
];

/// The content of a frame: its EtherType and payload.
pub(super) type Content = (u16, Vec<u8>);

/// Builds one frame.
pub(super) struct Maker<'a> {
    pub(super) scene: &'a Scene,
    pub(super) rng: Rng,
    /// Random numbers that all fragments of one packet share.
    pub(super) group: Rng,
    pub(super) marker: [u8; MARKER_LEN],
}

impl<'a> Maker<'a> {
    pub(super) fn new(scene: &'a Scene, rng: Rng, group: Rng, marker: [u8; MARKER_LEN]) -> Self {
        Self {
            scene,
            rng,
            group,
            marker,
        }
    }

    pub(super) fn frame(&mut self) -> Frame {
        let is_marked = self.one_in(20);
        if self.one_in(50)
            && let Some((bytes, segmentation)) = self.segmented()
        {
            return Frame {
                bytes,
                is_marked,
                segmentation: Some(segmentation),
            };
        }
        let (ethertype, content) = match self.rng.u8(0..100) {
            0..50 => self.packet(),
            50..62 => self.fragment(),
            62..80 => self.discovery(),
            80..88 => self.arp(),
            _ => self.other_protocol(),
        };
        let mut bytes = self.framed(ethertype, &content);
        if self.one_in(10) {
            let count = self.rng.usize(1..4);
            let tag = |rng: &mut Rng| (TAGS[rng.usize(0..TAGS.len())], rng.u16(..));
            let tags: Vec<_> = (0..count)
                .map(|_| match self.rng.u8(0..4) {
                    0 => tag(&mut self.rng),
                    1 => (0x8100, 0),
                    2 => (0x8100, self.rng.u16(0..8) << 13 | 7),
                    _ => (0x88a8, self.rng.u16(0..8)),
                })
                .collect();
            bytes = tagged(&bytes, &tags);
        }
        if self.one_in(8) {
            self.damage(&mut bytes);
        }
        Frame {
            bytes,
            is_marked,
            segmentation: None,
        }
    }

    /// Returns true with a probability of 1 in `n`.
    pub(super) fn one_in(&mut self, n: u32) -> bool {
        self.rng.u32(0..n) == 0
    }

    pub(super) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.rng.usize(0..from.len())]
    }

    /// Builds an Ethernet frame, mostly from the sender to its peer.
    fn framed(&mut self, ethertype: u16, content: &[u8]) -> Vec<u8> {
        let scene = self.scene;
        let to = match self.rng.u8(0..20) {
            0..14 => scene.peer.mac,
            14 | 15 => group_mac(ethertype, content),
            16 => self.pick(&scene.others).mac,
            17 => self.rng.u64(..).to_be_bytes()[2..]
                .try_into()
                .unwrap_or_default(),
            _ => self.pick(&ODD_MACS),
        };
        let from = match self.rng.u8(0..20) {
            0..16 => scene.own.mac,
            16 => scene.peer.mac,
            17 => self.pick(&scene.others).mac,
            _ => self.pick(&ODD_MACS),
        };
        ethernet(to, from, ethertype, content)
    }

    /// Changes, removes or adds some bytes.
    fn damage(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..self.rng.usize(1..4) {
            let len = bytes.len();
            // Damage headers rather than payload.
            let at = self.rng.usize(0..len.min(80));
            match self.rng.u8(0..8) {
                0 => bytes.truncate(14.max(self.rng.usize(0..len))),
                1 => bytes.truncate(14.max(at)),
                2 => bytes.resize(len + self.rng.usize(1..64), 0),
                3 => bytes.resize(1514 + self.rng.usize(0..600), 0xaa),
                4 => bytes[at] ^= 1 << self.rng.u8(0..8),
                5 => bytes[at] = self.rng.u8(..),
                _ => bytes[at] = INTERESTING_BYTES[self.rng.usize(0..INTERESTING_BYTES.len())],
            }
        }
    }

    /// Builds a frame to be segmented (GSO), with as small a linear part as the kernel allows.
    fn segmented(&mut self) -> Option<(Vec<u8>, Segmentation)> {
        const NEEDS_CHECKSUM: u8 = 1;
        const TCP4: u8 = 1;
        const TCP6: u8 = 4;
        const UDP: u8 = 5;
        let is_v4 = self.rng.bool();
        let is_tcp = self.rng.bool();
        let (protocol, header_len, check_at) = if is_tcp { (6, 20, 16) } else { (17, 8, 6) };
        let data = self.rng.usize(2000..9000);
        let ends = self.ends(is_v4);
        let mut content = self.ports(protocol);
        content.resize(header_len + data, 0x55);
        let end = content.len() - MARKER_LEN;
        content[end..].copy_from_slice(&self.marker);
        let (ethertype, packet) = self.wrapped(ends, protocol, &content)?;
        let start = 14 + if is_v4 { 20 } else { 40 };
        let headers = (start + header_len) as u16;
        let kind = match (is_tcp, is_v4) {
            (true, true) => TCP4,
            (true, false) => TCP6,
            _ => UDP,
        };
        let linear = self.pick(&[14, start as u16, headers, headers]);
        let mut header = vec![NEEDS_CHECKSUM, kind];
        for value in [linear, 1000, start as u16, check_at] {
            header.extend(value.to_ne_bytes());
        }
        let frame = ethernet(self.scene.peer.mac, self.scene.own.mac, ethertype, &packet);
        Some((frame, header.try_into().ok()?))
    }
}

/// The hardware address of a packet's multicast group, or broadcast if it has none (RFC 1112, RFC 2464).
fn group_mac(ethertype: u16, content: &[u8]) -> [u8; 6] {
    match (ethertype, content) {
        (IPV4, _) if content.len() >= 20 && content[16] >> 4 == 0xe => {
            [1, 0, 0x5e, content[17] & 0x7f, content[18], content[19]]
        }
        (IPV6, _) if content.len() >= 40 && content[24] == 0xff => [
            0x33,
            0x33,
            content[36],
            content[37],
            content[38],
            content[39],
        ],
        _ => [0xff; 6],
    }
}
