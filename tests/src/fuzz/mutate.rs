//! Derives packets from those in the corpus. A run's packet depends only on the seed and the run's number.

use std::ops::Range;

use fastrand::Rng;

use super::corpus::{HOSTS, PORTS, Seed};
use super::shape::{Ip, mend_checksums, mend_lengths, network, set_word, word};
use super::{Case, Context, MARK_ANSWERED, Program};
use crate::packet::tagged;

/// Length limits. The kernel rejects test runs of shorter frames, and of frames that exceed a page with their overhead.
const SHORTEST: usize = 14;
const LONGEST: usize = 2000;
/// Maximum number of changes to one packet.
const CHANGES_MAX: usize = 6;
/// Byte values that have a meaning in headers: lengths, protocols, types, offsets.
const INTERESTING_BYTES: [u8; 20] = [
    0, 1, 2, 3, 4, 6, 8, 11, 17, 43, 44, 45, 58, 59, 60, 127, 128, 129, 132, 255,
];
const INTERESTING_WORDS: [u16; 12] = [
    0, 1, 7, 20, 40, 1500, 0x1fff, 0x2000, 0x4000, 0x7fff, 0x8000, 0xffff,
];

/// The packet of a run and the program that sees it.
pub(super) fn case(corpus: &[Seed], seed: u64, run: u64) -> Case {
    // Multiplying by the 64-bit golden ratio spreads neighbouring runs.
    let mut rng = Rng::with_seed(seed ^ run.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let from = pick(&mut rng, corpus);
    let mut frame = from.frame.clone();
    // A quarter of the packets is unchanged except for ports, so that flows make progress.
    let changes = rng.usize(0..CHANGES_MAX * 4 / 3).saturating_sub(1);
    if rng.bool() {
        let port = PORTS.0 + rng.u16(0..64);
        set_ports(&mut frame, port);
        mend_checksums(&mut frame);
    }
    for _ in 0..changes {
        change(&mut rng, &mut frame, corpus);
        frame.truncate(LONGEST);
        frame.resize(frame.len().max(SHORTEST), 0);
    }
    if rng.bool() {
        mend_lengths(&mut frame);
    }
    if rng.u8(0..4) > 0 {
        mend_checksums(&mut frame);
    }
    let program = if rng.u8(0..8) > 0 {
        from.program
    } else {
        *pick(&mut rng, &Program::ALL)
    };
    Case {
        program,
        context: context(&mut rng),
        frame,
    }
}

fn context(rng: &mut Rng) -> Context {
    match rng.u8(0..16) {
        0 => Context::Marked(MARK_ANSWERED),
        1 => Context::Marked(rng.u32(..)),
        2 => Context::Stamped(rng.u64(..)),
        3 => Context::Offloaded(rng.u32(1..1500)),
        _ => Context::Plain,
    }
}

fn pick<'a, T>(rng: &mut Rng, from: &'a [T]) -> &'a T {
    &from[rng.usize(0..from.len())]
}

fn change(rng: &mut Rng, frame: &mut Vec<u8>, corpus: &[Seed]) {
    match rng.u8(0..16) {
        0 => {
            let at = place(rng, frame);
            frame[at] ^= 1 << rng.u8(0..8);
        }
        1 => {
            let at = place(rng, frame);
            frame[at] = rng.u8(..);
        }
        2 => {
            let at = place(rng, frame);
            frame[at] = *pick(rng, &INTERESTING_BYTES);
        }
        3 => {
            let at = place(rng, frame) & !1;
            set_word(frame, at, *pick(rng, &INTERESTING_WORDS));
        }
        4 => frame.truncate(rng.usize(SHORTEST..=frame.len())),
        5 => {
            let more = rng.usize(1..64);
            frame.extend((0..more).map(|_| rng.u8(..)));
        }
        6 => {
            let range = part(rng, frame);
            frame.drain(range);
        }
        7 => {
            let range = part(rng, frame);
            let again = frame[range.clone()].to_vec();
            frame.splice(range.start..range.start, again);
        }
        8 => {
            let other = &pick(rng, corpus).frame;
            let at = rng.usize(SHORTEST..=frame.len().min(other.len()));
            frame.truncate(at);
            frame.extend(&other[at..]);
        }
        9 | 10 => set_address(rng, frame),
        11 => {
            let port = *pick(rng, &[0, 1, PORTS.0, PORTS.1, 4240, 0xffff]);
            set_ports(frame, port);
        }
        12 => set_protocol(rng, frame),
        13 => set_fragment(rng, frame),
        14 => insert_header(rng, frame),
        _ => {
            let tag = *pick(rng, &[(0x8100, 7), (0x88a8, 0xfff)]);
            *frame = tagged(frame, &[tag]);
        }
    }
}

