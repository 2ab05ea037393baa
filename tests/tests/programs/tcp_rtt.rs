//! TCP round-trip times: the uplinks' programs on crafted segments.

use std::net::IpAddr;
use std::time::Instant;

use health_common::LAYOUT_VERSION;
use health_common::config::{DatapathConfig, PASSIVE_RTT};
use health_common::probe::Path;
use health_common::rtt::{PROTOCOL_HTTP, PROTOCOL_TCP, RttKey, RttRow, SOURCE_KERNEL};
use health_datapath::rtt_store::{Connection, Measurement, RttStore as _};
use health_net::clock;
use tests::PATIENCE;
use tests::packet::{IPV4, Ipv4, Tcp, ethernet, timestamps};
use tests::testrun::{GO_ON, Outcome, TestRun};

const HEALTH_PORT: u16 = 4240;
const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
const ACK: u8 = 16;
/// Number of data bytes in a full-sized segment.
const FULL: u32 = 500;

fn ip(text: &str) -> IpAddr {
    text.parse().expect("a literal address")
}

/// Two hosts per IP version: this one and a peer.
fn pairs() -> [(IpAddr, IpAddr); 2] {
    [("172.30.0.1", "172.30.0.2"), ("fd00:30::1", "fd00:30::2")]
        .map(|(local, peer)| (ip(local), ip(peer)))
}

fn bed(flags: u16) -> TestRun {
    let mut bed = TestRun::load();
    bed.datapath
        .configure(DatapathConfig {
            layout_version: LAYOUT_VERSION,
            health_port_be: HEALTH_PORT.to_be(),
            flags,
            ..DatapathConfig::default()
        })
        .expect("the settings");
    let rtt = bed.datapath.rtt().expect("the rows");
    for (_, peer) in pairs() {
        rtt.follow(peer, Path::Endpoint).expect("a peer");
    }
    bed
}

/// Both sides of a connection between this host and a peer.
struct Talk<'a> {
    bed: &'a TestRun,
    local: IpAddr,
    peer: IpAddr,
    ports: (u16, u16),
    /// The next sequence number that this host sends.
    next: u32,
    /// This host's clock for TCP timestamps; `None` for segments without timestamps.
    clock: Option<u32>,
}

impl<'a> Talk<'a> {
    fn new(bed: &'a TestRun, (local, peer): (IpAddr, IpAddr), next: u32) -> Self {
        Self {
            bed,
            local,
            peer,
            ports: (40_000, 80),
            next,
            clock: None,
        }
    }

    fn outgoing(&self, flags: u8, sequence: u32, len: u32) -> Vec<u8> {
        let segment = Tcp {
            source: self.ports.0,
            destination: self.ports.1,
            sequence,
            acknowledgement: 77,
            flags,
            options: self.clock.map_or(Vec::new(), |clock| timestamps(clock, 5)),
            data: vec![b'x'; len as usize],
        };
        segment.frame(self.local, self.peer)
    }

    /// A segment from the peer that has no data and acknowledges everything up to `acknowledgement`.
    fn answer(&self, flags: u8, acknowledgement: u32) -> Tcp {
        Tcp {
            source: self.ports.1,
            destination: self.ports.0,
            sequence: 77,
            acknowledgement,
            flags,
            options: self.clock.map_or(Vec::new(), |clock| timestamps(5, clock)),
            data: Vec::new(),
        }
    }

    fn leaves(&self, packet: &[u8]) {
        assert_eq!(self.bed.run("to_netdev", packet), untouched(packet));
    }

    fn comes(&self, packet: &[u8]) {
        assert_eq!(self.bed.run("from_netdev", packet), untouched(packet));
    }

    fn comes_segment(&self, segment: &Tcp) {
        self.comes(&segment.frame(self.peer, self.local));
    }

    /// Exchanges the three segments that open a connection from this side.
    fn open(&mut self) {
        self.leaves(&self.outgoing(SYN, self.next, 0));
        self.next = self.next.wrapping_add(1);
        self.comes_segment(&self.answer(SYN | ACK, self.next));
        self.leaves(&self.outgoing(ACK, self.next, 0));
    }

    /// Sends enough new data that the peer must reply immediately.
    fn send(&mut self) {
        let packet = self.outgoing(ACK, self.next, 2 * FULL);
        self.next = self.next.wrapping_add(2 * FULL);
        let outcome = self.bed.run_offloaded("to_netdev", &packet, FULL);
        assert_eq!(outcome, untouched(&packet));
    }

    fn row(&self) -> Option<RttRow> {
        row(self.bed, self.peer)
    }

