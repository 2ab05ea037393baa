//! What to probe, and how often.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use health_common::probe::{Path, Protocol};
use health_model::duration::{duration_text, parse_duration};

use super::range::Ranged;

/// Time between two probes of a target, by path (what the address belongs to) and protocol. Targets without an interval
/// are not probed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeIntervals {
    /// Nodes' own addresses, ICMP.
    pub host_icmp: Option<Duration>,
    /// Nodes' own addresses, HTTP.
    pub host_http: Option<Duration>,
    /// Health endpoints, ICMP.
    pub endpoint_icmp: Option<Duration>,
    /// Health endpoints, HTTP.
    pub endpoint_http: Option<Duration>,
}

impl ProbeIntervals {
    /// Probes all targets once per `interval`.
    pub fn all(interval: Duration) -> Self {
        Self {
            host_icmp: Some(interval),
            host_http: Some(interval),
            endpoint_icmp: Some(interval),
            endpoint_http: Some(interval),
        }
    }

    /// Probes all targets once per `interval`, except as `choices` say; later choices override earlier ones.
    pub fn new(interval: Duration, choices: &[ProbeChoice]) -> Self {
        let mut intervals = Self::all(interval);
        for choice in choices {
            for (path, protocol) in CLASSES {
                if choice.path.is_none_or(|chosen| chosen == path)
                    && choice.protocol.is_none_or(|chosen| chosen == protocol)
                {
                    *intervals.get_mut(path, protocol) = choice.interval;
                }
            }
        }
        intervals
    }

    /// The interval of these targets; `None` if they are not probed.
    pub fn get(&self, path: Path, protocol: Protocol) -> Option<Duration> {
        let mut intervals = *self;
        *intervals.get_mut(path, protocol)
    }

    /// The intervals of all targets that are probed.
    pub fn iter(&self) -> impl Iterator<Item = Duration> {
        CLASSES
            .into_iter()
            .filter_map(|(path, protocol)| self.get(path, protocol))
    }

    fn get_mut(&mut self, path: Path, protocol: Protocol) -> &mut Option<Duration> {
        match (path, protocol) {
            (Path::Host, Protocol::Icmp) => &mut self.host_icmp,
            (Path::Host, Protocol::Http) => &mut self.host_http,
            (Path::Endpoint, Protocol::Icmp) => &mut self.endpoint_icmp,
            (Path::Endpoint, Protocol::Http) => &mut self.endpoint_http,
        }
    }
}

const CLASSES: [(Path, Protocol); 4] = [
    (Path::Host, Protocol::Icmp),
    (Path::Host, Protocol::Http),
    (Path::Endpoint, Protocol::Icmp),
    (Path::Endpoint, Protocol::Http),
];

/// An interval for some of the targets: `http=30s`, `endpoint=off`, `host-icmp=1s`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeChoice {
    /// What the addresses belong to; `None` means any.
    pub path: Option<Path>,
    /// How the targets are probed; `None` means by any protocol.
    pub protocol: Option<Protocol>,
    /// Their interval; `None` means that they are not probed.
    pub interval: Option<Duration>,
}

const TARGETS: [(&str, Option<Path>, Option<Protocol>); 8] = [
    ("icmp", None, Some(Protocol::Icmp)),
    ("http", None, Some(Protocol::Http)),
    ("host", Some(Path::Host), None),
    ("endpoint", Some(Path::Endpoint), None),
    ("host-icmp", Some(Path::Host), Some(Protocol::Icmp)),
    ("host-http", Some(Path::Host), Some(Protocol::Http)),
    ("endpoint-icmp", Some(Path::Endpoint), Some(Protocol::Icmp)),
    ("endpoint-http", Some(Path::Endpoint), Some(Protocol::Http)),
];

impl fmt::Display for ProbeChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named =
            |&&(_, path, protocol): &&(_, _, _)| (path, protocol) == (self.path, self.protocol);
        let name = TARGETS.iter().find(named).map_or("all", |(name, ..)| name);
        match self.interval {
            Some(interval) => write!(f, "{name}={}", duration_text(interval)),
            None => write!(f, "{name}=off"),
        }
    }
}

/// The text is not a [`ProbeChoice`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "write it like http=30s or endpoint-icmp=off; targets are icmp, http, host, endpoint, host-icmp, \
     host-http, endpoint-icmp and endpoint-http"
)]
pub struct ProbeChoiceError;

impl FromStr for ProbeChoice {
    type Err = ProbeChoiceError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (name, interval) = text.split_once('=').ok_or(ProbeChoiceError)?;
        let &(_, path, protocol) = TARGETS
            .iter()
            .find(|(known, ..)| *known == name)
            .ok_or(ProbeChoiceError)?;
        let interval = match interval {
            "off" => None,
            duration => Some(parse_duration(duration).map_err(|_| ProbeChoiceError)?),
        };
        Ok(Self {
            path,
            protocol,
            interval,
        })
    }
}

impl Ranged for ProbeChoice {
    type Bound = Duration;
    const OR: Option<&'static str> = Some("off");

    fn amounts(&self) -> impl Iterator<Item = Duration> {
        self.interval.into_iter()
    }
}

/// Time between two checks of something, or `off`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interval(pub Option<Duration>);

impl fmt::Display for Interval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(interval) => f.write_str(&duration_text(interval)),
            None => f.write_str("off"),
        }
    }
}

/// The text is not an [`Interval`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("write it like 10m or 1m30s, or off")]
pub struct IntervalError;

impl FromStr for Interval {
    type Err = IntervalError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "off" => Ok(Self(None)),
            text => {
                let interval = parse_duration(text).map_err(|_| IntervalError)?;
                Ok(Self(Some(interval)))
            }
        }
    }
}

impl Ranged for Interval {
    type Bound = Duration;
    const OR: Option<&'static str> = Some("off");

    fn amounts(&self) -> impl Iterator<Item = Duration> {
        self.0.into_iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_read_as_they_are_shown() {
        for text in [
            "http=30s",
            "endpoint=off",
            "host-icmp=1s",
            "endpoint-http=1m0s",
        ] {
            let choice: ProbeChoice = text.parse().expect(text);
            assert_eq!(choice.to_string(), text);
        }
        for bad in ["", "http", "=1s", "tcp=1s", "icmp=", "icmp=on", "icmp=10"] {
            assert_eq!(bad.parse::<ProbeChoice>(), Err(ProbeChoiceError), "{bad}");
        }
    }

    #[test]
    fn an_interval_may_be_off() {
        for text in ["10m0s", "1s", "off"] {
            let interval: Interval = text.parse().expect(text);
            assert_eq!(interval.to_string(), text);
        }
        for bad in ["", "10", "never", "-1s"] {
            assert_eq!(bad.parse::<Interval>(), Err(IntervalError), "{bad}");
        }
    }

    #[test]
    fn the_last_choice_for_a_target_stands() {
        let choices = ["http=off", "endpoint=30s", "endpoint-icmp=5s"].map(|c| c.parse().expect(c));
        let seconds = |n| Some(Duration::from_secs(n));
        assert_eq!(
            ProbeIntervals::new(Duration::from_secs(10), &choices),
            ProbeIntervals {
                host_icmp: seconds(10),
                host_http: None,
                endpoint_icmp: seconds(5),
                endpoint_http: seconds(30),
            }
        );
    }
}
