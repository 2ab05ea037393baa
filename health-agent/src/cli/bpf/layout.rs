//! Layouts of the maps that no listing shows, read from their bytes.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

use serde::Serialize;

use super::entry::Entry;
use super::rtt::path_name;

/// Reads the fields of a `repr(C)` value from first to last.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (field, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*field)
    }

    /// A [`health_common::addr::Addr`].
    fn address(&mut self) -> Option<IpAddr> {
        let octets: [u8; 16] = self.take()?;
        Some(IpAddr::V6(Ipv6Addr::from(octets)).to_canonical())
    }

    /// As [`Self::address`]; `::` stands for none.
    fn address_if_set(&mut self) -> Option<Option<IpAddr>> {
        self.address()
            .map(|ip| Some(ip).filter(|ip| !ip.is_unspecified()))
    }

    /// Refuses what is longer than the layout.
    fn end<T>(self, value: T) -> Option<T> {
        self.0.is_empty().then_some(value)
    }
}

/// Decodes all entries, or none if one does not have the layout.
pub(super) fn decode<K, V>(
    entries: &[(Vec<u8>, Vec<u8>)],
    key: impl Fn(&[u8]) -> Option<K>,
    value: impl Fn(&[u8]) -> Option<V>,
) -> Option<Vec<Entry<K, V>>> {
    entries
        .iter()
        .map(|(k, v)| {
            Some(Entry {
                key: key(k)?,
                value: value(v)?,
            })
        })
        .collect()
}

/// A [`health_common::rtt::InflightKey`].
#[derive(Debug, Serialize)]
pub(super) struct InflightKey {
    peer: IpAddr,
    id: u16,
    sequence: u16,
}

impl InflightKey {
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut fields = Fields(bytes);
        let key = Self {
            peer: fields.address()?,
            id: u16::from_be_bytes(fields.take()?),
            sequence: u16::from_be_bytes(fields.take()?),
        };
        fields.end(key)
    }
}

impl fmt::Display for InflightKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} id={} sequence={}", self.peer, self.id, self.sequence)
    }
}

/// A [`health_common::rtt::Inflight`].
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Inflight {
    /// `CLOCK_MONOTONIC`.
    sent_ns: u64,
    path: &'static str,
}

impl Inflight {
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut fields = Fields(bytes);
        let sent_ns = u64::from_ne_bytes(fields.take()?);
        let [path] = fields.take()?;
        let _pad: [u8; 7] = fields.take()?;
        fields.end(Self {
            sent_ns,
            path: path_name(path),
        })
    }
}

impl fmt::Display for Inflight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sent_ns={} path={}", self.sent_ns, self.path)
    }
}

/// The index of an array.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub(super) struct Index(u32);

impl Index {
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut fields = Fields(bytes);
        let index = u32::from_ne_bytes(fields.take()?);
        fields.end(Self(index))
    }
}

impl fmt::Display for Index {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A [`health_common::config::DatapathConfig`].
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct DatapathConfig {
    layout_version: u32,
    icmp_id: u16,
    /// Hexadecimal: JSON readers round numbers of this size.
    probe_magic: String,
    ct_any_timeout_s: u32,
    gateway4: Option<IpAddr>,
    gateway6: Option<IpAddr>,
}

impl DatapathConfig {
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut fields = Fields(bytes);
        let layout_version = u32::from_ne_bytes(fields.take()?);
        let icmp_id = u16::from_be_bytes(fields.take()?);
        let _pad: [u8; 2] = fields.take()?;
        let probe_magic = u64::from_ne_bytes(fields.take()?);
        let ct_any_timeout_s = u32::from_ne_bytes(fields.take()?);
        let _pad2: [u8; 4] = fields.take()?;
        let config = Self {
            layout_version,
            icmp_id,
            probe_magic: format!("{probe_magic:#018x}"),
            ct_any_timeout_s,
            gateway4: fields.address_if_set()?,
            gateway6: fields.address_if_set()?,
        };
        fields.end(config)
    }
}

