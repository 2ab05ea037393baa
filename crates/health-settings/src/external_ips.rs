//! The setting for the external addresses that services may have.

use std::fmt;
use std::str::FromStr;

use health_model::address::parse_network_or_ip;
use ipnet::IpNet;

/// The external addresses (`spec.externalIPs`) at which services are served: `no-nodes`, `all`, `none`, or networks
/// separated by commas.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ExternalIpSetting {
    /// All except the addresses of nodes.
    #[default]
    NoNodes,
    /// All.
    All,
    /// None.
    None,
    /// Addresses in these networks.
    Within(Vec<IpNet>),
}

/// The text is not an [`ExternalIpSetting`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected no-nodes, all, none, or networks such as 203.0.113.0/24,2001:db8::/64")]
pub struct ExternalIpSettingError;

impl fmt::Display for ExternalIpSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoNodes => f.write_str("no-nodes"),
            Self::All => f.write_str("all"),
            Self::None => f.write_str("none"),
            Self::Within(networks) => {
                let networks: Vec<_> = networks.iter().map(ToString::to_string).collect();
                f.write_str(&networks.join(","))
            }
        }
    }
}

impl FromStr for ExternalIpSetting {
    type Err = ExternalIpSettingError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(match text {
            "no-nodes" => Self::NoNodes,
            "all" => Self::All,
            "none" => Self::None,
            networks => {
                let read = networks.split(',').map(parse_network_or_ip);
                let read: Result<Vec<_>, _> = read.collect();
                let read = read.map_err(|_| ExternalIpSettingError)?;
                Self::Within(read.iter().map(IpNet::trunc).collect())
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_as_they_are_shown() {
        for text in ["no-nodes", "all", "none", "203.0.113.0/24,2001:db8::/64"] {
            let setting: ExternalIpSetting = text.parse().expect(text);
            assert_eq!(setting.to_string(), text);
        }
        let mapped: ExternalIpSetting = "::ffff:203.0.113.9/120".parse().expect("a network");
        assert_eq!(mapped.to_string(), "203.0.113.0/24");
        for bad in ["", "nodes", "203.0.113.0/24,", "203.0.113.0/33"] {
            let read = bad.parse::<ExternalIpSetting>();
            assert_eq!(read, Err(ExternalIpSettingError), "{bad}");
        }
    }
}
