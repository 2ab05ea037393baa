//! Invariants of the maps that hold at any time, whatever packets arrived. Entries are parsed according to their
//! documented layout, docs/maps.md.

use std::collections::{HashMap, HashSet};

use anyhow::Context as _;
use health_common::inflight::{Fate, Inflight};
use health_common::metrics::{Direction, Reason};
use health_common::rtt::{PROTOCOL_ICMP, RttKey, RttRow};
use health_datapath::rtt_store::RttStore as _;
use health_net::clock::coarse_now_secs;

use super::shape::{ICMP, ICMPV6, TCP};
use super::{Case, Context, MARK_ANSWERED, Program};
use crate::testrun::{DROP, Outcome, REDIRECT, TestRun};

const SCTP: u8 = 132;

/// Flags of conntrack entries.
const RX_CLOSING: u16 = 1;
const TX_CLOSING: u16 = 2;
const SEEN_NON_SYN: u16 = 0x10;
const KNOWN_FLAGS: u16 = RX_CLOSING | TX_CLOSING | SEEN_NON_SYN | 0x1000 | 0x2000 | 0x4000 | 0x8000;
/// The only flag that applies to protocols other than TCP.
const MASQUERADED: u16 = 0x1000;
/// NAT flags: host-local, and tracked in conntrack by the uplinks' programs.
const KNOWN_NAT_FLAGS: u32 = 1 | 2;

/// Number of entries at which a NAT map is emptied. A full map would evict entries by itself, one of a pair at a time.
const MANY_TRANSLATIONS: usize = 20_000;

/// Packets and bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Count {
    packets: u64,
    bytes: u64,
}

impl Count {
    fn add(&mut self, packets: u64, bytes: u64) {
        self.packets += packets;
        self.bytes += bytes;
    }
}

/// The totals that the counters must match.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    /// Packets dropped by any program.
    dropped: Count,
    /// Packets answered by any program.
    answered: Count,
    /// Packets passed on to an endpoint and from an endpoint.
    to_endpoint: Count,
    from_endpoint: Count,
    /// Probes that earlier checks gave up.
    given_up: u64,
    /// Probes whose round-trip times were recorded in a row.
    returned: u64,
}

impl Ledger {
    /// Records the verdict of a program.
    pub(super) fn note(&mut self, case: &Case, outcome: &Outcome) {
        let is_marked = case.context == Context::Marked(MARK_ANSWERED);
        let count = match (outcome.code, case.program) {
            (DROP, _) => &mut self.dropped,
            (REDIRECT, _) => &mut self.answered,
            (_, Program::ToEndpoint) => &mut self.to_endpoint,
            // Already counted when it was answered.
            (_, Program::FromEndpoint) if is_marked => return,
            (_, Program::FromEndpoint) => &mut self.from_endpoint,
            (_, Program::ToNetdev | Program::FromNetdev) => return,
        };
        count.add(1, outcome.bytes.len() as u64);
    }
}

/// Checks all maps. The inner error describes a violation.
pub(super) fn check(bed: &TestRun, ledger: &mut Ledger) -> anyhow::Result<Result<(), String>> {
    let checks = [
        check_counters,
        check_probes,
        check_flows,
        check_translations,
        check_fragments,
    ];
    for check in checks {
        if let Err(what) = check(bed, ledger)? {
            return Ok(Err(what));
        }
    }
    Ok(Ok(()))
}

/// The result of each check.
type CheckResult = anyhow::Result<Result<(), String>>;

/// Returns a violation from the function unless the condition holds.
macro_rules! hold {
    ($condition:expr, $($what:tt)+) => {
        if !$condition {
            return Ok(Err(format!($($what)+)));
        }
    };
}

