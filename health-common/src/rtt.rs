//! Round-trip times by peer: `HEALTH_RTT` and the probes in flight, `HEALTH_INFLIGHT`.

use crate::addr::Addr;
use crate::probe::Protocol;
use crate::tcp::FlowKey;

/// First power of two with its own buckets: values below `2^10` ns (1.024 us) share bucket 0.
const FIRST_OCTAVE: u32 = 10;
/// First power of two past the histogram: values from `2^36` ns (68.7 s) on share the last bucket.
const END_OCTAVE: u32 = 36;
/// Each octave is cut into `2^3` buckets of equal width, so a bucket's middle is within 6.25 % of
/// any value in it.
const SUB_BITS: u32 = 3;
/// Number of histogram buckets, the two for values outside the range included.
pub const HISTOGRAM_BUCKETS: usize = ((END_OCTAVE - FIRST_OCTAVE) << SUB_BITS) as usize + 2;

/// ICMP echo, measured or counted.
pub const PROTOCOL_ICMP: u8 = Protocol::Icmp as u8;
/// HTTP `GET /hello` over TCP.
pub const PROTOCOL_HTTP: u8 = Protocol::Http as u8;

/// Nothing is probed: the connections that there are to the address, over TCP.
pub const PROTOCOL_TCP: u8 = 2;

/// Stamped by `to_netdev` and `from_netdev`.
pub const SOURCE_KERNEL: u8 = 1;
/// Stamped at the agent's socket.
pub const SOURCE_SOCKET: u8 = 2;

/// Key of `HEALTH_RTT`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RttKey {
    /// The probed address.
    pub peer: Addr,
    /// [`crate::probe::Path`] as a byte.
    pub path: u8,
    /// [`PROTOCOL_ICMP`], [`PROTOCOL_HTTP`] or [`PROTOCOL_TCP`].
    pub protocol: u8,
    /// Explicit padding, zero.
    pub pad: u16,
}

/// Round-trip times along one path. All times in nanoseconds.
///
/// Written by kernel programs alone (the agent's own observations go through `rtt_account`), so no
/// writer overwrites another's count.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RttRow {
    /// Round trips measured.
    pub samples: u64,
    /// Probes given up without an answer.
    pub lost: u64,
    /// Replies that came after their probe was given up, and duplicates.
    pub late: u64,
    /// The last round trip.
    pub last_ns: u64,
    /// The shortest.
    pub min_ns: u64,
    /// The longest.
    pub max_ns: u64,
    /// Their sum.
    pub sum_ns: u64,
    /// Smoothed round trip, gain 1/8 (RFC 6298 section 2).
    pub smoothed_ns: u64,
    /// Mean deviation between neighbouring samples, gain 1/16 (RFC 3550 section 6.4.1).
    pub jitter_ns: u64,
    /// When the last one was measured: `CLOCK_MONOTONIC`.
    pub last_at_ns: u64,
    /// ICMP sequence number of the last one, host byte order.
    pub last_sequence: u16,
    /// [`SOURCE_KERNEL`] or [`SOURCE_SOCKET`], of the last one.
    pub source: u8,
    /// Explicit padding, zero.
    pub pad: u8,
    /// Log-linear histogram; see [`bucket`]. When a bucket is full, all are halved: the shape is
    /// kept, and older samples weigh less.
    pub histogram: [u16; HISTOGRAM_BUCKETS],
}

impl RttRow {
    /// A row without samples.
    pub const EMPTY: Self = Self {
        samples: 0,
        lost: 0,
        late: 0,
        last_ns: 0,
        min_ns: 0,
        max_ns: 0,
        sum_ns: 0,
        smoothed_ns: 0,
        jitter_ns: 0,
        last_at_ns: 0,
        last_sequence: 0,
        source: 0,
        pad: 0,
        histogram: [0; HISTOGRAM_BUCKETS],
    };

