//! How often conntrack entries are collected.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::duration::{duration_text, parse_duration};

/// Time between two collections, or `adaptive`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum GcInterval {
    /// By how much each collection removes.
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

impl From<GcInterval> for String {
    fn from(interval: GcInterval) -> Self {
        interval.to_string()
    }
}

/// The text is no [`GcInterval`].
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

impl TryFrom<String> for GcInterval {
    type Error = GcIntervalError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
