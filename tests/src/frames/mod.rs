//! Hostile frames, derived from a seed: those that a workload with packet sockets can send on its wire, and those that
//! its neighbours can send to it. [`fate_of_sent`] and [`fate_of_received`] define what may happen to each.

mod discovery;
mod fate;
mod link;
mod maker;
mod packet;
mod tap;

use std::net::{Ipv4Addr, Ipv6Addr};

use fastrand::Rng;

use self::maker::Maker;

pub use self::fate::{
    Fate, fate_of_received, fate_of_sent, is_of_host, names_address, without_tags,
};
pub use self::tap::{Outlet, Tap};

/// All nodes on a link (RFC 4291 section 2.7.1).
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
/// All routers on a link (RFC 4291 section 2.7.1).
const ALL_ROUTERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 2);
/// All routers that receive version 2 multicast listener reports (RFC 3810 section 5.2.14).
const LISTENERS_ROUTERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 0x16);

/// A host on the wire or behind it.
#[derive(Clone, Copy, Debug)]
pub struct Party {
    /// Hardware address.
    pub mac: [u8; 6],
    /// IPv4 address.
    pub v4: Ipv4Addr,
    /// IPv6 address.
    pub v6: Ipv6Addr,
    /// Link-local address.
    pub link: Ipv6Addr,
}

/// The sender and its network environment.
#[derive(Clone, Debug)]
pub struct Scene {
    /// The sender.
    pub own: Party,
    /// The host at the other end of the sender's wire.
    pub peer: Party,
    /// The gateway's IPv4 and IPv6 addresses.
    pub gateway: (Ipv4Addr, Ipv6Addr),
    /// Hosts behind the peer. The first one is the most frequent destination.
    pub others: Vec<Party>,
}

/// A header that tells the kernel how to segment a frame (`struct virtio_net_hdr`).
pub type Segmentation = [u8; 10];

/// A frame and how to send it.
#[derive(Clone, Debug)]
pub struct Frame {
    /// The frame from its Ethernet header on.
    pub bytes: Vec<u8>,
    /// Whether to send it with the mark of packets that the programs have answered.
    pub is_marked: bool,
    /// How to segment the frame, if at all.
    pub segmentation: Option<Segmentation>,
}

/// Size of a [`marker`].
pub const MARKER_LEN: usize = 12;
const MARKER: [u8; 4] = *b"hfrm";

/// Payload that identifies a frame by the low halves of its seed and number.
pub fn marker(seed: u64, number: u64) -> [u8; MARKER_LEN] {
    let mut marker = [0; MARKER_LEN];
    marker[..4].copy_from_slice(&MARKER);
    // The halves that vary most.
    marker[4..8].copy_from_slice(&(seed as u32).to_be_bytes());
    marker[8..].copy_from_slice(&(number as u32).to_be_bytes());
    marker
}

/// Finds a marker with this seed in these bytes, and returns the frame's number.
pub fn marked_number(seed: u64, bytes: &[u8]) -> Option<u32> {
    let start = &marker(seed, 0)[..8];
    let at = bytes.windows(8).position(|part| part == start)?;
    let number = bytes.get(at + 8..at + MARKER_LEN)?;
    Some(u32::from_be_bytes(number.try_into().ok()?))
}

/// Builds frame `number` of a seed. The result depends on nothing else.
pub fn frame(scene: &Scene, seed: u64, number: u64) -> Frame {
    // Multiplying by the 64-bit golden ratio spreads neighbouring numbers.
    let rng = |number: u64| Rng::with_seed(seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    // Fragments of one packet are frames of the same group.
    let group = rng(!(number / GROUP));
    Maker::new(scene, rng(number), group, marker(seed, number)).frame()
}

/// Number of consecutive frames that may be fragments of the same packet.
const GROUP: u64 = 4;

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    pub(super) fn scene() -> Scene {
        let party = |number: u8| Party {
            mac: [2, 0, 0, 0, 0, number],
            v4: Ipv4Addr::new(10, 244, 1, number),
            v6: Ipv6Addr::new(0xfd00, 0x10, 0x244, 1, 0, 0, 0, number.into()),
            link: Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, number.into()),
        };
        let gateway = party(1);
        Scene {
            own: party(9),
            peer: party(2),
            gateway: (gateway.v4, gateway.v6),
            others: [3, 4, 5].map(party).into(),
        }
    }

    #[test]
    fn a_number_stands_for_one_frame_and_most_frames_identify_it() {
        let scene = scene();
        let mut reported = 0;
        for number in 0..5000 {
            let made = frame(&scene, 7, number);
            assert_eq!(made.bytes, frame(&scene, 7, number).bytes);
            assert!(made.bytes.len() >= 14);
            let found = marked_number(7, &made.bytes).map(u64::from);
            reported += u32::from(found == Some(number));
        }
        assert!(reported > 4000, "{reported}");
    }

    #[test]
    fn every_fate_is_that_of_many_frames() {
        let scene = scene();
        let mut sent = BTreeMap::new();
        let mut received = BTreeMap::new();
        for number in 0..20_000 {
            let bytes = frame(&scene, 7, number).bytes;
            *sent.entry(fate_of_sent(&scene, &bytes)).or_insert(0) += 1;
            // The same scene, seen from the other end.
            let turned = Scene {
                own: scene.peer,
                peer: scene.own,
                ..scene.clone()
            };
            let bytes = frame(&turned, 7, number).bytes;
            *received
                .entry(fate_of_received(&turned, &bytes))
                .or_insert(0) += 1;
        }
        for fate in [Fate::Passes, Fate::Judged, Fate::Dropped, Fate::Answered] {
            assert!(sent.get(&fate) > Some(&20), "{fate:?}: {sent:?}");
            let is_possible = fate != Fate::Dropped;
            assert!(
                !is_possible || received.get(&fate) > Some(&20),
                "{fate:?}: {received:?}"
            );
        }
    }
}