/// Checks that every packet was counted once, with its bytes, under a reason that fits its verdict.
fn check_counters(bed: &TestRun, ledger: &mut Ledger) -> CheckResult {
    let rows = bed.maps().metrics()?;
    let counted = |is_wanted: &dyn Fn(u8, u8) -> bool| {
        let mut count = Count::default();
        for row in rows
            .iter()
            .filter(|row| is_wanted(row.reason, row.direction))
        {
            count.add(row.packets, row.bytes);
        }
        count
    };
    let answers = [Reason::EchoAnswered, Reason::NeighbourAnswered].map(|reason| reason as u8);
    let passes = [Reason::Forwarded, Reason::LeftToStack].map(|reason| reason as u8);
    let passed = |way: Direction| {
        counted(&|reason, direction| passes.contains(&reason) && direction == way as u8)
    };
    for (what, counted, expected) in [
        ("drops", counted(&|reason, _| reason >= 128), ledger.dropped),
        (
            "answers",
            counted(&|reason, _| answers.contains(&reason)),
            ledger.answered,
        ),
        (
            "packets passed to an endpoint",
            passed(Direction::Egress),
            ledger.to_endpoint,
        ),
        (
            "packets passed from an endpoint",
            passed(Direction::Ingress),
            ledger.from_endpoint,
        ),
    ] {
        hold!(
            counted == expected,
            "HEALTH_METRICS has {counted:?} for {what}, expected {expected:?}"
        );
    }
    Ok(Ok(()))
}

/// Checks that rows are unlocked and consistent, and that each probe is a sample, lost or in flight.
fn check_probes(bed: &TestRun, ledger: &mut Ledger) -> CheckResult {
    let maps = bed.maps();
    let rows = maps.rtt()?;
    let open = maps.inflight()?;
    let has_row = |peer, path| {
        let key = RttKey {
            peer,
            path,
            protocol: PROTOCOL_ICMP,
            pad: 0,
        };
        rows.iter().any(|(of, _)| *of == key)
    };
    let count = |fate| {
        let is_known = |probe: &Inflight| has_row(probe.peer, probe.path());
        let known = open.iter().filter(|(_, probe)| is_known(probe));
        known
            .filter(|(_, probe)| probe.fate() == Some(fate))
            .count() as u64
    };
    let (expected, returned) = (count(Fate::InFlight), count(Fate::Returned));
    let given_up = bed.datapath.rtt()?.give_up_leftovers()?;
    hold!(
        given_up == expected,
        "{given_up} probes were given up, but {expected} were in flight"
    );
    ledger.given_up += given_up;
    ledger.returned += returned;

    let rows = maps.rtt()?;
    for (key, row) in &rows {
        if let Some(what) = inconsistency(row) {
            return Ok(Err(format!("HEALTH_RTT, {key:?}: {what} in {row:?}")));
        }
    }
    let probes = rows.iter().filter(|(key, _)| key.protocol == PROTOCOL_ICMP);
    let (mut samples, mut lost, mut others) = (0, 0, 0);
    for (_, row) in probes {
        samples += row.samples;
        lost += row.lost;
        others += row.late + row.duplicates;
    }
    let counted = |reason| bed.counted(reason);
    hold!(
        samples == ledger.returned,
        "{samples} samples in HEALTH_RTT of {} probes that returned",
        ledger.returned
    );
    let matched = counted(Reason::ProbeMatched);
    hold!(
        samples <= matched,
        "{samples} samples in HEALTH_RTT of {matched} replies that were matched"
    );
    hold!(
        lost == ledger.given_up,
        "{lost} probes lost in HEALTH_RTT, but {} were given up",
        ledger.given_up
    );
    let stamped = counted(Reason::ProbeStamped);
    hold!(
        samples + lost <= stamped,
        "{samples} samples and {lost} losses of {stamped} probes"
    );
    let unmatched = counted(Reason::ProbeUnmatched);
    hold!(
        others <= unmatched,
        "{others} late or repeated replies of {unmatched} that made no sample"
    );
    Ok(Ok(()))
}

/// Describes how a row contradicts itself, if it does.
fn inconsistency(row: &RttRow) -> Option<&'static str> {
    let counted: u64 = row.histogram.iter().map(|&count| u64::from(count)).sum();
    let samples = row.samples;
    let of_all = |ns: u64| ns.saturating_mul(samples);
    if !row.is_unlocked() {
        Some("a lock")
    } else if counted > samples {
        Some("more in the histogram than samples")
    } else if samples == 0 {
        None
    } else if !(row.min_ns..=row.max_ns).contains(&row.last_ns) {
        Some("a last sample out of range")
    } else if !(of_all(row.min_ns)..=of_all(row.max_ns)).contains(&row.sum_ns) {
        Some("a sum out of range")
    } else if row.remote.samples > samples || row.remote.sum_ns > row.remote.rtt_sum_ns {
        Some("more time in the peer's host than in total")
    } else if row.one_way.samples > row.remote.samples {
        Some("more delays than times in the peer's host")
    } else {
        None
    }
}

