//! Query parameters of `GET /v1/monitor`, and the lines of its answer.

use std::fmt::{self, Display};
use std::net::IpAddr;
use std::str::FromStr;

use clap::ValueEnum;
use jiff::Timestamp;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use super::flow::{IpProtocol, Network};

/// A type of event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum EventType {
    /// Dropped packets, except those of `nat`
    Drop,
    /// New conntrack entries, and closed connections
    Ct,
    /// Packets dropped because they could not be translated
    Nat,
    /// Packets that pass, of endpoints with debug=on
    Trace,
}

impl EventType {
    /// All types.
    pub const ALL: [Self; 4] = [Self::Drop, Self::Ct, Self::Nat, Self::Trace];
}

impl Display for EventType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Drop => "drop",
            Self::Ct => "ct",
            Self::Nat => "nat",
            Self::Trace => "trace",
        })
    }
}

/// The string is not an [`EventType`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected drop, ct, nat or trace")]
pub struct EventTypeError;

impl FromStr for EventType {
    type Err = EventTypeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|known| known.to_string() == text)
            .ok_or(EventTypeError)
    }
}

/// Selects events. An event must match every field; it matches a field if it matches any of its values, or if the field
/// is empty. In a query string, the values of a field are separated by commas.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct EventFilter {
    /// Types: `drop`, `ct`, `nat` or `trace`.
    #[serde(rename = "type", deserialize_with = "list")]
    #[cfg_attr(feature = "openapi", schemars(with = "String", example = "drop,nat"))]
    pub types: Vec<EventType>,
    /// Protocols: `tcp`, `udp`, `icmp`, `icmpv6`, `sctp` or numbers.
    #[serde(rename = "proto", deserialize_with = "list")]
    #[cfg_attr(feature = "openapi", schemars(with = "String", example = &"tcp"))]
    pub protocols: Vec<IpProtocol>,
    /// Sources of the packet, or of the flow's first packet: addresses or prefixes.
    #[serde(rename = "src", deserialize_with = "list")]
    #[cfg_attr(
        feature = "openapi",
        schemars(with = "String", example = "10.244.0.0/16,fd00::7")
    )]
    pub sources: Vec<Network>,
    /// Destinations.
    #[serde(rename = "dst", deserialize_with = "list")]
    #[cfg_attr(feature = "openapi", schemars(with = "String"))]
    pub destinations: Vec<Network>,
    /// Ports or ICMP identifiers, on either side.
    #[serde(rename = "port", deserialize_with = "list")]
    #[cfg_attr(feature = "openapi", schemars(with = "String", example = "53,443"))]
    pub ports: Vec<u16>,
    /// Ids of endpoints.
    #[serde(rename = "endpoint", deserialize_with = "list")]
    #[cfg_attr(feature = "openapi", schemars(with = "String"))]
    pub endpoints: Vec<u16>,
}

fn list<'de, D: Deserializer<'de>, T: FromStr<Err: Display>>(from: D) -> Result<Vec<T>, D::Error> {
    let text = String::deserialize(from)?;
    text.split(',')
        .map(|item| {
            item.parse()
                .map_err(|error| D::Error::custom(format!("'{item}': {error}")))
        })
        .collect()
}

impl EventFilter {
    /// Formats the filter as a query string, without the question mark.
    pub fn query(&self) -> String {
        fn field<T: Display>(name: &str, values: &[T]) -> Option<String> {
            let values: Vec<String> = values.iter().map(T::to_string).collect();
            (!values.is_empty()).then(|| format!("{name}={}", values.join(",")))
        }
        let fields = [
            field("type", &self.types),
            field("proto", &self.protocols),
            field("src", &self.sources),
            field("dst", &self.destinations),
            field("port", &self.ports),
            field("endpoint", &self.endpoints),
        ];
        fields.into_iter().flatten().collect::<Vec<_>>().join("&")
    }
}

/// One line of the answer, distinguished by `type`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(tag = "type", rename_all = "kebab-case")]
pub enum MonitorLine {
    /// A packet was dropped.
    Drop(DropEvent),
    /// A packet was dropped because it could not be translated.
    Nat(DropEvent),
    /// A flow started or ended.
    Ct(CtEvent),
    /// A packet passed to or from an endpoint whose packets are traced.
    Trace(TraceEvent),
    /// Events were lost.
    Lost {
        /// How many.
        #[cfg_attr(feature = "openapi", schemars(range(min = 1)))]
        events: u64,
        /// Where.
        cause: LossCause,
    },
    /// The last line: the agent is stopping.
    End,
}

/// Where events were lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum LossCause {
    /// The ring buffer was full because the agent did not read it in time. The lost events may not have matched this
    /// reader's filter.
    RingFull,
    /// This reader was too slow.
    SlowReader,
}

