//! Ports by number and by name.

use std::fmt;

/// A port that a container lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedPort {
    /// The port's name; may be empty.
    pub name: String,
    /// The port number.
    pub port: u16,
}

/// A port as given in a probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Port {
    /// The port number.
    Number(i32),
    /// The name of one of the container's ports, or a number as a string.
    Name(String),
}

impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.fmt(f),
            Self::Name(name) => name.fmt(f),
        }
    }
}

/// A probe's port that does not exist.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PortError {
    /// The number is not a valid port.
    #[error("invalid port {0}; expected 1 to 65535")]
    OutOfRange(i64),
    /// The container has no port of this name.
    #[error("the container has no port {0:?}")]
    Unknown(String),
}

impl Port {
    /// Resolves the port to a number, using the container's ports.
    pub fn resolve(&self, ports: &[NamedPort]) -> Result<u16, PortError> {
        let number = match self {
            Self::Number(number) => i64::from(*number),
            Self::Name(name) => {
                let named = ports
                    .iter()
                    .find(|port| port.name == *name && !name.is_empty());
                match named {
                    Some(port) => i64::from(port.port),
                    None => name.parse().map_err(|_| PortError::Unknown(name.clone()))?,
                }
            }
        };
        u16::try_from(number)
            .ok()
            .filter(|&port| port > 0)
            .ok_or(PortError::OutOfRange(number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ports() -> Vec<NamedPort> {
        [("", 7), ("web", 93), ("80", 81)]
            .map(|(name, port)| NamedPort {
                name: name.to_owned(),
                port,
            })
            .to_vec()
    }

    #[test]
    fn p1_a_port_that_does_not_exist_is_an_error() {
        let name = |name: &str| Port::Name(name.to_owned());
        for (port, error) in [
            (Port::Number(-1), PortError::OutOfRange(-1)),
            (Port::Number(0), PortError::OutOfRange(0)),
            (Port::Number(65_536), PortError::OutOfRange(65_536)),
            (name(""), PortError::Unknown(String::new())),
            (name("-1"), PortError::OutOfRange(-1)),
            (name("other"), PortError::Unknown("other".to_owned())),
        ] {
            assert_eq!(port.resolve(&ports()), Err(error), "{port}");
        }
    }

    #[test]
    fn p2_a_port_is_found_by_name_by_number_and_by_a_number_as_text() {
        for (port, number) in [
            (Port::Name("web".to_owned()), 93),
            (Port::Name("118".to_owned()), 118),
            (Port::Name("80".to_owned()), 81),
            (Port::Number(76), 76),
        ] {
            assert_eq!(port.resolve(&ports()), Ok(number), "{port}");
        }
    }
}
