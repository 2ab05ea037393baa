//! Headers of `GET /hello` in which two agents exchange facts about the requester's echo probes: who is asking, and how
//! many of its probes arrived.
//!
//! Both headers hold numbers in a fixed format. Anything else is ignored.

use std::sync::atomic::{AtomicU64, Ordering};

use health_common::arrivals::{Arrivals, Prober, WAYS, WayCounts};

/// Request header that says whose probes to count: session and ICMP identifier exactly as in the probes, in
/// hexadecimal, such as `1a2b3c4d-5e6f`.
pub(super) const PROBER_HEADER: &str = "health-prober";
/// Answer header that reports how many of the asker's probes arrived: when the counts started, and for each way (IPv4
/// to the host, IPv4 to the endpoint, then the same for IPv6) the number of probes that arrived and of replies that
/// left. Decimal numbers separated by spaces.
pub(super) const ARRIVALS_HEADER: &str = "health-arrivals";

/// Number of malformed headers since the start.
#[derive(Debug, Default)]
pub(super) struct MalformedHeaders(AtomicU64);

impl MalformedHeaders {
    pub(super) fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// The current count.
    pub(super) fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The value of [`PROBER_HEADER`].
pub(super) fn prober_value(prober: Prober) -> String {
    let icmp_id = u16::from_be(prober.icmp_id_be);
    format!("{:08x}-{icmp_id:04x}", prober.session)
}

/// Parses a [`PROBER_HEADER`] value; `None` if it is malformed.
pub(super) fn parse_prober(value: &[u8]) -> Option<Prober> {
    let (session, icmp_id) = std::str::from_utf8(value).ok()?.split_once('-')?;
    let is_hex = |text: &str, len| {
        text.len() == len && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
    };
    if !is_hex(session, 8) || !is_hex(icmp_id, 4) {
        return None;
    }
    Some(Prober {
        session: u32::from_str_radix(session, 16).ok()?,
        icmp_id_be: u16::from_str_radix(icmp_id, 16).ok()?.to_be(),
        pad: 0,
    })
}

/// The value of [`ARRIVALS_HEADER`].
pub(super) fn arrivals_value(arrivals: &Arrivals) -> String {
    let mut value = arrivals.since_ns.to_string();
    for WayCounts { arrived, replied } in arrivals.ways {
        value += &format!(" {arrived} {replied}");
    }
    value
}

/// Parses an [`ARRIVALS_HEADER`] value; `None` if it is malformed.
pub(super) fn parse_arrivals(value: &[u8]) -> Option<Arrivals> {
    let mut numbers = std::str::from_utf8(value).ok()?.split(' ');
    let mut next = || {
        let text = numbers.next()?;
        // `parse` would accept a sign.
        let is_number = text.bytes().all(|b| b.is_ascii_digit());
        is_number.then(|| text.parse::<u64>().ok())?
    };
    let mut arrivals = Arrivals {
        since_ns: next()?,
        ways: [WayCounts::default(); WAYS],
    };
    for way in &mut arrivals.ways {
        *way = WayCounts {
            arrived: next()?.try_into().ok()?,
            replied: next()?.try_into().ok()?,
        };
    }
    numbers.next().is_none().then_some(arrivals)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn rubbish_is_distinguished_from_values() {
        for rubbish in [
            "",
            "1a2b3c4d",
            "1a2b3c4d-5e6",
            "1a2b3c4d-5e6f ",
            "1A2b3c4d-5e6f",
            "+a2b3c4d-5e6f",
            "1a2b3c4d-5e6f-",
        ] {
            assert_eq!(parse_prober(rubbish.as_bytes()), None, "{rubbish}");
        }
        for rubbish in [
            "",
            "1 2 3 4 5 6 7 8",
            "1 2 3 4 5 6 7 8 9 10",
            "1 2 3 4 5 6 7 8 +9",
            "1 2 3 4 5 6 7 8 -9",
            "1  2 3 4 5 6 7 8 9",
            "1 2 3 4 5 6 7 8 4294967296",
            "18446744073709551616 2 3 4 5 6 7 8 9",
        ] {
            assert_eq!(parse_arrivals(rubbish.as_bytes()), None, "{rubbish}");
        }
    }

    proptest! {
        #[test]
        fn values_are_read_as_they_were_written(
            since_ns: u64,
            counts: [(u32, u32); WAYS],
            session: u32,
            icmp_id_be: u16,
        ) {
            let ways = counts.map(|(arrived, replied)| WayCounts { arrived, replied });
            let arrivals = Arrivals { since_ns, ways };
            let value = arrivals_value(&arrivals);
            prop_assert_eq!(parse_arrivals(value.as_bytes()), Some(arrivals));
            let prober = Prober { session, icmp_id_be, pad: 0 };
            prop_assert_eq!(parse_prober(prober_value(prober).as_bytes()), Some(prober));
        }

        #[test]
        fn no_value_panics(value in prop::collection::vec(any::<u8>(), 0..100)) {
            let _ = parse_prober(&value);
            let _ = parse_arrivals(&value);
        }
    }
}
