//! Listing a million entries, compared with bare lookups, with `bpftool`, and with `conntrack` on the kernel's own
//! table.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Seek as _, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use health_datapath::dump::Pinned;
use health_datapath::layout;
use nix::unistd::Pid;

use super::filled::FilledMaps;
use crate::bed::agent_binary;
use crate::bench::lookups::look_up_all;
use crate::bench::parts::median;
use crate::bench::usage::ResidentMemory;
use crate::bench::{Figure, MIB, Target};
use crate::process::{run, shown};
use crate::{Bed, Node};

const ENTRIES: u32 = 1_000_000;
/// Map capacity, larger than the number of entries.
const CAPACITY: u32 = 1 << 20;
/// Number of entries in the kernel's own conntrack: below its limit, which applies to the whole machine.
const KERNEL_ENTRIES: u32 = 250_000;
const ROUNDS: u32 = 5;
const LOOKUPS_RATIO: f64 = 3.0;
const BPFTOOL_RATIO: f64 = 1.0 / 8.0;
const CONNTRACK_RATIO: f64 = 1.0 / 5.0;
const MEMORY_LIMIT_MIB: f64 = 64.0;

pub(super) fn figures() -> anyhow::Result<Vec<Figure>> {
    let filled = FilledMaps::new(CAPACITY, ENTRIES)?;
    let bed = Bed::builder().nodes(1).without_agents().start()?;
    fill_kernel(bed.node(1))?;
    let pinned = Pinned::open(&filled.location)?;
    let mut output = tempfile::tempfile().context("cannot create a temporary file")?;
    let mut times = Times::default();
    // The first round warms up.
    for round in 0..=ROUNDS {
        let jsonl = written(&mut list(&filled, &["-o", "jsonl"])?, &mut output)?;
        if round == 0 {
            check_lines(&mut output, ENTRIES)?;
        }
        let text = written(&mut list(&filled, &[])?, &mut output)?;
        let count = written(
            &mut list(&filled, &["--port", "53", "--count"])?,
            &mut output,
        )?;
        let lookups = look_up_all(&pinned, layout::CT4.name)?;
        let bpftool = written(&mut bpftool(&filled.location.pins()), &mut output)?;
        let conntrack = written(bed.node(1).command("conntrack").arg("-L"), &mut output)?;
        if round == 0 {
            check_lines(&mut output, KERNEL_ENTRIES)?;
            continue;
        }
        times.jsonl.push(millis(jsonl));
        times.text.push(millis(text));
        times.count.push(millis(count));
        times.lookups.push(millis(lookups));
        times.bpftool.push(millis(bpftool));
        times.conntrack.push(millis(conntrack));
    }
    let figures = times.figures()?;
    let memory = Figure {
        name: format!("{ENTRIES} entries: ct list -o jsonl, resident memory at its peak"),
        unit: MIB,
        ours: peak_memory(&filled)?,
        other: None,
        target: Some(Target::MibAtMost(MEMORY_LIMIT_MIB)),
    };
    Ok(figures.into_iter().chain([memory]).collect())
}

/// Milliseconds of each round.
#[derive(Default)]
struct Times {
    jsonl: Vec<f64>,
    text: Vec<f64>,
    count: Vec<f64>,
    lookups: Vec<f64>,
    bpftool: Vec<f64>,
    conntrack: Vec<f64>,
}

