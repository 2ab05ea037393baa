//! Lifetimes and limits of conntrack entries, and how often they are collected.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use health_common::ct::{DEFAULT_ANY_ENTRIES, DEFAULT_ENTRIES, Timeouts};
use health_model::duration::{duration_text, parse_duration};

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

/// How long an entry is kept after its last packet: up to ten days.
pub type Lifetime = Seconds<1, { 240 * 3600 }>;

/// Connection tracking and translation.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
#[command(next_help_heading = "Conntrack")]
pub struct ConntrackSettings {
    /// Time between two garbage collections of conntrack entries, 1s to 12h, or adaptive to choose it by the number
    /// of entries that expire
    #[arg(long, value_name = "DURATION", default_value = "adaptive")]
    pub conntrack_gc_interval: GcInterval,
    /// Longest time between two garbage collections of conntrack entries if --conntrack-gc-interval is adaptive, 10s
    /// to 12h
    #[arg(long, value_name = "DURATION", default_value = "12h", value_parser = parse_duration)]
    pub conntrack_gc_max_interval: Duration,
    /// How long conntrack entries live.
    #[command(flatten)]
    pub timeouts: ConntrackTimeouts,
    /// Maximum number of conntrack entries for TCP, per IP version, 1024 to 16777216 [default: 65536; with services,
    /// the value of --service-flow-max-entries]
    #[arg(long, value_name = "NUMBER")]
    pub conntrack_max_entries: Option<u32>,
    /// Maximum number of conntrack entries for protocols other than TCP, per IP version, 1024 to 16777216
    #[arg(long, value_name = "NUMBER", default_value_t = DEFAULT_ANY_ENTRIES)]
    pub conntrack_any_max_entries: u32,
    /// Maximum number of NAT entries for TCP, per IP version, 1024 to 16777216; each translation takes two
    #[arg(long, value_name = "NUMBER", default_value_t = DEFAULT_ENTRIES)]
    pub nat_max_entries: u32,
    /// Maximum number of NAT entries for protocols other than TCP, per IP version, 1024 to 16777216; each translation
    /// takes two
    #[arg(long, value_name = "NUMBER", default_value_t = DEFAULT_ANY_ENTRIES)]
    pub nat_any_max_entries: u32,
}

/// How long entries live.
#[derive(Args, Clone, Copy, Debug, PartialEq, Eq)]
#[command(next_help_heading = "Conntrack")]
pub struct ConntrackTimeouts {
    /// Lifetime of conntrack entries of TCP connections whose handshake is not complete after their last packet, 1s to
    /// 240h
    #[arg(
        long = "conntrack-timeout-tcp-syn",
        value_name = "DURATION",
        default_value_t = Self::default().tcp_syn
    )]
    pub tcp_syn: Lifetime,
    /// Lifetime of conntrack entries of established TCP connections after their last packet, 1s to 240h
    #[arg(
        long = "conntrack-timeout-tcp-established",
        value_name = "DURATION",
        default_value_t = Self::default().tcp_established
    )]
    pub tcp_established: Lifetime,
    /// Lifetime of conntrack entries of closed or reset TCP connections after their last packet, 1s to 240h
    #[arg(
        long = "conntrack-timeout-tcp-close",
        value_name = "DURATION",
        default_value_t = Self::default().tcp_close
    )]
    pub tcp_close: Lifetime,
    /// Lifetime of conntrack entries of UDP after their last packet, 1s to 240h
    #[arg(
        long = "conntrack-timeout-udp",
        value_name = "DURATION",
        default_value_t = Self::default().udp
    )]
    pub udp: Lifetime,
    /// Lifetime of conntrack entries of ICMP echo after their last packet, 1s to 240h
    #[arg(
        long = "conntrack-timeout-icmp",
        value_name = "DURATION",
        default_value_t = Self::default().icmp
    )]
    pub icmp: Lifetime,
    /// Lifetime of conntrack entries of SCTP after their last packet, 1s to 240h
    #[arg(
        long = "conntrack-timeout-sctp",
        value_name = "DURATION",
        default_value_t = Self::default().sctp
    )]
    pub sctp: Lifetime,
    /// Lifetime of conntrack entries of all other protocols after their last packet, 1s to 240h
    #[arg(
        long = "conntrack-timeout-any",
        value_name = "DURATION",
        default_value_t = Self::default().any
    )]
    pub any: Lifetime,
    /// How long the ports of a packet in fragments are kept for its later fragments, 1s to 240h
    #[arg(
        long = "conntrack-timeout-fragment",
        value_name = "DURATION",
        default_value_t = Self::default().fragment
    )]
    pub fragment: Lifetime,
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
            tcp_syn: Lifetime::of(tcp_syn),
            tcp_established: Lifetime::of(tcp_established),
            tcp_close: Lifetime::of(tcp_close),
            udp: Lifetime::of(udp),
            icmp: Lifetime::of(icmp),
            sctp: Lifetime::of(sctp),
            any: Lifetime::of(any),
            fragment: Lifetime::of(fragment),
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
        let udp = Lifetime::of(7);
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
