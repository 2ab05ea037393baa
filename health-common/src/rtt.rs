//! Round-trip times per peer: `HEALTH_RTT`.
//!
//! The module of the same name in `health-ebpf` writes these rows. The pair shares its name on purpose: layout and
//! rules live here, kernel-only code lives there.

use crate::addr::Addr;
use crate::probe::{ProbeId, Protocol};

/// First power of two with its own buckets: values below `2^10` ns (1.024 us) share bucket 0.
const FIRST_OCTAVE: u32 = 10;
/// Upper end of the histogram, 60.13 s, which is also the upper end of a bucket. All larger values share the last
/// bucket.
const END_NS: u64 = 14 << 32;
/// Each octave is divided into `2^3` buckets of equal width, so a bucket's middle is within 6.25 % of any value in
/// it.
const SUB_BITS: u32 = 3;
/// Number of histogram buckets, including the two for values outside the range.
pub const HISTOGRAM_BUCKETS: usize = log_linear(END_NS) + 1;

/// ICMP echo, whether measured or only counted.
pub const PROTOCOL_ICMP: u8 = Protocol::Icmp as u8;
/// HTTP `GET /hello` over TCP.
pub const PROTOCOL_HTTP: u8 = Protocol::Http as u8;

/// Existing TCP connections to the address, measured without probes.
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

/// Round-trip times along one path. All times are in nanoseconds.
///
/// Programs on several CPUs write the row, one at a time: a writer increments `lock` to acquire the row and `version`
/// to release it. A reader takes two copies in succession: if they are equal and [unlocked](RttRow::is_unlocked), they
/// are a consistent snapshot. One copy is not enough, because the kernel does not guarantee the order in which it
/// copies a value's bytes (x86 uses `rep movsb`, or copies from the end if the addresses suggest it). With two copies,
/// nothing is older than `version`, which already had its value before the second copy started, and nothing is newer
/// than `lock`, which had not changed by the end of the first copy.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RttRow {
    /// Number of writes to the row, modulo 2^32. Incremented after each write.
    pub version: u32,
    /// ICMP sequence number of the last round trip, host byte order.
    pub last_sequence: u16,
    /// Source of the last round trip: [`SOURCE_KERNEL`] or [`SOURCE_SOCKET`].
    pub source: u8,
    /// Explicit padding, zero.
    pub pad: u8,
    /// Round trips measured.
    pub samples: u64,
    /// Probes given up as unanswered.
    pub lost: u64,
    /// Answers to probes that had already been given up.
    pub late: u64,
    /// Duplicate answers to probes.
    pub duplicates: u64,
    /// The last round trip.
    pub last_ns: u64,
    /// The shortest round trip.
    pub min_ns: u64,
    /// The longest round trip.
    pub max_ns: u64,
    /// Sum of all round trips.
    pub sum_ns: u64,
    /// Smoothed round trip, gain 1/8 (RFC 6298 section 2).
    pub smoothed_ns: u64,
    /// Mean deviation between consecutive samples, gain 1/16 (RFC 3550 section 6.4.1).
    pub jitter_ns: u64,
    /// When the last round trip was measured: `CLOCK_MONOTONIC`.
    pub last_at_ns: u64,
    /// Time that round trips spent in the peer's host.
    pub remote: RemoteTime,
    /// Delays per direction.
    pub one_way: OneWay,
    /// Log-linear histogram; see [`bucket`]. When a bucket is full, all buckets are halved: the shape is kept, and
    /// older samples weigh less.
    pub histogram: [u16; HISTOGRAM_BUCKETS],
    /// Number of times the row was locked for writing. Incremented before each write.
    pub lock: u64,
}

/// Times between a probe's arrival at the peer's uplink and the departure of its reply, as reported by the peer's
/// programs. Nanoseconds.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoteTime {
    /// Round trips for which the time is known.
    pub samples: u64,
    /// The last time.
    pub last_ns: u64,
    /// The longest time.
    pub max_ns: u64,
    /// Sum of all times.
    pub sum_ns: u64,
    /// Smoothed, gain 1/8.
    pub smoothed_ns: u64,
    /// Sum of the round trips for which the time is known.
    pub rtt_sum_ns: u64,
}

impl RemoteTime {
    #[inline(always)]
    fn record(&mut self, remote_ns: u64, rtt_ns: u64) {
        self.smoothed_ns = if self.samples == 0 {
            remote_ns
        } else {
            (self.smoothed_ns * 7 + remote_ns) >> 3
        };
        self.max_ns = self.max_ns.max(remote_ns);
        self.samples += 1;
        self.last_ns = remote_ns;
        self.sum_ns += remote_ns;
        self.rtt_sum_ns += rtt_ns;
    }

