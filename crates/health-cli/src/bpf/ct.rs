//! `health-agent bpf ct`: connection tracking.

use std::fmt;
use std::str::FromStr;

use clap::{ArgGroup, Args, Subcommand};
use health_common::ct::tcp::TcpState;
use health_common::ct::{CT_FLAG_NAMES, CtEntry};
use health_common::tcp::IP_PROTOCOL_TCP;
use health_datapath::dump::{Flow, Pinned};
use health_net::clock;
use serde::{Serialize, Serializer};

use super::entry::{Entry, Row};
use super::filter::{FlowFilter, LocalSide, Scope};
use super::flow::FlowKey;
use super::{flush, stream};
use crate::output::{OutputArgs, print};

const EXAMPLES: &str = "\
Examples:
  health-agent bpf ct list --proto tcp --dst 10.0.0.0/8
  health-agent bpf ct flush --src 10.244.1.9";

const LIST_EXAMPLES: &str = "\
Output:
  Entries are listed while they are read, unordered: pipe them through sort. Times are seconds since
  the host was started. An entry that is created or deleted meanwhile may be listed or not; every
  other entry is listed once

Examples:
  health-agent bpf ct list
  health-agent bpf ct list 1017 --time-diff
  health-agent bpf ct list 10.244.1.7 --proto icmp --dir in
  health-agent bpf ct list --src 10.244.0.0/16 --state established --count
  health-agent bpf ct list global -o jsonl | jq -r .source | sort | uniq -c";

const FLUSH_EXAMPLES: &str = "\
Examples:
  health-agent bpf ct flush global
  health-agent bpf ct flush 1017 --proto udp
  health-agent bpf ct flush --dst 10.96.0.10 --port 53";

/// Commands of `bpf ct`.
#[derive(Debug, Subcommand)]
#[command(after_help = EXAMPLES)]
pub enum CtCommand {
    /// List the tracked flows
    #[command(after_help = LIST_EXAMPLES)]
    List(ListArgs),
    /// Delete entries and the translations of their flows
    #[command(after_help = FLUSH_EXAMPLES)]
    Flush(FlushArgs),
}

/// Flags of `bpf ct list`.
#[derive(Args, Debug)]
pub struct ListArgs {
    /// `global` for all flows, or an endpoint's id or address for its flows
    #[arg(default_value = "global")]
    scope: Scope,
    #[command(flatten)]
    filter: CtFilter,
    /// Show times relative to now: until expiry, and since the last packets
    #[arg(short = 'd', long)]
    time_diff: bool,
    /// Print only the number of entries
    #[arg(long)]
    count: bool,
    #[command(flatten)]
    output: OutputArgs,
}

/// Flags of `bpf ct flush`.
#[derive(Args, Debug)]
#[command(group = ArgGroup::new("what").args(["scope", "states"]).args(FlowFilter::FLAGS).multiple(true).required(true))]
pub struct FlushArgs {
    /// `global` for all flows, or an endpoint's id or address for its flows
    scope: Option<Scope>,
    #[command(flatten)]
    filter: CtFilter,
}

/// Flags that select conntrack entries.
#[derive(Args, Debug)]
struct CtFilter {
    #[command(flatten)]
    flows: FlowFilter,
    /// Only TCP connections in this state, such as established or time_wait (repeatable)
    #[arg(long = "state", value_name = "STATE")]
    states: Vec<State>,
}

/// The state of a TCP connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct State(TcpState);

impl State {
    const ALL: [TcpState; 10] = [
        TcpState::None,
        TcpState::SynSent,
        TcpState::SynSent2,
        TcpState::SynRecv,
        TcpState::Established,
        TcpState::FinWait,
        TcpState::CloseWait,
        TcpState::LastAck,
        TcpState::TimeWait,
        TcpState::Close,
    ];

    /// `None` for protocols other than TCP.
    fn of(flow: &Flow, entry: &CtEntry) -> Option<Self> {
        (flow.protocol == IP_PROTOCOL_TCP).then(|| Self(TcpState::of(entry.state())))
    }
}

impl FromStr for State {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut states = Self::ALL.iter();
        let wanted = states.find(|state| state.name().eq_ignore_ascii_case(text));
        wanted.copied().map(Self).ok_or_else(|| {
            let names = Self::ALL.map(|state| state.name().to_ascii_lowercase());
            format!("expected one of {}", names.join(", "))
        })
    }
}

impl Serialize for State {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(self.0.name())
    }
}

impl CtCommand {
    pub(super) fn execute(self, pinned: &Pinned) -> anyhow::Result<()> {
        match self {
            Self::List(args) => args.execute(pinned),
            Self::Flush(args) => {
                let selection = Selection::new(args.scope, args.filter, pinned)?;
                flush::print(&pinned.flush_conntrack(|flow, entry| selection.has(flow, entry))?)
            }
        }
    }
}

