//! The rows report exactly what netem does to echo requests: the test compares round trips, losses, late answers and
//! duplicates with netem's own counters.

use anyhow::{Context as _, ensure};
use serde_json::Value;
use tests::{Bed, Node, PATIENCE, wait_for};

/// How long netem delays a slow request, in milliseconds.
const SLOW_MS: u64 = 40;
/// How long netem delays a late request, in milliseconds: longer than the agents' probe timeout.
const LATE_MS: u64 = 2500;
/// Number of requests that must pass through netem in a test.
const ENOUGH: u64 = 20;

/// Two nodes whose agents probe each other only by ICMP. A netem on the first node's uplink handles all echo requests
/// of that node, and nothing else.
struct Wire {
    bed: Bed,
    /// The counts before netem started.
    before: RowCounts,
}

/// netem's counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Netem {
    /// Packets that netem has sent on.
    sent: u64,
    /// Packets that netem has dropped.
    dropped: u64,
    /// Packets that netem is still holding.
    held: u64,
}

/// The first node's counts for the second node. The endpoint's address is not probed, because agents learn it over
/// HTTP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct RowCounts {
    samples: u64,
    lost: u64,
    late: u64,
    duplicates: u64,
}

impl Wire {
    /// Starts netem with the settings `what`, in netem's own syntax, once all probes are answered.
    fn new(flags: &str, what: &str) -> anyhow::Result<Self> {
        let bed = Bed::builder()
            .nodes(2)
            .agent_args(&format!("--probe http=off {flags}"))
            .start()?;
        let mut wire = Self {
            bed,
            before: RowCounts::default(),
        };
        wait_for("round trips", PATIENCE, || {
            let rows = wire.rows()?;
            let answered = rows.iter().all(|row| row["samples"].as_u64() >= Some(3));
            Ok(answered.then_some(()))
        })?;
        wire.before = wire.total()?;
        // netem is on band 1, which only the filter selects. The limit is far above the number of packets in flight.
        for command in [
            "tc qdisc add dev eth0 root handle 1: prio priomap 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1",
            &format!("tc qdisc add dev eth0 parent 1:1 handle 10: netem limit 10000 {what}"),
            "tc filter add dev eth0 parent 1: prio 1 protocol ip u32 \
             match ip protocol 1 0xff match u8 8 0xff at 20 flowid 1:1",
        ] {
            wire.node().exec(command)?;
        }
        Ok(wire)
    }

    fn node(&self) -> &Node {
        self.bed.node(1)
    }

    /// Changes netem's settings.
    fn change(&self, what: &str) -> anyhow::Result<()> {
        self.node().exec(&format!(
            "tc qdisc change dev eth0 parent 1:1 handle 10: netem limit 10000 {what}"
        ))?;
        Ok(())
    }

    /// Removes the filter, waits until netem is empty, and returns its counters, which are then final.
    fn close(&self) -> anyhow::Result<Netem> {
        self.node()
            .exec("tc filter delete dev eth0 parent 1: prio 1")?;
        wait_for("netem to be empty", PATIENCE, || {
            Ok(Some(self.netem()?).filter(|netem| netem.held == 0))
        })
    }

    fn netem(&self) -> anyhow::Result<Netem> {
        let shown = self.node().exec("tc -s -j qdisc show dev eth0")?;
        let qdiscs: Vec<Value> = serde_json::from_str(&shown)?;
        let netem = qdiscs.iter().find(|qdisc| qdisc["kind"] == "netem");
        let netem = netem.with_context(|| format!("no netem in {shown}"))?;
        let counter = |name| netem[name].as_u64().with_context(|| format!("no {name}"));
        Ok(Netem {
            sent: counter("packets")?,
            dropped: counter("drops")?,
            held: counter("qlen")?,
        })
    }

    /// Waits until netem has sent on or dropped enough requests.
    fn wait_enough(&self) -> anyhow::Result<()> {
        wait_for("enough requests", PATIENCE, || {
            let netem = self.netem()?;
            Ok((netem.sent + netem.dropped >= ENOUGH).then_some(()))
        })
    }

    fn rows(&self) -> anyhow::Result<Vec<Value>> {
        let peer = self.bed.node(2).name();
        let listing = format!("bpf rtt list --protocol icmp --peer {peer}");
        let rows = self.node().listing(&listing)?;
        let rows = rows.as_array().context("not a list")?.clone();
        ensure!(rows.len() == 1, "{rows:?}");
        Ok(rows)
    }

    /// The counts since netem started.
    fn row_counts(&self) -> anyhow::Result<RowCounts> {
        let (before, now) = (self.before, self.total()?);
        Ok(RowCounts {
            samples: now.samples - before.samples,
            lost: now.lost - before.lost,
            late: now.late - before.late,
            duplicates: now.duplicates - before.duplicates,
        })
    }

