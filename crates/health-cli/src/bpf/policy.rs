//! `health-agent bpf policy`: the verdicts on endpoints' packets, as the programs know them.

use std::collections::HashMap;
use std::fmt;

use anyhow::ensure;
use clap::{Args, Subcommand};
use health_common::endpoint::EndpointInfo;
use health_common::metrics::Counter;
use health_common::policy::{
    ANY_IDENTITY, POLICY_EGRESS, POLICY_INGRESS, PREFIX_PORT, PREFIX_PROTOCOL, VERDICT_ALLOW,
    VERDICT_DENY, VERDICT_NONE,
};
use health_datapath::dump::{Pinned, PolicyRow};
use health_datapath::policy::PolicyMatch;
use health_model::flow::IpProtocol;
use health_model::identity::Identity;
use serde::Serialize;

use super::entry::{Entry, Row};
use super::ipcache::named;
use crate::output::{NONE, OutputArgs, table};

const EXAMPLES: &str = "\
Examples:
  health-agent bpf policy get
  health-agent bpf policy get 1017
  health-agent bpf policy get --table 3 -o json | jq '.[] | select(.policy == \"deny\")'";

/// Commands of `bpf policy`.
#[derive(Debug, Subcommand)]
#[command(after_help = EXAMPLES)]
pub enum PolicyCommand {
    /// Show the verdicts in an endpoint's table, in one table or in all tables
    #[command(after_help = EXAMPLES)]
    Get(GetArgs),
}

/// Flags of `bpf policy get`.
#[derive(Args, Debug)]
pub struct GetArgs {
    /// Endpoint id
    endpoint: Option<u16>,
    /// Table number
    #[arg(long, value_name = "N", conflicts_with = "endpoint")]
    table: Option<u32>,
    #[command(flatten)]
    output: OutputArgs,
}

impl PolicyCommand {
    pub(super) fn execute(self, pinned: &Pinned) -> anyhow::Result<()> {
        let Self::Get(args) = self;
        let table = match (args.endpoint, args.table) {
            (Some(id), _) => {
                let endpoints = pinned.endpoints()?;
                Some(table_of(id, endpoints.iter().map(|(_, info)| info))?)
            }
            (None, table) => table,
        };
        let mut rows = Vec::new();
        pinned.policy_rows()?.each(|row| {
            if table.is_none_or(|table| table == row.table) {
                rows.push(row);
            }
        })?;
        rows.sort_by_key(|row| (row.table, row.what));
        let counters = pinned.policy_counters()?;
        let rows: Vec<VerdictRow> = rows
            .iter()
            .map(|row| VerdictRow::new(row, &counters))
            .collect();
        args.output.output.print_rows(&rows, verdicts_table)
    }
}

/// The policy table number in an endpoint's entry.
fn table_of<'a>(
    id: u16,
    endpoints: impl IntoIterator<Item = &'a EndpointInfo>,
) -> anyhow::Result<u32> {
    let found = endpoints.into_iter().find(|info| info.id == id);
    let table = found.map(|info| info.policy);
    ensure!(
        table.is_some(),
        "no endpoint {id}; `health-agent bpf endpoint list` lists the existing ones"
    );
    let table = table.unwrap_or_default();
    ensure!(table != 0, "endpoint {id} has no policy table");
    Ok(table)
}

/// Converts an entry for a dump of the map.
pub(super) fn entry(row: &PolicyRow) -> Entry<VerdictKey, VerdictValue> {
    Entry {
        key: VerdictKey::new(row),
        value: VerdictValue {
            policy: verdict(row.entry.verdict),
            subject: row.entry.subject,
            counter: row.entry.counter,
        },
    }
}

/// Converts a counter for a dump of the map.
pub(super) fn counter((index, counter): (u32, Counter)) -> Entry<u32, EntryCounts> {
    Entry {
        key: index,
        value: EntryCounts {
            packets: counter.packets,
            bytes: counter.bytes,
        },
    }
}

