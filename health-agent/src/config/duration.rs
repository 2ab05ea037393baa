//! Durations in flags and in JSON.

use std::str::FromStr;
use std::time::Duration;

use jiff::SignedDuration;

use crate::api::types::go_duration;

/// A duration as flags and reports write it: `10s`, `500ms`, `1m0s`.
pub fn duration_text(value: Duration) -> String {
    go_duration(value.as_nanos().try_into().unwrap_or(i64::MAX))
}

/// Reads a duration that [`duration_text`] or a person wrote: `10s`, `500ms`, `1m`, `1m30s`.
pub fn parse_duration(text: &str) -> Result<Duration, DurationError> {
    SignedDuration::from_str(text)
        .ok()
        .and_then(|d| Duration::try_from(d).ok())
        .ok_or(DurationError)
}

/// The text is no duration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a duration; write it like 10s, 500ms or 1m30s")]
pub struct DurationError;

/// A whole number of nanoseconds.
pub(super) mod nanoseconds {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer};

    pub(in super::super) fn serialize<S: Serializer>(
        value: &Duration,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.serialize_u64(value.as_nanos().try_into().unwrap_or(u64::MAX))
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Duration, D::Error> {
        u64::deserialize(from).map(Duration::from_nanos)
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
}