    fn total(&self) -> anyhow::Result<RowCounts> {
        let mut reported = RowCounts::default();
        for row in self.rows()? {
            let figure = |name| row[name].as_u64().with_context(|| format!("no {name}"));
            reported.samples += figure("samples")?;
            reported.lost += figure("lost")?;
            reported.late += figure("late")?;
            reported.duplicates += figure("duplicates")?;
        }
        Ok(reported)
    }

    /// Waits until the rows match, then until there are more round trips, after which the rows must still match.
    fn wait_for_stable_counts(
        &self,
        what: &str,
        is_so: impl Fn(RowCounts) -> bool,
    ) -> anyhow::Result<RowCounts> {
        let reported = wait_for(what, PATIENCE, || {
            let reported = self.row_counts()?;
            ensure!(is_so(reported), "{reported:?}");
            Ok(Some(reported))
        })?;
        let later = wait_for("more round trips", PATIENCE, || {
            Ok(Some(self.row_counts()?).filter(|later| later.samples >= reported.samples + 4))
        })?;
        ensure!(is_so(later), "{what}: {reported:?}, then {later:?}");
        Ok(reported)
    }
}

#[test]
#[ignore = "needs root and netem"]
fn what_netem_loses_is_lost() -> anyhow::Result<()> {
    let wire = Wire::new("--probe-interval 500ms --probe-timeout 500ms", "loss 40%")?;
    wire.wait_enough()?;
    let netem = wire.close()?;
    assert!(netem.dropped > 0 && netem.sent > 0, "{netem:?}");
    wire.wait_for_stable_counts("all losses", |reported| {
        reported.lost == netem.dropped && reported.late == 0 && reported.samples >= netem.sent
    })?;
    Ok(())
}

#[test]
#[ignore = "needs root and netem"]
fn what_netem_delays_takes_so_long_on_the_way_there() -> anyhow::Result<()> {
    let wire = Wire::new(
        "--probe-interval 500ms --probe-timeout 500ms --one-way",
        &format!("delay {SLOW_MS}ms"),
    )?;
    // By then, no probe from before the change is in flight.
    wire.wait_enough()?;
    wire.node().cli("bpf rtt reset --all")?.success()?;
    wait_for("new round trips", PATIENCE, || {
        let rows = wire.rows()?;
        let measured = rows.iter().all(|row| row["samples"].as_u64() >= Some(3));
        Ok(measured.then_some(()))
    })?;
    let delay = i64::try_from(SLOW_MS * 1_000_000)?;
    for row in wire.rows()? {
        let shortest = |name| row[name].as_i64().with_context(|| format!("no {name}"));
        assert!(shortest("min-ns")? >= delay, "{row}");
        assert!(shortest("forward-min-ns")? >= delay, "{row}");
        assert!(shortest("back-min-ns")? < delay, "{row}");
    }
    // Without the delay, round trips are shorter again.
    wire.change("delay 0ms")?;
    wait_for("shorter round trips", PATIENCE, || {
        let rows = wire.rows()?;
        let shortest = rows.iter().filter_map(|row| row["min-ns"].as_i64());
        Ok((shortest.filter(|&shortest| shortest < delay).count() == rows.len()).then_some(()))
    })
}

#[test]
#[ignore = "needs root and netem"]
fn what_netem_duplicates_is_one_round_trip_and_one_duplicate() -> anyhow::Result<()> {
    let wire = Wire::new(
        "--probe-interval 500ms --probe-timeout 500ms",
        // Duplicates every request.
        "duplicate 100%",
    )?;
    wire.wait_enough()?;
    let netem = wire.close()?;
    let requests = netem.sent / 2;
    assert_eq!(netem.sent, requests * 2, "{netem:?}");
    wire.wait_for_stable_counts("all duplicates", |reported| {
        reported.duplicates == requests && reported.lost == 0 && reported.samples >= requests
    })?;
    Ok(())
}

#[test]
#[ignore = "needs root and netem"]
fn what_netem_holds_back_is_lost_once_and_late_once_while_others_overtake_it() -> anyhow::Result<()>
{
    const GAP: u64 = 3;
    let wire = Wire::new(
        "--probe-interval 1s --probe-timeout 1s",
        // Every third request is sent at once and overtakes those that are held.
        &format!("delay {LATE_MS}ms reorder 100% gap {GAP}"),
    )?;
    wire.wait_enough()?;
    let netem = wire.close()?;
    let at_once = netem.sent / GAP;
    let held = netem.sent - at_once;
    let reported = wire.wait_for_stable_counts("all that is late", |reported| {
        reported.late == held
            && reported.lost == held
            && reported.samples >= at_once
            && reported.duplicates == 0
    })?;
    // Late answers do not count as round trips.
    for row in wire.rows()? {
        let longest = row["max-ns"].as_u64().context("no round trip")?;
        assert!(longest < LATE_MS * 1_000_000, "{reported:?}: {row}");
    }
    Ok(())
}