impl fmt::Display for DatapathConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "layout_version={} icmp_id={} probe_magic={} ct_any_timeout_s={}",
            self.layout_version, self.icmp_id, self.probe_magic, self.ct_any_timeout_s
        )?;
        for (name, gateway) in [("gateway4", self.gateway4), ("gateway6", self.gateway6)] {
            if let Some(gateway) = gateway {
                write!(f, " {name}={gateway}")?;
            }
        }
        Ok(())
    }
}

/// Bytes of no known layout, hexadecimal.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub(super) struct Hex(String);

impl From<&[u8]> for Hex {
    fn from(bytes: &[u8]) -> Self {
        Self(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

impl fmt::Display for Hex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use health_common::addr::Addr;
    use std::mem::offset_of;

    /// The bytes of a type of `health-common`, its fields put where the compiler puts them.
    struct Image(Vec<u8>);

    impl Image {
        fn new(size: usize) -> Self {
            Self(vec![0; size])
        }

        fn put(mut self, offset: usize, bytes: &[u8]) -> Self {
            self.0[offset..offset + bytes.len()].copy_from_slice(bytes);
            self
        }
    }

    fn address(text: &str) -> [u8; 16] {
        match text.parse().unwrap() {
            IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            IpAddr::V6(v6) => v6.octets(),
        }
    }

    #[test]
    fn a_probe_in_flight_is_decoded() {
        use health_common::rtt;
        let key = Image::new(size_of::<rtt::InflightKey>())
            .put(offset_of!(rtt::InflightKey, peer), &address("172.30.0.2"))
            .put(offset_of!(rtt::InflightKey, id_be), &[0x12, 0x34])
            .put(offset_of!(rtt::InflightKey, sequence_be), &[0, 9]);
        let value = Image::new(size_of::<rtt::Inflight>())
            .put(offset_of!(rtt::Inflight, sent_ns), &77_u64.to_ne_bytes())
            .put(offset_of!(rtt::Inflight, path), &[2]);
        let entries = [(key.0, value.0)];
        let decoded = decode(&entries, InflightKey::decode, Inflight::decode).unwrap();
        assert_eq!(decoded[0].key.to_string(), "172.30.0.2 id=4660 sequence=9");
        assert_eq!(decoded[0].value.to_string(), "sent_ns=77 path=endpoint");
    }

    #[test]
    fn the_configuration_is_decoded() {
        use health_common::config::DatapathConfig as Layout;
        let value = Image::new(size_of::<Layout>())
            .put(offset_of!(Layout, layout_version), &1_u32.to_ne_bytes())
            .put(offset_of!(Layout, icmp_id_be), &[0x01, 0x02])
            .put(offset_of!(Layout, probe_magic), &0xabcd_u64.to_ne_bytes())
            .put(
                offset_of!(Layout, ct_any_timeout_secs),
                &60_u32.to_ne_bytes(),
            )
            .put(offset_of!(Layout, gateway6), &address("fd00:10:244:1::1"));
        let config = DatapathConfig::decode(&value.0).unwrap();
        assert_eq!(
            config.to_string(),
            "layout_version=1 icmp_id=258 probe_magic=0x000000000000abcd ct_any_timeout_s=60 \
             gateway6=fd00:10:244:1::1"
        );
        assert_eq!(
            Index::decode(&3_u32.to_ne_bytes()).unwrap().to_string(),
            "3"
        );
    }

    #[test]
    fn addresses_are_laid_out_as_the_datapath_does() {
        let addr = Addr::from("172.30.0.2".parse::<IpAddr>().unwrap());
        let bytes: Vec<u8> = addr.words_be.iter().flat_map(|w| w.to_ne_bytes()).collect();
        assert_eq!(bytes, address("172.30.0.2"));
    }

    #[test]
    fn other_sizes_are_not_decoded() {
        assert!(Index::decode(&[0; 3]).is_none());
        assert!(Index::decode(&[0; 5]).is_none());
        assert!(DatapathConfig::decode(&[0; 55]).is_none());
        assert!(DatapathConfig::decode(&[0; 57]).is_none());
        let mixed = [(vec![0; 20], vec![0; 16]), (vec![0; 20], vec![0; 8])];
        assert!(decode(&mixed, InflightKey::decode, Inflight::decode).is_none());
        assert_eq!(Hex::from(&[0, 0xab][..]).to_string(), "00ab");
    }
}
