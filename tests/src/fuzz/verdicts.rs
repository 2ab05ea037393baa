//! Rules for single packets: the verdicts that a program may return, the bytes that it may change, and that it never
//! makes a checksum worse.

use std::ops::Range;

use super::shape::{Checksum, Ip, Place, checksums, network};
use super::{Case, Program};
use crate::packet::ARP;
use crate::testrun::{DROP, GO_ON, Outcome, REDIRECT};

const SOLICITATION: u8 = 135;
/// Magic number and length of a mesh probe, and the range of its times.
const PROBE_MAGIC: &[u8] = b"hlt\x02";
const PROBE_LEN: usize = 40;
const PROBE_TIMES: Range<usize> = 24..40;

/// Checks one run. The error describes a violation.
pub(super) fn check(case: &Case, outcome: &Outcome) -> Result<(), String> {
    let (before, after) = (&case.frame[..], &outcome.bytes[..]);
    if after.len() > before.len() {
        return Err(format!(
            "the packet grew from {} to {} bytes",
            before.len(),
            after.len()
        ));
    }
    match (case.program, outcome.code) {
        // The packet goes no further.
        (_, DROP) => return Ok(()),
        (Program::ToEndpoint | Program::FromEndpoint, GO_ON) => {
            same_but_for(&[], before, after)?;
        }
        (Program::ToEndpoint | Program::FromEndpoint, REDIRECT) => {
            check_answer(case.program, before, after)?;
        }
        (Program::ToNetdev | Program::FromNetdev, GO_ON) => {
            if before != after {
                let may_change = rewritten(case.program, before);
                same_but_for(&may_change, before, after)?;
            }
        }
        (_, code) => return Err(format!("{code} is not one of its verdicts")),
    }
    check_checksums(before, after)
}

/// Checks that a packet was passed on unchanged, except for these ranges.
fn same_but_for(ranges: &[Range<usize>], before: &[u8], after: &[u8]) -> Result<(), String> {
    if before.len() != after.len() {
        return Err(format!(
            "the packet shrank from {} to {} bytes",
            before.len(),
            after.len()
        ));
    }
    let changed = (0..before.len()).filter(|&at| before[at] != after[at]);
    let mut forbidden = changed.filter(|at| !ranges.iter().any(|range| range.contains(at)));
    match forbidden.next() {
        Some(at) => Err(format!(
            "it must not change byte {at}: {:#04x} became {:#04x}",
            before[at], after[at]
        )),
        None => Ok(()),
    }
}

/// Checks a request that the program turned into its reply.
fn check_answer(program: Program, before: &[u8], after: &[u8]) -> Result<(), String> {
    // The reply goes to the hardware address of the sender.
    same("hardware address", &before[6..12], &after[..6])?;
    let ethernet = 0..12;
    let (ethertype, at) = network(before).ok_or("a truncated frame was answered")?;
    if ethertype == ARP {
        return same_but_for(&[ethernet, at + 6..at + 28], before, after);
    }
    let ip = Ip::of(before).ok_or("a packet that is neither IP nor ARP was answered")?;
    let answer = Ip::of(after).ok_or("the answer is not IP")?;
    let transport_at = ip.transport_at.ok_or("a later fragment was answered")?;
    let addresses = ip.source().start..ip.destination().end;
    same(
        "destination",
        &before[ip.source()],
        &after[answer.destination()],
    )?;
    if !ip.is_v4 && ip.icmp_type(before) == Some(SOLICITATION) {
        let target = transport_at + 8..transport_at + 24;
        same("target", &before[target.clone()], &after[target])?;
        let message = transport_at..transport_at + 32;
        return same_but_for(&[ethernet, addresses, message], before, after);
    }
    if program == Program::FromEndpoint {
        return Err("a packet that is not a request for the gateway was answered".to_owned());
    }
    if !ip.is_echo(before) || !answer.is_echo(after) {
        return Err("a packet that is not an echo request was answered".to_owned());
    }
    same("sender", &before[..6], &after[6..12])?;
    same("source", &before[ip.destination()], &after[answer.source()])?;
    // The program removes IPv4 options, which changes length and checksum.
    let mut whole = before.to_vec();
    if ip.is_v4 {
        let options = ip.at + 20..ip.at + ip.header_len;
        let cut = options.len();
        whole.drain(options);
        if answer.header_len != 20 || answer.end + cut != ip.end {
            return Err("the answer is not as long as the request without options".to_owned());
        }
    }
    let transport_at = transport_at - (before.len() - whole.len());
    let at = ip.at;
    let header = if ip.is_v4 {
        vec![at..at + 1, at + 2..at + 9, at + 10..at + 20]
    } else {
        vec![at + 7..at + 8, addresses]
    };
    let message = [
        transport_at..transport_at + 1,
        transport_at + 2..transport_at + 4,
    ];
    let may_change = [&[ethernet][..], &header, &message].concat();
    same_but_for(&may_change, &whole, after)
}