/// The key of a conntrack or NAT entry.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Tuple {
    source: Vec<u8>,
    destination: Vec<u8>,
    /// In network byte order, as in memory.
    ports: [[u8; 2]; 2],
    protocol: u8,
    direction: u8,
}

impl Tuple {
    /// Parses a key. The error describes what is wrong with it.
    fn read(key: &[u8]) -> Result<Self, String> {
        let address = if key.len() == 16 { 4 } else { 16 };
        let (source, rest) = key.split_at(address);
        let (destination, rest) = rest.split_at(address);
        let &[a, b, c, d, protocol, direction, 0, 0] = rest else {
            return Err(format!("padding that is not zero in the key {key:02x?}"));
        };
        if direction > 1 {
            return Err(format!("direction {direction} in the key {key:02x?}"));
        }
        Ok(Self {
            source: source.to_vec(),
            destination: destination.to_vec(),
            ports: [[a, b], [c, d]],
            protocol,
            direction,
        })
    }

    fn reversed(&self) -> Self {
        let [source, destination] = self.ports;
        Self {
            source: self.destination.clone(),
            destination: self.source.clone(),
            ports: [destination, source],
            protocol: self.protocol,
            direction: 1 - self.direction,
        }
    }
}

/// Copies `N` bytes of a field, for example for a number in host byte order.
fn field<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut field = [0; N];
    field.copy_from_slice(&bytes[at..at + N]);
    field
}

/// Checks that packets can create all conntrack entries, and that no flow has two live entries.
fn check_flows(bed: &TestRun, _: &mut Ledger) -> CheckResult {
    for (name, are_tcp) in [
        ("HEALTH_CT4", true),
        ("HEALTH_CT6", true),
        ("HEALTH_CT_ANY4", false),
        ("HEALTH_CT_ANY6", false),
    ] {
        let entries = bed.maps().raw(name)?;
        let now = coarse_now_secs();
        let mut living = HashSet::new();
        for (key, value) in &entries {
            let wrong = |what: &str| Ok(Err(format!("{name}: {what}: {key:02x?} {value:02x?}")));
            let tuple = match Tuple::read(key) {
                Ok(tuple) => tuple,
                Err(what) => return wrong(&what),
            };
            if (tuple.protocol == TCP) != are_tcp {
                return wrong("a flow that belongs in another map");
            }
            if let Some(what) = impossible(&tuple, value, now) {
                return wrong(what);
            }
            if expires(value) > now {
                living.insert(tuple);
            }
        }
        for tuple in &living {
            // The program creates the entry of an answered echo without checking for the reversed tuple.
            let is_icmp = [ICMP, ICMPV6].contains(&tuple.protocol);
            hold!(
                is_icmp || !living.contains(&tuple.reversed()),
                "{name}: two entries for the flow {tuple:02x?}"
            );
        }
    }
    Ok(Ok(()))
}

fn expires(entry: &[u8]) -> u32 {
    u32::from_ne_bytes(field(entry, 32))
}

/// Returns a property of an entry that no packet can cause, if it has one.
fn impossible(tuple: &Tuple, entry: &[u8], now: u32) -> Option<&'static str> {
    let counter = |at| u64::from_ne_bytes(field(entry, at));
    let [rx_packets, rx_bytes, tx_packets, tx_bytes] = [0, 8, 16, 24].map(counter);
    let [last_rx, last_tx] = [40, 44].map(|at| u32::from_ne_bytes(field(entry, at)));
    let flags = u16::from_ne_bytes(field(entry, 36));
    let [rx_seen, tx_seen] = [entry[38], entry[39]];
    let header = if tuple.source.len() == 4 { 20 } else { 40 };
    let is_closed = flags & (RX_CLOSING | TX_CLOSING) == RX_CLOSING | TX_CLOSING;
    let lifetime = match tuple.protocol {
        TCP if is_closed => 10,
        TCP if flags & SEEN_NON_SYN != 0 => 8000,
        SCTP => 210,
        _ => 60,
    };
    let last = last_rx.max(last_tx);
    if rx_packets + tx_packets == 0 {
        Some("an entry without packets")
    } else if rx_bytes < rx_packets * header || tx_bytes < tx_packets * header {
        Some("packets shorter than their headers")
    } else if (rx_packets == 0) != (last_rx == 0) || (tx_packets == 0) != (last_tx == 0) {
        Some("packets without a time, or a time without packets")
    } else if last > now {
        Some("a packet from the future")
    } else if !(last + lifetime - 1..=last + lifetime).contains(&expires(entry)) {
        // One second of tolerance: some packets use a clock that runs a tick behind.
        Some("a lifetime that is not its protocol's")
    } else if flags & !KNOWN_FLAGS != 0 {
        Some("unknown flags")
    } else if tuple.protocol != TCP && (flags & !MASQUERADED != 0 || rx_seen | tx_seen != 0) {
        Some("TCP flags in another protocol")
    } else {
        None
    }
}

