//! The results of a benchmark, which can be printed as a table or as JSON.

use std::{fmt, fs, thread};

use anyhow::{Context as _, bail};
use serde::Serialize;

use crate::process::print_line;

/// The target for a figure, usually relative to another figure measured at the same time, so that a slow machine does
/// not miss it. Only sizes, which do not depend on a machine's speed, have absolute limits.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Target {
    /// Upper limit for the ratio of our figure to the other one.
    RatioAtMost(f64),
    /// Lower limit for the ratio of our figure to the other one.
    RatioAtLeast(f64),
    /// Our figure must equal the other one.
    Equal,
    /// Upper limit for our figure, a size in MiB.
    MibAtMost(f64),
}

/// The unit of sizes with limits.
pub const MIB: &str = "MiB";

/// A measured figure. Smaller is better, unless the target says otherwise.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figure {
    /// What was measured.
    pub name: String,
    /// The unit of `ours` and `other`; [`MIB`] for a size that has a limit.
    pub unit: &'static str,
    /// Our figure.
    pub ours: f64,
    /// The figure of the competitor or the floor, measured on the same machine at the same time.
    pub other: Option<f64>,
    /// The promised target, if any.
    pub target: Option<Target>,
}

impl Figure {
    /// Our figure divided by the other one, unless that is 0.
    pub fn ratio(&self) -> Option<f64> {
        let other = self.other.filter(|&other| other != 0.0)?;
        Some(self.ours / other)
    }

    /// Whether the target is met. `None` without a target, without the other figure that the target needs, or if the
    /// target is a size limit and the figure is not a size.
    pub fn met(&self) -> Option<bool> {
        match self.target? {
            Target::RatioAtMost(limit) => self.ratio().map(|ratio| ratio <= limit),
            Target::RatioAtLeast(limit) => self.ratio().map(|ratio| ratio >= limit),
            Target::Equal => self.other.map(|other| self.ours == other),
            Target::MibAtMost(limit) => (self.unit == MIB).then_some(self.ours <= limit),
        }
    }
}

impl Figure {
    /// Prints the figure on standard error, to show intermediate results: a run may take minutes.
    pub(super) fn print(&self) {
        let other = self.other.map_or(String::new(), |other| {
            format!(", other {other:.2} {}", self.unit)
        });
        print_line(format_args!(
            "  {}: {:.2} {}{other}",
            self.name, self.ours, self.unit
        ));
    }
}

/// The machine that ran a measurement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Machine {
    /// The CPU's model.
    pub cpu: String,
    /// Number of CPUs that this process may use.
    pub cpus: usize,
    /// The kernel's release.
    pub kernel: String,
}

impl Machine {
    /// Reads the properties of this machine.
    pub fn here() -> anyhow::Result<Self> {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").context("cannot read /proc/cpuinfo")?;
        let cpu = cpuinfo
            .lines()
            .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
            .map_or("unknown CPU", |(_, model)| model)
            .to_owned();
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease")
            .context("cannot read the kernel's release")?
            .trim_end()
            .to_owned();
        let cpus = thread::available_parallelism()
            .context("cannot count the CPUs")?
            .get();
        Ok(Self { cpu, cpus, kernel })
    }
}

/// A figure that could not be measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Unmeasured {
    /// Name of the figure.
    pub name: String,
    /// The reason why it could not be measured.
    pub why: String,
}

/// Results of a benchmark so far.
#[derive(Debug, Default)]
pub(super) struct Findings {
    pub(super) figures: Vec<Figure>,
    unmeasured: Vec<Unmeasured>,
}

impl Findings {
    /// Prints and stores a figure.
    pub(super) fn add(&mut self, figure: Figure) {
        figure.print();
        self.figures.push(figure);
    }

    /// Returns the measurement if it succeeded. Otherwise prints the error and records it for the report.
    pub(super) fn measured<T>(&mut self, name: &str, found: anyhow::Result<T>) -> Option<T> {
        match found {
            Ok(found) => Some(found),
            Err(error) => {
                let unmeasured = Unmeasured {
                    name: name.to_owned(),
                    why: format!("{error:#}"),
                };
                print_line(format_args!("  {unmeasured}"));
                self.unmeasured.push(unmeasured);
                None
            }
        }
    }

    /// Creates the report for this machine. Fails if nothing could be measured.
    pub(super) fn report(self, rounds: u32) -> anyhow::Result<Report> {
        if let ([], [first, ..]) = (&self.figures[..], &self.unmeasured[..]) {
            bail!("nothing could be measured; {first}");
        }
        Ok(Report {
            unmeasured: self.unmeasured,
            ..Report::new(self.figures, rounds)?
        })
    }
}

impl fmt::Display for Unmeasured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: not measured: {}", self.name, self.why)
    }
}

/// The results of a benchmark.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// The measured figures.
    pub figures: Vec<Figure>,
    /// Figures that could not be measured.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unmeasured: Vec<Unmeasured>,
    /// Number of measurements per figure.
    pub rounds: u32,
    /// The machine that ran the benchmark.
    pub machine: Machine,
    /// A single ratio that summarises the results, printed on a separate last line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_ratio: Option<f64>,
}

impl Report {
    /// Sets the ratio that summarises the results.
    pub fn with_last_ratio(mut self, ratio: f64) -> Self {
        self.last_ratio = Some(ratio);
        self
    }

    /// Creates a report for this machine.
    pub fn new(figures: Vec<Figure>, rounds: u32) -> anyhow::Result<Self> {
        Ok(Self {
            figures,
            unmeasured: Vec::new(),
            rounds,
            machine: Machine::here()?,
            last_ratio: None,
        })
    }
}