fn same(what: &str, expected: &[u8], found: &[u8]) -> Result<(), String> {
    if expected == found {
        return Ok(());
    }
    Err(format!("the {what} is {found:02x?}, not {expected:02x?}"))
}

/// The ranges that an uplink's program may rewrite: one end of the packet, the corresponding end of the packet in an
/// ICMP error, checksums, and the times in a probe.
fn rewritten(program: Program, frame: &[u8]) -> Vec<Range<usize>> {
    let Some(ip) = Ip::of(frame) else {
        return Vec::new();
    };
    let is_source = program == Program::ToNetdev;
    let mut may_change = end(&ip, frame, is_source);
    if let Some(inner) = ip.inner(frame) {
        // The packet in an ICMP error goes in the other direction.
        may_change.extend(end(&inner, frame, !is_source));
    }
    if let Some(at) = ip.transport_at.filter(|_| ip.is_echo(frame)) {
        let payload = at + 8..ip.end;
        let is_probe = frame
            .get(payload.clone())
            .is_some_and(|payload| payload.len() == PROBE_LEN && payload.starts_with(PROBE_MAGIC));
        if is_probe {
            may_change.push(at + 8 + PROBE_TIMES.start..at + 8 + PROBE_TIMES.end);
        }
    }
    may_change
}

/// Address and port of one end, and the checksums that cover them.
fn end(ip: &Ip, frame: &[u8], is_source: bool) -> Vec<Range<usize>> {
    let address = if is_source {
        ip.source()
    } else {
        ip.destination()
    };
    let port = ip.port(frame, is_source);
    let ends = [Some(address), port].into_iter().flatten();
    ends.chain(ip.checksum_places()).collect()
}

/// Checks that correct checksums stay correct, and that wrong ones stay wrong by the same amount: damage must remain
/// visible.
fn check_checksums(before: &[u8], after: &[u8]) -> Result<(), String> {
    if before == after {
        return Ok(());
    }
    let (old, new) = (checksums(before), checksums(after));
    if old.len() != new.len() {
        return Err(format!("other checksums: {old:?} became {new:?}"));
    }
    for (old, new) in old.iter().zip(&new) {
        if old != new {
            return Err(describe_change(*old, *new));
        }
    }
    Ok(())
}

