//! Ranges of settings. A definition states its range with `add = within(...)`; value checks, the help, the JSON Schema
//! and the reference are derived from it.

use std::fmt;
use std::time::Duration;

use clap::builder::ArgExt;
use clap::{Arg, ArgMatches};
use health_model::duration::duration_text;

use super::form::name;

/// The values that a setting may have, both ends inclusive.
#[derive(Clone, Debug)]
pub struct Range {
    /// The smallest valid value.
    pub min: Amount,
    /// The largest valid value.
    pub max: Amount,
    /// The unit of a number; empty for durations and for numbers without a unit.
    unit: &'static str,
    /// A word that is also valid.
    or: Option<&'static str>,
    /// Finds the index of a parsed value outside the range.
    outside: fn(&Self, &ArgMatches, &str) -> Option<usize>,
}

impl ArgExt for Range {}

/// A number or a duration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Amount {
    /// A number.
    Number(u32),
    /// A duration.
    Time(Duration),
}

/// The type of a setting that can have a range.
pub(super) trait Ranged: Clone + Send + Sync + 'static {
    /// The type of the smallest and the largest value.
    type Bound: Into<Amount>;
    /// A word that is valid instead of an amount.
    const OR: Option<&'static str> = None;

    /// The amounts that must be within the range.
    fn amounts(&self) -> impl Iterator<Item = Self::Bound>;
}

/// The range from `min` to `max` of a setting of type `T`.
pub(super) fn within<T: Ranged>(min: T::Bound, max: T::Bound) -> Range {
    Range {
        min: min.into(),
        max: max.into(),
        unit: "",
        or: T::OR,
        outside: |range, matches, id| {
            let is_outside = |amount: T::Bound| {
                let amount = amount.into();
                amount < range.min || range.max < amount
            };
            let mut values = matches.get_many::<T>(id)?;
            values.position(|value| value.amounts().any(is_outside))
        },
    }
}

impl Range {
    /// Sets the unit.
    pub(super) fn of(self, unit: &'static str) -> Self {
        Self { unit, ..self }
    }

    /// Why a value outside the range is invalid.
    pub(super) fn reason(&self) -> String {
        format!("must be {self}")
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { min, max, unit, .. } = self;
        write!(f, "{min} to {max}")?;
        if !unit.is_empty() {
            write!(f, " {unit}")?;
        }
        match self.or {
            Some(word) => write!(f, ", or {word}"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.fmt(f),
            Self::Time(duration) => {
                // `12h` is easier to read than `12h0m0s`.
                let text = duration_text(*duration);
                let text = text
                    .strip_suffix("m0s")
                    .map_or(&*text, |whole| &text[..=whole.len()]);
                let text = text
                    .strip_suffix("h0m")
                    .map_or(text, |whole| &text[..=whole.len()]);
                f.write_str(text)
            }
        }
    }
}

/// The range stated in a setting's definition.
pub(super) fn range(arg: &Arg) -> Option<&Range> {
    arg.get::<Range>()
}

/// A value outside the range of its setting: the value as written, and why it is invalid.
pub(super) fn outside(arg: &Arg, matches: &ArgMatches) -> Option<(String, String)> {
    let range = range(arg)?;
    let id = arg.get_id().as_str();
    let index = (range.outside)(range, matches, id)?;
    let text = matches.get_raw(id).and_then(|mut texts| texts.nth(index));
    let text = text.map_or_else(|| name(arg).into(), |text| text.to_string_lossy());
    Some((text.into_owned(), range.reason()))
}

/// Implements [`Ranged`] for numbers.
macro_rules! ranged_numbers {
    ($($number:ty),*) => {$(
        impl Ranged for $number {
            type Bound = Self;

            fn amounts(&self) -> impl Iterator<Item = Self> {
                [*self].into_iter()
            }
        }

        impl From<$number> for Amount {
            fn from(number: $number) -> Self {
                Self::Number(number.into())
            }
        }
    )*};
}

ranged_numbers!(u8, u16, u32);

impl Ranged for Duration {
    type Bound = Self;

    fn amounts(&self) -> impl Iterator<Item = Self> {
        [*self].into_iter()
    }
}

impl From<Duration> for Amount {
    fn from(duration: Duration) -> Self {
        Self::Time(duration)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_no_empty_parts() {
        for (seconds, text) in [
            (0, "0s"),
            (10, "10s"),
            (90, "1m30s"),
            (600, "10m"),
            (3600, "1h"),
            (3630, "1h0m30s"),
            (3660, "1h1m"),
            (36_000, "10h"),
        ] {
            assert_eq!(Amount::Time(Duration::from_secs(seconds)).to_string(), text);
        }
        assert_eq!(
            Amount::Time(Duration::from_millis(100)).to_string(),
            "100ms"
        );
    }
}