    fn samples(&self) -> u64 {
        self.row().map_or(0, |row| row.samples)
    }

    /// Exchanges data until a round trip is counted, which takes as long as the minimum interval between samples.
    fn send_until_counted(&mut self) {
        let before = self.samples();
        let deadline = Instant::now() + PATIENCE;
        while self.samples() == before {
            assert!(Instant::now() < deadline, "no round trip is ever counted");
            self.send();
            self.comes_segment(&self.answer(ACK, self.next));
        }
    }

    /// Sends data until a segment is timed, and leaves that segment unacknowledged.
    fn send_until_timed(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        while !self.is_timed() {
            assert!(Instant::now() < deadline, "no segment is ever timed");
            self.send();
        }
    }

    fn is_timed(&self) -> bool {
        let flows = self.bed.maps().raw("HEALTH_TCP").expect("the flows");
        // The value starts with the time.
        flows.iter().any(|(_, flow)| flow[..8] != [0; 8])
    }
}

fn row(bed: &TestRun, peer: IpAddr) -> Option<RttRow> {
    let key = RttKey {
        peer: peer.into(),
        path: Path::Endpoint as u8,
        protocol: PROTOCOL_TCP,
        pad: 0,
    };
    bed.datapath
        .rtt()
        .expect("the rows")
        .row(key)
        .expect("the map")
}

fn untouched(packet: &[u8]) -> Outcome {
    Outcome {
        code: GO_ON,
        bytes: packet.to_vec(),
    }
}

#[test]
#[ignore = "needs root"]
fn a_handshake_makes_one_round_trip_whoever_opens() {
    let bed = bed(PASSIVE_RTT);
    for pair in pairs() {
        for (isn, clock) in [(u32::MAX, None), (u32::MAX - 1, Some(u32::MAX))] {
            let before = row(&bed, pair.1).map_or(0, |row| row.samples);
            let mut opened_here = Talk::new(&bed, pair, isn);
            opened_here.clock = clock;
            opened_here.open();
            let row = opened_here
                .row()
                .expect("the first round trip makes the row");
            assert_eq!((row.samples, row.source), (before + 1, SOURCE_KERNEL));
            assert!(row.min_ns > 0 && row.last_ns < 1_000_000_000, "{row:?}");
            // A repeated answer does not count.
            opened_here.comes_segment(&opened_here.answer(SYN | ACK, opened_here.next));
            opened_here.comes_segment(&opened_here.answer(ACK, opened_here.next));
            assert_eq!(opened_here.samples(), before + 1);

            let mut opened_there = Talk::new(&bed, pair, isn);
            (opened_there.ports, opened_there.clock) = ((443, 50_000), clock);
            opened_there.comes_segment(&opened_there.answer(SYN, 0));
            opened_there.leaves(&opened_there.outgoing(SYN | ACK, isn, 0));
            opened_there.comes_segment(&opened_there.answer(ACK, isn.wrapping_add(1)));
            assert_eq!(opened_there.samples(), before + 2);
        }
    }
}

#[test]
#[ignore = "needs root"]
fn segments_behind_tags_are_timed_too() {
    let bed = bed(PASSIVE_RTT);
    let (one, two) = (
        [0x81, 0, 0, 7].to_vec(),
        [0x88, 0xa8, 0, 9, 0x81, 0, 0, 7].to_vec(),
    );
    for pair in pairs() {
        for (isn, tags) in [(10, &one), (20, &two)] {
            let before = row(&bed, pair.1).map_or(0, |row| row.samples);
            let tagged = |frame: Vec<u8>| [&frame[..12], tags, &frame[12..]].concat();
            let talk = Talk::new(&bed, pair, isn);
            talk.leaves(&tagged(talk.outgoing(SYN, isn, 0)));
            let answer = talk.answer(SYN | ACK, isn + 1);
            talk.comes(&tagged(answer.frame(pair.1, pair.0)));
            assert_eq!(talk.samples(), before + 1, "{tags:02x?}");
        }
    }
}

#[test]
#[ignore = "needs root"]
fn established_connections_make_round_trips_over_the_wrap_of_both_counters() {
    let bed = bed(PASSIVE_RTT);
    for pair in pairs() {
        for clock in [None, Some(u32::MAX)] {
            let mut talk = Talk::new(&bed, pair, u32::MAX - 3 * FULL);
            talk.clock = clock;
            talk.open();
            for _ in 0..3 {
                talk.send_until_counted();
                talk.clock = talk.clock.map(|clock| clock.wrapping_add(1));
            }
        }
    }
}

