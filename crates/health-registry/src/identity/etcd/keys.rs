//! The etcd keys of a cluster's identities, and their values.

use std::net::IpAddr;

use health_model::address::parse_ip;
use health_model::identity::Identity;
use health_model::labels::LabelSet;
use serde::{Deserialize, Serialize};

use super::super::AddressAnnouncement;
use super::super::sets;
use crate::etcd::Value;

/// Maximum length of a label set in bytes: 256 labels of 1024 bytes each, with quotes and escapes.
const MAX_LABELS_LEN: usize = 512 * 1024;
/// Maximum length of any other value in bytes.
const MAX_VALUE_LEN: usize = 1024;

/// The keys of one cluster.
#[derive(Clone, Debug)]
pub(super) struct Keys {
    prefix: String,
}

/// The meaning of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Key {
    /// Holds the label set of a number.
    Number(Identity),
    /// Holds the number of a label set, which is given by its digest.
    Labels(String),
    /// A node uses a number.
    Reference(Identity, String),
    /// A number was in use until recently.
    Freed(Identity),
    /// Holds the identity of an address announced by a node.
    Address(String, IpAddr),
}

impl Keys {
    pub(super) fn of(cluster: &str) -> Self {
        Self {
            prefix: format!("/health-agent/identities/v1/{cluster}/"),
        }
    }

    /// Prefix of all keys of the cluster.
    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    pub(super) fn number(&self, identity: Identity) -> String {
        format!("{}numbers/{identity}", self.prefix)
    }

    pub(super) fn labels(&self, digest: &str) -> String {
        format!("{}labels/{digest}", self.prefix)
    }

    /// Prefix of the keys of all references to a number.
    pub(super) fn references(&self, identity: Identity) -> String {
        format!("{}references/{identity}/", self.prefix)
    }

    pub(super) fn reference(&self, identity: Identity, node: &str) -> String {
        self.references(identity) + node
    }

    pub(super) fn freed(&self, identity: Identity) -> String {
        format!("{}freed/{identity}", self.prefix)
    }

    pub(super) fn address(&self, node: &str, ip: IpAddr) -> String {
        format!("{}addresses/{node}/{ip}", self.prefix)
    }

    /// Parses a key.
    pub(super) fn read(&self, key: &str) -> Result<Key, &'static str> {
        const UNKNOWN: &str = "unknown key";
        let rest = key.strip_prefix(&self.prefix).ok_or(UNKNOWN)?;
        let (kind, rest) = rest.split_once('/').ok_or(UNKNOWN)?;
        Ok(match kind {
            "numbers" => Key::Number(number(rest)?),
            "labels" => Key::Labels(rest.to_owned()),
            "freed" => Key::Freed(number(rest)?),
            "references" => {
                let (identity, node) = rest.split_once('/').ok_or(UNKNOWN)?;
                Key::Reference(number(identity)?, node.to_owned())
            }
            "addresses" => {
                let (node, ip) = rest.split_once('/').ok_or(UNKNOWN)?;
                let read = parse_ip(ip).map_err(|_| "not an IP address")?;
                // Only the canonical form is accepted; otherwise an address could have several keys.
                if read.to_string() != ip {
                    return Err("not the canonical form of the address");
                }
                Key::Address(node.to_owned(), read)
            }
            _ => return Err(UNKNOWN),
        })
    }
}

/// Parses a number, which must be in canonical form.
fn number(text: &str) -> Result<Identity, &'static str> {
    let number: u32 = text.parse().map_err(|_| "not a number")?;
    if number.to_string() == text && Identity(number).is_of_cluster() {
        Ok(Identity(number))
    } else {
        Err("invalid cluster identity; expected 256 to 65535")
    }
}

/// Returns a label set's digest: SHA-256 over its JSON form, as 64 hexadecimal digits.
pub(super) fn digest_of(labels: &LabelSet) -> String {
    let digest = sets::digest_of(labels);
    digest
        .as_ref()
        .iter()
        .fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
}

/// Reads a label set.
pub(super) fn read_labels(value: &Value) -> Result<LabelSet, String> {
    let bytes = value.within(MAX_LABELS_LEN)?;
    let labels: LabelSet =
        serde_json::from_slice(bytes).map_err(|error| format!("not a label set: {error}"))?;
    sets::checked(labels)
}

/// Reads the number of a label set.
pub(super) fn read_number(value: &Value) -> Result<Identity, String> {
    Ok(number(&read_text(value)?)?)
}

/// Reads a session: the lease that a key is bound to.
pub(super) fn read_text(value: &Value) -> Result<String, String> {
    let text = std::str::from_utf8(value.within(MAX_VALUE_LEN)?);
    text.map(str::to_owned)
        .map_err(|error| format!("not text: {error}"))
}

/// The value of an address's key.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct AddressRecord {
    pub(super) identity: Identity,
    /// The address of the node.
    pub(super) node: IpAddr,
    /// The session of the node, see [`read_text`].
    pub(super) session: String,
}

impl AddressRecord {
    pub(super) fn text(&self) -> String {
        // Serializing this to JSON cannot fail.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Reads a node's announcement.
    pub(super) fn read(value: &Value, owner: &str) -> Result<(AddressAnnouncement, Self), String> {
        let bytes = value.within(MAX_VALUE_LEN)?;
        let record: Self = serde_json::from_slice(bytes)
            .map_err(|error| format!("not an address record: {error}"))?;
        let Self { identity, node, .. } = record;
        if !identity.is_of_endpoints() {
            return Err(format!("identity {identity} is not valid for endpoints"));
        }
        let announced = AddressAnnouncement {
            identity,
            node,
            owner: owner.to_owned(),
        };
        Ok((announced, record))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read_as_they_are_written() {
        let keys = Keys::of("default");
        let ip: IpAddr = "fd00::7".parse().unwrap();
        for (text, key) in [
            (keys.number(Identity(256)), Key::Number(Identity(256))),
            (keys.labels("ab"), Key::Labels("ab".to_owned())),
            (
                keys.reference(Identity(65_535), "n1"),
                Key::Reference(Identity(65_535), "n1".to_owned()),
            ),
            (keys.freed(Identity(300)), Key::Freed(Identity(300))),
            (keys.address("n1", ip), Key::Address("n1".to_owned(), ip)),
        ] {
            assert_eq!(keys.read(&text), Ok(key), "{text}");
        }
        for bad in [
            "numbers/255",
            "numbers/65536",
            "numbers/0300",
            "numbers/+300",
            "numbers/",
            "numbers",
            "references/300",
            "addresses/n1/10.0.0",
            "addresses/n1/FD00::7",
            "others/1",
        ] {
            let key = format!("{}{bad}", keys.prefix());
            assert!(keys.read(&key).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_would_give_a_wrong_identity_is_not_read() {
        let value = |text: &str| Value::from(text.as_bytes().to_vec());
        for bad in [
            "",
            "{}",
            "[]",
            r#"["reserved:host"]"#,
            r#"["k8s:a=1","reserved:host"]"#,
            r#"["cidr:10.0.0.0/8"]"#,
            r#"["a=1","a=2"]"#,
        ] {
            assert!(read_labels(&value(bad)).is_err(), "{bad}");
        }
        for bad in ["1", "2", "6", "16777217", "255", "70000"] {
            let text = format!(r#"{{"identity":{bad},"node":"10.0.0.1","session":"1"}}"#);
            assert!(AddressRecord::read(&value(&text), "n1").is_err(), "{bad}");
        }
    }
}