    /// The share of the round-trip time that was spent outside the peer's host, 0 to 1; `None` if unknown.
    pub fn network_share(&self) -> Option<f64> {
        (self.rtt_sum_ns > 0).then(|| 1.0 - self.sum_ns as f64 / self.rtt_sum_ns as f64)
    }
}

/// Delays in one direction, by the clocks of both hosts. Nanoseconds; clock error may make them negative.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Delay {
    /// Delay of the last round trip.
    pub last_ns: i64,
    /// The shortest delay.
    pub min_ns: i64,
    /// Smoothed, gain 1/8.
    pub smoothed_ns: i64,
}

impl Delay {
    #[inline(always)]
    fn record(&mut self, delay_ns: i64, is_first: bool) {
        self.last_ns = delay_ns;
        if is_first {
            self.min_ns = delay_ns;
            self.smoothed_ns = delay_ns;
        } else {
            self.min_ns = self.min_ns.min(delay_ns);
            self.smoothed_ns = (self.smoothed_ns * 7 + delay_ns) >> 3;
        }
    }
}

/// Delays in each direction; unknown if there are no samples.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OneWay {
    /// Round trips for which the delays are known.
    pub samples: u64,
    /// From this host to the peer.
    pub forward: Delay,
    /// From the peer to this host.
    pub back: Delay,
}

impl OneWay {
    #[inline(always)]
    fn record(&mut self, forward_ns: i64, back_ns: i64) {
        let is_first = self.samples == 0;
        self.forward.record(forward_ns, is_first);
        self.back.record(back_ns, is_first);
        self.samples += 1;
    }
}

/// Value of an unknown delay.
pub const UNKNOWN_DELAY: i64 = i64::MIN;

/// The times of a reply. The fields are plain numbers because the verifier refuses to spill the uninitialised payload
/// of a `None`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The round-trip time in nanoseconds.
    pub rtt_ns: u64,
    /// Time that the round trip spent in the peer's host, in nanoseconds. 0: unknown.
    pub remote_ns: u64,
    /// Forward delay in nanoseconds, or [`UNKNOWN_DELAY`].
    pub forward_ns: i64,
    /// Return delay in nanoseconds; unknown if the forward delay is.
    pub back_ns: i64,
}

impl Reply {
    /// Creates a reply for which only the round trip is known.
    #[inline(always)]
    pub const fn new(rtt_ns: u64) -> Self {
        Self {
            rtt_ns,
            remote_ns: 0,
            forward_ns: UNKNOWN_DELAY,
            back_ns: UNKNOWN_DELAY,
        }
    }
}

impl RttRow {
    /// A row without samples.
    pub const EMPTY: Self = Self {
        version: 0,
        last_sequence: 0,
        source: 0,
        pad: 0,
        samples: 0,
        lost: 0,
        late: 0,
        duplicates: 0,
        last_ns: 0,
        min_ns: 0,
        max_ns: 0,
        sum_ns: 0,
        smoothed_ns: 0,
        jitter_ns: 0,
        last_at_ns: 0,
        remote: RemoteTime {
            samples: 0,
            last_ns: 0,
            max_ns: 0,
            sum_ns: 0,
            smoothed_ns: 0,
            rtt_sum_ns: 0,
        },
        one_way: OneWay {
            samples: 0,
            forward: Delay {
                last_ns: 0,
                min_ns: 0,
                smoothed_ns: 0,
            },
            back: Delay {
                last_ns: 0,
                min_ns: 0,
                smoothed_ns: 0,
            },
        },
        histogram: [0; HISTOGRAM_BUCKETS],
        lock: 0,
    };

    /// Whether no writer held the row, as far as this copy shows.
    #[inline(always)]
    pub const fn is_unlocked(&self) -> bool {
        self.version == self.lock as u32
    }

    /// Resets the row, except for `version` and `lock`.
    #[inline(always)]
    pub fn clear(&mut self) {
        *self = Self {
            version: self.version,
            lock: self.lock,
            ..Self::EMPTY
        };
    }

    /// Adds one round trip of `rtt_ns`, measured at `now_ns`.
    #[inline(always)]
    pub fn record(&mut self, rtt_ns: u64, now_ns: u64, sequence: u16, source: u8) {
        if !self.record_in(bucket(rtt_ns), rtt_ns, now_ns, sequence, source) {
            self.halve_histogram();
        }
    }