#[test]
#[ignore = "needs root"]
fn what_is_sent_again_makes_no_round_trip() {
    let bed = bed(PASSIVE_RTT);
    for pair in pairs() {
        let mut talk = Talk::new(&bed, pair, 100);
        talk.leaves(&talk.outgoing(SYN, 100, 0));
        talk.leaves(&talk.outgoing(SYN, 100, 0));
        talk.comes_segment(&talk.answer(SYN | ACK, 101));
        assert_eq!(talk.samples(), 0);

        talk.next = 5000;
        talk.open();
        assert_eq!(
            talk.samples(),
            1,
            "another connection between the same ports"
        );
        talk.send_until_timed();
        // Part of an older segment is sent again, so the acknowledgement may have waited for it.
        talk.leaves(&talk.outgoing(ACK, talk.next - 2 * FULL, FULL));
        talk.comes_segment(&talk.answer(ACK, talk.next));
        assert_eq!(talk.samples(), 1);
        talk.send_until_counted();
    }
}

#[test]
#[ignore = "needs root"]
fn answers_that_may_have_waited_make_no_round_trip() {
    let bed = bed(PASSIVE_RTT);
    for pair in pairs() {
        let mut talk = Talk::new(&bed, pair, 100);
        talk.clock = Some(7);
        talk.open();
        let data = |talk: &Talk| Tcp {
            data: vec![b'y'; 10],
            ..talk.answer(ACK, talk.next)
        };
        let last = |talk: &Talk| talk.answer(ACK | FIN, talk.next);
        let later = |talk: &Talk| Tcp {
            options: timestamps(5, 8),
            ..talk.answer(ACK, talk.next)
        };
        let without_clock = |talk: &Talk| Tcp {
            options: Vec::new(),
            ..talk.answer(ACK, talk.next)
        };
        for first in [
            &data as &dyn Fn(&Talk) -> Tcp,
            &last,
            &later,
            &without_clock,
        ] {
            let before = talk.samples();
            talk.send_until_timed();
            talk.comes_segment(&first(&talk));
            // Only the first acknowledgement counts.
            talk.comes_segment(&talk.answer(ACK, talk.next));
            assert_eq!(talk.samples(), before);
        }
        // A single small segment, which the peer may acknowledge late.
        for _ in 0..3 {
            talk.leaves(&talk.outgoing(ACK, talk.next, 10));
            talk.next += 10;
            assert!(!talk.is_timed());
        }
    }
}

#[test]
#[ignore = "needs root"]
fn segments_that_lie_pass_and_make_no_round_trip() {
    let bed = bed(PASSIVE_RTT);
    for pair in pairs() {
        let mut talk = Talk::new(&bed, pair, 100);
        talk.clock = Some(7);
        talk.open();
        talk.send_until_timed();
        let good = talk.answer(ACK, talk.next);
        let l4_at = if pair.0.is_ipv4() { 34 } else { 54 };
        let frame = |segment: &Tcp| segment.frame(pair.1, pair.0);
        let with_options = |options: &[u8]| {
            frame(&Tcp {
                options: options.to_vec(),
                ..good.clone()
            })
        };
        let mut lies = Vec::new();
        // The frame cut to every shorter length.
        for len in 14..frame(&good).len() {
            lies.push(frame(&good)[..len].to_vec());
        }
        for offset in (0..=15).filter(|&offset| offset != 8) {
            let mut bytes = frame(&good);
            bytes[l4_at + 12] = offset << 4;
            lies.push(bytes);
        }
        for place in l4_at..frame(&good).len() {
            let mut bytes = frame(&good);
            bytes[place] ^= 0x10;
            lies.push(bytes);
        }
        for options in [
            &[8, 0, 0, 0][..],
            &[8, 10, 0, 0],
            &[1, 1, 8, 10, 0, 0, 0, 5, 0, 0, 0, 7, 8, 0, 0, 0][..8],
            &[3, 0, 1, 1, 1, 1, 8, 10, 0, 0, 0, 5, 0, 0, 0, 7],
            &[2, 200, 1, 1],
            &[1, 1, 1, 8],
            &[8, 9, 0, 0, 0, 5, 0, 0, 0, 7, 0, 0],
        ] {
            lies.push(with_options(options));
        }
        for (flags, acknowledgement) in [
            (ACK, talk.next.wrapping_add(1)),
            (ACK, talk.next.wrapping_add(1 << 30)),
            (ACK, talk.next.wrapping_sub(2 * FULL)),
            (ACK | SYN, talk.next),
            (ACK | RST, talk.next),
            (0, talk.next),
        ] {
            lies.push(frame(&talk.answer(flags, acknowledgement)));
        }
        if let (IpAddr::V4(peer), IpAddr::V4(local)) = (pair.1, pair.0) {
            let segment = good.segment(pair.1, pair.0);
            let usual = Ipv4 {
                protocol: 6,
                ..Ipv4::icmp(peer, local)
            };
            for unusual in [
                Ipv4 {
                    fragment: 0x2000,
                    ..usual.clone()
                },
                Ipv4 {
                    fragment: 1,
                    ..usual.clone()
                },
                Ipv4 {
                    options: vec![1, 1, 1, 0],
                    ..usual.clone()
                },
            ] {
                lies.push(ethernet([2; 6], [2; 6], IPV4, &unusual.packet(&segment)));
            }
        }
        let before = talk.samples();
        for lie in &lies {
            // The kernel refuses test runs with the shortest of these.
            if let Some(outcome) = bed.try_run("from_netdev", lie) {
                assert_eq!(outcome, untouched(lie));
            }
            if let Some(outcome) = bed.try_run("to_netdev", lie) {
                assert_eq!(outcome, untouched(lie));
            }
            assert_eq!(talk.samples(), before, "{lie:02x?}");
        }
        assert!(lies.len() > 100);
    }
}