const COLUMNS: [&str; 6] = ["FIGURE", "OURS", "OTHER", "RATIO", "TARGET", ""];

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rows = vec![COLUMNS.map(str::to_owned)];
        rows.extend(self.figures.iter().map(row));
        let widths: [usize; COLUMNS.len()] = std::array::from_fn(|column| {
            let widest = rows.iter().map(|row| row[column].chars().count()).max();
            widest.unwrap_or(0)
        });
        for row in &rows {
            let mut line = String::new();
            for (cell, width) in row.iter().zip(widths) {
                line += &format!("{cell:width$}   ");
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        for unmeasured in &self.unmeasured {
            writeln!(f, "{unmeasured}")?;
        }
        let Machine { cpu, cpus, kernel } = &self.machine;
        writeln!(f, "machine: {cpu}, {cpus} CPUs, Linux {kernel}")?;
        writeln!(f, "rounds: {}", self.rounds)?;
        match self.last_ratio {
            Some(ratio) => writeln!(f, "ratio {ratio:.2}"),
            None => Ok(()),
        }
    }
}

fn row(figure: &Figure) -> [String; COLUMNS.len()] {
    let with_unit = |value: f64| format!("{value:.2} {}", figure.unit);
    let target = match figure.target {
        None => "-".to_owned(),
        Some(Target::RatioAtMost(limit)) => format!("ratio <= {limit:.2}"),
        Some(Target::RatioAtLeast(limit)) => format!("ratio >= {limit:.2}"),
        Some(Target::Equal) => "equal".to_owned(),
        Some(Target::MibAtMost(limit)) => format!("<= {limit:.2} {MIB}"),
    };
    let verdict = match figure.met() {
        None => "",
        Some(true) => "ok",
        Some(false) => "MISS",
    };
    [
        figure.name.clone(),
        with_unit(figure.ours),
        figure.other.map_or("-".to_owned(), with_unit),
        figure
            .ratio()
            .map_or("-".to_owned(), |ratio| format!("{ratio:.2}")),
        target,
        verdict.to_owned(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(ours: f64, other: Option<f64>, target: Option<Target>) -> Figure {
        Figure {
            name: "echo".to_owned(),
            unit: "us",
            ours,
            other,
            target,
        }
    }

    #[test]
    fn targets_are_limits_of_the_ratio() {
        let ratio = Some(Target::RatioAtMost(0.78));
        assert_eq!(figure(7.8, Some(10.0), ratio).met(), Some(true));
        assert_eq!(figure(7.9, Some(10.0), ratio).met(), Some(false));
        assert_eq!(figure(7.9, None, ratio).met(), None);
        assert_eq!(figure(7.9, Some(0.0), ratio).met(), None);
        assert_eq!(figure(25.1, None, None).met(), None);
        let floor = Some(Target::RatioAtLeast(0.97));
        assert_eq!(figure(9.7, Some(10.0), floor).met(), Some(true));
        assert_eq!(figure(9.6, Some(10.0), floor).met(), Some(false));
        let equal = Some(Target::Equal);
        assert_eq!(figure(7.0, Some(7.0), equal).met(), Some(true));
        assert_eq!(figure(6.0, Some(7.0), equal).met(), Some(false));
        assert_eq!(figure(6.0, None, equal).met(), None);
    }

    #[test]
    fn sizes_alone_have_limits_of_their_own() {
        let limit = Some(Target::MibAtMost(25.0));
        let size = |ours| Figure {
            unit: MIB,
            ..figure(ours, None, limit)
        };
        assert_eq!(size(25.0).met(), Some(true));
        assert_eq!(size(25.1).met(), Some(false));
        assert_eq!(figure(25.1, None, limit).met(), None);
    }

    #[test]
    fn what_cannot_be_measured_is_in_the_report_and_the_rest_goes_on() {
        let mut findings = Findings::default();
        let failed = Err::<f64, _>(anyhow::anyhow!("too busy"));
        assert_eq!(findings.measured("echo", failed), None);
        assert_eq!(findings.measured("reply", Ok(7.0)), Some(7.0));
        findings.add(figure(7.0, None, None));
        let report = findings.report(1).unwrap();
        assert_eq!(report.figures.len(), 1);
        assert_eq!(
            report.unmeasured[0].to_string(),
            "echo: not measured: too busy"
        );

        let mut nothing = Findings::default();
        let failed = Err::<(), _>(anyhow::anyhow!("too busy"));
        nothing.measured("echo", failed);
        let error = nothing.report(1).unwrap_err().to_string();
        assert_eq!(
            error,
            "nothing could be measured; echo: not measured: too busy"
        );
    }

    #[test]
    fn a_row_a_figure_then_machine_and_rounds() {
        let report = Report {
            figures: vec![figure(7.4, Some(10.0), Some(Target::RatioAtMost(0.78)))],
            unmeasured: vec![Unmeasured {
                name: "reply".to_owned(),
                why: "nobody answers".to_owned(),
            }],
            rounds: 5,
            machine: Machine {
                cpu: "A CPU".to_owned(),
                cpus: 2,
                kernel: "6.18.5".to_owned(),
            },
            last_ratio: Some(0.74),
        };
        assert_eq!(
            report.to_string(),
            "FIGURE   OURS      OTHER      RATIO   TARGET\n\
             echo     7.40 us   10.00 us   0.74    ratio <= 0.78   ok\n\
             reply: not measured: nobody answers\n\
             machine: A CPU, 2 CPUs, Linux 6.18.5\n\
             rounds: 5\n\
             ratio 0.74\n"
        );
    }
}
