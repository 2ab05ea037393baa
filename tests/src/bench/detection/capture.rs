//! Captures the probes of a node and their replies on the node's uplink, with the kernel's timestamps.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use health_model::api::Protocol;

use crate::Node;
use crate::bench::tap::Tap;
use crate::process::print_line;

const PORT: u16 = 4240;
const PROTOCOL_ICMP: u8 = 1;
const PROTOCOL_TCP: u8 = 6;
const ECHO_REQUEST: u8 = 8;
const ECHO_REPLY: u8 = 0;
const SYN: u8 = 0x02;
const ACK: u8 = 0x10;
/// Start of a good response to an HTTP probe.
const GOOD_ANSWER: &[u8] = b"HTTP/1.1 200 ";

/// A probed target.
pub(super) type Target = (IpAddr, Protocol);

/// A probe that left the node. Times are wall-clock times since the epoch.
#[derive(Clone, Copy, Debug)]
struct Probe {
    /// The identifier and sequence number of an echo, or the source port of a connection.
    key: (u16, u16),
    /// The initial sequence number of a connection, which distinguishes it from other connections on the same port.
    attempt: u32,
    sent: Duration,
    answered: Option<Duration>,
}

type Probes = HashMap<Target, Vec<Probe>>;

/// A thread that records a node's IPv4 probes. It stops on drop.
#[derive(Debug)]
pub(super) struct Capture {
    probes: Arc<Mutex<Probes>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Capture {
    /// Records the probes of `node` from now on.
    pub(super) fn start(node: &Node) -> anyhow::Result<Self> {
        let tap = Tap::open(node)?;
        let probes = Arc::new(Mutex::new(Probes::new()));
        let stop = Arc::new(AtomicBool::new(false));
        let own = node.ipv4();
        let thread = thread::Builder::new().name("capture".to_owned()).spawn({
            let (probes, stop) = (probes.clone(), stop.clone());
            move || {
                while !stop.load(Ordering::Relaxed) {
                    match tap.receive() {
                        Ok(Some((at, packet))) => {
                            if let Some(packet) = Packet::read(own, &packet) {
                                note(&mut lock(&probes), &packet, at);
                            }
                        }
                        Ok(None) => {}
                        Err(errno) => {
                            print_line(format_args!("bench: the capture stopped: {errno}"));
                            return;
                        }
                    }
                }
            }
        })?;
        Ok(Self {
            probes,
            stop,
            thread: Some(thread),
        })
    }

    /// When the target's first lost probe was sent: the first of the unanswered probes in a row that ends at `until`.
    pub(super) fn first_lost(&self, target: Target, until: Duration) -> Option<Duration> {
        let probes = lock(&self.probes);
        let sent = probes
            .get(&target)?
            .iter()
            .filter(|probe| probe.sent < until);
        let lost = sent.rev().take_while(|probe| probe.answered.is_none());
        lost.last().map(|probe| probe.sent)
    }

    /// When the first reply arrived to a probe that was sent to the target after `since`.
    pub(super) fn first_answer(&self, target: Target, since: Duration) -> Option<Duration> {
        let probes = lock(&self.probes);
        let sent = probes.get(&target)?.iter();
        let sent_since = sent.filter(|probe| probe.sent > since);
        sent_since.filter_map(|probe| probe.answered).min()
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            print_line("bench: the capture panicked");
        }
    }
}

fn lock(probes: &Mutex<Probes>) -> MutexGuard<'_, Probes> {
    probes.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The fields of a packet that matter for probes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Packet {
    target: Target,
    key: (u16, u16),
    attempt: u32,
    what: What,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Sent,
    Answered,
}

impl Packet {
    /// Parses an IPv4 packet that `own` sent or received. Returns `None` if it is neither a probe nor a reply.
    fn read(own: Ipv4Addr, packet: &[u8]) -> Option<Self> {
        let header_len = usize::from(packet.first()? & 0x0f) * 4;
        let address = |at: usize| -> Option<Ipv4Addr> {
            let bytes: [u8; 4] = packet.get(at..at + 4)?.try_into().ok()?;
            Some(bytes.into())
        };
        let (from, to) = (address(12)?, address(16)?);
        if packet[0] >> 4 != 4 || from == to {
            return None;
        }
        let body = packet.get(header_len..)?;
        let word = |at: usize| Some(u16::from_be_bytes([*body.get(at)?, *body.get(at + 1)?]));
        let (peer, what) = match own {
            own if own == from => (to, What::Sent),
            own if own == to => (from, What::Answered),
            _ => return None,
        };
        let (protocol, key) = match (packet[9], what) {
            (PROTOCOL_ICMP, What::Sent) if body.first() == Some(&ECHO_REQUEST) => {
                (Protocol::Icmp, (word(4)?, word(6)?))
            }
            (PROTOCOL_ICMP, What::Answered) if body.first() == Some(&ECHO_REPLY) => {
                (Protocol::Icmp, (word(4)?, word(6)?))
            }
            (PROTOCOL_TCP, What::Sent) if word(2)? == PORT => {
                let opens = body.get(13)? & (SYN | ACK) == SYN;
                (Protocol::Http, (word(0).filter(|_| opens)?, 0))
            }
            (PROTOCOL_TCP, What::Answered) if word(0)? == PORT => {
                let data = body.get(usize::from(body.get(12)? >> 4) * 4..)?;
                let good = data.starts_with(GOOD_ANSWER);
                (Protocol::Http, (word(2).filter(|_| good)?, 0))
            }
            _ => return None,
        };
        let attempt = match protocol {
            Protocol::Icmp => 0,
            Protocol::Http => u32::from(word(4)?) << 16 | u32::from(word(6)?),
        };
        Some(Self {
            target: (peer.into(), protocol),
            key,
            attempt,
            what,
        })
    }
}

