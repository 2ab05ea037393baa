//! Round-trip times in the output of the command line, with and without an agent.

use std::io::{BufRead as _, BufReader};
use std::net::{IpAddr, Ipv4Addr};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use anyhow::Context as _;
use aya::maps::{HashMap, Map, MapData};
use health_common::probe::Path;
use health_common::rtt::{PROTOCOL_ICMP, RttKey, RttRow, SOURCE_KERNEL};
use health_datapath::layout;
use nix::sys::signal::Signal;
use tests::bed::{Node, agent_binary};
use tests::process::run;
use tests::testrun::TestRun;
use tests::{Bed, PATIENCE, wait_for};

fn bed() -> anyhow::Result<Bed> {
    let bed = Bed::builder().nodes(3).probing(200, 100).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    Ok(bed)
}

fn rows(node: &Node, flags: &str) -> anyhow::Result<Vec<serde_json::Value>> {
    let text = node
        .cli(&format!("bpf rtt list {flags} -o json"))?
        .success()?;
    Ok(serde_json::from_str(&text)?)
}

#[test]
#[ignore = "needs root"]
fn rows_are_named_sorted_and_filtered_and_their_histograms_add_up() -> anyhow::Result<()> {
    let bed = bed()?;
    let node = bed.node(1);
    let peer = bed.node(2);
    wait_for("a few round trips", PATIENCE, || {
        let rows = rows(node, "--protocol icmp")?;
        let all = rows.len() == 6 && rows.iter().all(|row| row["samples"].as_u64() >= Some(3));
        Ok(all.then_some(()))
    })?;
    let of_peer = rows(node, &format!("--peer {} --sort max", peer.name()))?;
    // TCP has its own rows where the agent tracks connections.
    let probed: Vec<_> = of_peer
        .iter()
        .filter(|row| row["protocol"] != "TCP")
        .collect();
    assert_eq!(probed.len(), 4, "{of_peer:?}");
    for row in &probed {
        assert_eq!(row["node"], format!("default/{}", peer.name()));
        let buckets = row["histogram-ns"].as_array().context("no histogram")?;
        let counts = buckets.iter().filter_map(|bucket| bucket[2].as_u64());
        assert_eq!(Some(counts.sum::<u64>()), row["samples"].as_u64(), "{row}");
    }
    let longest: Vec<_> = of_peer.iter().map(|row| row["max-ns"].as_u64()).collect();
    assert!(longest.is_sorted_by(|a, b| a >= b), "{longest:?}");
    let hosts = rows(
        node,
        "--path host --protocol icmp --peer 172.30.0.0/24 --top 2",
    )?;
    let peers: Vec<_> = hosts.iter().map(|row| row["peer"].clone()).collect();
    assert_eq!(peers, ["172.30.0.1", "172.30.0.2"]);
    // A busy machine may lose some probes on its own, but not half of those on every path.
    let lossy = rows(node, "--min-loss 50")?;
    let lost_half = |row: &serde_json::Value| row["lost"].as_u64() >= row["samples"].as_u64();
    assert!(lossy.iter().all(lost_half), "{lossy:?}");
    assert!(lossy.len() < rows(node, "")?.len(), "{lossy:?}");

    let table = node.cli("bpf rtt list --peer 172.30.0.2")?.success()?;
    assert!(table.starts_with("PEER "), "{table}");
    assert!(
        table.contains(&format!("default/{}", peer.name())),
        "{table}"
    );
    let plot = node.cli("bpf rtt list --histogram 172.30.0.2 --protocol icmp")?;
    let plot = plot.success()?;
    assert!(plot.contains('█') && plot.contains("p50"), "{plot}");
    assert!(!plot.contains('\u{1b}'), "{plot}");
    let unknown = node.cli("bpf rtt list --peer nobody")?;
    assert_eq!(unknown.code, Some(1));
    assert!(unknown.stderr.contains("nobody"), "{unknown:?}");
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn rows_are_reset_by_name_alone_and_listed_without_an_agent() -> anyhow::Result<()> {
    let bed = bed()?;
    let node = bed.node(1);
    assert_eq!(node.cli("bpf rtt reset")?.code, Some(2));
    let nobody = node.cli("bpf rtt reset 172.30.0.2 10.99.0.1")?;
    assert_eq!(nobody.code, Some(1));
    assert!(nobody.stderr.contains("10.99.0.1"), "{nobody:?}");

    node.kill_agent(Signal::SIGKILL)?;
    let of_peer = "--peer 172.30.0.2 --protocol icmp";
    let before = rows(node, "")?;
    assert!(rows(node, of_peer)?[0]["samples"].as_u64() > Some(0));
    let by_name = node.cli(&format!("bpf rtt reset {}", bed.node(2).name()))?;
    assert_eq!(by_name.code, Some(1));
    assert!(by_name.stderr.contains("no agent"), "{by_name:?}");

    let said = node
        .cli("bpf rtt reset 172.30.0.2 --protocol icmp")?
        .success()?;
    assert_eq!(said, "1 row reset\n");
    let [row] = &rows(node, of_peer)?[..] else {
        panic!("one row");
    };
    assert_eq!(row["samples"], 0);
    assert_eq!(row["histogram-ns"], serde_json::json!([]));
    assert_eq!(row["node"], serde_json::Value::Null);
    let others = |rows: &[serde_json::Value]| {
        let measured = rows.iter().filter(|row| row["samples"].as_u64() > Some(0));
        measured.count()
    };
    assert_eq!(others(&rows(node, "")?), others(&before) - 1);
    let all = node.cli("bpf rtt reset --all")?.success()?;
    assert_eq!(all, format!("{} rows reset\n", before.len()));
    assert_eq!(others(&rows(node, "")?), 0);
    Ok(())
}

/// Rows in a map that no program writes to.
struct Rows {
    bed: TestRun,
    map: HashMap<MapData, RttKey, RttRow>,
}

impl Rows {
    fn new() -> anyhow::Result<Self> {
        let bed = TestRun::load();
        let map = MapData::from_pin(bed.location.pins().join(layout::RTT.name))?;
        let map = HashMap::try_from(Map::from_map_data(map)?)?;
        Ok(Self { bed, map })
    }

    fn key(address: Ipv4Addr) -> RttKey {
        RttKey {
            peer: IpAddr::from(address).into(),
            path: Path::Host as u8,
            protocol: PROTOCOL_ICMP,
            pad: 0,
        }
    }

    fn command(&self, words: &str) -> anyhow::Result<Command> {
        let mut command = Command::new(agent_binary()?);
        command
            .args(["--instance", &self.bed.location.instance, "--bpf-root"])
            .arg(&self.bed.location.bpf_root)
            .args(words.split_whitespace());
        Ok(command)
    }
}

/// A listing in watch mode, whose lines are read one by one.
struct Watch {
    child: Child,
    lines: Receiver<String>,
}

impl Watch {
    fn start(command: &mut Command) -> anyhow::Result<Self> {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let out = child.stdout.take().context("no output")?;
        let (sender, lines) = channel();
        thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Self { child, lines })
    }

    /// The next line, as JSON.
    fn next(&self) -> anyhow::Result<serde_json::Value> {
        let line = self.lines.recv_timeout(PATIENCE).context("no line")?;
        serde_json::from_str(&line).with_context(|| format!("not JSON: {line:?}"))
    }

    /// The first line with nonzero counters.
    fn next_change(&self) -> anyhow::Result<serde_json::Value> {
        loop {
            let row = self.next()?;
            if row["samples"] != 0 || row["lost"] != 0 {
                return Ok(row);
            }
            assert_eq!(row["p50-ns"], serde_json::Value::Null, "{row}");
            assert_eq!(row["histogram-ns"], serde_json::json!([]), "{row}");
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
#[ignore = "needs root"]
fn differences_are_of_what_came_since_the_look_before_and_never_negative() -> anyhow::Result<()> {
    let mut rows = Rows::new()?;
    let key = Rows::key(Ipv4Addr::new(10, 9, 8, 7));
    let mut row = RttRow::EMPTY;
    (0..100).for_each(|at| row.record(50_000_000, at, 0, SOURCE_KERNEL));
    row.lost = 5;
    rows.map.insert(key, row, 0)?;
    let mut command = rows.command("bpf rtt list --numeric -o jsonl --watch=0.1 --delta")?;
    let watch = Watch::start(&mut command)?;
    // The first line ignores values from before the start.
    assert_eq!(watch.next()?["samples"], 0);

    (0..3).for_each(|at| row.record(20_000, at, 0, SOURCE_KERNEL));
    row.lost += 1;
    rows.map.insert(key, row, 0)?;
    let change = watch.next_change()?;
    assert_eq!(change["samples"], 3);
    assert_eq!(change["lost"], 1);
    assert_eq!(change["loss-ratio"], 0.25);
    assert_eq!(change["mean-ns"], 20_000);
    assert_eq!(change["min-ns"], 20_000, "a record");
    let p99 = change["p99-ns"].as_u64().context("no percentile")?;
    assert!(p99.abs_diff(20_000) <= 1_250, "{change}");
    assert_eq!(
        change["histogram-ns"],
        serde_json::json!([[18_432, 20_480, 3]])
    );

    let reset = run(&mut rows.command("bpf rtt reset --all")?)?.success()?;
    assert_eq!(reset, "1 row reset\n");
    let mut anew = rows.map.get(&key, 0)?;
    assert_eq!(anew.samples, 0);
    anew.record(7_000, 1, 0, SOURCE_KERNEL);
    rows.map.insert(key, anew, 0)?;
    let change = watch.next_change()?;
    assert_eq!(change["samples"], 1);
    assert_eq!(change["lost"], 0);
    assert_eq!(change["max-ns"], 7_000);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_listing_of_very_many_rows_has_each_of_them_in_aligned_columns() -> anyhow::Result<()> {
    const ROWS: u32 = 10_000;
    let mut rows = Rows::new()?;
    let first = Ipv4Addr::new(10, 128, 0, 0).to_bits();
    for number in 0..ROWS {
        let mut row = RttRow::EMPTY;
        row.record(u64::from(1_000 + 977 * number), 1, 0, SOURCE_KERNEL);
        rows.map
            .insert(Rows::key(Ipv4Addr::from_bits(first + number)), row, 0)?;
    }
    let table = run(&mut rows.command("bpf rtt list --numeric -o wide")?)?.success()?;
    let header = table.lines().next().context("no header")?;
    let path = header.find("PATH").context("no column")?;
    let p50 = header.find("P50").context("no column")?;
    assert_eq!(table.lines().count(), 1 + ROWS as usize);
    for (line, number) in table.lines().skip(1).zip(0..) {
        assert!(line.starts_with(&Ipv4Addr::from_bits(first + number).to_string()));
        assert_eq!(&line[path..path + 4], "host", "{line}");
        // A column further left contains micro signs, which are two bytes long but one column wide.
        let text: String = line.chars().skip(p50 - 1).take(2).collect();
        assert!(text.starts_with(' ') && !text.ends_with(' '), "{line}");
    }
    let json = run(&mut rows.command("bpf rtt list --numeric --sort max -o json")?)?.success()?;
    let json: Vec<serde_json::Value> = serde_json::from_str(&json)?;
    assert_eq!(json.len(), ROWS as usize);
    let longest = json.iter().map(|row| row["max-ns"].as_u64());
    assert!(longest.is_sorted_by(|a, b| a > b));
    let arguments = run(&mut rows.command("bpf rtt list --delta")?)?;
    assert_eq!(arguments.code, Some(2), "{arguments:?}");
    Ok(())
}