#[test]
#[ignore = "needs root"]
fn an_answer_of_this_machine_counts_before_its_checksum_is_complete() {
    let bed = bed(PASSIVE_RTT);
    let (local, peer) = pairs()[0];
    let mut talk = Talk::new(&bed, (local, peer), 100);
    talk.leaves(&talk.outgoing(SYN, 100, 0));
    let mut packet = talk.answer(SYN | ACK, 101).frame(peer, local);
    // The checksum of the pseudo-header alone: 172.30.0.2, 172.30.0.1, protocol 6, 20 bytes.
    let sum = 0xac1e_u32 + 2 + 0xac1e + 1 + 6 + 20;
    let sum = (sum & 0xffff) + (sum >> 16);
    packet[50..52].copy_from_slice(&(sum as u16).to_be_bytes());
    talk.next = 101;
    talk.comes(&packet);
    assert_eq!(talk.samples(), 1);
}

#[test]
#[ignore = "needs root"]
fn only_traffic_of_peers_that_is_no_probe_is_kept() {
    let (local, peer) = pairs()[0];
    let stranger = ip("192.0.2.9");
    for (flags, other, ports) in [
        (PASSIVE_RTT, stranger, (40_000, 80)),
        (PASSIVE_RTT, peer, (HEALTH_PORT, 40_000)),
        (0, peer, (40_000, 80)),
    ] {
        let bed = bed(flags);
        let mut talk = Talk::new(&bed, (local, other), 100);
        talk.ports = ports;
        talk.open();
        talk.send();
        talk.comes_segment(&talk.answer(ACK, talk.next));
        assert_eq!(bed.maps().raw("HEALTH_TCP").expect("the flows"), []);
        assert_eq!(bed.maps().rtt().expect("the rows"), []);
    }
}

#[test]
#[ignore = "needs root"]
fn an_address_that_is_no_peer_any_more_gets_no_row() {
    let bed = bed(PASSIVE_RTT);
    let pair = pairs()[0];
    let rtt = bed.datapath.rtt().expect("the rows");
    let talk = Talk::new(&bed, pair, 100);
    talk.leaves(&talk.outgoing(SYN, 100, 0));
    rtt.unfollow(pair.1).expect("the map");
    rtt.unfollow(pair.1).expect("what is gone may go");
    talk.comes_segment(&talk.answer(SYN | ACK, 101));
    assert!(talk.row().is_none());
    let left = rtt.followed().expect("the map");
    assert_eq!(left, [pairs()[1].1]);
}

/// A probe's connection, and the agent's lookup key for it.
struct Probe<'a> {
    talk: Talk<'a>,
    key: RttKey,
    connection: Connection,
}

impl<'a> Probe<'a> {
    fn new(bed: &'a TestRun, pair: (IpAddr, IpAddr)) -> Self {
        let mut talk = Talk::new(bed, pair, u32::MAX);
        talk.ports.1 = HEALTH_PORT;
        let key = RttKey {
            peer: pair.1.into(),
            path: Path::Host as u8,
            protocol: PROTOCOL_HTTP,
            pad: 0,
        };
        let rtt = bed.datapath.rtt().expect("the rows");
        rtt.ensure(key).expect("a row");
        Self {
            connection: Connection {
                local: (pair.0, talk.ports.0).into(),
                peer_port: HEALTH_PORT,
                begun_ns: clock::now_ns(),
            },
            talk,
            key,
        }
    }

