//! Address ranges in settings.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::Family;
use crate::address::{parse_ip, parse_network_or_ip};

/// The string is not a range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not an address range; expected a CIDR, an address, or FIRST-LAST of one IP version"
)]
pub struct AddressRangeError(String);

/// Consecutive addresses of one family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct AddressRange {
    first: IpAddr,
    last: IpAddr,
}

impl AddressRange {
    /// Whether an address is in it.
    pub fn contains(&self, address: IpAddr) -> bool {
        Family::of(address) == Family::of(self.first) && (self.first..=self.last).contains(&address)
    }

    /// Its last address.
    pub const fn last(&self) -> IpAddr {
        self.last
    }
}

impl fmt::Display for AddressRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

impl FromStr for AddressRange {
    type Err = AddressRangeError;

    fn from_str(text: &str) -> Result<Self, AddressRangeError> {
        let bad = || AddressRangeError(text.to_owned());
        if let Some((first, last)) = text.split_once('-') {
            let first = parse_ip(first.trim()).map_err(|_| bad())?;
            let last = parse_ip(last.trim()).map_err(|_| bad())?;
            let is_range = Family::of(first) == Family::of(last) && first <= last;
            return is_range.then_some(Self { first, last }).ok_or_else(bad);
        }
        let cidr = parse_network_or_ip(text).map_err(|_| bad())?;
        Ok(Self {
            first: cidr.network(),
            last: cidr.broadcast(),
        })
    }
}

impl TryFrom<String> for AddressRange {
    type Error = AddressRangeError;

    fn try_from(text: String) -> Result<Self, AddressRangeError> {
        text.parse()
    }
}

impl From<AddressRange> for String {
    fn from(range: AddressRange) -> Self {
        range.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_cidrs_addresses_or_first_and_last() {
        for (text, shown) in [
            ("10.0.0.0/30", "10.0.0.0-10.0.0.3"),
            ("10.0.0.7", "10.0.0.7-10.0.0.7"),
            ("::ffff:10.0.0.0/126", "10.0.0.0-10.0.0.3"),
            ("010.0.0.07 - ::ffff:10.0.0.9", "10.0.0.7-10.0.0.9"),
            ("fd00::1-fd00::f", "fd00::1-fd00::f"),
            ("10.0.0.9 - 10.0.0.10", "10.0.0.9-10.0.0.10"),
        ] {
            assert_eq!(text.parse::<AddressRange>().unwrap().to_string(), shown);
        }
        for bad in [
            "",
            "a",
            "10.0.0.2-10.0.0.1",
            "10.0.0.1-fd00::1",
            "10.0.0.0/33",
            "-",
        ] {
            assert!(bad.parse::<AddressRange>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn only_addresses_between_the_ends_are_in_it() {
        let range: AddressRange = "10.0.0.2-10.0.0.4".parse().unwrap();
        for (address, inside) in [
            ("10.0.0.1", false),
            ("10.0.0.2", true),
            ("10.0.0.4", true),
            ("10.0.0.5", false),
            ("fd00::1", false),
        ] {
            assert_eq!(
                range.contains(address.parse().unwrap()),
                inside,
                "{address}"
            );
        }
    }
}
