//! The parts of README.md that come from a run: sample output and figures. `cargo xtask docs` updates them, and a test
//! compares them.
//!
//! A sample is the code block after a line `<!-- sample: NAME -->`; a figure is the text between
//! `<!-- figure: NAME -->` and `<!-- -->`.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use nix::sys::signal::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::{Bed, Node, PATIENCE, wait_for};

const SAMPLE: &str = "<!-- sample: ";
const FIGURE: &str = "<!-- figure: ";
const FIGURE_END: &str = "<!-- -->";
const FENCE: &str = "```";
const MIB: f64 = 1024.0 * 1024.0;

/// Size limit of a released executable, megabytes.
pub const PROGRAM_LIMIT_MB: f64 = 20.0;
/// Relative error above which a figure in the README must be updated.
const TOLERANCE: f64 = 0.05;

/// Prefixes of words that only some runs print: statistics over several replies.
const SOMETIMES: [&str; 3] = ["p90=", "jitter=", "network"];

/// Strings for the README, each with the name of its slot.
pub type Shown = Vec<(&'static str, String)>;

/// Produces the samples from runs on this machine.
pub fn samples() -> anyhow::Result<Shown> {
    let mut samples = well()?;
    samples.extend(faulty()?);
    Ok(samples)
}

/// Samples from a healthy cluster.
fn well() -> anyhow::Result<Shown> {
    let start = Instant::now();
    let bed = Bed::builder().nodes(3).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    // The same line that `cargo xtask run` prints.
    let reachable = format!(
        "3 nodes, all reachable after {:.1} s",
        start.elapsed().as_secs_f64()
    );
    let node = bed.node(1);
    // Right after the start, parts of the agent may still be connecting.
    let status = wait_for("a status without warnings", PATIENCE, || {
        let status = node.cli("status")?.success()?;
        Ok((!status.contains("Agent warning")).then_some(status))
    })?;
    let flows = wait_for("a flow each way", PATIENCE, || {
        let listed = node.cli("bpf ct list --proto icmp")?.success()?;
        let first = |direction: &str| {
            let mut lines = listed.lines();
            lines
                .find(|line| line.starts_with(direction))
                .map(str::to_owned)
        };
        Ok(first("ICMP OUT ").zip(first("ICMP IN ")))
    })?;
    Ok(vec![
        (
            "run",
            format!("$ cargo xtask run --once\n{reachable}\n{status}"),
        ),
        (
            "flows",
            format!("$ health-agent bpf ct list\n{}\n{}\n", flows.0, flows.1),
        ),
    ])
}

/// Samples from a faulty cluster: one agent is killed, another node drops echo requests, and the route to an endpoint
/// is a blackhole.
fn faulty() -> anyhow::Result<Shown> {
    let bed = Bed::builder().nodes(4).probing(500, 400).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let [prober, killed, filters, lost] = [1, 2, 3, 4].map(|index| bed.node(index));
    let endpoint = lost.health_ipv4()?;
    killed.kill_agent(Signal::SIGKILL)?;
    let deaf = "add table inet deaf; add chain inet deaf in { type filter hook input priority 0; }; \
                add rule inet deaf in ip daddr 172.30.0.3 icmp type echo-request drop";
    let mut nft = filters.command("nft");
    crate::process::run(nft.arg(deaf))?.success()?;
    prober.exec(&format!("ip route add blackhole {endpoint}/32"))?;
    let overview = wait_for("all diagnoses", PATIENCE, || {
        let ran = prober.cli("status --probe --succinct")?;
        let causes = ["agent-down", "icmp-filtered", "no-route"];
        let is_known = causes.iter().all(|cause| ran.stdout.contains(cause));
        Ok(is_known.then_some(ran.stdout))
    })?;
    let details = prober.cli(&format!("status --verbose --node {}", killed.name()))?;
    // Showing only the host's part is enough.
    let host = details
        .stdout
        .lines()
        .take_while(|line| !line.contains("Endpoint connectivity"));
    let details: String = host.map(|line| format!("{line}\n")).collect();
    Ok(vec![
        (
            "overview",
            format!("$ health-agent status --probe --succinct\n{overview}"),
        ),
        (
            "details",
            format!("$ health-agent status --verbose --node hnode2\n{details}...\n"),
        ),
    ])
}

/// Figures for the maps: an agent's kernel memory, MiB.
pub fn map_figures() -> anyhow::Result<Shown> {
    let folder = TempDir::new()?;
    let bed = Bed::builder().nodes(1).without_agents().start()?;
    let node = bed.node(1);
    node.take_over(None)?;
    let plain = Maps::of(node)?;
    node.kill_agent(Signal::SIGTERM)?;
    node.take_over_with(&format!("--service-manifests {}", folder.path().display()))?;
    let serving = Maps::of(node)?;
    let services = serving.all() - plain.all();
    let figure = |mib: f64| format!("{mib:.0}");
    Ok(vec![
        ("maps", figure(plain.all())),
        (
            "maps-tcp",
            figure(plain.of_names(&["CT4", "CT6", "NAT4", "NAT6"])),
        ),
        (
            "maps-any",
            figure(plain.of_names(&["CT_ANY4", "CT_ANY6", "NAT_ANY4", "NAT_ANY6"])),
        ),
        ("maps-inflight", figure(plain.of_names(&["INFLIGHT"]))),
        ("maps-services", figure(services)),
    ])
}

/// The figure for the size of an executable.
pub fn program_figure(program: &Path) -> anyhow::Result<Shown> {
    let file = program
        .metadata()
        .with_context(|| format!("cannot inspect {}", program.display()))?;
    let megabytes = file.len() as f64 / 1e6;
    ensure!(
        megabytes <= PROGRAM_LIMIT_MB,
        "{} has {megabytes:.1} MB: {PROGRAM_LIMIT_MB} at most",
        program.display()
    );
    Ok(vec![("program", format!("{megabytes:.1}"))])
}

/// Map names without the prefix `HEALTH_`, and their memory in bytes.
struct Maps(Vec<(String, f64)>);

impl Maps {
    fn of(node: &Node) -> anyhow::Result<Self> {
        let listed = node.listing("bpf map list")?;
        let maps = listed.as_array().context("no maps")?.iter();
        let read = |map: &Value| {
            let name = map["name"].as_str()?.trim_start_matches("HEALTH_");
            // Excluded: this map has a row per target, and the README counts it separately.
            (name != "RTT").then_some((name.to_owned(), map["memory-bytes"].as_f64()?))
        };
        Ok(Self(maps.filter_map(read).collect()))
    }

    fn all(&self) -> f64 {
        self.0.iter().map(|(_, bytes)| bytes / MIB).sum()
    }

    fn of_names(&self, names: &[&str]) -> f64 {
        let named = self
            .0
            .iter()
            .filter(|(name, _)| names.contains(&name.as_str()));
        named.map(|(_, bytes)| bytes / MIB).sum()
    }
}

/// Inserts these samples into their slots. Fails if a slot is missing.
pub fn with_samples(readme: &str, samples: &Shown) -> anyhow::Result<String> {
    let mut text = readme.to_owned();
    for (name, sample) in samples {
        let (begin, end) = sample_range(&text, name)?;
        text.replace_range(begin..end, sample);
    }
    Ok(text)
}

/// Inserts these figures into their slots. Fails if a slot is missing.
pub fn with_figures(readme: &str, figures: &Shown) -> anyhow::Result<String> {
    let mut text = readme.to_owned();
    for (name, figure) in figures {
        let (begin, end) = figure_range(&text, name)?;
        text.replace_range(begin..end, figure);
    }
    Ok(text)
}

/// Checks that the README's samples have the same form as these samples.
pub fn check_samples(readme: &str, samples: &Shown) -> anyhow::Result<()> {
    for (name, sample) in samples {
        let (begin, end) = sample_range(readme, name)?;
        let (written, now) = (form(&readme[begin..end]), form(sample));
        ensure!(
            written == now,
            "the README's sample {name} differs from a run's; update it with: cargo xtask docs\n\
             README:\n{written}\nrun:\n{now}"
        );
    }
    Ok(())
}

/// Checks that the README's figures are close to these figures.
pub fn check_figures(readme: &str, figures: &Shown) -> anyhow::Result<()> {
    for (name, figure) in figures {
        let written = written_figure(readme, name)?;
        let now: f64 = figure.parse()?;
        // A rounded figure may be off by one.
        let tolerance = (now * TOLERANCE).max(1.0);
        ensure!(
            (written - now).abs() <= tolerance,
            "the README's figure {name} is {written}, but a run's is {now}; update it with: cargo xtask docs"
        );
    }
    Ok(())
}

/// Parses a figure in the README.
pub fn written_figure(readme: &str, name: &str) -> anyhow::Result<f64> {
    let (begin, end) = figure_range(readme, name)?;
    let text = &readme[begin..end];
    text.parse()
        .with_context(|| format!("the README's figure {name} is not a number: {text:?}"))
}

fn sample_range(readme: &str, name: &str) -> anyhow::Result<(usize, usize)> {
    let marker = format!("{SAMPLE}{name} -->\n{FENCE}\n");
    let begin = readme.find(&marker).map(|at| at + marker.len());
    let begin = begin.with_context(|| format!("the README has no place for the sample {name}"))?;
    let length = readme[begin..].find(FENCE);
    let length = length.with_context(|| format!("the README's sample {name} has no end"))?;
    Ok((begin, begin + length))
}

fn figure_range(readme: &str, name: &str) -> anyhow::Result<(usize, usize)> {
    let marker = format!("{FIGURE}{name} -->");
    let begin = readme.find(&marker).map(|at| at + marker.len());
    let begin = begin.with_context(|| format!("the README has no place for the figure {name}"))?;
    let length = readme[begin..].find(FIGURE_END);
    let length = length.with_context(|| format!("the README's figure {name} has no end"))?;
    Ok((begin, begin + length))
}

/// Reduces output to the part that is the same in every run: words and their order, without numbers, addresses, times,
/// column widths, and statistics that need more replies than some runs have.
fn form(text: &str) -> String {
    let lines = text.lines().filter(|line| {
        let first = line.split_whitespace().next();
        first.is_none_or(|first| !SOMETIMES.iter().any(|word| first.starts_with(word)))
    });
    let lines = lines.map(|line| {
        let words = line.split_whitespace();
        let words = words.filter(|word| !SOMETIMES.iter().any(|some| word.starts_with(some)));
        let words = words.map(|word| match word.find(|c: char| c.is_ascii_digit()) {
            // Keep the names of the bed's nodes.
            Some(_) if word.contains("hnode") => word.to_owned(),
            Some(at) if is_label(&word[..at]) => format!("{}N", &word[..at]),
            Some(_) => "N".to_owned(),
            None => word.to_owned(),
        });
        words.collect::<Vec<_>>().join(" ")
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// Whether the string before a number is its label: `p50=` is one, the start of an address is not.
fn is_label(text: &str) -> bool {
    text.contains('=')
}

#[cfg(test)]
mod tests {
    use super::*;

    const README: &str = "\
A run:

<!-- sample: run -->
```
$ run
ICMP to stack:   OK, RTT=57.966µs
```

The file has <!-- figure: program -->15.8<!-- --> MB.
";

    #[test]
    fn samples_and_figures_are_written_and_compared() {
        let sample = |line: &str| vec![("run", format!("$ run\n{line}\n"))];
        let same = sample("ICMP to stack:  OK, RTT=1.2ms");
        check_samples(README, &same).unwrap();
        let other = sample("ICMP to host: OK, RTT=1ms");
        let error = check_samples(README, &other).unwrap_err().to_string();
        assert!(error.contains("cargo xtask docs"), "{error}");
        let written = with_samples(README, &other).unwrap();
        check_samples(&written, &other).unwrap();
        assert!(written.ends_with(&README[README.len() - 60..]), "{written}");

        let figure = |text: &str| vec![("program", text.to_owned())];
        check_figures(README, &figure("16.2")).unwrap();
        assert!(check_figures(README, &figure("19.1")).is_err());
        let written = with_figures(README, &figure("19.1")).unwrap();
        assert_eq!(written_figure(&written, "program").unwrap(), 19.1);
        check_samples(&written, &same).unwrap();
        let missing = vec![("none", String::new())];
        assert!(with_samples(README, &missing).is_err());
        assert!(with_figures(README, &missing).is_err());
    }
}
