//! Settings in whole seconds.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use health_model::duration::{duration_text, parse_duration};

/// Whole seconds, from `MIN` to `MAX`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seconds<const MIN: u32, const MAX: u32>(u32);

impl<const MIN: u32, const MAX: u32> Seconds<MIN, MAX> {
    /// The number of seconds.
    pub const fn secs(self) -> u32 {
        self.0
    }

    /// Creates the setting from a value that is known to be within the bounds.
    pub(super) const fn of(secs: u32) -> Self {
        assert!(MIN <= secs && secs <= MAX);
        Self(secs)
    }

    fn duration(self) -> Duration {
        Duration::from_secs(self.0.into())
    }
}

impl<const MAX: u32> Default for Seconds<0, MAX> {
    fn default() -> Self {
        Self(0)
    }
}

/// The text or duration is outside the bounds of a [`Seconds`], which are given in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("write whole seconds from {min}s to {}h, like 90s or 2h", max / 3600)]
pub struct SecondsError {
    min: u32,
    max: u32,
}

impl<const MIN: u32, const MAX: u32> TryFrom<Duration> for Seconds<MIN, MAX> {
    type Error = SecondsError;

    fn try_from(duration: Duration) -> Result<Self, Self::Error> {
        match u32::try_from(duration.as_secs()) {
            Ok(secs) if (MIN..=MAX).contains(&secs) && duration.subsec_nanos() == 0 => {
                Ok(Self(secs))
            }
            _ => Err(SecondsError { min: MIN, max: MAX }),
        }
    }
}

impl<const MIN: u32, const MAX: u32> FromStr for Seconds<MIN, MAX> {
    type Err = SecondsError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let duration = parse_duration(text);
        duration
            .map_err(|_| SecondsError { min: MIN, max: MAX })?
            .try_into()
    }
}

impl<const MIN: u32, const MAX: u32> fmt::Display for Seconds<MIN, MAX> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&duration_text(self.duration()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// At most ten days.
    type Days = Seconds<1, 864_000>;

    #[test]
    fn seconds_are_whole_and_within_their_bounds() {
        for (text, secs) in [("1s", 1), ("90s", 90), ("2h", 7200), ("240h", 864_000)] {
            let read: Days = text.parse().expect(text);
            assert_eq!(read.secs(), secs);
            assert_eq!(read.to_string().parse(), Ok(read));
        }
        for bad in ["", "60", "0s", "500ms", "1.5s", "240h1s", "-1s", "off"] {
            let error = bad.parse::<Days>().expect_err(bad);
            let advice = "write whole seconds from 1s to 240h, like 90s or 2h";
            assert_eq!(error.to_string(), advice);
        }
    }

    #[test]
    fn no_time_at_all_is_within_bounds_that_begin_at_zero() {
        let none: Seconds<0, 3600> = "0s".parse().expect("0s");
        assert_eq!(none, Seconds::default());
        assert_eq!(none.to_string(), "0s");
        assert!("61m".parse::<Seconds<0, 3600>>().is_err());
    }
}