fn note(probes: &mut Probes, packet: &Packet, at: Duration) {
    let of_target = probes.entry(packet.target).or_default();
    let known = of_target.iter_mut().rev().find(|p| p.key == packet.key);
    match (packet.what, known) {
        (What::Answered, Some(probe)) => probe.answered = probe.answered.or(Some(at)),
        (What::Answered, None) => {}
        // The kernel retransmits SYNs until it gives up.
        (What::Sent, Some(probe))
            if packet.target.1 == Protocol::Http && probe.attempt == packet.attempt => {}
        (What::Sent, _) => of_target.push(Probe {
            key: packet.key,
            attempt: packet.attempt,
            sent: at,
            answered: None,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: Ipv4Addr = Ipv4Addr::new(172, 30, 0, 1);
    const PEER: Ipv4Addr = Ipv4Addr::new(172, 30, 0, 2);

    fn ipv4(from: Ipv4Addr, to: Ipv4Addr, protocol: u8, body: &[u8]) -> Vec<u8> {
        let mut packet = vec![0; 20];
        packet[0] = 0x45;
        packet[9] = protocol;
        packet[12..16].copy_from_slice(&from.octets());
        packet[16..20].copy_from_slice(&to.octets());
        packet.extend_from_slice(body);
        packet
    }

    fn tcp(ports: [u16; 2], flags: u8, data: &[u8]) -> Vec<u8> {
        let mut segment = vec![0; 20];
        segment[..2].copy_from_slice(&ports[0].to_be_bytes());
        segment[2..4].copy_from_slice(&ports[1].to_be_bytes());
        segment[12] = 5 << 4;
        segment[13] = flags;
        segment.extend_from_slice(data);
        segment
    }

    fn millis(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn capture(packets: &[(u64, Vec<u8>)]) -> Capture {
        let mut probes = Probes::new();
        for (at, packet) in packets {
            if let Some(packet) = Packet::read(OWN, packet) {
                note(&mut probes, &packet, millis(*at));
            }
        }
        Capture {
            probes: Arc::new(Mutex::new(probes)),
            stop: Arc::default(),
            thread: None,
        }
    }

    #[test]
    fn the_first_lost_echo_follows_the_last_answered_one() {
        let request = |sequence| ipv4(OWN, PEER, 1, &[8, 0, 0, 0, 0, 7, 0, sequence]);
        let reply = |sequence| ipv4(PEER, OWN, 1, &[0, 0, 0, 0, 0, 7, 0, sequence]);
        let capture = capture(&[
            (10, request(1)),
            (11, reply(1)),
            (20, request(2)),
            (30, request(3)),
            (40, request(4)),
            (41, reply(4)),
        ]);
        let target = (PEER.into(), Protocol::Icmp);
        assert_eq!(capture.first_lost(target, millis(35)), Some(millis(20)));
        assert_eq!(capture.first_lost(target, millis(15)), None);
        assert_eq!(capture.first_lost(target, millis(50)), None);
        assert_eq!(capture.first_answer(target, millis(15)), Some(millis(41)));
    }

    #[test]
    fn an_http_probe_is_answered_by_a_good_response_alone() {
        let syn = |port| ipv4(OWN, PEER, 6, &tcp([port, PORT], SYN, &[]));
        let another_syn = |port| {
            let mut segment = tcp([port, PORT], SYN, &[]);
            segment[7] = 1;
            ipv4(OWN, PEER, 6, &segment)
        };
        let answer = |port, data: &[u8]| ipv4(PEER, OWN, 6, &tcp([PORT, port], ACK, data));
        let capture = capture(&[
            (10, syn(1000)),
            (11, answer(1000, b"HTTP/1.1 200 OK\r\n\r\n")),
            (20, syn(1001)),
            (21, answer(1001, b"HTTP/1.1 500 Oh\r\n\r\n")),
            (30, syn(1002)),
            (31, answer(1002, b"")),
            // A SYN retransmission by the kernel.
            (40, syn(1002)),
            // Another connection from the same port.
            (50, another_syn(1002)),
            (51, answer(1002, b"HTTP/1.1 200 OK\r\n\r\n")),
            (60, syn(1003)),
        ]);
        let target = (PEER.into(), Protocol::Http);
        assert_eq!(capture.first_lost(target, millis(45)), Some(millis(20)));
        assert_eq!(capture.first_lost(target, millis(100)), Some(millis(60)));
        assert_eq!(capture.first_answer(target, millis(10)), Some(millis(51)));
    }
}
