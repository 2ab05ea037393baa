//! `health-agent bpf ipcache`: the identities of addresses, as the programs know them.

use std::fmt;
use std::net::IpAddr;

use anyhow::Context as _;
use clap::{Args, Subcommand};
use health_common::ipcache::IpcacheEntry;
use health_datapath::dump::Pinned;
use health_model::address::parse_ip;
use health_model::identity::Identity;
use ipnet::IpNet;
use serde::Serialize;

use super::entry::{Entry, Row};
use crate::output::{NONE, OutputArgs, table};

const EXAMPLES: &str = "\
Examples:
  health-agent bpf ipcache list
  health-agent bpf ipcache get 10.244.2.7";

const LIST_EXAMPLES: &str = "\
Examples:
  health-agent bpf ipcache list
  health-agent bpf ipcache list -o json | jq '.[] | select(.identity == 6)'";

const GET_EXAMPLES: &str = "\
Examples:
  health-agent bpf ipcache get 10.244.2.7
  health-agent bpf ipcache get fd00:10:244:2::7 -o json | jq .identity";

/// Commands of `bpf ipcache`.
#[derive(Debug, Subcommand)]
#[command(after_help = EXAMPLES)]
pub enum IpcacheCommand {
    /// List all prefixes with their identities
    #[command(after_help = LIST_EXAMPLES)]
    List(OutputArgs),
    /// Show the longest prefix that contains an address
    #[command(after_help = GET_EXAMPLES)]
    Get(GetArgs),
}

/// Flags of `bpf ipcache get`.
#[derive(Args, Debug)]
pub struct GetArgs {
    /// Address to look up
    #[arg(value_parser = parse_ip)]
    address: IpAddr,
    #[command(flatten)]
    output: OutputArgs,
}

impl IpcacheCommand {
    pub(super) fn execute(self, pinned: &Pinned) -> anyhow::Result<()> {
        let mut entries = pinned.ipcache_rows()?.collect()?;
        entries.sort_by_key(|(net, _)| *net);
        match self {
            Self::List(args) => args.output.print_rows(&rows(entries), prefixes_table),
            Self::Get(GetArgs { address, output }) => {
                let found = longest(entries, address).with_context(|| {
                    format!("no prefix contains {address}: its identity is reserved:world")
                })?;
                output.output.print_rows(&rows(vec![found]), prefixes_table)
            }
        }
    }
}

/// The longest prefix that contains an address. A prefix only contains addresses of its own IP version.
fn longest(entries: Vec<(IpNet, IpcacheEntry)>, address: IpAddr) -> Option<(IpNet, IpcacheEntry)> {
    entries
        .into_iter()
        .filter(|(net, _)| net.contains(&address))
        .max_by_key(|(net, _)| net.prefix_len())
}

/// Converts an entry for a dump of the map.
pub(super) fn entry((prefix, entry): (IpNet, IpcacheEntry)) -> Entry<PrefixKey, PrefixValue> {
    Entry {
        key: PrefixKey { prefix },
        value: PrefixValue {
            identity: Identity(entry.identity),
            name: Identity(entry.identity).reserved_name(),
            node: (!entry.node.is_unset()).then(|| entry.node.to_ip()),
        },
    }
}

fn rows(entries: Vec<(IpNet, IpcacheEntry)>) -> Vec<Row<PrefixKey, PrefixValue>> {
    entries.into_iter().map(|row| entry(row).into()).collect()
}

fn prefixes_table(rows: &[Row<PrefixKey, PrefixValue>]) -> String {
    let rows = rows.iter().map(|Row { key, value }| {
        [
            key.to_string(),
            named(value.identity),
            value
                .node
                .map_or_else(|| NONE.to_owned(), |node| node.to_string()),
        ]
    });
    table(["IP PREFIX/ADDRESS", "IDENTITY", "NODE"], rows)
}

/// Formats an identity: its number and, if it is reserved, its name.
pub(super) fn named(identity: Identity) -> String {
    match identity.reserved_name() {
        Some(name) => format!("{} (reserved:{name})", identity.0),
        None => identity.0.to_string(),
    }
}

/// The key.
#[derive(Debug, Serialize)]
pub(super) struct PrefixKey {
    prefix: IpNet,
}

impl fmt::Display for PrefixKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.prefix.fmt(f)
    }
}

/// The value: the identity of a prefix.
#[derive(Debug, Serialize)]
pub(super) struct PrefixValue {
    identity: Identity,
    /// Name of a reserved identity.
    name: Option<&'static str>,
    /// The node of an endpoint's address.
    node: Option<IpAddr>,
}

impl fmt::Display for PrefixValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "identity={}", self.identity.0)?;
        self.node.map_or(Ok(()), |node| write!(f, " node={node}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bpf::entry::lines;

    fn entries() -> Vec<(IpNet, IpcacheEntry)> {
        [
            ("0.0.0.0/0", 2, None),
            ("10.244.2.0/24", 300, None),
            ("10.244.2.7/32", 4, Some(IpAddr::from([172, 30, 0, 2]))),
            ("::/0", 2, None),
        ]
        .map(|(net, identity, node)| {
            let entry = IpcacheEntry {
                identity,
                node: node.map(Into::into).unwrap_or_default(),
                pad: 0,
            };
            (net.parse().unwrap(), entry)
        })
        .to_vec()
    }

    #[test]
    fn prefixes_are_listed_with_identity_and_node() {
        let rows = rows(entries());
        assert_eq!(
            prefixes_table(&rows),
            "\
IP PREFIX/ADDRESS   IDENTITY              NODE
0.0.0.0/0           2 (reserved:world)    -
10.244.2.0/24       300                   -
10.244.2.7/32       4 (reserved:health)   172.30.0.2
::/0                2 (reserved:world)    -
"
        );
        let json = serde_json::to_value(&rows[2]).unwrap();
        assert_eq!(
            json,
            serde_json::json!({"prefix": "10.244.2.7/32", "identity": 4, "name": "health", "node": "172.30.0.2"})
        );
        assert_eq!(
            lines(&[entry(entries()[2])]),
            "10.244.2.7/32: identity=4 node=172.30.0.2\n"
        );
    }

    #[test]
    fn the_longest_prefix_of_an_address_holds() {
        for (address, expected) in [
            ("10.244.2.7", "10.244.2.7/32"),
            ("10.244.2.8", "10.244.2.0/24"),
            ("192.0.2.9", "0.0.0.0/0"),
            ("2001:db8::1", "::/0"),
        ] {
            let (net, _) = longest(entries(), address.parse().unwrap()).unwrap();
            assert_eq!(net.to_string(), expected);
        }
        assert_eq!(longest(Vec::new(), "10.0.0.1".parse().unwrap()), None);
    }
}