fn verdict(number: u8) -> &'static str {
    match number {
        VERDICT_ALLOW => "allow",
        VERDICT_DENY => "deny",
        VERDICT_NONE => "none",
        _ => "unknown",
    }
}

fn verdicts_table(rows: &[VerdictRow]) -> String {
    let rows = rows.iter().map(|row| {
        let key = &row.entry.key;
        let [bytes, packets] = match &row.counted {
            Some(counted) => [counted.bytes.to_string(), counted.packets.to_string()],
            None => [NONE; 2].map(str::to_owned),
        };
        [
            key.table.to_string(),
            capitalized(row.entry.value.policy),
            capitalized(key.direction),
            key.peer(),
            key.ports(),
            bytes,
            packets,
        ]
    });
    table(
        [
            "TABLE",
            "POLICY",
            "DIRECTION",
            "IDENTITY",
            "PORT/PROTO",
            "BYTES",
            "PACKETS",
        ],
        rows,
    )
}

fn capitalized(word: &str) -> String {
    let mut letters = word.chars();
    let first = letters.next().map(|letter| letter.to_ascii_uppercase());
    first.into_iter().chain(letters).collect()
}

/// An entry and its counts.
#[derive(Debug, Serialize)]
struct VerdictRow {
    #[serde(flatten)]
    entry: Row<VerdictKey, VerdictValue>,
    /// `null` if the entry has no counter of its own.
    #[serde(flatten)]
    counted: Option<EntryCounts>,
}

impl VerdictRow {
    fn new(row: &PolicyRow, counters: &HashMap<u32, Counter>) -> Self {
        let index = row.entry.counter;
        let counter = counters.get(&index).copied().unwrap_or_default();
        Self {
            entry: entry(row).into(),
            counted: (index != 0).then_some(EntryCounts {
                packets: counter.packets,
                bytes: counter.bytes,
            }),
        }
    }
}

/// The key: the packets to which the verdict applies.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct VerdictKey {
    table: u32,
    direction: &'static str,
    /// Identity of the other side; 0 for any.
    identity: Identity,
    /// `null` for all protocols.
    protocol: Option<IpProtocol>,
    /// The first port or, for ICMP, the first type.
    first_port: u16,
    last_port: u16,
}

impl VerdictKey {
    fn new(row: &PolicyRow) -> Self {
        let PolicyMatch {
            direction,
            identity,
            protocol,
            port_be,
            prefix_len,
        } = row.what;
        let open = PREFIX_PORT.saturating_sub(prefix_len.max(PREFIX_PROTOCOL));
        let first_port = u16::from_be(port_be);
        Self {
            table: row.table,
            direction: match direction {
                POLICY_INGRESS => "ingress",
                POLICY_EGRESS => "egress",
                _ => "unknown",
            },
            identity: Identity(identity),
            protocol: (prefix_len >= PREFIX_PROTOCOL).then_some(IpProtocol(protocol)),
            first_port,
            last_port: first_port | ((1_u32 << open) - 1) as u16,
        }
    }

    fn peer(&self) -> String {
        match self.identity.0 {
            ANY_IDENTITY => "ANY".to_owned(),
            _ => named(self.identity),
        }
    }

    fn ports(&self) -> String {
        let Some(protocol) = &self.protocol else {
            return "ANY".to_owned();
        };
        match (self.first_port, self.last_port) {
            (0, u16::MAX) => format!("ANY/{protocol}"),
            (first, last) if first == last => format!("{first}/{protocol}"),
            (first, last) => format!("{first}-{last}/{protocol}"),
        }
    }
}

impl fmt::Display for VerdictKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "table={} {} identity={} {}",
            self.table,
            self.direction,
            self.identity.0,
            self.ports()
        )
    }
}

/// The verdict on the packets.
#[derive(Debug, Serialize)]
pub(super) struct VerdictValue {
    policy: &'static str,
    /// The owner of the policy.
    subject: u32,
    /// Index of the entry's counter; 0 for the counter shared by entries without their own.
    counter: u32,
}

