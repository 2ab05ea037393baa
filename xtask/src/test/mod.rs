//! `cargo xtask test`: runs all tests, on this machine or in a virtual one, and counts the results.

mod environment;
pub(crate) mod events;
mod idle;
pub(crate) mod job;
mod long;
mod pool;
pub(crate) mod programs;
pub(crate) mod report;

use std::time::Instant;

use anyhow::bail;

use self::job::Job;
use self::pool::Width;
use self::programs::TestProgram;
use self::report::Report;
use crate::vm::Share;
use crate::workspace::Workspace;
use crate::{features, kubernetes, packages, setup, vm};

#[derive(clap::Args)]
#[command(after_help = "Examples:
  cargo xtask test                      all tests on this machine's kernel
  cargo xtask test masquerade kill      tests of tests/tests/beds/masquerade.rs, and all with
                                        `kill` in their names
  cargo xtask test health_mesh::engine  tests of a module
  cargo xtask test kubernetes_cluster   a real Kubernetes cluster, which is built first
  cargo xtask test --long               long runs too: churn, kills, random packets, a cluster
                                        on aarch64
  cargo xtask test --vm all --ci        CI's share in virtual machines of all tested kernels")]
pub(crate) struct Args {
    /// Run only tests with one of these words in their names, or of a file or crate of this name
    #[arg(value_name = "FILTER")]
    filters: Vec<String>,
    #[command(flatten)]
    vm: vm::Choice,
    /// Run only the tests that CI runs in virtual machines
    #[arg(long)]
    ci: bool,
    /// Build the tests and run none
    #[arg(long, conflicts_with_all = ["filters", "ci", "long"])]
    no_run: bool,
    /// Run tests of many rounds long enough to find rare failures, with new random numbers
    #[arg(long, conflicts_with = "ci")]
    long: bool,
    /// Number of test processes at once [default: three per processor, six while they
    /// are idle]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    jobs: Option<u16>,
}

pub(crate) fn test(workspace: &Workspace, args: &Args) -> anyhow::Result<()> {
    if args.no_run {
        setup::setup(workspace)?;
        programs::build(workspace)?;
        return Ok(());
    }
    let environment = environment::of_tests(args.long);
    if args.vm.wanted() {
        let share = if args.ci { Share::Ci } else { Share::All };
        return vm::test(workspace, &args.vm, &args.filters, &environment, share);
    }
    setup::setup(workspace)?;
    packages::require(packages::TESTS)?;
    let start = Instant::now();
    let programs = programs::build(workspace)?;
    let built = start.elapsed();

    let filter = Filter::new(&args.filters, &programs);
    let mut chosen = Vec::new();
    for program in &programs {
        let tests = program.tests.iter().map(String::as_str);
        let tests: Vec<_> = tests.filter(|test| filter.wants(program, test)).collect();
        chosen.push((program, tests));
    }
    if chosen
        .iter()
        .any(|(program, tests)| program.is_on_clusters() && !tests.is_empty())
    {
        kubernetes::setup(workspace)?;
    }
    let mut report = Report::default();
    let skipped = features::without(&mut chosen)?;
    report.counts.skipped += skipped.len() as u64;

    let start = Instant::now();
    let width = args
        .jobs
        .map_or_else(Width::of_machine, |jobs| Width::exactly(jobs.into()));
    pool::run(workspace, &environment, jobs(chosen), width, &mut report)?;
    let ran = start.elapsed();

    report.print_slowest();
    for (test, feature) in &skipped {
        println!("skipped {test}: it needs {feature}, which this machine's kernel lacks");
    }
    report.print_failed();
    println!(
        "build {:.1} s, tests {:.1} s: {:.1} s in total and {:.1} s of CPU time, {} to {} processes in parallel",
        built.as_secs_f64(),
        ran.as_secs_f64(),
        report.total().as_secs_f64(),
        report.total_busy().as_secs_f64(),
        width.steady,
        width.most
    );
    println!("{}", report.counts);
    if report.counts.failed > 0 {
        bail!("{} tests failed", report.counts.failed);
    }
    if report.counts.passed == 0 && skipped.is_empty() {
        bail!("no test matches {}", args.filters.join(", "));
    }
    if args.long && args.filters.is_empty() {
        long::run_all()?;
    }
    Ok(())
}

