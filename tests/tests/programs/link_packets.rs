//! What passes an endpoint's policy because it concerns its link alone, and what only pretends to.

use std::iter;

use health_common::endpoint::ENDPOINT_HEALTH;
use health_common::metrics::Reason;
use health_common::policy::{ANY_IDENTITY, VERDICT_ALLOW};
use tests::packet::{ARP, ethernet, payload, tagged};

use crate::endpoint_packets::Way::Out;
use crate::endpoint_packets::{HOST_MAC, MAC, UDP};
use crate::policy_packets::{APP, BOTH, Bed, address, everything, opening, set_endpoint};

/// Tags of both kinds (802.1Q, 802.1ad), with priority alone and with a VLAN.
const TAGS: [(u16, u16); 4] = [(0x8100, 0), (0x8100, 7), (0x88a8, 0), (0x88a8, 7)];

/// Every stack of up to three tags, outermost first.
fn stacks() -> Vec<Vec<(u16, u16)>> {
    let longer = |stacks: &Vec<Vec<(u16, u16)>>| {
        let with = |tag: &(u16, u16)| {
            let tag = *tag;
            stacks
                .iter()
                .map(move |stack| [&[tag], &stack[..]].concat())
        };
        Some(TAGS.iter().flat_map(with).collect())
    };
    let none = vec![Vec::new()];
    let by_length = iter::successors(longer(&none), longer);
    by_length.take(3).flatten().collect()
}

#[test]
#[ignore = "needs root"]
fn an_endpoint_sends_arp_and_ip_without_tags_and_nothing_else() {
    let mut bed = Bed::new(&[(everything(Out, ANY_IDENTITY), VERDICT_ALLOW)]);
    let refused = Some(Reason::UnsupportedL2);
    let packets = [true, false].map(|is_v4| opening(Out, address(APP, is_v4), UDP, 53));
    let arp = ethernet(HOST_MAC, MAC, ARP, &payload(28));
    for flags in [BOTH, 0, ENDPOINT_HEALTH] {
        set_endpoint(&mut bed.run.datapath, flags, 1);
        for packet in packets.iter().chain([&arp]) {
            assert_eq!(bed.verdict(Out, packet), None);
            for stack in stacks() {
                let packet = tagged(packet, &stack);
                assert_eq!(bed.verdict(Out, &packet), refused, "{stack:x?}");
            }
        }
        for ethertype in [
            // LLC: its length stands where the type would.
            0, 38, 0x05dc, 0x05ff,
            // X.25, Wake-on-LAN, AVTP, TRILL, DECnet, RARP, AppleTalk, IPX, Q-in-Q of old, PROFINET, flow control.
            0x0805, 0x0842, 0x22f0, 0x22f3, 0x6003, 0x8035, 0x809b, 0x8137, 0x9100, 0x9200, 0x8892,
            0x8808,
            // LACP, MPLS, PPPoE, EAPOL, ATA, EtherCAT, LLDP, MACsec, PBB, PTP, NC-SI, PRP, CFM, FCoE, HSR.
            0x8809, 0x8847, 0x8848, 0x8863, 0x8864, 0x888e, 0x88a2, 0x88a4, 0x88cc, 0x88e5, 0x88e7,
            0x88f7, 0x88f8, 0x88fb, 0x8902, 0x8906, 0x892f,
            // ERSPAN, batman-adv, those next to IP's, experiments, the last one.
            0x22eb, 0x88be, 0x4305, 0x0801, 0x86dc, 0x86de, 0x88b5, 0xffff,
        ] {
            for packet in &packets {
                let frame = ethernet(HOST_MAC, MAC, ethertype, &packet[14..]);
                assert_eq!(bed.verdict(Out, &frame), refused, "{ethertype:#06x}");
            }
        }
    }
}