    /// Like [`Self::record`], for a caller that computed the round trip's [`bucket`] before locking the row. Returns
    /// `false` if the bucket is full; the caller must then halve the histogram.
    #[must_use]
    #[inline(always)]
    pub fn record_in(
        &mut self,
        bucket: usize,
        rtt_ns: u64,
        now_ns: u64,
        sequence: u16,
        source: u8,
    ) -> bool {
        if self.samples == 0 {
            self.min_ns = rtt_ns;
            self.max_ns = rtt_ns;
            self.smoothed_ns = rtt_ns;
        } else {
            self.min_ns = self.min_ns.min(rtt_ns);
            self.max_ns = self.max_ns.max(rtt_ns);
            // Divides last, by a power of two and unsigned: BPF before v4 has no signed division.
            self.smoothed_ns = (self.smoothed_ns * 7 + rtt_ns) >> 3;
            self.jitter_ns = (self.jitter_ns * 15 + self.last_ns.abs_diff(rtt_ns)) >> 4;
        }
        self.samples += 1;
        self.sum_ns += rtt_ns;
        self.last_ns = rtt_ns;
        self.last_at_ns = now_ns;
        self.last_sequence = sequence;
        self.source = source;
        match self.histogram.get_mut(bucket) {
            Some(&mut u16::MAX) => false,
            Some(slot) => {
                *slot += 1;
                true
            }
            None => true,
        }
    }

    /// Adds the reply to a probe, whose round trip falls into this [`bucket`]. Like [`Self::record_in`], returns
    /// `false` if the bucket is full.
    #[must_use]
    #[inline(always)]
    pub fn record_reply(
        &mut self,
        bucket: usize,
        reply: &Reply,
        now_ns: u64,
        sequence: u16,
        source: u8,
    ) -> bool {
        let had_room = self.record_in(bucket, reply.rtt_ns, now_ns, sequence, source);
        if reply.remote_ns > 0 {
            self.remote.record(reply.remote_ns, reply.rtt_ns);
        }
        if reply.forward_ns != UNKNOWN_DELAY {
            self.one_way.record(reply.forward_ns, reply.back_ns);
        }
        had_room
    }

    /// Halves the counts of all buckets to make space in a full one.
    #[inline(always)]
    pub fn halve_histogram(&mut self) {
        for count in &mut self.histogram {
            *count >>= 1;
        }
    }

    /// The mean round trip; `None` without samples.
    pub fn mean_ns(&self) -> Option<u64> {
        self.sum_ns.checked_div(self.samples)
    }

    /// The given percentiles, in ascending order, of the samples in the histogram; `None` without samples. They are
    /// accurate to 6.25 % from 1 us on and always within `min_ns..=max_ns`.
    pub fn percentiles_ns<const N: usize>(&self, percents: [f64; N]) -> Option<[u64; N]> {
        let buckets = self.histogram.iter().copied().enumerate();
        percentiles_ns(buckets, percents)
            .map(|values| values.map(|value| value.clamp(self.min_ns, self.max_ns)))
    }
}

/// The given percentiles of samples; `None` without samples. `buckets` yields the number of samples per [`bucket`].
/// Both buckets and percentages must be in ascending order. The percentiles are accurate to 6.25 % from 1 us on.
pub fn percentiles_ns<const N: usize>(
    buckets: impl Iterator<Item = (usize, u16)> + Clone,
    percents: [f64; N],
) -> Option<[u64; N]> {
    // At most 208 times 65 535.
    let total: u32 = buckets.clone().map(|(_, count)| u32::from(count)).sum();
    if total == 0 {
        return None;
    }
    let targets = percents.map(|percent| percent / 100.0 * f64::from(total));
    let mut values = [0; N];
    let mut next = 0;
    let mut seen = 0;
    for (index, count) in buckets {
        if count == 0 {
            continue;
        }
        seen += u32::from(count);
        while next < N && f64::from(seen) >= targets[next] {
            values[next] = bucket_value(index);
            next += 1;
        }
        if next == N {
            break;
        }
    }
    Some(values)
}

/// The histogram bucket of a round trip.
#[inline(always)]
pub const fn bucket(ns: u64) -> usize {
    if ns < 1 << FIRST_OCTAVE {
        return 0;
    }
    if ns >= END_NS {
        return HISTOGRAM_BUCKETS - 1;
    }
    log_linear(ns)
}

