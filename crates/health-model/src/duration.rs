//! Durations in flags and in JSON.

use std::str::FromStr;
use std::time::Duration;

use jiff::SignedDuration;

/// Formats a duration as Go does, which Cilium's schema and output use: `9.557967ms`, `1m0s`, `405.072µs`.
pub fn go_duration(ns: i64) -> String {
    let (sign, ns) = if ns < 0 {
        ("-", ns.unsigned_abs())
    } else {
        ("", ns.unsigned_abs())
    };
    let decimal = |value: u64, unit: u64| {
        let fraction = value % unit;
        let width = unit.ilog10() as usize;
        let digits = format!("{fraction:0width$}");
        match digits.trim_end_matches('0') {
            _ if unit == 1 => value.to_string(),
            "" => (value / unit).to_string(),
            digits => format!("{}.{digits}", value / unit),
        }
    };
    let text = match ns {
        0 => "0s".to_owned(),
        1..1_000 => format!("{ns}ns"),
        1_000..1_000_000 => format!("{}µs", decimal(ns, 1_000)),
        1_000_000..1_000_000_000 => format!("{}ms", decimal(ns, 1_000_000)),
        _ => {
            let minutes = ns / 60_000_000_000;
            let seconds = decimal(ns % 60_000_000_000, 1_000_000_000);
            match (minutes / 60, minutes % 60) {
                (0, 0) => format!("{seconds}s"),
                (0, minutes) => format!("{minutes}m{seconds}s"),
                (hours, minutes) => format!("{hours}h{minutes}m{seconds}s"),
            }
        }
    };
    format!("{sign}{text}")
}

/// Like [`go_duration`], but with three significant digits: stored round-trip times are not more precise.
pub fn short_duration(ns: u64) -> String {
    let unit = 10_u64.pow(ns.max(1).ilog10().saturating_sub(2));
    let rounded = (ns.saturating_add(unit / 2)) / unit * unit;
    go_duration(i64::try_from(rounded).unwrap_or(i64::MAX))
}

/// Formats a duration as in flags and reports: `10s`, `500ms`, `1m0s`.
pub fn duration_text(value: Duration) -> String {
    go_duration(value.as_nanos().try_into().unwrap_or(i64::MAX))
}

/// Parses a duration written by [`duration_text`] or by a person: `10s`, `500ms`, `1m`, `1m30s`.
pub fn parse_duration(text: &str) -> Result<Duration, DurationError> {
    SignedDuration::from_str(text)
        .ok()
        .and_then(|d| Duration::try_from(d).ok())
        .ok_or(DurationError)
}

/// The string is not a duration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a duration; write it like 10s, 500ms or 1m30s")]
pub struct DurationError;

/// A whole number of nanoseconds, for `#[serde(with)]`.
pub mod nanoseconds {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer};

    /// Serializes a duration; one that is too long for 64 bits becomes the maximum.
    pub fn serialize<S: Serializer>(value: &Duration, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u64(value.as_nanos().try_into().unwrap_or(u64::MAX))
    }

    /// Deserializes a duration.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
        u64::deserialize(from).map(Duration::from_nanos)
    }
}

/// Like [`nanoseconds`], for an optional value.
pub mod optional_nanoseconds {
    use std::time::Duration;

    use serde::{Deserialize as _, Deserializer, Serialize, Serializer};

    #[derive(serde::Deserialize, Serialize)]
    struct Whole(#[serde(with = "super::nanoseconds")] Duration);

    /// Serializes an optional duration.
    pub fn serialize<S: Serializer>(value: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
        value.map(Whole).serialize(to)
    }

    /// Deserializes an optional duration.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
        Ok(Option::<Whole>::deserialize(from)?.map(|whole| whole.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_with_their_unit() {
        for (text, ms) in [
            ("10s", 10_000),
            ("500ms", 500),
            ("1m", 60_000),
            ("1m30s", 90_000),
            ("1.5s", 1_500),
            ("0s", 0),
        ] {
            assert_eq!(
                parse_duration(text),
                Ok(Duration::from_millis(ms)),
                "{text}"
            );
        }
        for bad in [
            "",
            "10",
            "-1s",
            "ten",
            "10x",
            "s",
            "1 month",
            "99999999999999999999s",
        ] {
            assert_eq!(parse_duration(bad), Err(DurationError), "{bad}");
        }
    }

    #[test]
    fn durations_read_as_in_go() {
        for (ns, text) in [
            (0, "0s"),
            (7, "7ns"),
            (405_072, "405.072µs"),
            (9_557_967, "9.557967ms"),
            (10_000_000_000, "10s"),
            (1_500_000_000, "1.5s"),
            (60_000_000_000, "1m0s"),
            (3_661_000_000_000, "1h1m1s"),
        ] {
            assert_eq!(go_duration(ns), text);
        }
    }
}