/// Selects tests.
pub(crate) struct Filter<'a> {
    /// Names of files and crates.
    whole: Vec<&'a str>,
    /// Substrings of names.
    parts: Vec<&'a str>,
}

impl<'a> Filter<'a> {
    pub(crate) fn new(filters: &'a [String], programs: &[TestProgram]) -> Self {
        let is_whole = |filter: &&str| {
            programs.iter().any(|program| {
                program.name == *filter
                    || program
                        .tests
                        .iter()
                        .any(|test| is_below(&program.name_of(test), filter))
            })
        };
        let (whole, parts) = filters.iter().map(String::as_str).partition(is_whole);
        Self { whole, parts }
    }

    /// Whether a test is selected. Tests that run on demand are selected only if their program is named.
    pub(crate) fn wants(&self, program: &TestProgram, test: &str) -> bool {
        let name = program.name_of(test);
        let named = |above: &&str| program.name == *above || is_below(&name, above);
        if self.whole.iter().any(named) {
            return true;
        }
        let all = self.whole.is_empty() && self.parts.is_empty();
        !program.is_on_demand() && (all || self.parts.iter().any(|part| name.contains(part)))
    }
}

/// Whether `name` equals `above`, or belongs to the file or module `above`.
pub(crate) fn is_below(name: &str, above: &str) -> bool {
    name.strip_prefix(above)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

/// Groups tests by process: each test on a bed gets its own, all selected tests of another program share one.
pub(crate) fn jobs<'a>(chosen: Vec<(&'a TestProgram, Vec<&'a str>)>) -> Vec<Job<'a>> {
    let mut jobs = Vec::new();
    for (program, tests) in chosen {
        if program.is_on_machines() {
            let each = tests.into_iter().map(|test| vec![test]);
            jobs.extend(each.map(|tests| Job { program, tests }));
        } else if !tests.is_empty() {
            jobs.push(Job { program, tests });
        }
    }
    jobs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(name: &str, tests: &[&str]) -> TestProgram {
        TestProgram {
            name: name.to_owned(),
            path: "/nowhere".into(),
            package: "/".into(),
            tests: tests.iter().map(|&test| test.to_owned()).collect(),
        }
    }

    #[test]
    fn names_are_compared_by_whole_parts() {
        assert!(is_below("vm", "vm") && is_below("vm::a", "vm") && is_below("vm::a", "vm::a"));
        assert!(!is_below("vm_init::a", "vm") && !is_below("vm::ab", "vm::a"));
    }

    #[test]
    fn filters_are_files_crates_modules_or_parts_of_names() {
        let programs = [
            program("beds", &["nat::kept", "echo::kept_by_nat"]),
            program("health_agent", &["mesh::kept"]),
            program("vm", &["kept"]),
        ];
        let chosen = |filters: &[&str]| {
            let filters: Vec<_> = filters.iter().map(|&filter| filter.to_owned()).collect();
            let filter = Filter::new(&filters, &programs);
            let mut chosen = Vec::new();
            for program in &programs {
                for test in &program.tests {
                    if filter.wants(program, test) {
                        chosen.push(program.name_of(test));
                    }
                }
            }
            chosen
        };
        assert_eq!(chosen(&["nat"]), ["nat::kept"]);
        assert_eq!(chosen(&["by_nat"]), ["echo::kept_by_nat"]);
        assert_eq!(
            chosen(&["health_agent::mesh"]),
            ["health_agent::mesh::kept"]
        );
        assert_eq!(chosen(&["vm"]), ["vm::kept"]);
        assert_eq!(chosen(&[]).len(), 3);
        assert_eq!(chosen(&["kept"]).len(), 3);
        assert!(chosen(&["none"]).is_empty());
    }

    #[test]
    fn each_test_on_beds_is_a_job_and_other_programs_are_one() {
        let beds = program("beds", &["nat::a", "nat::b"]);
        let crates = program("health_agent", &["a", "b", "c"]);
        let chosen = vec![(&beds, vec!["nat::a", "nat::b"]), (&crates, vec!["a", "c"])];
        let names: Vec<_> = jobs(chosen).iter().map(Job::name).collect();
        assert_eq!(names, ["nat::a", "nat::b", "health_agent"]);
    }
}