/// Picks an offset in the frame, in more than half of the cases among the first headers.
fn place(rng: &mut Rng, frame: &[u8]) -> usize {
    let end = if rng.bool() {
        frame.len()
    } else {
        frame.len().min(74)
    };
    rng.usize(0..end)
}

fn part(rng: &mut Rng, frame: &[u8]) -> Range<usize> {
    let start = rng.usize(SHORTEST..=frame.len());
    let len = *pick(rng, &[1, 2, 4, 8, 16, 20, 40]);
    start..frame.len().min(start + len)
}

/// Picks the packet itself or, in an ICMP error, the packet inside it.
fn packet(rng: &mut Rng, frame: &[u8]) -> Option<Ip> {
    let ip = Ip::of(frame)?;
    let inner = ip.inner(frame).filter(|_| rng.bool());
    Some(inner.unwrap_or(ip))
}

fn set_address(rng: &mut Rng, frame: &mut [u8]) {
    let Some(ip) = packet(rng, frame) else {
        return;
    };
    let host = pick(rng, &HOSTS);
    let at = if rng.bool() {
        ip.source()
    } else {
        ip.destination()
    };
    if ip.is_v4 {
        frame[at].copy_from_slice(&host.v4.octets());
    } else {
        frame[at].copy_from_slice(&host.v6.octets());
    }
}

/// Replaces the port of the corpus' flow openers with another port, wherever it occurs.
fn set_ports(frame: &mut [u8], port: u16) {
    let outer = Ip::of(frame);
    let inner = outer.as_ref().and_then(|ip| ip.inner(frame));
    for ip in [outer, inner].into_iter().flatten() {
        for is_source in [true, false] {
            if let Some(at) = ip.port(frame, is_source)
                && word(frame, at.start) == Some(PORTS.0)
            {
                set_word(frame, at.start, port);
            }
        }
    }
}

fn set_protocol(rng: &mut Rng, frame: &mut [u8]) {
    if let Some(ip) = packet(rng, frame) {
        let at = if ip.is_v4 { 9 } else { 6 };
        frame[ip.at + at] = *pick(rng, &INTERESTING_BYTES);
    }
}

fn set_fragment(rng: &mut Rng, frame: &mut [u8]) {
    if let Some(ip) = packet(rng, frame).filter(|ip| ip.is_v4) {
        let value = *pick(rng, &[0, 0x2000, 0x2010, 0x0010, 0x4000, 0x8000, 0x1fff]);
        set_word(frame, ip.at + 6, value);
    }
}

/// Inserts IPv4 options or an IPv6 extension header.
fn insert_header(rng: &mut Rng, frame: &mut Vec<u8>) {
    let Some(ip) = Ip::of(frame) else {
        return;
    };
    if !ip.is_v4 {
        let kind = *pick(rng, &[0, 43, 44, 51, 60]);
        let units = rng.u8(0..2);
        let len = match kind {
            44 => 8,
            51 => (usize::from(units) + 2) * 4,
            _ => (usize::from(units) + 1) * 8,
        };
        let mut header = vec![0; len];
        (header[0], header[1]) = (frame[ip.at + 6], units);
        if kind == 44 {
            header[3] = rng.u8(0..10);
        }
        frame[ip.at + 6] = kind;
        frame.splice(ip.at + 40..ip.at + 40, header);
    } else if ip.header_len < 60 {
        let words = rng.usize(1..=(60 - ip.header_len) / 4);
        let options = (0..words * 4).map(|_| *pick(rng, &[0, 1, 4, 7, 68, 148]));
        let options: Vec<u8> = options.collect();
        frame[ip.at] += words as u8;
        let end = ip.at + ip.header_len;
        frame.splice(end..end, options);
    }
    if network(frame).is_some() && rng.bool() {
        mend_lengths(frame);
    }
}

#[cfg(test)]
mod tests {
    use super::super::corpus::corpus;
    use super::*;

    #[test]
    fn a_run_gets_the_same_packet_each_time_and_every_other_run_another() {
        let corpus = corpus();
        let mut seen = std::collections::BTreeSet::new();
        for run in 0..2000 {
            let made = case(&corpus, 1, run);
            assert_eq!(made, case(&corpus, 1, run));
            assert!((SHORTEST..=LONGEST).contains(&made.frame.len()));
            seen.insert(made.frame);
        }
        assert!(seen.len() > 1600, "{}", seen.len());
        assert_ne!(case(&corpus, 1, 0), case(&corpus, 2, 0));
    }
}
