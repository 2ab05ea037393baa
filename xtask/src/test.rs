//! `cargo xtask test`: all tests, on this machine or in a virtual one, and what they counted to.

use std::fmt;
use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail};

use crate::features::{self, Skipped};
use crate::privilege::{is_root, require_sudo};
use crate::process::{cannot_run, run};
use crate::workspace::Workspace;
use crate::{packages, setup, vm};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Run only tests whose name contains one of these, or those of the file tests/tests/FILTER.rs
    #[arg(value_name = "FILTER")]
    filters: Vec<String>,
    #[command(flatten)]
    vm: vm::Choice,
    /// In virtual machines: only the tests that CI runs there
    #[arg(long)]
    ci: bool,
}

pub(crate) fn test(workspace: &Workspace, args: &Args) -> anyhow::Result<()> {
    if args.vm.wanted() {
        return vm::test(workspace, &args.vm, &args.filters, args.ci);
    }
    setup::setup(workspace)?;
    packages::require(packages::TESTS)?;
    // Integration tests start the agent's program, which cargo does not build for them.
    run(workspace.cargo()?.args(["build", "--package=health-agent"]))?;

    let filters = &args.filters[..];
    let skipped: Vec<_> = features::skipped(workspace)?
        .into_iter()
        .filter(|skipped| {
            filters.is_empty() || filters.iter().any(|filter| skipped.matches(filter))
        })
        .collect();
    let mut counts = Counts {
        skipped: skipped.len() as u64,
        ..Counts::default()
    };
    let mut all_ran = true;
    for selection in selections(workspace, filters, &skipped) {
        let mut cargo = cargo_test(workspace)?;
        cargo.args(selection);
        all_ran &= run_counted(&mut cargo, &mut counts)?;
    }

    println!();
    for Skipped { test, feature } in &skipped {
        println!("skipped {test}: it needs {feature}, which this machine's kernel lacks");
    }
    println!("{counts}");
    if counts.failed > 0 {
        bail!("{} tests failed", counts.failed);
    }
    if !all_ran {
        bail!("cargo test failed");
    }
    if counts.passed == 0 && skipped.is_empty() {
        bail!("no test matches {}", filters.join(", "));
    }
    Ok(())
}

/// Cargo's selections of the tests that crates have of themselves, and of those on the bed. Together cargo would
/// build other dependencies for them.
pub(crate) const UNITS: &[&str] = &["--workspace", "--exclude=health-ebpf", "--exclude=tests"];
pub(crate) const ON_BED: &[&str] = &["--package=tests"];

/// What to give to `cargo test`, run by run. Tests on the bed share this machine's namespaces, so
/// they come one at a time.
fn selections(workspace: &Workspace, filters: &[String], skipped: &[Skipped]) -> Vec<Vec<String>> {
    let words = |words: &[&str]| {
        words
            .iter()
            .map(|&word| word.to_owned())
            .collect::<Vec<_>>()
    };
    let is_file = |name: &str| {
        workspace
            .root()
            .join("tests/tests")
            .join(format!("{name}.rs"))
            .is_file()
    };
    // Tests that need root are marked as ignored, so that a plain `cargo test` skips them.
    let all = ["--", "--include-ignored"];
    let skips = skipped
        .iter()
        .flat_map(|skipped| ["--skip", skipped.name()]);
    let on_bed: Vec<_> = all
        .into_iter()
        .chain(["--test-threads=1"])
        .chain(skips)
        .collect();
    let (files, parts): (Vec<_>, Vec<_>) =
        filters.iter().cloned().partition(|filter| is_file(filter));
    let mut selections = Vec::new();
    if !files.is_empty() {
        let files = files
            .into_iter()
            .flat_map(|file| ["--test".to_owned(), file]);
        selections.push([words(ON_BED), files.collect(), words(&on_bed)].concat());
    }
    if !parts.is_empty() || selections.is_empty() {
        selections.push([words(UNITS), words(&all), parts.clone()].concat());
        selections.push([words(ON_BED), words(&on_bed), parts].concat());
    }
    selections
}

/// Has a program with tests print their names, for [`listed`].
pub(crate) const LIST: &[&str] = &["--list", "--format=terse", "--include-ignored"];

/// The names that it prints.
pub(crate) fn listed(printed: &str) -> Vec<String> {
    printed
        .lines()
        .filter_map(|line| line.strip_suffix(": test"))
        .map(str::to_owned)
        .collect()
}

fn cargo_test(workspace: &Workspace) -> anyhow::Result<Command> {
    let mut cargo = workspace.cargo()?;
    cargo.args(["test", "--no-fail-fast"]);
    if !is_root()? {
        require_sudo("testing on network namespaces")?;
        cargo.args(["--config", r#"target."cfg(unix)".runner=["sudo", "-E"]"#]);
    }
    Ok(cargo)
}

#[derive(Default)]
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

impl Counts {
    /// Reads `test result: ok. 3 passed; 0 failed; 1 ignored; ...`.
    pub(crate) fn add(&mut self, line: &str) {
        let Some(result) = line.strip_prefix("test result: ") else {
            return;
        };
        let counted = |what: &str| -> u64 {
            result
                .split([';', '.'])
                .find_map(|part| part.trim().strip_suffix(what)?.trim().parse().ok())
                .unwrap_or(0)
        };
        self.passed += counted("passed");
        self.failed += counted("failed");
        self.skipped += counted("ignored");
    }
}

/// Runs it, passing its output on; false if it failed.
fn run_counted(cargo: &mut Command, counts: &mut Counts) -> anyhow::Result<bool> {
    let mut child = cargo
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| cannot_run(cargo, error))?;
    let stdout = child
        .stdout
        .take()
        .context("cargo has no standard output")?;
    for line in BufReader::new(stdout).lines() {
        let line = line.context("cannot read the output of cargo test")?;
        println!("{line}");
        counts.add(&line);
    }
    Ok(child
        .wait()
        .context("cannot wait for cargo test")?
        .success())
}

#[cfg(test)]
mod tests {
    use super::Counts;

    #[test]
    fn results_add_up() {
        let mut counts = Counts::default();
        for line in [
            "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out",
            "test some::name ... ok",
            "test result: FAILED. 10 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out",
        ] {
            counts.add(line);
        }
        assert_eq!((counts.passed, counts.failed, counts.skipped), (13, 2, 1));
    }
}
