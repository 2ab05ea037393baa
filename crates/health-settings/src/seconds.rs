//! Settings in whole seconds.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use health_model::duration::{duration_text, parse_duration};

use super::range::Ranged;

/// Whole seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seconds(u32);

impl Seconds {
    /// The number of seconds.
    pub const fn secs(self) -> u32 {
        self.0
    }

    /// Creates the setting from a number of seconds.
    pub(super) const fn of(secs: u32) -> Self {
        Self(secs)
    }

    fn duration(self) -> Duration {
        Duration::from_secs(self.0.into())
    }
}

/// The text is not a [`Seconds`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("write whole seconds, like 90s or 2h")]
pub struct SecondsError;

impl FromStr for Seconds {
    type Err = SecondsError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let duration = parse_duration(text).map_err(|_| SecondsError)?;
        if duration.subsec_nanos() != 0 {
            return Err(SecondsError);
        }
        // The maximum is outside every range.
        Ok(Self(duration.as_secs().try_into().unwrap_or(u32::MAX)))
    }
}

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&duration_text(self.duration()))
    }
}

impl Ranged for Seconds {
    type Bound = Duration;

    fn amounts(&self) -> impl Iterator<Item = Duration> {
        [self.duration()].into_iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_whole() {
        for (text, secs) in [
            ("0s", 0),
            ("1s", 1),
            ("90s", 90),
            ("2h", 7200),
            ("9999999h", u32::MAX),
        ] {
            let read: Seconds = text.parse().expect(text);
            assert_eq!(read.secs(), secs);
            assert_eq!(read.to_string().parse(), Ok(read));
        }
        for bad in ["", "60", "500ms", "1.5s", "-1s", "off"] {
            assert_eq!(bad.parse::<Seconds>(), Err(SecondsError), "{bad}");
        }
    }
}
