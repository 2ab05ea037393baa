//! Formats IP addresses fast enough for listings of a million rows.

use std::fmt::{self, Write as _};
use std::net::{IpAddr, Ipv4Addr};

use serde::Serializer;
use serde::ser::Error as _;

/// Serializes an address in the standard library's format.
pub(super) fn serialize<S: Serializer>(address: &IpAddr, to: S) -> Result<S::Ok, S::Error> {
    let mut text = Text::default();
    let written = match address {
        IpAddr::V4(v4) => text.write_v4(*v4),
        IpAddr::V6(v6) => write!(text, "{v6}"),
    };
    written.map_err(S::Error::custom)?;
    to.serialize_str(text.as_str())
}

/// Length of the longest address: all IPv6 groups, the last two in IPv4 form.
const MAX_LEN: usize = 45;

/// A formatted address in a stack buffer.
struct Text {
    bytes: [u8; MAX_LEN],
    len: usize,
}

impl Default for Text {
    fn default() -> Self {
        Self {
            bytes: [0; MAX_LEN],
            len: 0,
        }
    }
}

impl Text {
    fn as_str(&self) -> &str {
        std::str::from_utf8(&self.bytes[..self.len]).unwrap_or_default()
    }

    /// Several times as fast as the standard library's formatter.
    fn write_v4(&mut self, address: Ipv4Addr) -> fmt::Result {
        let mut digits = itoa::Buffer::new();
        for (place, octet) in address.octets().into_iter().enumerate() {
            if place > 0 {
                self.write_str(".")?;
            }
            self.write_str(digits.format(octet))?;
        }
        Ok(())
    }
}

impl fmt::Write for Text {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = self.bytes.get_mut(self.len..self.len + text.len());
        room.ok_or(fmt::Error)?.copy_from_slice(text.as_bytes());
        self.len += text.len();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn serialized(address: IpAddr) -> String {
        let mut json = Vec::new();
        serialize(&address, &mut serde_json::Serializer::new(&mut json)).unwrap();
        String::from_utf8(json).unwrap()
    }

    proptest! {
        #[test]
        fn addresses_are_what_the_standard_library_writes(v4: u32, v6: u128) {
            for address in [IpAddr::V4(v4.into()), IpAddr::V6(v6.into())] {
                prop_assert_eq!(serialized(address), format!("\"{address}\""));
            }
        }
    }

    #[test]
    fn the_longest_address_fits() {
        for text in [
            "255.255.255.255",
            "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
            "::ffff:255.255.255.255",
            "::",
        ] {
            assert_eq!(serialized(text.parse().unwrap()), format!("\"{text}\""));
        }
    }
}