/// A dropped packet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema), schemars(inline))]
#[serde(rename_all = "kebab-case")]
pub struct DropEvent {
    /// When.
    pub time: Timestamp,
    /// Why, in words.
    pub reason: String,
    /// Why, as `HEALTH_METRICS` counts it.
    pub reason_code: u8,
    /// Direction of the packet.
    pub direction: PacketDirection,
    /// Where it was dropped.
    #[serde(flatten)]
    pub place: Place,
    /// Its length, including the Ethernet header.
    pub length_bytes: u32,
    /// Its header fields; `null` without an IP header.
    pub packet: Option<TupleShown>,
}

/// A packet that passed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema), schemars(inline))]
#[serde(rename_all = "kebab-case")]
pub struct TraceEvent {
    /// When.
    pub time: Timestamp,
    /// Direction of the packet.
    pub direction: PacketDirection,
    /// The endpoint and its device.
    #[serde(flatten)]
    pub place: Place,
    /// Its length, including the Ethernet header.
    pub length_bytes: u32,
    /// Its header fields; `null` without an IP header.
    pub packet: Option<TupleShown>,
}

/// Direction of a packet, seen from the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum PacketDirection {
    /// From the network or from an endpoint.
    Ingress,
    /// To the network or to an endpoint.
    Egress,
}

/// A change to a flow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema), schemars(inline))]
#[serde(rename_all = "kebab-case")]
pub struct CtEvent {
    /// When.
    pub time: Timestamp,
    /// The change.
    pub event: CtChange,
    /// Which side opened it.
    pub direction: FlowDirection,
    /// Where it was opened.
    #[serde(flatten)]
    pub place: Place,
    /// Identity of the side that opened it.
    pub source_identity: u32,
    /// Its tuple.
    pub flow: TupleShown,
}

/// What can happen to a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum CtChange {
    /// Its conntrack entry was created.
    Created,
    /// A new connection between the same ports followed a closed one.
    Reopened,
    /// Both sides have closed the connection, or one has reset it.
    Closed,
}

/// Which side opened a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum FlowDirection {
    /// This host.
    Out,
    /// The other side, towards a local endpoint.
    In,
}

/// Where something happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub struct Place {
    /// Id of the endpoint involved; `null` for none.
    pub endpoint: Option<u16>,
    /// Name of the device; `null` if it no longer exists.
    pub device: Option<String>,
    /// Interface index of the device.
    pub ifindex: u32,
}

/// Protocol, addresses and ports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(
    feature = "openapi",
    derive(schemars::JsonSchema),
    schemars(rename = "Tuple")
)]
#[serde(rename_all = "kebab-case")]
pub struct TupleShown {
    /// `TCP`, `UDP`, `ICMP`, `ICMPv6`, `SCTP` or a number.
    pub protocol: IpProtocol,
    /// Source address.
    pub source: IpAddr,
    /// Source port, or the ICMP identifier; 0 if unknown.
    pub source_port: u16,
    /// Destination address.
    pub destination: IpAddr,
    /// Destination port; 0 where there is none.
    pub destination_port: u16,
}

#[cfg(test)]
mod tests {
    use axum::extract::Query;
    use axum::http::Uri;

    use super::*;

    fn read(query: &str) -> Result<EventFilter, String> {
        let uri: Uri = format!("/v1/monitor?{query}").parse().unwrap();
        Query::try_from_uri(&uri)
            .map(|Query(filter)| filter)
            .map_err(|rejection| rejection.body_text())
    }

    #[test]
    fn a_filter_is_read_from_its_query() {
        let filter = EventFilter {
            types: vec![EventType::Drop, EventType::Nat],
            protocols: vec![IpProtocol(6), IpProtocol(99)],
            sources: vec!["10.0.0.0/8".parse().unwrap(), "fd00::7".parse().unwrap()],
            destinations: vec!["::/0".parse().unwrap()],
            ports: vec![53, 65535],
            endpoints: vec![1017],
        };
        assert_eq!(read(&filter.query()), Ok(filter));
        assert_eq!(EventFilter::default().query(), "");
        assert_eq!(read(""), Ok(EventFilter::default()));
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        for (query, named) in [
            ("type=drop,all", "'all': expected drop, ct, nat or trace"),
            ("proto=tpc", "'tpc': expected tcp"),
            ("src=10.0.0.0/33", "'10.0.0.0/33': expected an address"),
            ("port=70000", "'70000'"),
            ("port=", "''"),
            ("direction=in", "direction"),
        ] {
            let error = read(query).unwrap_err();
            assert!(error.contains(named), "{error}");
        }
    }
}