impl ListArgs {
    fn execute(self, pinned: &Pinned) -> anyhow::Result<()> {
        let selection = Selection::new(Some(self.scope), self.filter, pinned)?;
        let maps = pinned.conntrack_rows()?;
        if self.count {
            let mut count = 0_u64;
            for rows in maps {
                rows.each(|(flow, entry)| count += u64::from(selection.has(&flow, &entry)))?;
            }
            return print(|out| writeln!(out, "{count}"));
        }
        let now_s = self.time_diff.then(|| i64::from(clock::coarse_now_secs()));
        stream::print(self.output.output, &maps, |(flow, entry)| {
            selection.has(&flow, &entry).then(|| Row {
                key: FlowKey::from(&flow),
                value: CtValue::new(&flow, &entry, now_s),
            })
        })
    }
}

/// The entries to list or flush.
struct Selection {
    local_side: Option<LocalSide>,
    filter: CtFilter,
}

impl Selection {
    fn new(scope: Option<Scope>, filter: CtFilter, pinned: &Pinned) -> anyhow::Result<Self> {
        Ok(Self {
            local_side: scope.unwrap_or(Scope::Global).addresses(pinned)?,
            filter,
        })
    }

    fn has(&self, flow: &Flow, entry: &CtEntry) -> bool {
        let CtFilter { flows, states } = &self.filter;
        flows.has(flow)
            && self.local_side.as_ref().is_none_or(|side| side.has(flow))
            && (states.is_empty()
                || State::of(flow, entry).is_some_and(|state| states.contains(&state)))
    }
}

/// Converts an entry for a dump of the map.
pub(super) fn entry((flow, entry): (Flow, CtEntry)) -> Entry<FlowKey, CtValue> {
    Entry {
        key: FlowKey::from(&flow),
        value: CtValue::new(&flow, &entry, None),
    }
}

/// State of a flow.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct CtValue {
    /// `null` for protocols other than TCP.
    state: Option<State>,
    #[serde(flatten)]
    times: Times,
    rx_packets: u64,
    rx_bytes: u64,
    rx_flags_seen: u8,
    tx_packets: u64,
    tx_bytes: u64,
    tx_flags_seen: u8,
    flags: u16,
    source_identity: u32,
    ifindex: u32,
}

impl CtValue {
    /// Times are relative to `now_s` (`CLOCK_MONOTONIC`, in seconds) if it is given, absolute otherwise.
    fn new(flow: &Flow, entry: &CtEntry, now_s: Option<i64>) -> Self {
        Self {
            state: State::of(flow, entry),
            times: Times::new(entry, now_s),
            rx_packets: entry.rx_packets,
            rx_bytes: entry.rx_bytes,
            rx_flags_seen: entry.rx_flags_seen,
            tx_packets: entry.tx_packets,
            tx_bytes: entry.tx_bytes,
            tx_flags_seen: entry.tx_flags_seen,
            flags: entry.flags,
            source_identity: entry.source_identity,
            ifindex: entry.ifindex,
        }
    }
}

/// The format of `cilium bpf ct list`. Service addresses are not translated back.
impl fmt::Display for CtValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [expires, last_rx, last_tx] = self.times.moments();
        write!(
            f,
            "expires={expires} RxPackets={} RxBytes={} RxFlagsSeen=0x{:02x} LastRxReport={last_rx} \
             TxPackets={} TxBytes={} TxFlagsSeen=0x{:02x} LastTxReport={last_tx} Flags=0x{:04x} [ {}] \
             RevNAT=0 SourceSecurityID={} IfIndex={}",
            self.rx_packets,
            self.rx_bytes,
            self.rx_flags_seen,
            self.tx_packets,
            self.tx_bytes,
            self.tx_flags_seen,
            self.flags,
            FlagNames(self.flags),
            self.source_identity,
            self.ifindex
        )
    }
}

/// The names of the set flags, each followed by a space.
struct FlagNames(u16);

impl fmt::Display for FlagNames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        CT_FLAG_NAMES
            .iter()
            .filter(|(flag, _)| self.0 & flag != 0)
            .try_for_each(|(_, name)| write!(f, "{name} "))
    }
}

/// When a flow expires, and when it last received and sent packets.
#[derive(Debug, Serialize)]
#[serde(untagged, rename_all_fields = "kebab-case")]
enum Times {
    /// `CLOCK_MONOTONIC`, in seconds; 0 for never.
    Clock {
        expires_s: u32,
        last_rx_s: u32,
        last_tx_s: u32,
    },
    /// Seconds until expiry and since the last packets. `expires_in_s` is negative for an expired entry that has not
    /// been collected yet.
    Relative {
        expires_in_s: i64,
        last_rx_age_s: Option<i64>,
        last_tx_age_s: Option<i64>,
    },
}

impl Times {
    fn new(entry: &CtEntry, now_s: Option<i64>) -> Self {
        let Some(now_s) = now_s else {
            return Self::Clock {
                expires_s: entry.expires,
                last_rx_s: entry.last_rx,
                last_tx_s: entry.last_tx,
            };
        };
        let age = |at: u32| (at != 0).then(|| now_s - i64::from(at));
        Self::Relative {
            expires_in_s: i64::from(entry.expires) - now_s,
            last_rx_age_s: age(entry.last_rx),
            last_tx_age_s: age(entry.last_tx),
        }
    }