    /// Adds one round trip of `rtt_ns`, measured at `now_ns`.
    #[inline(always)]
    pub fn record(&mut self, rtt_ns: u64, now_ns: u64, sequence: u16, source: u8) {
        if self.samples == 0 {
            self.min_ns = rtt_ns;
            self.max_ns = rtt_ns;
            self.smoothed_ns = rtt_ns;
        } else {
            self.min_ns = self.min_ns.min(rtt_ns);
            self.max_ns = self.max_ns.max(rtt_ns);
            // The division by a power of two comes last, and in unsigned numbers: BPF before v4
            // has no signed division.
            self.smoothed_ns = (self.smoothed_ns * 7 + rtt_ns) >> 3;
            self.jitter_ns = (self.jitter_ns * 15 + self.last_ns.abs_diff(rtt_ns)) >> 4;
        }
        self.samples += 1;
        self.sum_ns += rtt_ns;
        self.last_ns = rtt_ns;
        self.last_at_ns = now_ns;
        self.last_sequence = sequence;
        self.source = source;
        self.count_bucket(bucket(rtt_ns));
    }

    #[inline(always)]
    fn count_bucket(&mut self, index: usize) {
        let Some(slot) = self.histogram.get_mut(index) else {
            return;
        };
        if *slot < u16::MAX {
            *slot += 1;
            return;
        }
        let mut i = 0;
        while i < HISTOGRAM_BUCKETS {
            self.histogram[i] >>= 1;
            i += 1;
        }
    }

    /// The mean round trip; `None` without samples.
    pub fn mean_ns(&self) -> Option<u64> {
        self.sum_ns.checked_div(self.samples)
    }

    /// The value below which `percent` of the samples in the histogram lie, within 6.25 %; `None`
    /// without samples. Never outside `min_ns..=max_ns`.
    pub fn percentile_ns(&self, percent: f64) -> Option<u64> {
        let total: u64 = self.histogram.iter().map(|&n| u64::from(n)).sum();
        if total == 0 {
            return None;
        }
        let target = percent / 100.0 * total as f64;
        let mut seen = 0;
        for (index, &count) in self.histogram.iter().enumerate() {
            seen += u64::from(count);
            if count > 0 && seen as f64 >= target {
                let (low, high) = bucket_bounds(index);
                return Some((low + (high - low) / 2).clamp(self.min_ns, self.max_ns));
            }
        }
        Some(self.max_ns)
    }
}

/// The histogram bucket of a round trip.
#[inline(always)]
pub const fn bucket(ns: u64) -> usize {
    if ns < 1 << FIRST_OCTAVE {
        return 0;
    }
    if ns >= 1 << END_OCTAVE {
        return HISTOGRAM_BUCKETS - 1;
    }
    let octave = 63 - ns.leading_zeros();
    let sub = (ns >> (octave - SUB_BITS)) & ((1 << SUB_BITS) - 1);
    1 + (((octave - FIRST_OCTAVE) << SUB_BITS) as u64 + sub) as usize
}

/// The values that fall into a bucket, `low..high` in nanoseconds.
pub const fn bucket_bounds(index: usize) -> (u64, u64) {
    if index == 0 {
        return (0, 1 << FIRST_OCTAVE);
    }
    if index >= HISTOGRAM_BUCKETS - 1 {
        return (1 << END_OCTAVE, u64::MAX);
    }
    let octave = FIRST_OCTAVE + ((index - 1) >> SUB_BITS) as u32;
    let width = 1 << (octave - SUB_BITS);
    let low = (1 << octave) + ((index - 1) & ((1 << SUB_BITS) - 1)) as u64 * width;
    (low, low + width)
}

/// Key of `HEALTH_INFLIGHT`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct InflightKey {
    /// The probed address.
    pub peer: Addr,
    /// ICMP identifier.
    pub id_be: u16,
    /// ICMP sequence number.
    pub sequence_be: u16,
}

/// Value of `HEALTH_INFLIGHT`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Inflight {
    /// When the probe left: `CLOCK_MONOTONIC`, nanoseconds.
    pub sent_ns: u64,
    /// [`crate::probe::Path`] as a byte.
    pub path: u8,
    /// Explicit padding, zero.
    pub pad: [u8; 7],
}

