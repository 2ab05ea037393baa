//! Text form of protocols and networks in flags, queries and answers.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use ipnet::IpNet;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::address::parse_network_or_ip;

/// An IP protocol number, shown by name (IANA protocol numbers).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "openapi",
    derive(schemars::JsonSchema),
    schemars(with = "String", inline)
)]
pub struct IpProtocol(pub u8);

impl IpProtocol {
    const NAMES: [(u8, &str); 5] = [
        (1, "ICMP"),
        (6, "TCP"),
        (17, "UDP"),
        (58, "ICMPv6"),
        (132, "SCTP"),
    ];

    fn name(self) -> Cow<'static, str> {
        match Self::NAMES.iter().find(|(number, _)| *number == self.0) {
            Some((_, name)) => (*name).into(),
            None => self.0.to_string().into(),
        }
    }
}

/// The string is not an [`IpProtocol`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected tcp, udp, icmp, icmpv6, sctp or a number from 0 to 255")]
pub struct IpProtocolError;

impl FromStr for IpProtocol {
    type Err = IpProtocolError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let named = Self::NAMES
            .iter()
            .find(|(_, name)| name.eq_ignore_ascii_case(text));
        match named {
            Some((number, _)) => Ok(Self(*number)),
            None => text.parse().map(Self).map_err(|_| IpProtocolError),
        }
    }
}

impl fmt::Display for IpProtocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

impl Serialize for IpProtocol {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&self.name())
    }
}

impl<'de> Deserialize<'de> for IpProtocol {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = Cow::<str>::deserialize(from)?;
        text.parse().map_err(D::Error::custom)
    }
}

/// An address or a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network(pub IpNet);

/// The string is not a [`Network`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected an address, or a prefix such as 10.0.0.0/8")]
pub struct NetworkError;

impl FromStr for Network {
    type Err = NetworkError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse_network_or_ip(text)
            .map(Self)
            .map_err(|_| NetworkError)
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn protocols_are_read_as_they_are_shown() {
        for number in 0..=u8::MAX {
            let protocol = IpProtocol(number);
            assert_eq!(protocol.to_string().parse(), Ok(protocol));
            let json = serde_json::to_string(&protocol).unwrap();
            assert_eq!(serde_json::from_str::<IpProtocol>(&json).unwrap(), protocol);
        }
        assert_eq!("tcp".parse(), Ok(IpProtocol(6)));
        assert_eq!("256".parse::<IpProtocol>(), Err(IpProtocolError));
    }

    #[test]
    fn networks_are_read_as_they_are_shown() {
        for text in ["10.0.0.0/8", "fd00::/8", "192.0.2.9/32", "::1/128"] {
            let network: Network = text.parse().unwrap();
            assert_eq!(network.to_string(), text);
        }
        assert_eq!("::1".parse::<Network>(), "::1/128".parse());
        for text in ["::ffff:10.0.0.0/104", "010.000.0.0/08"] {
            assert_eq!(text.parse::<Network>(), "10.0.0.0/8".parse(), "{text}");
        }
        assert_eq!("host".parse::<Network>(), Err(NetworkError));
    }
}