impl Times {
    fn figures(self) -> anyhow::Result<Vec<Figure>> {
        let jsonl = median(self.jsonl)?;
        let lookups = median(self.lookups)?;
        let figure = |what: &str, ours, other, target| Figure {
            name: format!("{ENTRIES} entries: {what}, median of {ROUNDS}"),
            unit: "ms",
            ours,
            other: Some(other),
            target,
        };
        let nanos_each = |millis: f64, entries: u32| millis * 1e6 / f64::from(entries);
        Ok(vec![
            figure(
                "ct list -o jsonl to a file (other: the bare look-ups)",
                jsonl,
                lookups,
                Some(Target::RatioAtMost(LOOKUPS_RATIO)),
            ),
            figure(
                "ct list -o jsonl to a file (other: bpftool map dump)",
                jsonl,
                median(self.bpftool)?,
                Some(Target::RatioAtMost(BPFTOOL_RATIO)),
            ),
            Figure {
                name: format!(
                    "an entry: ct list -o jsonl (other: conntrack -L, of {KERNEL_ENTRIES})"
                ),
                unit: "ns",
                ours: nanos_each(jsonl, ENTRIES),
                other: Some(nanos_each(median(self.conntrack)?, KERNEL_ENTRIES)),
                target: Some(Target::RatioAtMost(CONNTRACK_RATIO)),
            },
            figure(
                "ct list to a file (other: the bare look-ups)",
                median(self.text)?,
                lookups,
                None,
            ),
            figure(
                "ct list --port 53 --count (other: the bare look-ups)",
                median(self.count)?,
                lookups,
                None,
            ),
        ])
    }
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn list(filled: &FilledMaps, flags: &[&str]) -> anyhow::Result<Command> {
    let mut command = Command::new(agent_binary()?);
    command
        .args(["--instance", &filled.location.instance, "--bpf-root"])
        .arg(&filled.location.bpf_root)
        .args(["bpf", "ct", "list"])
        .args(flags);
    Ok(command)
}

fn bpftool(pins: &Path) -> Command {
    let mut command = Command::new("bpftool");
    command
        .args(["map", "dump", "pinned"])
        .arg(pins.join(layout::CT4.name));
    command
}

/// Measures how long a command takes to write its output to an empty file.
fn written(command: &mut Command, output: &mut File) -> anyhow::Result<Duration> {
    output.set_len(0)?;
    output.rewind()?;
    command
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(Stdio::piped());
    let start = Instant::now();
    let ran = command
        .spawn()
        .and_then(std::process::Child::wait_with_output)
        .with_context(|| format!("cannot run {}", shown(command)))?;
    let elapsed = start.elapsed();
    ensure!(
        ran.status.success(),
        "{} ended with {}: {}",
        shown(command),
        ran.status,
        String::from_utf8_lossy(&ran.stderr)
    );
    Ok(elapsed)
}

fn check_lines(output: &mut File, expected: u32) -> anyhow::Result<()> {
    output.rewind()?;
    let lines = BufReader::new(output).lines().count();
    ensure!(lines == expected as usize, "{lines} lines, not {expected}");
    Ok(())
}

/// Peak memory of a list command, read when it has printed most entries and the pipe is full.
fn peak_memory(filled: &FilledMaps) -> anyhow::Result<f64> {
    let mut command = list(filled, &["-o", "jsonl"])?;
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {}", shown(&command)))?;
    let stdout = child.stdout.take().context("no standard output")?;
    let mut lines = BufReader::new(stdout).split(b'\n');
    for line in lines.by_ref().take(ENTRIES as usize / 10 * 9) {
        line?;
    }
    let peak = ResidentMemory::of(Pid::from_raw(child.id().cast_signed()))?.peak;
    lines.try_for_each(|line| line.map(drop))?;
    ensure!(child.wait()?.success(), "{} failed", shown(&command));
    Ok(peak)
}

/// Creates entries in the kernel's own conntrack of a node's namespace.
fn fill_kernel(node: &Node) -> anyhow::Result<()> {
    let mut entries = tempfile::NamedTempFile::new().context("cannot create a temporary file")?;
    for number in 0..KERNEL_ENTRIES {
        let [_, high, middle, low] = number.to_be_bytes();
        writeln!(
            entries,
            "-A -p tcp -s 10.{}.{middle}.{low} -d 10.244.1.7 --sport 40000 --dport 443 -t 86400 \
             --state ESTABLISHED -u ASSURED,SEEN_REPLY",
            128 + high
        )?;
    }
    entries.flush()?;
    let mut load = node.command("conntrack");
    run(load.arg("--load-file").arg(entries.path()))?.success()?;
    Ok(())
}