    fn moments(&self) -> [Moment; 3] {
        match *self {
            Self::Clock {
                expires_s,
                last_rx_s,
                last_tx_s,
            } => [expires_s, last_rx_s, last_tx_s].map(Moment::Clock),
            Self::Relative {
                expires_in_s,
                last_rx_age_s,
                last_tx_age_s,
            } => [
                Moment::Relative(expires_in_s),
                last_rx_age_s.map_or(Moment::Never, |age| Moment::Relative(-age)),
                last_tx_age_s.map_or(Moment::Never, |age| Moment::Relative(-age)),
            ],
        }
    }
}

/// A time in a line of text output.
enum Moment {
    Clock(u32),
    Relative(i64),
    Never,
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Clock(seconds) => seconds.fmt(f),
            Self::Relative(seconds) => write!(f, "{seconds:+}s"),
            Self::Never => f.write_str("never"),
        }
    }
}

#[cfg(test)]
mod tests {
    use health_common::ct::{CT_RX_CLOSING, CT_SEEN_NON_SYN};

    use super::*;
    use crate::bpf::entry::lines;

    fn flow() -> Flow {
        Flow {
            protocol: 1,
            inbound: true,
            source: "172.30.0.2".parse().unwrap(),
            source_port: 1234,
            destination: "10.244.1.7".parse().unwrap(),
            destination_port: 0,
        }
    }

    fn ct_entry() -> CtEntry {
        CtEntry {
            rx_packets: 1,
            rx_bytes: 50,
            rx_flags_seen: 0x1b,
            expires: 1_987_899,
            last_rx: 1_987_839,
            source_identity: 1,
            ifindex: 5,
            ..CtEntry::default()
        }
    }

    fn row(now_s: Option<i64>) -> Row<FlowKey, CtValue> {
        Row {
            key: FlowKey::from(&flow()),
            value: CtValue::new(&flow(), &ct_entry(), now_s),
        }
    }

    #[test]
    fn flows_are_listed_as_cilium_does() {
        assert_eq!(
            lines(&[row(None)]),
            "ICMP IN 172.30.0.2:1234 -> 10.244.1.7:0 expires=1987899 RxPackets=1 RxBytes=50 \
             RxFlagsSeen=0x1b LastRxReport=1987839 TxPackets=0 TxBytes=0 TxFlagsSeen=0x00 \
             LastTxReport=0 Flags=0x0000 [ ] RevNAT=0 SourceSecurityID=1 IfIndex=5\n"
        );
        let json = serde_json::to_value(row(None)).unwrap();
        assert_eq!(json["source-port"], 1234);
        assert_eq!(json["expires-s"], 1_987_899);
        assert_eq!(json["last-tx-s"], 0);
    }

    #[test]
    fn tcp_connections_have_flags_by_name_and_a_state_to_choose_by() {
        let flow = Flow {
            protocol: IP_PROTOCOL_TCP,
            ..flow()
        };
        let closing = CtEntry {
            flags: CT_RX_CLOSING | CT_SEEN_NON_SYN,
            ..ct_entry()
        };
        let value = CtValue::new(&flow, &closing, None);
        let text = value.to_string();
        assert!(
            text.contains(" Flags=0x0011 [ RxClosing SeenNonSyn ] "),
            "{text}"
        );
        let json = serde_json::to_value(value).unwrap();
        assert_eq!(json["state"], "FIN_WAIT");

        let with_states = |states: &[&str]| Selection {
            local_side: None,
            filter: CtFilter {
                flows: FlowFilter::default(),
                states: states.iter().map(|name| name.parse().unwrap()).collect(),
            },
        };
        let selection = with_states(&["time_wait", "fin_wait"]);
        assert!(selection.has(&flow, &closing));
        assert!(!selection.has(&super::tests::flow(), &closing), "ICMP");
        assert!(!with_states(&["ESTABLISHED"]).has(&flow, &closing));
        let error = "open".parse::<State>().unwrap_err();
        assert!(error.contains("syn_sent2, syn_recv"), "{error}");
    }

    #[test]
    fn times_are_relative_to_now_on_demand() {
        let text = lines(&[row(Some(1_987_842))]);
        assert!(text.contains(" expires=+57s "), "{text}");
        assert!(text.contains(" LastRxReport=-3s "), "{text}");
        assert!(text.contains(" LastTxReport=never "), "{text}");
        let json = serde_json::to_value(row(Some(1_987_900))).unwrap();
        assert_eq!(json["expires-in-s"], -1);
        assert_eq!(json["last-rx-age-s"], 61);
        assert_eq!(json["last-tx-age-s"], serde_json::Value::Null);
        assert_eq!(json.get("expires-s"), None);
    }

    #[test]
    fn a_dump_has_a_line_an_entry() {
        let text = lines(&[entry((flow(), ct_entry()))]);
        assert!(
            text.starts_with("ICMP IN 172.30.0.2:1234 -> 10.244.1.7:0: expires=1987899 "),
            "{text}"
        );
    }
}
