//! Hardware addresses.

use std::fmt;
use std::str::FromStr;

use rand::Rng;
use serde::{Deserialize, Serialize};

/// An Ethernet address, bytes in transmission order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MacAddr(pub [u8; 6]);

/// A string that is not an Ethernet address.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is not a MAC address; expected aa:bb:cc:dd:ee:ff")]
pub struct BadMacAddr(String);

/// The group bit of the first byte: set for multicast.
const GROUP: u8 = 0x01;
/// The bit of the first byte that distinguishes locally administered addresses from manufacturers' addresses.
const LOCAL: u8 = 0x02;

impl MacAddr {
    /// Returns a random unicast address, marked as locally administered.
    pub fn random(rng: &mut (impl Rng + ?Sized)) -> Self {
        let mut bytes: [u8; 6] = rng.random();
        bytes[0] = bytes[0] & !GROUP | LOCAL;
        Self(bytes)
    }
}

impl fmt::Display for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl FromStr for MacAddr {
    type Err = BadMacAddr;

    fn from_str(text: &str) -> Result<Self, BadMacAddr> {
        let bad = || BadMacAddr(text.to_owned());
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts
                .next()
                .filter(|part| part.len() == 2 && part.bytes().all(|b| b.is_ascii_hexdigit()))
                .ok_or_else(bad)?;
            *byte = u8::from_str_radix(part, 16).map_err(|_| bad())?;
        }
        parts.next().map_or(Ok(Self(bytes)), |_| Err(bad()))
    }
}

impl TryFrom<String> for MacAddr {
    type Error = BadMacAddr;

    fn try_from(text: String) -> Result<Self, BadMacAddr> {
        text.parse()
    }
}

impl From<MacAddr> for String {
    fn from(mac: MacAddr) -> Self {
        mac.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_addresses_are_local_unicast() {
        let mut rng = rand::rng();
        for _ in 0..1000 {
            let mac = MacAddr::random(&mut rng);
            assert_eq!(mac.0[0] & (GROUP | LOCAL), LOCAL, "{mac}");
        }
    }

    #[test]
    fn text_survives_the_round_trip() {
        let mac = MacAddr([0x02, 0, 0x5e, 0xff, 0x10, 0x09]);
        assert_eq!(mac.to_string(), "02:00:5e:ff:10:09");
        assert_eq!(mac.to_string().parse::<MacAddr>().unwrap(), mac);
    }

    #[test]
    fn other_text_is_refused() {
        for text in [
            "",
            "02",
            "02:00:5e:ff:10",
            "02:00:5e:ff:10:09:11",
            "02:00:5e:ff:10:9",
            "02:00:5e:ff:10:zz",
            "+2:00:5e:ff:10:09",
        ] {
            assert!(text.parse::<MacAddr>().is_err(), "{text}");
        }
    }
}
