//! Reports the results of tests and how long they took.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use super::events::{Outcome, TestEnd};

/// Number of slowest tests and files to list.
const SLOWEST: usize = 15;

/// Number of lines of a failed test's output to repeat at the end.
const LAST_LINES: usize = 60;

/// Passed, failed and skipped tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
}

impl fmt::Display for Counts {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        write!(
            formatter,
            "{} passed, {} failed, {} skipped",
            self.passed, self.failed, self.skipped
        )
    }
}

/// The results of a run.
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) counts: Counts,
    /// Names of failed tests, with their output.
    failed: Vec<(String, String)>,
    took: Vec<(Duration, String)>,
    /// CPU time by process.
    busy: Vec<(Duration, String)>,
}

impl Report {
    /// Adds the result of a test; `name` is its name among all tests.
    pub(crate) fn add(&mut self, name: String, ended: &TestEnd) {
        match &ended.outcome {
            Outcome::Passed => self.counts.passed += 1,
            Outcome::Ignored => self.counts.skipped += 1,
            Outcome::Failed(said) => {
                self.counts.failed += 1;
                self.failed.push((name.clone(), said.clone()));
            }
        }
        self.took.push((ended.took, name));
    }

    /// Adds the CPU time of a process.
    pub(crate) fn add_busy(&mut self, name: String, busy: Duration) {
        self.busy.push((busy, name));
    }

    /// The CPU time of all processes together.
    pub(crate) fn total_busy(&self) -> Duration {
        self.busy.iter().map(|(busy, _)| busy).sum()
    }

    /// The total time of all tests.
    pub(crate) fn total(&self) -> Duration {
        self.took.iter().map(|(took, _)| took).sum()
    }

    /// Prints the slowest tests and files, and the processes that used most CPU time, if there are several.
    pub(crate) fn print_slowest(&self) {
        if self.took.len() < 2 {
            return;
        }
        print_largest("slowest tests", self.took.clone());
        print_largest("slowest files, total of their tests", by_file(&self.took));
        print_largest("CPU time by process", self.busy.clone());
        print_largest("CPU time by file", by_file(&self.busy));
    }

    /// Prints the failed tests, each with the end of its output: a log's tail shows the cause.
    pub(crate) fn print_failed(&self) {
        for (name, said) in &self.failed {
            println!("\nfailed {name}\n{}", last_lines(said));
        }
    }
}

/// The total time of each file's tests.
fn by_file(tests: &[(Duration, String)]) -> Vec<(Duration, String)> {
    let mut files = BTreeMap::<&str, Duration>::new();
    for (took, name) in tests {
        let file = name.split("::").next().unwrap_or(name);
        *files.entry(file).or_default() += *took;
    }
    let files = files.into_iter();
    files.map(|(file, took)| (took, file.to_owned())).collect()
}

fn print_largest(title: &str, mut took: Vec<(Duration, String)>) {
    if took.is_empty() {
        return;
    }
    took.sort_by(|first, second| second.cmp(first));
    println!("\n{title}");
    for (took, name) in took.iter().take(SLOWEST) {
        println!("{:>8.1} s  {name}", took.as_secs_f64());
    }
}

/// The last lines of a text, preceded by the number of omitted lines.
fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let (before, last) = lines.split_at(lines.len().saturating_sub(LAST_LINES));
    let last = last.join("\n");
    match before.len() {
        0 => last,
        before => format!("({before} lines more where it failed)\n{last}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_add_up() {
        let mut report = Report::default();
        for outcome in [
            Outcome::Passed,
            Outcome::Passed,
            Outcome::Failed(String::new()),
            Outcome::Ignored,
        ] {
            let ended = TestEnd {
                test: "a".to_owned(),
                took: Duration::from_secs(1),
                outcome,
            };
            report.add("file::a".to_owned(), &ended);
        }
        assert_eq!(report.counts.to_string(), "2 passed, 1 failed, 1 skipped");
        assert_eq!(report.total(), Duration::from_secs(4));
    }

    #[test]
    fn of_a_long_text_the_last_lines_are_shown() {
        assert_eq!(last_lines("a\nb\n"), "a\nb");
        let text: String = (1..=70).map(|number| format!("line {number}\n")).collect();
        let shown = last_lines(&text);
        assert!(shown.starts_with("(10 lines more where it failed)\nline 11\n"));
        assert!(shown.ends_with("\nline 70"), "{shown}");
    }
}
