//! Protocols, ports and ICMP types: the part of a packet that rules check besides its two ends.

use std::fmt;
use std::str::FromStr;

use health_common::ct::{IP_PROTOCOL_SCTP, IP_PROTOCOL_UDP};
use health_common::echo::{PROTOCOL_ICMP, PROTOCOL_ICMPV6};
use health_common::tcp::IP_PROTOCOL_TCP;
use serde::{Deserialize, Serialize};

/// The string names no protocol, or no port of one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a port and protocol; expected, for example, 80/TCP, 53/UDP, 8/ICMP (an ICMP type) or 47 (a protocol number)"
)]
pub struct ParseL4Error(String);

/// A protocol's number (IANA, "Assigned Internet Protocol Numbers").
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema), schemars(inline))]
#[serde(try_from = "String", into = "String")]
pub struct Protocol(pub u8);

impl Protocol {
    /// ICMP of IPv4.
    pub const ICMP: Self = Self(PROTOCOL_ICMP);
    /// TCP.
    pub const TCP: Self = Self(IP_PROTOCOL_TCP);
    /// UDP.
    pub const UDP: Self = Self(IP_PROTOCOL_UDP);
    /// ICMP of IPv6.
    pub const ICMPV6: Self = Self(PROTOCOL_ICMPV6);
    /// SCTP.
    pub const SCTP: Self = Self(IP_PROTOCOL_SCTP);

    /// Protocols with ports: the meaning of `ANY` in a rule.
    pub const WITH_PORTS: [Self; 3] = [Self::TCP, Self::UDP, Self::SCTP];

    const NAMED: [(Self, &str); 5] = [
        (Self::ICMP, "ICMP"),
        (Self::TCP, "TCP"),
        (Self::UDP, "UDP"),
        (Self::ICMPV6, "ICMPv6"),
        (Self::SCTP, "SCTP"),
    ];
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Self::NAMED.iter().find(|(protocol, _)| protocol == self) {
            Some((_, name)) => f.write_str(name),
            None => self.0.fmt(f),
        }
    }
}

impl From<Protocol> for String {
    fn from(protocol: Protocol) -> Self {
        protocol.to_string()
    }
}

impl TryFrom<String> for Protocol {
    type Error = ParseL4Error;

    fn try_from(text: String) -> Result<Self, ParseL4Error> {
        text.parse()
    }
}

impl FromStr for Protocol {
    type Err = ParseL4Error;

    /// A name in any case, or a number.
    fn from_str(text: &str) -> Result<Self, ParseL4Error> {
        let named = Self::NAMED
            .iter()
            .find(|(_, name)| name.eq_ignore_ascii_case(text));
        match named {
            Some((protocol, _)) => Ok(*protocol),
            None => text
                .parse()
                .map(Self)
                .map_err(|_| ParseL4Error(text.to_owned())),
        }
    }
}

/// The part of a packet that rules check: its protocol and destination port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
pub struct L4 {
    /// Its protocol, by name or number.
    pub protocol: Protocol,
    /// Its destination port; for ICMP, the type; 0 if the protocol has neither.
    pub port: u16,
}

impl L4 {
    /// This port of this protocol.
    pub const fn new(protocol: Protocol, port: u16) -> Self {
        Self { protocol, port }
    }
}

impl fmt::Display for L4 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if Protocol::NAMED
            .iter()
            .any(|(known, _)| *known == self.protocol)
        {
            write!(f, "{}/{}", self.port, self.protocol)
        } else {
            self.protocol.fmt(f)
        }
    }
}

impl FromStr for L4 {
    type Err = ParseL4Error;

    fn from_str(text: &str) -> Result<Self, ParseL4Error> {
        let no = || ParseL4Error(text.to_owned());
        let (port, protocol) = match text.split_once('/') {
            Some((port, protocol)) => (port.parse().map_err(|_| no())?, protocol),
            None => (0, text),
        };
        let protocol: Protocol = protocol.parse().map_err(|_| no())?;
        let is_icmp = matches!(protocol, Protocol::ICMP | Protocol::ICMPV6);
        if is_icmp && port > u16::from(u8::MAX) {
            return Err(no());
        }
        Ok(Self { protocol, port })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_read_as_they_are_shown() {
        for text in ["80/TCP", "53/UDP", "8/ICMP", "128/ICMPv6", "7/SCTP", "47"] {
            assert_eq!(text.parse::<L4>().unwrap().to_string(), text);
        }
        assert_eq!("80/tcp".parse(), Ok(L4::new(Protocol::TCP, 80)));
        assert_eq!("tcp".parse(), Ok(L4::new(Protocol::TCP, 0)));
        for bad in ["", "/", "80/", "http/TCP", "65536/TCP", "256/ICMP", "256"] {
            assert!(bad.parse::<L4>().is_err(), "{bad:?}");
        }
    }
}