    /// Whether the kernel's round trip counts. It is shorter than the one that the agent reports here.
    fn is_timed_by_kernel(&self) -> bool {
        const MEASURED_NS: u64 = 60_000_000_000;
        let rtt = self.talk.bed.datapath.rtt().expect("the rows");
        let counted = rtt
            .connected(self.key, &self.connection, MEASURED_NS)
            .expect("an answer");
        let row = rtt.row(self.key).expect("the map").expect("the row");
        let by_kernel = counted == Measurement::ByKernel(row.last_ns);
        assert_eq!(by_kernel, row.source == SOURCE_KERNEL);
        assert_eq!(by_kernel, row.last_ns != MEASURED_NS);
        assert!(row.last_ns > 0);
        by_kernel
    }
}

#[test]
#[ignore = "needs root"]
fn a_probes_own_handshake_is_its_round_trip() {
    // With and without tracking of other traffic.
    for flags in [0, PASSIVE_RTT] {
        let bed = bed(flags);
        for pair in pairs() {
            let mut probe = Probe::new(&bed, pair);
            probe.talk.open();
            assert!(probe.is_timed_by_kernel());
            assert!(!probe.is_timed_by_kernel(), "it is taken once");
            assert_eq!(bed.maps().raw("HEALTH_TCP").expect("the flows"), []);
            assert_eq!(probe.talk.row(), None, "a probe is no traffic");
        }
    }
}

#[test]
#[ignore = "needs root"]
fn other_peoples_connections_to_the_health_port_do_not_count() {
    let bed = bed(PASSIVE_RTT);
    for pair in pairs() {
        let mut probe = Probe::new(&bed, pair);
        probe.talk.open();
        let mine = probe.connection;
        for other in [
            Connection {
                local: (pair.0, 40_001).into(),
                ..mine
            },
            Connection {
                local: (ip("10.9.9.9"), 40_000).into(),
                ..mine
            },
            Connection {
                peer_port: 4241,
                ..mine
            },
        ] {
            probe.connection = other;
            assert!(!probe.is_timed_by_kernel());
        }
        probe.connection = mine;
        assert!(probe.is_timed_by_kernel());
        let key = RttKey {
            protocol: PROTOCOL_HTTP,
            ..probe.key
        };
        let rtt = bed.datapath.rtt().expect("the rows");
        assert_eq!(rtt.row(key).expect("the map").expect("the row").samples, 4);
    }
}

#[test]
#[ignore = "needs root"]
fn a_probe_whose_handshake_reports_no_time_falls_back_on_what_the_agent_measured() {
    let bed = bed(PASSIVE_RTT);
    for pair in pairs() {
        let no_answer = Probe::new(&bed, pair);
        no_answer.talk.leaves(&no_answer.talk.outgoing(SYN, 3, 0));
        assert!(!no_answer.is_timed_by_kernel());

        let twice = Probe::new(&bed, pair);
        for _ in 0..2 {
            twice.talk.leaves(&twice.talk.outgoing(SYN, 3, 0));
        }
        twice.talk.comes_segment(&twice.talk.answer(SYN | ACK, 4));
        assert!(!twice.is_timed_by_kernel());

        let refused = Probe::new(&bed, pair);
        refused.talk.leaves(&refused.talk.outgoing(SYN, 3, 0));
        refused
            .talk
            .comes_segment(&refused.talk.answer(RST | ACK, 4));
        refused
            .talk
            .comes_segment(&refused.talk.answer(SYN | ACK, 5));
        let mut damaged = refused.talk.answer(SYN | ACK, 4).frame(pair.1, pair.0);
        let end = damaged.len() - 1;
        damaged[end] ^= 1;
        refused.talk.comes(&damaged);
        assert!(!refused.is_timed_by_kernel());

        let mut before = Probe::new(&bed, pair);
        before.talk.open();
        before.connection.begun_ns = clock::now_ns();
        assert!(
            !before.is_timed_by_kernel(),
            "another connection of these ports"
        );
    }
}

#[test]
#[ignore = "needs root"]
fn an_answer_without_a_row_is_refused() {
    let bed = bed(0);
    let probe = Probe::new(&bed, pairs()[0]);
    let rtt = bed.datapath.rtt().expect("the rows");
    rtt.remove(probe.key).expect("the map");
    let error = rtt
        .connected(probe.key, &probe.connection, 1)
        .expect_err("no row");
    assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
}