impl fmt::Display for VerdictValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} subject={} counter={}",
            self.policy, self.subject, self.counter
        )
    }
}

/// An entry's counts, summed over all CPUs.
#[derive(Debug, Serialize)]
pub(super) struct EntryCounts {
    packets: u64,
    bytes: u64,
}

impl fmt::Display for EntryCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "packets={} bytes={}", self.packets, self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use health_common::policy::{PREFIX_ALL, PolicyEntry};

    use super::*;
    use crate::bpf::entry::lines;

    fn row(what: PolicyMatch, verdict: u8, counter: u32) -> PolicyRow {
        PolicyRow {
            table: 3,
            what,
            entry: PolicyEntry {
                counter,
                subject: 300,
                verdict,
                pad: [0; 3],
            },
        }
    }

    fn what(direction: u8, identity: u32, protocol: u8, port: u16, prefix_len: u32) -> PolicyMatch {
        PolicyMatch {
            direction,
            identity,
            protocol,
            port_be: port.to_be(),
            prefix_len,
        }
    }

    #[test]
    fn verdicts_are_listed_with_ranges_of_ports_and_counts() {
        let counters = HashMap::from([(
            7,
            Counter {
                packets: 5,
                bytes: 300,
            },
        )]);
        let rows = [
            row(what(POLICY_INGRESS, 1, 0, 0, PREFIX_ALL), VERDICT_ALLOW, 0),
            row(
                what(POLICY_INGRESS, 300, 6, 80, PREFIX_PORT),
                VERDICT_ALLOW,
                7,
            ),
            row(
                what(POLICY_INGRESS, 300, 6, 8080, PREFIX_PORT - 3),
                VERDICT_DENY,
                8,
            ),
            row(
                what(POLICY_EGRESS, 0, 17, 0, PREFIX_PROTOCOL),
                VERDICT_NONE,
                9,
            ),
        ]
        .map(|row| VerdictRow::new(&row, &counters));
        assert_eq!(
            verdicts_table(&rows),
            "\
TABLE   POLICY   DIRECTION   IDENTITY            PORT/PROTO      BYTES   PACKETS
3       Allow    Ingress     1 (reserved:host)   ANY             -       -
3       Allow    Ingress     300                 80/TCP          300     5
3       Deny     Ingress     300                 8080-8087/TCP   0       0
3       None     Egress      ANY                 ANY/UDP         0       0
"
        );
        let json = serde_json::to_value(&rows).unwrap();
        assert_eq!(json[1]["packets"], 5);
        assert_eq!(json[2]["first-port"], 8080);
        assert_eq!(json[2]["last-port"], 8087);
    }

    #[test]
    fn dumps_show_the_entries_as_they_are() {
        let range = row(
            what(POLICY_EGRESS, 2, 17, 0, PREFIX_PORT - 10),
            VERDICT_ALLOW,
            8,
        );
        assert_eq!(
            lines(&[entry(&range)]),
            "table=3 egress identity=2 0-1023/UDP: allow subject=300 counter=8\n"
        );
        let counts = Counter {
            packets: 1,
            bytes: 60,
        };
        assert_eq!(lines(&[counter((8, counts))]), "8: packets=1 bytes=60\n");
    }

    #[test]
    fn an_endpoint_is_found_by_its_id() {
        let info = |id, policy| EndpointInfo {
            id,
            policy,
            ..EndpointInfo::default()
        };
        let endpoints = [info(7, 3), info(8, 0)];
        assert_eq!(table_of(7, &endpoints).unwrap(), 3);
        let unknown = table_of(9, &endpoints).unwrap_err().to_string();
        assert!(unknown.contains("no endpoint 9"), "{unknown}");
        let without = table_of(8, &endpoints).unwrap_err().to_string();
        assert!(without.contains("no policy table"), "{without}");
    }
}
