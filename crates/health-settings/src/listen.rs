//! Where the monitoring pages are served.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

use health_model::address::parse_socket_address;

/// Where a monitoring page is served: `ADDRESS:PORT`, `localhost:PORT` or `off`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListenAddress {
    /// Nowhere.
    Off,
    /// On a port of the host's loopback addresses, of both IP versions.
    Localhost(u16),
    /// On one address.
    Address(SocketAddr),
}

impl ListenAddress {
    /// The TCP port; `None` if the page is not served.
    pub fn port(self) -> Option<u16> {
        match self {
            Self::Off => None,
            Self::Localhost(port) => Some(port),
            Self::Address(address) => Some(address.port()),
        }
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::Localhost(port) => write!(f, "localhost:{port}"),
            Self::Address(address) => address.fmt(f),
        }
    }
}

/// The text is not a [`ListenAddress`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "not an address to listen on; write it like 127.0.0.1:9962, [::1]:9962, localhost:9962 or off"
)]
pub struct ListenAddressError;

impl FromStr for ListenAddress {
    type Err = ListenAddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "off" {
            return Ok(Self::Off);
        }
        match text.strip_prefix("localhost:") {
            Some(port) => port.parse().map(Self::Localhost).ok(),
            None => parse_socket_address(text).map(Self::Address).ok(),
        }
        .ok_or(ListenAddressError)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_to_listen_on_are_read_as_they_are_shown() {
        for text in ["off", "localhost:9879", "127.0.0.1:9962", "[::1]:9962"] {
            let address: ListenAddress = text.parse().expect(text);
            assert_eq!(address.to_string(), text);
        }
        let mapped: ListenAddress = "[::ffff:127.0.0.01]:9962".parse().expect("an address");
        assert_eq!(mapped.to_string(), "127.0.0.1:9962");
        for bad in [
            "",
            "on",
            "localhost",
            "localhost:x",
            "::1:80x",
            "127.0.0.1",
            ":9962",
        ] {
            assert_eq!(
                bad.parse::<ListenAddress>(),
                Err(ListenAddressError),
                "{bad}"
            );
        }
    }
}
