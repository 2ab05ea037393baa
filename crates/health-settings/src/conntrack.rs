//! Lifetimes and limits of conntrack entries, and how often expired entries are collected.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use health_common::ct::{DEFAULT_ANY_ENTRIES, DEFAULT_ENTRIES, Timeouts};
use health_model::duration::{duration_text, parse_duration};

use super::form::Live;
use super::range::{Range, Ranged, within};
use super::seconds::Seconds;

/// Time between two collections, or `adaptive`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GcInterval {
    /// Depends on how many entries each collection removes.
    Adaptive,
    /// Always the same.
    Fixed(Duration),
}

impl fmt::Display for GcInterval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Adaptive => f.write_str("adaptive"),
            Self::Fixed(interval) => f.write_str(&duration_text(*interval)),
        }
    }
}

/// The text is not a [`GcInterval`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("write it like 30s or 5m, or adaptive")]
pub struct GcIntervalError;

impl FromStr for GcInterval {
    type Err = GcIntervalError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "adaptive" => Ok(Self::Adaptive),
            text => match parse_duration(text) {
                Ok(interval) => Ok(Self::Fixed(interval)),
                Err(_) => Err(GcIntervalError),
            },
        }
    }
}

impl Ranged for GcInterval {
    type Bound = Duration;
    const OR: Option<&'static str> = Some("adaptive");

    fn amounts(&self) -> impl Iterator<Item = Duration> {
        match self {
            Self::Adaptive => None,
            Self::Fixed(interval) => Some(*interval),
        }
        .into_iter()
    }
}

const LONGEST_GC_INTERVAL: Duration = Duration::from_hours(12);

/// Range of a map's capacity for flows; the bounds are the same as Cilium's.
fn flows() -> Range {
    within::<u32>(1 << 10, 1 << 24).of("entries")
}

/// Range of the time for which an entry is kept after its last packet.
fn lifetime() -> Range {
    within::<Seconds>(Duration::from_secs(1), Duration::from_hours(240))
}

/// Connection tracking and translation.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
#[command(next_help_heading = "Conntrack")]
pub struct ConntrackSettings {
    /// Time between two garbage collections of conntrack entries, or adaptive to choose it by the number of entries
    /// that expire
    #[arg(
        long, value_name = "DURATION", default_value = "adaptive",
        add = within::<GcInterval>(Duration::from_secs(1), LONGEST_GC_INTERVAL)
    )]
    pub conntrack_gc_interval: GcInterval,
    /// Longest time between two garbage collections of conntrack entries if --conntrack-gc-interval is adaptive
    #[arg(
        long, value_name = "DURATION", default_value = "12h", value_parser = parse_duration,
        add = within::<Duration>(Duration::from_secs(10), LONGEST_GC_INTERVAL)
    )]
    pub conntrack_gc_max_interval: Duration,
    /// How long conntrack entries live.
    #[command(flatten)]
    pub timeouts: ConntrackTimeouts,
    /// Maximum number of conntrack entries for TCP, per IP version [default: 65536; with services, the value of
    /// --service-flow-max-entries]
    #[arg(long, value_name = "NUMBER", add = flows())]
    pub conntrack_max_entries: Option<u32>,
    /// Maximum number of conntrack entries for protocols other than TCP, per IP version
    #[arg(long, value_name = "NUMBER", default_value_t = DEFAULT_ANY_ENTRIES, add = flows())]
    pub conntrack_any_max_entries: u32,
    /// Maximum number of NAT entries for TCP, per IP version; each translation takes two
    #[arg(long, value_name = "NUMBER", default_value_t = DEFAULT_ENTRIES, add = flows())]
    pub nat_max_entries: u32,
    /// Maximum number of NAT entries for protocols other than TCP, per IP version; each translation takes two
    #[arg(long, value_name = "NUMBER", default_value_t = DEFAULT_ANY_ENTRIES, add = flows())]
    pub nat_any_max_entries: u32,
}