/// The agent gives up a probe: its entry in flight goes, and one loss is counted. A reply that got
/// there first stands, and nothing is counted.
pub const ACCOUNT_LOST: u32 = 1;
/// The agent measured a round trip itself.
pub const ACCOUNT_SAMPLE: u32 = 2;
/// The agent was answered over a connection of its own: the round trip of its handshake, as it was
/// timed on the uplink, or else as the agent measured it. The request tells afterwards which.
pub const ACCOUNT_CONNECTION: u32 = 3;

/// `rtt_account` changed the row.
pub const ACCOUNTED: u32 = 0;
/// `rtt_account` left the row as it is: the probe had been answered.
pub const ALREADY_ANSWERED: u32 = 1;
/// `rtt_account` found no row for the key.
pub const UNKNOWN_PEER: u32 = 2;

/// What the agent tells `rtt_account`, as the "packet" of a test run. The space in front stands for
/// the Ethernet header that the kernel asks of it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AccountRequest {
    /// Unused, zero.
    pub ethernet: [u8; 16],
    /// The row.
    pub key: RttKey,
    /// [`ACCOUNT_LOST`] or [`ACCOUNT_SAMPLE`].
    pub operation: u32,
    /// The round trip of a sample, nanoseconds.
    pub rtt_ns: u64,
    /// ICMP identifier of a lost probe, network byte order.
    pub id_be: u16,
    /// ICMP sequence number, network byte order.
    pub sequence_be: u16,
    /// 1 if the lost probe never crossed an uplink, so no entry in flight is expected.
    pub unstamped: u32,
    /// The connection of an [`ACCOUNT_CONNECTION`].
    pub flow: FlowKey,
    /// Answer: [`SOURCE_KERNEL`] if `rtt_ns` was replaced.
    pub source: u32,
    /// When the connection was begun: `CLOCK_MONOTONIC`, nanoseconds. What was timed before was another
    /// connection between the same ports.
    pub begun_ns: u64,
}

crate::map_types!(
    RttKey = 20,
    RttRow = 504,
    InflightKey = 20,
    Inflight = 16,
    AccountRequest = 104,
);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn buckets_are_contiguous_and_hold_their_bounds() {
        for index in 0..HISTOGRAM_BUCKETS {
            let (low, high) = bucket_bounds(index);
            assert_eq!(bucket(low), index, "low end of {index}");
            assert_eq!(bucket(high - 1), index, "high end of {index}");
            if index + 1 < HISTOGRAM_BUCKETS {
                assert_eq!(bucket_bounds(index + 1).0, high);
            }
        }
    }

    #[test]
    fn a_full_bucket_halves_all_and_keeps_the_shape() {
        let mut row = RttRow::EMPTY;
        for i in 0..100_000_u64 {
            let rtt = if i % 4 == 0 { 1_000_000 } else { 10_000 };
            row.record(rtt, i, 0, SOURCE_KERNEL);
        }
        let fast = u32::from(row.histogram[bucket(10_000)]);
        let slow = u32::from(row.histogram[bucket(1_000_000)]);
        assert!((2..=3).contains(&(fast / slow)), "{fast} to {slow}");
        assert_eq!(row.samples, 100_000);
        assert_eq!(row.min_ns, 10_000);
        assert_eq!(row.max_ns, 1_000_000);
    }

    proptest! {
        #[test]
        fn a_percentile_is_within_the_promised_error(ns in 1_024_u64..60_000_000_000) {
            let mut row = RttRow::EMPTY;
            row.record(1, 0, 0, SOURCE_KERNEL);
            row.record(ns, 1, 0, SOURCE_KERNEL);
            row.record(1 << 40, 2, 0, SOURCE_KERNEL);
            let got = row.percentile_ns(50.0).unwrap();
            prop_assert!(got.abs_diff(ns) as f64 <= ns as f64 * 0.0625, "{got} for {ns}");
        }
    }
}
