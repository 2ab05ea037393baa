//! Flows come and go for a long time and at high rates: none of their entries remain, and live flows lose nothing.

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use health_common::ct::Timeouts;
use health_datapath::dump::Flow;
use tests::conntrack::churn::churn;
use tests::conntrack::lab::{is_silent, silent};
use tests::conntrack::script::{ACK, Content, FIN, RST, SYN, Side, Talk, segment};
use tests::conntrack::{Lab, Ours, Way, Wire};
use tests::{Node, PATIENCE, is_long, wait_for};

/// A day whose hours last a second each. Every hour has a collection and sees the end of flows that started some hours
/// before.
const HOURS: u16 = 24;
/// Enough for all kinds of flows to start, end and be collected, and for the longest-lived ones to do so several times.
const HOURS_OF_SHORT_RUN: u16 = 10;
const TIMEOUTS: Timeouts = Timeouts {
    tcp_syn: 3,
    tcp_established: 6,
    tcp_close: 3,
    udp: 3,
    icmp: 3,
    sctp: 4,
    any: 3,
    fragment: 3,
};
/// An entry certainly lives at least this long, since lifetimes are in whole seconds.
const SHORTEST: Duration = Duration::from_secs(2);
/// Flows of each kind per hour, for each IP version and each opening side.
const FLOWS_OF_A_KIND: u16 = 20;
const METRICS_PORT: u16 = 9962;
/// Everything that the endpoint opens is masqueraded, except the packets that show that earlier ones have passed. The
/// agent sends few probes of its own, because their flows are counted too.
const AGENT_ARGS: &str = "--conntrack-gc-interval 1s --probe-interval 1h \
    --native-routing-cidr 10.0.0.0/8 --native-routing-cidr fd00::/8 \
    --masquerade-exclude 198.18.255.255/32 --masquerade-exclude 2001:db8:18::ffff/128";
/// A translation that a late packet leaves behind without its flow is removed after a minute.
const ORPHAN_PATIENCE: Duration = Duration::from_secs(180);

/// The packets that the two hosts of a flow send.
type Script = Vec<(Side, Content)>;

fn scripts() -> Vec<Script> {
    use Content::{Chunk, Datagram, Parts, Protocol, Request};
    use Side::{Answerer, Opener};
    let flags = |side, flags| (side, Content::Segment(segment(flags)));
    let open = [
        flags(Opener, SYN),
        flags(Answerer, SYN | ACK),
        flags(Opener, ACK),
        (Opener, Content::Segment(segment(ACK).data(300))),
        flags(Answerer, ACK),
    ];
    let then = |more: &[(Side, Content)]| [&open[..], more].concat();
    vec![
        then(&[
            flags(Opener, FIN | ACK),
            flags(Answerer, ACK),
            flags(Answerer, FIN | ACK),
            flags(Opener, ACK),
        ]),
        then(&[flags(Answerer, RST | ACK)]),
        // Both hosts disappear silently.
        then(&[]),
        vec![flags(Opener, SYN)],
        vec![(Opener, Datagram(100)), (Answerer, Datagram(500))],
        vec![(Opener, Datagram(100))],
        vec![(Opener, Parts(3, &[0, 1, 2]))],
        vec![(Opener, Chunk(1)), (Answerer, Chunk(2))],
        vec![(Opener, Protocol(47)), (Answerer, Protocol(47))],
        vec![(Opener, Request)],
    ]
}

/// Flows that were opened. Each should have exactly one entry.
#[derive(Clone, Copy, Debug, Default)]
struct OpenedFlows {
    flows: u64,
    /// Packets that may have arrived after their flow's entry expired, and so created another entry.
    late: u64,
}

/// The current entries, checked often enough that none appears and disappears unnoticed.
struct Census {
    ours: Ours,
    /// Flows of the agent's own probes.
    of_agent: BTreeSet<Flow>,
    /// Maximum number of translation entries seen at once.
    translations: usize,
}

impl Census {
    fn entries(&mut self) -> anyhow::Result<u64> {
        let flows = self.ours.flows()?;
        let entries = flows.len() as u64;
        let is_made = |flow: &Flow| is_silent(flow.source) || is_silent(flow.destination);
        self.of_agent
            .extend(flows.into_iter().filter(|flow| !is_made(flow)));
        self.translations = self.translations.max(self.ours.translations()?);
        Ok(entries)
    }

    /// Whether this number of entries is consistent with the flows.
    fn accounts_for(&self, made: OpenedFlows, entries: u64) -> bool {
        let least = made.flows + self.of_agent.len() as u64;
        (least..=least + made.late).contains(&entries)
    }
}