/// Like [`bucket`], but without limits on the range.
#[inline(always)]
const fn log_linear(ns: u64) -> usize {
    let octave = 63 - ns.leading_zeros();
    let sub = (ns >> (octave - SUB_BITS)) & ((1 << SUB_BITS) - 1);
    1 + (((octave - FIRST_OCTAVE) << SUB_BITS) as u64 + sub) as usize
}

/// The range of values in a bucket, `low..high` in nanoseconds.
pub const fn bucket_bounds(index: usize) -> (u64, u64) {
    if index == 0 {
        return (0, 1 << FIRST_OCTAVE);
    }
    if index >= HISTOGRAM_BUCKETS - 1 {
        return (END_NS, u64::MAX);
    }
    let octave = FIRST_OCTAVE + ((index - 1) >> SUB_BITS) as u32;
    let width = 1 << (octave - SUB_BITS);
    let low = (1 << octave) + ((index - 1) & ((1 << SUB_BITS) - 1)) as u64 * width;
    (low, low + width)
}

/// The value that represents a bucket: its middle; for the first bucket, the value from which the accuracy of 6.25 %
/// holds; for the last bucket, its lower end.
pub const fn bucket_value(index: usize) -> u64 {
    let (low, high) = bucket_bounds(index);
    if index == 0 {
        1_000
    } else if index >= HISTOGRAM_BUCKETS - 1 {
        low
    } else {
        low + (high - low) / 2
    }
}

/// Operation: the agent gives up on a probe. If the probe has returned, it is recorded as answered.
pub const ACCOUNT_LOST: u32 = 1;
/// Operation: the agent measured a round trip at its socket. If the uplinks' programs measured it too, their value is
/// recorded instead.
pub const ACCOUNT_SAMPLE: u32 = 2;
/// Operation: resets the row.
pub const ACCOUNT_RESET: u32 = 3;

/// Return value: `rtt_account` changed the row.
pub const ACCOUNTED: u32 = 0;
/// Return value: the probe has been answered, and `rtt_account` recorded the answer unless that had already happened.
pub const ALREADY_ANSWERED: u32 = 1;
/// Return value: `rtt_account` left the row unchanged because the agent had already given up on the probe.
pub const ALREADY_LOST: u32 = 2;
/// Return value: `rtt_account` found no row for the key.
pub const UNKNOWN_PEER: u32 = 3;
/// Return value: `rtt_account` left the row unchanged because other writers kept it locked. The agent should retry.
pub const BUSY: u32 = 4;

/// The agent's request to `rtt_account`, passed as the packet of a test run. It starts with a placeholder for the
/// Ethernet header that the kernel requires.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AccountRequest {
    /// Unused, zero.
    pub ethernet: [u8; 16],
    /// Key of the row.
    pub key: RttKey,
    /// [`ACCOUNT_LOST`], [`ACCOUNT_SAMPLE`] or [`ACCOUNT_RESET`].
    pub operation: u32,
    /// The round-trip time of a sample in nanoseconds. On return, the value measured by the uplinks' programs, if there
    /// is one.
    pub rtt_ns: u64,
    /// Id of the echo probe; all zero for probes of other protocols, which are not tracked individually.
    pub probe: ProbeId,
}

crate::map_types!(RttKey = 20, RttRow = 624, AccountRequest = 56);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn buckets_are_contiguous_and_hold_their_bounds() {
        assert_eq!(HISTOGRAM_BUCKETS, 208);
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
        fn a_percentile_is_within_the_promised_error(ns in 1_000_u64..60_000_000_000) {
            let mut row = RttRow::EMPTY;
            row.record(1, 0, 0, SOURCE_KERNEL);
            row.record(ns, 1, 0, SOURCE_KERNEL);
            row.record(1 << 40, 2, 0, SOURCE_KERNEL);
            let [got] = row.percentiles_ns([50.0]).unwrap();
            prop_assert!(got.abs_diff(ns) as f64 <= ns as f64 * 0.0625, "{got} for {ns}");
        }

        #[test]
        fn percentiles_read_together_are_those_read_one_by_one(
            all in proptest::collection::vec(1_u64..100_000_000_000, 1..200),
        ) {
            let mut row = RttRow::EMPTY;
            for (at, ns) in (0..).zip(all) {
                row.record(ns, at, 0, SOURCE_KERNEL);
            }
            let percents = [0.0, 50.0, 90.0, 99.0, 100.0];
            let one_by_one = percents.map(|percent| row.percentiles_ns([percent]).unwrap()[0]);
            prop_assert_eq!(row.percentiles_ns(percents), Some(one_by_one));
            prop_assert!(one_by_one.is_sorted());
        }
    }
}
