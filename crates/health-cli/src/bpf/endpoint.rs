//! `health-agent bpf endpoint`: local endpoints as the datapath knows them.

use std::fmt;
use std::net::IpAddr;

use clap::Subcommand;
use health_common::endpoint::{
    ENDPOINT_ENFORCE_EGRESS, ENDPOINT_ENFORCE_INGRESS, ENDPOINT_HEALTH, EndpointInfo,
};
use health_datapath::dump::Pinned;
use ipnet::IpNet;
use serde::Serialize;

use super::entry::{Entry, Row};
use crate::output::{NONE, OutputArgs, table};

const EXAMPLES: &str = "\
Examples:
  health-agent bpf endpoint list
  health-agent bpf endpoint list -o json";

/// Commands of `bpf endpoint`.
#[derive(Debug, Subcommand)]
#[command(after_help = EXAMPLES)]
pub enum EndpointCommand {
    /// List the addresses of local endpoints
    #[command(after_help = EXAMPLES)]
    List(OutputArgs),
}

impl EndpointCommand {
    pub(super) fn execute(self, pinned: &Pinned) -> anyhow::Result<()> {
        let Self::List(args) = self;
        let rows: Vec<Row<_, _>> = entries(pinned.endpoints()?)
            .into_iter()
            .map(Row::from)
            .collect();
        args.output.print_rows(&rows, endpoints_table)
    }
}

/// Converts entries for display, sorted by address.
pub(super) fn entries(
    endpoints: Vec<(IpAddr, EndpointInfo)>,
) -> Vec<Entry<EndpointAddress, EndpointValue>> {
    let mut entries: Vec<_> = endpoints
        .into_iter()
        .map(|(address, info)| Entry {
            key: EndpointAddress { address },
            value: EndpointValue::from(info),
        })
        .collect();
    entries.sort_by_key(|entry| entry.key.address);
    entries
}

fn endpoints_table(rows: &[Row<EndpointAddress, EndpointValue>]) -> String {
    table(
        ["IP ADDRESS", "LOCAL ENDPOINT INFO"],
        rows.iter()
            .map(|Row { key, value }| [key.to_string(), value.to_string()]),
    )
}

/// The key.
#[derive(Debug, Serialize)]
pub(super) struct EndpointAddress {
    address: IpAddr,
}

impl fmt::Display for EndpointAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.address.fmt(f)
    }
}

/// An endpoint as the datapath knows it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct EndpointValue {
    id: u16,
    identity: u32,
    health: bool,
    flags: u32,
    /// Number of the endpoint's policy table; 0 for none.
    policy: u32,
    enforces_ingress: bool,
    enforces_egress: bool,
    ifindex: u32,
    mac: String,
    host_mac: String,
}

impl From<EndpointInfo> for EndpointValue {
    fn from(info: EndpointInfo) -> Self {
        Self {
            id: info.id,
            identity: info.identity,
            health: info.flags & ENDPOINT_HEALTH != 0,
            flags: info.flags,
            policy: info.policy,
            enforces_ingress: info.flags & ENDPOINT_ENFORCE_INGRESS != 0,
            enforces_egress: info.flags & ENDPOINT_ENFORCE_EGRESS != 0,
            ifindex: info.ifindex,
            mac: mac(info.mac),
            host_mac: mac(info.host_mac),
        }
    }
}

impl fmt::Display for EndpointValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "id={} sec_id={} flags=0x{:04x} ifindex={} mac={} nodemac={} policy={} enforcement={}",
            self.id,
            self.identity,
            self.flags,
            self.ifindex,
            self.mac,
            self.host_mac,
            self.policy,
            match (self.enforces_ingress, self.enforces_egress) {
                (true, true) => "ingress,egress",
                (true, false) => "ingress",
                (false, true) => "egress",
                (false, false) => NONE,
            }
        )
    }
}

/// Converts an entry of `HEALTH_DEVICES`, an ifindex and its endpoint's id, for display.
pub(super) fn device((key, id): (u32, u32)) -> Entry<u32, DeviceEndpoint> {
    Entry {
        key,
        value: DeviceEndpoint { id },
    }
}

/// The endpoint of a device.
#[derive(Debug, Serialize)]
pub(super) struct DeviceEndpoint {
    id: u32,
}

impl fmt::Display for DeviceEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "id={}", self.id)
    }
}

/// Converts an entry of `HEALTH_OWN` for display: a prefix of the host's addresses, and the ifindex if it is
/// link-local.
pub(super) fn own((key, ifindex): (IpNet, Option<u32>)) -> Entry<IpNet, OwnDevice> {
    Entry {
        key,
        value: OwnDevice { ifindex },
    }
}

/// The device that has one of the host's addresses.
#[derive(Debug, Serialize)]
pub(super) struct OwnDevice {
    ifindex: Option<u32>,
}

impl fmt::Display for OwnDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.ifindex {
            Some(ifindex) => write!(f, "ifindex={ifindex}"),
            None => f.write_str(NONE),
        }
    }
}

/// Formats a MAC address.
pub(super) fn mac(bytes: [u8; 6]) -> String {
    bytes.map(|byte| format!("{byte:02x}")).join(":")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_listed_with_its_endpoint() {
        let info = EndpointInfo {
            ifindex: 5,
            identity: 4,
            flags: ENDPOINT_HEALTH | ENDPOINT_ENFORCE_INGRESS,
            policy: 12,
            id: 1017,
            mac: [0x0a, 0, 0, 0, 0, 1],
            host_mac: [0x0a, 0, 0, 0, 0, 0xff],
            pad: 0,
        };
        let rows: Vec<Row<_, _>> = entries(vec![
            ("fd00:10:244:1::7".parse().unwrap(), info),
            ("10.244.1.7".parse().unwrap(), info),
        ])
        .into_iter()
        .map(Row::from)
        .collect();
        let value = "id=1017 sec_id=4 flags=0x0003 ifindex=5 mac=0a:00:00:00:00:01 \
                     nodemac=0a:00:00:00:00:ff policy=12 enforcement=ingress";
        assert_eq!(
            endpoints_table(&rows),
            format!(
                "IP ADDRESS         LOCAL ENDPOINT INFO\n\
                 10.244.1.7         {value}\n\
                 fd00:10:244:1::7   {value}\n"
            )
        );
        assert_eq!(serde_json::to_value(&rows).unwrap()[0]["health"], true);
    }
}