fn describe_change(old: Checksum, new: Checksum) -> String {
    let which = match old.place {
        Place::Header => "IPv4 header checksum",
        Place::Transport => "transport checksum",
        Place::InnerHeader => "header checksum of the packet in the error",
        Place::InnerTransport => "transport checksum of the packet in the error",
    };
    let shown = |error: Option<u16>| match error {
        None => "left out".to_owned(),
        Some(0) => "right".to_owned(),
        Some(error) => format!("wrong by {error:#06x}"),
    };
    format!(
        "the {which} was {}, and now is {}",
        shown(old.error),
        shown(new.error)
    )
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::super::Context;
    use super::super::shape::{TCP, mend_checksums, set_word};
    use super::*;
    use crate::packet::{IPV4, Ipv4, Tcp, echo4, ethernet};

    const ENDPOINT: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 7);
    const NODE: Ipv4Addr = Ipv4Addr::new(172, 30, 0, 1);
    const FAR: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 9);

    fn segment() -> Vec<u8> {
        let tcp = Tcp {
            source: 40_000,
            destination: 80,
            data: b"some data".to_vec(),
            ..Tcp::default()
        };
        tcp.frame(ENDPOINT.into(), FAR.into())
    }

    fn of(program: Program, code: i32, before: &[u8], after: &[u8]) -> Result<(), String> {
        let case = Case {
            program,
            context: Context::Plain,
            frame: before.to_vec(),
        };
        let bytes = after.to_vec();
        check(&case, &Outcome { code, bytes })
    }

    /// The segment with the node's address and another source port.
    fn masqueraded() -> Vec<u8> {
        let mut frame = segment();
        frame[14 + 12..14 + 16].copy_from_slice(&NODE.octets());
        set_word(&mut frame, 14 + 20, 50_000);
        mend_checksums(&mut frame);
        frame
    }

    #[test]
    fn a_source_that_is_translated_may_leave_by_an_uplink_and_nowhere_else() {
        let (before, after) = (segment(), masqueraded());
        assert_eq!(of(Program::ToNetdev, GO_ON, &before, &after), Ok(()));
        assert_eq!(of(Program::FromNetdev, GO_ON, &before, &before), Ok(()));
        for program in [Program::FromNetdev, Program::ToEndpoint] {
            of(program, GO_ON, &before, &after).expect_err("none of its business");
        }
    }

    #[test]
    fn every_other_byte_every_checksum_and_the_length_must_stay() {
        let (before, after) = (segment(), masqueraded());
        for at in 0..after.len() {
            let mut damaged = after.clone();
            damaged[at] ^= 0x10;
            of(Program::ToNetdev, GO_ON, &before, &damaged).expect_err("a damaged byte");
        }
        let mut longer = after.clone();
        longer.push(0);
        of(Program::ToNetdev, GO_ON, &before, &longer).expect_err("a byte more");
        of(Program::ToNetdev, GO_ON, &before, &after[..after.len() - 1]).expect_err("a byte less");
    }

    #[test]
    fn damage_must_not_be_hidden() {
        let mut before = segment();
        before[14 + 20 + 16] ^= 1;
        of(Program::ToNetdev, GO_ON, &before, &masqueraded()).expect_err("it was made whole");
    }

    #[test]
    fn verdicts_are_those_of_the_program() {
        let packet = segment();
        for code in [-2, 0, 1, 3, 4, 5, 6, 8] {
            for program in Program::ALL {
                of(program, code, &packet, &packet).expect_err("none of its verdicts");
            }
        }
        of(Program::ToNetdev, REDIRECT, &packet, &packet).expect_err("none of its verdicts");
        assert_eq!(segment()[14 + 9], TCP);
    }

    #[test]
    fn an_answer_goes_back_to_who_asked_and_says_the_same() {
        let (mac, host_mac) = ([2, 0, 0, 0, 0, 0x0e], [2, 0, 0, 0, 0, 1]);
        let with_options = Ipv4 {
            options: vec![1; 8],
            ..Ipv4::icmp(FAR, ENDPOINT)
        };
        let request = with_options.packet(&echo4(8, 0, 5, 6, b"data"));
        let request = ethernet(mac, host_mac, IPV4, &request);
        let reply = Ipv4 {
            fragment: 0,
            ..Ipv4::icmp(ENDPOINT, FAR)
        };
        let reply = reply.packet(&echo4(0, 0, 5, 6, b"data"));
        let reply = ethernet(host_mac, mac, IPV4, &reply);
        let answer = |reply: &[u8]| of(Program::ToEndpoint, REDIRECT, &request, reply);
        assert_eq!(answer(&reply), Ok(()));
        for at in (0..14).chain(14 + 12..reply.len()) {
            let mut other = reply.clone();
            other[at] ^= 1;
            let reported = format!("byte {at} changed");
            answer(&other).expect_err(&reported);
        }
    }
}