/// Checks that NAT entries come in pairs that refer to each other.
fn check_translations(bed: &TestRun, _: &mut Ledger) -> CheckResult {
    let mut is_large = false;
    for (name, are_tcp) in [
        ("HEALTH_NAT4", true),
        ("HEALTH_NAT6", true),
        ("HEALTH_NAT_ANY4", false),
        ("HEALTH_NAT_ANY6", false),
    ] {
        let entries = bed.maps().raw(name)?;
        is_large |= entries.len() > MANY_TRANSLATIONS;
        let mut pairs = HashMap::new();
        for (key, value) in &entries {
            let tuple = match Tuple::read(key) {
                Ok(tuple) => tuple,
                Err(what) => return Ok(Err(format!("{name}: {what}"))),
            };
            hold!(
                (tuple.protocol == TCP) == are_tcp,
                "{name}: a translation that belongs in another map: {tuple:02x?}"
            );
            let address = tuple.source.len();
            let flags = u32::from_ne_bytes(field(value, 8));
            hold!(
                flags & !KNOWN_NAT_FLAGS == 0
                    && value[12 + address + 2..].iter().all(|&byte| byte == 0),
                "{name}: unknown flags or non-zero padding: {tuple:02x?} {value:02x?}"
            );
            let to = value[12..12 + address].to_vec();
            let port: [u8; 2] = field(value, 12 + address);
            pairs.insert(tuple, (to, port, flags));
        }
        for (tuple, (to, port, flags)) in &pairs {
            // The key of the other entry is the tuple of a reply to a packet after NAT.
            let mut translated = tuple.clone();
            let is_outbound = tuple.direction == 0;
            if is_outbound {
                (translated.source, translated.ports[0]) = (to.clone(), *port);
            } else {
                (translated.destination, translated.ports[1]) = (to.clone(), *port);
            }
            let Some((back, back_port, back_flags)) = pairs.get(&translated.reversed()) else {
                return Ok(Err(format!("{name}: {tuple:02x?} has lost its other half")));
            };
            let (from, from_port) = if is_outbound {
                (&tuple.source, tuple.ports[0])
            } else {
                (&tuple.destination, tuple.ports[1])
            };
            hold!(
                (back, *back_port, back_flags) == (from, from_port, flags),
                "{name}: the other half of {tuple:02x?} leads to {back:02x?} {back_port:02x?}"
            );
        }
    }
    if is_large {
        bed.maps()
            .flush_nat(|_, _| true)
            .context("cannot empty the translations")?;
    }
    Ok(Ok(()))
}

/// Checks that ports of fragments are kept no longer than the fragment timeout.
fn check_fragments(bed: &TestRun, _: &mut Ledger) -> CheckResult {
    for name in ["HEALTH_FRAGMENTS4", "HEALTH_FRAGMENTS6"] {
        let entries = bed.maps().raw(name)?;
        let now = coarse_now_secs();
        for (key, value) in entries {
            let until = u32::from_ne_bytes(field(&value, 0));
            let is_padding_zero = (key.len() != 12 || key[11] == 0) && value[9..] == [0; 3];
            hold!(
                until <= now + 30 && is_padding_zero,
                "{name}: {key:02x?} {value:02x?} at {now}"
            );
        }
    }
    Ok(Ok(()))
}
