//! nf_conntrack's view of flows, obtained from the tools `conntrack` and `nft`.

use std::net::IpAddr;

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::{Entry, EntrylessPackets, TrafficCount, Tuple};
use crate::Node;
use crate::process::run_with_input;

const TABLE: &str = "compare";
/// Counts `related` and `invalid` packets among the forwarded packets and the node's own ICMP errors.
const RULES: &str = "table inet compare {
    counter related {}
    counter invalid {}
    chain of_flows {
        ct state related counter name related
        ct state invalid counter name invalid
    }
    chain forwarded { type filter hook forward priority 0; jump of_flows; }
    chain answered { type filter hook output priority 0; oifname lxc_health jump of_flows; }
}
";
/// Enables packet and byte counters, and sets timeouts so long that nothing expires while a slow machine reads the
/// entries.
const SETTINGS: [&str; 12] = [
    "acct=1",
    "tcp_timeout_syn_sent=300",
    "tcp_timeout_syn_recv=300",
    "tcp_timeout_fin_wait=300",
    "tcp_timeout_close_wait=300",
    "tcp_timeout_time_wait=300",
    "tcp_timeout_last_ack=300",
    "tcp_timeout_close=300",
    "udp_timeout=300",
    "icmp_timeout=300",
    "icmpv6_timeout=300",
    "sctp_timeout_closed=300",
];

/// nf_conntrack in a node's namespace.
#[derive(Debug)]
pub struct Kernel<'a> {
    node: &'a Node,
}

impl<'a> Kernel<'a> {
    /// Makes nf_conntrack track forwarded packets.
    pub fn start(node: &'a Node) -> anyhow::Result<Self> {
        // Load the rules first: if nf_conntrack is a module, they load it, and only then do the sysctls exist.
        run_with_input(node.command("nft").args(["-f", "-"]), RULES)?.success()?;
        for setting in SETTINGS {
            node.exec(&format!("sysctl -qw net.netfilter.nf_conntrack_{setting}"))?;
        }
        Ok(Self { node })
    }

    /// Returns the entries of flows with this host.
    pub fn entries(&self, host: IpAddr) -> anyhow::Result<Vec<Entry>> {
        let family = if host.is_ipv4() { "ipv4" } else { "ipv6" };
        let name = host.to_string();
        let list = self.node.exec(&format!("conntrack -L -f {family}"))?;
        // The list also has many entries of earlier flows, which are not worth parsing.
        let names_host = |line: &&str| {
            let mut words = line.split_ascii_whitespace();
            words.any(|word| word.split_once('=').is_some_and(|(_, value)| value == name))
        };
        let entries = list.lines().filter(names_host).map(|line| {
            entry(line).with_context(|| format!("conntrack printed an invalid entry: {line:?}"))
        });
        let entries: Vec<Entry> = entries.collect::<anyhow::Result<_>>()?;
        let is_of_host =
            |entry: &Entry| [entry.tuple.source, entry.tuple.destination].contains(&host);
        Ok(entries.into_iter().filter(is_of_host).collect())
    }

    /// Numbers of packets that created no entry.
    pub fn noted(&self) -> anyhow::Result<EntrylessPackets> {
        let text = self
            .node
            .exec(&format!("nft --json list counters table inet {TABLE}"))?;
        let counters: Value = serde_json::from_str(&text)?;
        let packets = |name: &str| {
            let list = counters["nftables"].as_array()?;
            let counter = list
                .iter()
                .find(|object| object["counter"]["name"] == name)?;
            counter["counter"]["packets"].as_u64()
        };
        Ok(EntrylessPackets {
            related: packets("related").context("no counter of related packets")?,
            invalid: packets("invalid").context("no counter of invalid packets")?,
        })
    }
}

/// One direction of an entry.
#[derive(Default)]
struct Direction<'a> {
    words: Vec<(&'a str, &'a str)>,
}