/// How long entries live.
#[derive(Args, Clone, Copy, Debug, PartialEq, Eq)]
#[command(next_help_heading = "Conntrack")]
pub struct ConntrackTimeouts {
    /// Lifetime of conntrack entries of TCP connections whose handshake is not complete after their last packet
    #[arg(
        long = "conntrack-timeout-tcp-syn",
        value_name = "DURATION",
        default_value_t = Self::default().tcp_syn,
        add = lifetime(), add = Live
    )]
    pub tcp_syn: Seconds,
    /// Lifetime of conntrack entries of established TCP connections after their last packet
    #[arg(
        long = "conntrack-timeout-tcp-established",
        value_name = "DURATION",
        default_value_t = Self::default().tcp_established,
        add = lifetime(), add = Live
    )]
    pub tcp_established: Seconds,
    /// Lifetime of conntrack entries of closed or reset TCP connections after their last packet
    #[arg(
        long = "conntrack-timeout-tcp-close",
        value_name = "DURATION",
        default_value_t = Self::default().tcp_close,
        add = lifetime(), add = Live
    )]
    pub tcp_close: Seconds,
    /// Lifetime of conntrack entries of UDP after their last packet
    #[arg(
        long = "conntrack-timeout-udp",
        value_name = "DURATION",
        default_value_t = Self::default().udp,
        add = lifetime(), add = Live
    )]
    pub udp: Seconds,
    /// Lifetime of conntrack entries of ICMP echo after their last packet
    #[arg(
        long = "conntrack-timeout-icmp",
        value_name = "DURATION",
        default_value_t = Self::default().icmp,
        add = lifetime(), add = Live
    )]
    pub icmp: Seconds,
    /// Lifetime of conntrack entries of SCTP after their last packet
    #[arg(
        long = "conntrack-timeout-sctp",
        value_name = "DURATION",
        default_value_t = Self::default().sctp,
        add = lifetime(), add = Live
    )]
    pub sctp: Seconds,
    /// Lifetime of conntrack entries of all other protocols after their last packet
    #[arg(
        long = "conntrack-timeout-any",
        value_name = "DURATION",
        default_value_t = Self::default().any,
        add = lifetime(), add = Live
    )]
    pub any: Seconds,
    /// How long the ports of a packet in fragments are kept for its later fragments
    #[arg(
        long = "conntrack-timeout-fragment",
        value_name = "DURATION",
        default_value_t = Self::default().fragment,
        add = lifetime(), add = Live
    )]
    pub fragment: Seconds,
}

impl Default for ConntrackTimeouts {
    fn default() -> Self {
        let Timeouts {
            tcp_syn,
            tcp_established,
            tcp_close,
            udp,
            icmp,
            sctp,
            any,
            fragment,
        } = Timeouts::default();
        Self {
            tcp_syn: Seconds::of(tcp_syn),
            tcp_established: Seconds::of(tcp_established),
            tcp_close: Seconds::of(tcp_close),
            udp: Seconds::of(udp),
            icmp: Seconds::of(icmp),
            sctp: Seconds::of(sctp),
            any: Seconds::of(any),
            fragment: Seconds::of(fragment),
        }
    }
}

impl From<ConntrackTimeouts> for Timeouts {
    fn from(timeouts: ConntrackTimeouts) -> Self {
        Self {
            tcp_syn: timeouts.tcp_syn.secs(),
            tcp_established: timeouts.tcp_established.secs(),
            tcp_close: timeouts.tcp_close.secs(),
            udp: timeouts.udp.secs(),
            icmp: timeouts.icmp.secs(),
            sctp: timeouts.sctp.secs(),
            any: timeouts.any.secs(),
            fragment: timeouts.fragment.secs(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_programs_learn_what_was_set() {
        assert_eq!(
            Timeouts::from(ConntrackTimeouts::default()),
            Timeouts::default()
        );
        let udp = Seconds::of(7);
        let timeouts = Timeouts::from(ConntrackTimeouts {
            udp,
            ..ConntrackTimeouts::default()
        });
        assert_eq!(
            timeouts,
            Timeouts {
                udp: 7,
                ..Timeouts::default()
            }
        );
    }

    #[test]
    fn an_interval_is_a_duration_or_adaptive() {
        for text in ["30s", "5m0s", "adaptive"] {
            let interval: GcInterval = text.parse().expect(text);
            assert_eq!(interval.to_string(), text);
        }
        for bad in ["", "30", "off", "-1s"] {
            assert_eq!(bad.parse::<GcInterval>(), Err(GcIntervalError), "{bad}");
        }
    }
}