/// Runs the flows of one hour, each with its own host, numbered from `number`.
fn make(
    lab: &Lab,
    wire: &mut Wire,
    number: &mut u16,
    made: &mut OpenedFlows,
) -> anyhow::Result<()> {
    for script in scripts() {
        for (opener, is_v4) in [
            (Way::Out, true),
            (Way::In, true),
            (Way::Out, false),
            (Way::In, false),
        ] {
            let mut talks: Vec<Talk> = (0..FLOWS_OF_A_KIND)
                .map(|_| {
                    *number += 1;
                    let (endpoint, host) = (lab.endpoint(is_v4), silent(*number, is_v4));
                    let (source, destination) = match opener {
                        Way::Out => (endpoint, host),
                        Way::In => (host, endpoint),
                    };
                    Talk::new(source, destination, (*number, 80))
                })
                .collect();
            let begun = Instant::now();
            let mut packets = 0;
            for (side, content) in &script {
                let said: Vec<Vec<u8>> = talks
                    .iter_mut()
                    .flat_map(|talk| talk.say(*side, content))
                    .collect();
                let is_out = (*side == Side::Opener) == (opener == Way::Out);
                wire.carry(if is_out { Way::Out } else { Way::In }, &said)?;
                packets += said.len() as u64;
            }
            made.flows += u64::from(FLOWS_OF_A_KIND);
            if begun.elapsed() > SHORTEST {
                made.late += packets;
            }
        }
    }
    Ok(())
}

/// What the agent reports about its collections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CollectorTotals {
    runs: u64,
    removed: u64,
}

fn collected(node: &Node) -> anyhow::Result<CollectorTotals> {
    let page = node.run_in(|| -> anyhow::Result<String> {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, METRICS_PORT))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(b"GET /metrics HTTP/1.0\r\nHost: node\r\n\r\n")?;
        let mut page = String::new();
        stream.read_to_string(&mut page)?;
        Ok(page)
    })??;
    let sum = |name: &str, label: &str| -> anyhow::Result<u64> {
        let series = page.lines().filter(|line| {
            line.strip_prefix(name)
                .is_some_and(|rest| rest.starts_with('{') && rest.contains(label))
        });
        let values = series.map(|line| {
            let (_, value) = line.rsplit_once(' ').context("no value")?;
            Ok(value.parse::<f64>()? as u64)
        });
        values.sum()
    };
    Ok(CollectorTotals {
        runs: sum(
            "health_agent_datapath_conntrack_gc_runs_total",
            "status=\"completed\"",
        )?,
        removed: sum(
            "health_agent_datapath_conntrack_gc_deleted_entries_total",
            "family=",
        )?,
    })
}

#[test]
#[ignore = "needs root"]
fn a_day_of_churn_leaves_nothing_and_the_counters_add_up() -> anyhow::Result<()> {
    let lab = Lab::start(AGENT_ARGS)?;
    let node = lab.node();
    let mut ours = Ours::open(node)?;
    ours.set_timeouts(TIMEOUTS)?;
    wait_for("the agent's own probes to be forgotten", PATIENCE, || {
        node.cli("bpf ct flush global")?.success()?;
        Ok((ours.flows()?.is_empty() && ours.translations()? == 0).then_some(()))
    })?;
    let mut census = Census {
        ours,
        of_agent: BTreeSet::new(),
        translations: 0,
    };
    let start = collected(node)?;
    census.entries()?;

    let mut wire = lab.wire()?;
    let mut made = OpenedFlows::default();
    let mut number = 0;
    let hours = if is_long() { HOURS } else { HOURS_OF_SHORT_RUN };
    for hour in 0..hours {
        let before = collected(node)?;
        make(&lab, &mut wire, &mut number, &mut made)?;
        wait_for("the collection of the hour", PATIENCE, || {
            census.entries()?;
            Ok((collected(node)?.runs > before.runs).then_some(()))
        })?;
        // At any moment between two collections, each created entry has been removed or still exists.
        let mut last = (0, 0);
        let added_up = wait_for("the counters to add up", PATIENCE, || {
            let before = collected(node)?;
            let entries = census.entries()?;
            let after = collected(node)?;
            last = (after.removed - start.removed, entries);
            let is_between = before == after;
            Ok((is_between && census.accounts_for(made, last.0 + last.1)).then_some(()))
        });
        added_up.with_context(|| {
            format!(
                "hour {hour}: {made:?}, {} of the agent; {} removed and {} there",
                census.of_agent.len(),
                last.0,
                last.1
            )
        })?;
    }
    let removed = wait_for("the end of all flows", ORPHAN_PATIENCE, || {
        let entries = census.entries()?;
        let removed = collected(node)?.removed - start.removed;
        let is_empty = entries == 0 && census.ours.translations()? == 0;
        Ok((is_empty && census.accounts_for(made, removed)).then_some(removed))
    })?;
    println!(
        "{made:?}, {} of the agent, {removed} entries removed, {} translations at once",
        census.of_agent.len(),
        census.translations
    );
    assert!(made.flows > 500 * u64::from(hours), "{made:?}");
    // Two entries per flow, for several hundred flows that the endpoint opens in an hour.
    assert!(census.translations > 400, "{}", census.translations);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn the_collector_never_removes_a_live_flow_nor_its_port() -> anyhow::Result<()> {
    let connections = if is_long() { 50_000 } else { 30_000 };
    let churned = churn(connections)?;
    println!("{churned:?}");
    assert_eq!((churned.wrong, churned.moved), (0, 0), "{churned:?}");
    assert_eq!(churned.opened, 3 * u64::from(connections));
    // On a slow machine, many connections are too late to be checked, and few are opened in time.
    assert!(churned.looks > u64::from(connections), "{churned:?}");
    assert!(churned.removed > 0 && churned.reopened > 0, "{churned:?}");
    assert!(churned.translated > u64::from(connections), "{churned:?}");
    assert!(churned.fullest_percent > 80, "{churned:?}");
    Ok(())
}