impl Direction<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        let found = self.words.iter().find(|(name, _)| *name == key);
        found.map(|(_, value)| *value)
    }

    fn address(&self, key: &str) -> anyhow::Result<IpAddr> {
        let text = self.get(key).with_context(|| format!("no {key}"))?;
        Ok(text.parse()?)
    }

    /// Parses a number; 0 if missing.
    fn number<T: std::str::FromStr + Default>(&self, key: &str) -> anyhow::Result<T>
    where
        T::Err: std::error::Error + Send + Sync + 'static,
    {
        Ok(self
            .get(key)
            .map(str::parse)
            .transpose()?
            .unwrap_or_default())
    }

    fn counted(&self) -> anyhow::Result<TrafficCount> {
        Ok(TrafficCount {
            packets: self.number("packets")?,
            bytes: self.number("bytes")?,
        })
    }

    /// Source and destination port. For an echo, the identifier and 0.
    fn ports(&self) -> anyhow::Result<(u16, u16)> {
        if self.get("id").is_some() {
            return Ok((self.number("id")?, 0));
        }
        Ok((self.number("sport")?, self.number("dport")?))
    }
}

/// Parses a line such as
/// `tcp 6 117 SYN_SENT src=A dst=B sport=1 dport=2 packets=1 bytes=60 [UNREPLIED] src=B dst=A ...`.
fn entry(line: &str) -> anyhow::Result<Entry> {
    let mut words = line.split_ascii_whitespace();
    let protocol = words.nth(1).context("no protocol")?.parse()?;
    let mut state = String::new();
    let mut replied = true;
    let mut directions: Vec<Direction<'_>> = Vec::new();
    for word in words {
        match word.split_once('=') {
            Some((key, value)) => {
                if key == "src" {
                    directions.push(Direction::default());
                }
                if let Some(direction) = directions.last_mut() {
                    direction.words.push((key, value));
                }
            }
            None if word == "[UNREPLIED]" => replied = false,
            None if directions.is_empty() && !word.starts_with(|c: char| c.is_ascii_digit()) => {
                state = word.to_owned();
            }
            None => {}
        }
    }
    let [there, back] = &directions[..] else {
        anyhow::bail!("{} directions", directions.len());
    };
    let (source, destination) = (there.address("src")?, there.address("dst")?);
    let (source_port, destination_port) = there.ports()?;
    let is_echo = there.get("id").is_some();
    ensure!(
        (back.address("dst")?, back.address("src")?) == (source, destination)
            && (is_echo || back.ports()? == (destination_port, source_port)),
        "the reply's tuple belongs to another flow"
    );
    Ok(Entry {
        tuple: Tuple {
            protocol,
            source,
            destination,
            source_port,
            destination_port,
        },
        state,
        replied,
        there: there.counted()?,
        back: back.counted()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_tool_is_an_entry() {
        let line = "tcp      6 117 SYN_SENT src=10.0.0.1 dst=10.0.0.2 sport=4000 dport=80 packets=2 \
                    bytes=120 [UNREPLIED] src=10.0.0.2 dst=10.0.0.1 sport=80 dport=4000 packets=0 \
                    bytes=0 mark=0 use=1";
        let read = entry(line).expect("an entry");
        assert_eq!((read.state.as_str(), read.replied), ("SYN_SENT", false));
        assert_eq!(read.tuple.protocol, 6);
        assert_eq!(
            (read.tuple.source_port, read.tuple.destination_port),
            (4000, 80)
        );
        assert_eq!((read.there.packets, read.there.bytes), (2, 120));
        let line = "icmpv6   58 29 src=fd00::1 dst=fd00::2 type=128 code=0 id=77 packets=1 bytes=84 \
                    src=fd00::2 dst=fd00::1 type=129 code=0 id=77 packets=1 bytes=84 mark=0 use=1";
        let read = entry(line).expect("an entry");
        assert_eq!((read.state.as_str(), read.replied), ("", true));
        assert_eq!(
            (read.tuple.source_port, read.tuple.destination_port),
            (77, 0)
        );
        let line = "unknown  253 599 src=10.0.0.1 dst=10.0.0.2 packets=1 bytes=60 [UNREPLIED] \
                    src=10.0.0.2 dst=10.0.0.1 packets=0 bytes=0 mark=0 use=1";
        assert_eq!(entry(line).expect("an entry").tuple.protocol, 253);
        let translated = "udp 17 29 src=10.0.0.1 dst=10.0.0.2 sport=1 dport=2 src=10.0.0.2 \
                          dst=10.0.0.9 sport=2 dport=1 mark=0 use=1";
        assert!(entry(translated).is_err());
    }
}
