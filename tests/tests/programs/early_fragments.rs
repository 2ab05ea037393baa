//! Fragments that arrive before the first fragment of their packet: how many are held, and for which sources.

use std::net::IpAddr;

use health_common::config::{DatapathConfig, EARLY_FRAGMENTS};
use health_common::ct::Timeouts;
use health_common::metrics::Reason;
use health_common::neighbour::ETHERTYPE_VLAN;
use tests::conntrack::packets::{IP_PROTOCOL_UDP, fragments, udp};
use tests::packet::tagged;
use tests::testrun::{DROP, GO_ON, TestRun};
use tests::{PATIENCE, wait_for};

use crate::endpoint_packets::Way::{self, In, Out};
use crate::endpoint_packets::{ENDPOINT4, ENDPOINT6};
use crate::endpoint_packets::{HOST_MAC, MAC, framed, hosts};

const PEERS: [&str; 2] = ["198.51.100.9", "2001:db8:9::9"];
const SIZE: usize = 1400;
/// How many fragments of one packet may be held.
const OF_PACKET: u32 = 64;
/// Number of packets whose fragments exceed the limit of any source.
const MANY: u16 = 500;

/// Programs with these flags. Held fragments would remain when programs return to the pool, so a test that holds any
/// must load its own programs.
fn programs(mut run: TestRun, flags: u16) -> TestRun {
    let config = DatapathConfig {
        flags,
        timeouts: Timeouts::default(),
        ..DatapathConfig::default()
    };
    run.set_health_endpoint((ENDPOINT4, ENDPOINT6), MAC, HOST_MAC, config);
    if flags & EARLY_FRAGMENTS != 0 {
        // Programs that have just taken over do not hold fragments yet.
        let of_nobody = datagram(In, [192, 0, 2, 200].into(), 1, SIZE);
        wait_for("fragments to be held", PATIENCE, || {
            Ok(is_held(&run, In, &of_nobody[1]).then_some(()))
        })
        .expect("they are held");
    }
    run
}

/// The fragments of one datagram, in their frames.
fn datagram(way: Way, peer: IpAddr, id: u16, size: usize) -> Vec<Vec<u8>> {
    let hosts = hosts(way, peer);
    let datagram = udp(hosts, (4000, 53), &vec![b'x'; 60_000]);
    fragments(hosts, IP_PROTOCOL_UDP, &datagram, id, size)
        .iter()
        .map(|fragment| framed(way, fragment))
        .collect()
}

fn program(way: Way) -> &'static str {
    match way {
        In => "from_netdev",
        Out => "from_endpoint",
    }
}

/// Sends copies of one fragment, as many as may be held of one packet, in a single call for speed. Returns how many are
/// held.
fn held_of_packet(run: &TestRun, way: Way, frame: &[u8]) -> u64 {
    let before = run.counted(Reason::FragmentHeld);
    run.run_often(program(way), frame, OF_PACKET);
    run.counted(Reason::FragmentHeld) - before
}

/// Whether the fragment was held. A fragment that is not held must pass.
fn is_held(run: &TestRun, way: Way, frame: &[u8]) -> bool {
    let before = run.counted(Reason::FragmentHeld);
    let code = run.run(program(way), frame).code;
    match run.counted(Reason::FragmentHeld) - before {
        0 => {
            assert_eq!(code, GO_ON);
            false
        }
        _ => {
            assert_eq!(code, DROP);
            true
        }
    }
}

fn ways() -> impl Iterator<Item = (Way, IpAddr)> {
    let peers = PEERS.map(|text| text.parse().expect(text));
    peers.into_iter().flat_map(|peer| [(In, peer), (Out, peer)])
}

#[test]
#[ignore = "needs root"]
fn fragments_wait_for_the_first_one_and_follow_it_at_once() {
    let run = programs(TestRun::load_alone(), EARLY_FRAGMENTS);
    for (way, peer) in ways() {
        let frames = datagram(way, peer, 1, SIZE);
        assert!(is_held(&run, way, &frames[2]));
        assert!(is_held(&run, way, &frames[1]));
        // The first fragment is held too: it arrives on its device again, together with the later ones.
        assert!(is_held(&run, way, &frames[0]));
        for frame in &frames {
            assert!(!is_held(&run, way, frame), "{way:?} {peer}");
        }
        // Fragments of another packet wait for the first fragment of their own packet.
        assert!(is_held(&run, way, &datagram(way, peer, 2, SIZE)[1]));
    }
}

#[test]
#[ignore = "needs root"]
fn fragments_go_on_where_none_are_to_be_held() {
    let run = programs(TestRun::load(), 0);
    for (way, peer) in ways() {
        assert!(!is_held(&run, way, &datagram(way, peer, 1, SIZE)[1]));
    }
}

#[test]
#[ignore = "needs root"]
fn fragments_with_a_vlan_tag_are_not_held() {
    let run = programs(TestRun::load(), EARLY_FRAGMENTS);
    for peer in PEERS.map(|text| text.parse().expect(text)) {
        let frame = &datagram(In, peer, 1, SIZE)[1];
        assert!(is_held(&run, In, frame));
        assert!(!is_held(&run, In, &tagged(frame, &[(ETHERTYPE_VLAN, 5)])));
    }
}

#[test]
#[ignore = "needs root"]
fn fragments_of_jumbo_frames_are_not_held() {
    // The largest size that a test run accepts, and more than other devices carry.
    const LARGE: usize = 2_400;
    let run = programs(TestRun::load(), EARLY_FRAGMENTS);
    for (way, peer) in ways() {
        assert!(!is_held(&run, way, &datagram(way, peer, 1, LARGE)[1]));
    }
}

#[test]
#[ignore = "needs root"]
fn one_packet_and_one_source_have_so_many_held_and_others_have_room() {
    let run = programs(TestRun::load_alone(), EARLY_FRAGMENTS);
    for (way, peer) in ways() {
        let frames = datagram(way, peer, 1, 640);
        let held = frames[1..].iter().filter(|frame| is_held(&run, way, frame));
        assert_eq!(held.count(), OF_PACKET as usize, "{way:?} {peer}");
        // The period for which a source's limit counts may end during the loop, and a new one may start.
        let is_refused = (2..MANY).any(|id| {
            let frame = &datagram(way, peer, id, SIZE)[1];
            held_of_packet(&run, way, frame) < OF_PACKET.into()
        });
        assert!(is_refused, "{way:?} {peer}");
    }
    let others = ["192.0.2.77", "2001:db8:77::1"].map(|text| text.parse().expect(text));
    for peer in others {
        assert!(is_held(&run, In, &datagram(In, peer, 1, SIZE)[1]), "{peer}");
    }
}
