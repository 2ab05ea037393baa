//! `cargo xtask test --vm`: runs the workspace's tests in guests, with the same programs as on this machine.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use anyhow::{Context as _, bail};
use vm_init::PlannedCommand;

use super::guest::{CommandOutput, Guest, Outcome};
use super::kernel::Kernel;
use super::needs::missing;
use super::{Choice, PROGRAMS};
use crate::process::{installed, run};
use crate::test::events::TestEnd;
use crate::test::job::{Job, Record};
use crate::test::programs::{self, TestProgram};
use crate::test::report::Report;
use crate::test::{Filter, is_below, jobs};
use crate::workspace::Workspace;
use crate::{packages, setup};

/// Names of the tests that CI runs: loading and attaching every program, code that the verifier inspects, health,
/// conntrack, restart. There are only a few of each, because a test that takes seconds with KVM takes minutes without.
const CI: &[&str] = &[RESTART_WITH_CLSACT, RESTART_WITH_TCX, "verifier"];

/// The longest test that CI runs. It runs only with the hooks that an agent chooses on that kernel, not with both
/// kinds.
const RESTART_WITH_CLSACT: &str =
    "attachment::no_echo_is_lost_through_kills_and_restarts_with_clsact";
const RESTART_WITH_TCX: &str = "attachment::no_echo_is_lost_through_kills_and_restarts_with_tcx";

/// Files of this workspace that tests read.
const READ_BY_TESTS: &[&str] = &["deploy", "docs"];

/// Folders of this machine that the tests' tools read, if they exist.
const READ_BY_TOOLS: &[&str] = &[
    "/etc/alternatives",
    "/etc/containers",
    "/etc/cni",
    "/etc/iproute2",
    "/usr/lib/cni",
    "/usr/lib/podman",
    "/usr/lib/x86_64-linux-gnu/xtables",
    "/usr/share/containers",
];

/// Tools that other tools call, if they exist.
const CALLED_BY_TOOLS: &[&str] = &[
    "conmon",
    "iptables",
    "ip6tables",
    "catatonit",
    "ldconfig",
    "containerd-shim-runc-v2",
];

/// Programs that tests run besides the agent, and a library that tests make the agent load.
const HELPERS: &[&str] = &[
    "machine",
    "bed",
    "connections",
    "examples/libshifted_clock.so",
];

/// Which tests to run.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Share {
    All,
    Ci,
}

/// Runs the tests in one virtual machine per kernel, in parallel, and prints the counts.
pub(crate) fn test(
    workspace: &Workspace,
    choice: &Choice,
    filters: &[String],
    environment: &[String],
    share: Share,
) -> anyhow::Result<()> {
    let arch = choice.arch()?;
    if !arch.is_own() {
        bail!("the tests are built for this machine's processor only: run a cluster there");
    }
    packages::require(&[packages::emulator(arch)])?;
    packages::require(packages::VM)?;
    packages::require(packages::TESTS)?;
    setup::setup(workspace)?;
    let programs = programs::build(workspace)?;
    let kernels = choice.kernels(workspace)?;
    if share == Share::Ci {
        require_all_of_ci(&programs)?;
    }
    let filter = Filter::new(filters, &programs);
    let selections: Vec<_> = kernels
        .iter()
        .map(|kernel| Selection::new(kernel, &programs, &filter, share))
        .collect();
    if selections
        .iter()
        .all(|selection| selection.jobs.is_empty() && selection.skipped.is_empty())
    {
        bail!("no test matches {}", filters.join(", "));
    }
    let results: Vec<_> = thread::scope(|scope| {
        let run = |selection: &Selection| {
            let mut report = Report::default();
            let ran = prepare(workspace, choice, environment, share, selection)
                .and_then(|(guest, commands)| run_in(guest, &commands, selection, &mut report));
            (report, ran)
        };
        let guests: Vec<_> = selections
            .iter()
            .map(|selection| scope.spawn(move || run(selection)))
            .collect();
        guests.into_iter().map(|guest| guest.join()).collect()
    });
    let mut reports = Vec::new();
    for (selection, result) in selections.iter().zip(results) {
        let Ok((report, ran)) = result else {
            bail!("the thread of {} panicked", selection.kernel.name);
        };
        reports.push((selection, report, ran));
    }
    print_all(&mut reports)
}

/// Prints the reports. Fails if a test failed or if not all tests were run.
fn print_all(reports: &mut [(&Selection, Report, anyhow::Result<Outcome>)]) -> anyhow::Result<()> {
    let mut problems = Vec::new();
    for (selection, report, ran) in &mut *reports {
        let kernel = selection.kernel;
        println!("\nLinux {}", kernel.release);
        report.print_slowest();
        for (test, feature) in &selection.skipped {
            println!("skipped {test}: it needs {feature}");
        }
        report.counts.skipped += selection.skipped.len() as u64;
        match ran {
            Ok(Outcome::Done(_)) if report.counts.failed == 0 => {}
            Ok(Outcome::Done(_)) => {
                let failed = report.counts.failed;
                problems.push(format!("{failed} tests failed on {}", kernel.name));
            }
            Ok(Outcome::Interrupted(_)) => problems.push("interrupted".to_owned()),
            Err(error) => problems.push(format!("{error:#}")),
        }
    }
    for (selection, report, _) in &*reports {
        if report.counts.failed > 0 {
            println!("\nLinux {}", selection.kernel.release);
            report.print_failed();
        }
    }
    println!();
    for (selection, report, _) in &*reports {
        println!("Linux {}: {}", selection.kernel.release, report.counts);
    }
    if !problems.is_empty() {
        bail!(problems.join("; "));
    }
    Ok(())
}

/// Fails if a test in [`CI`] does not exist, for example because it was renamed.
fn require_all_of_ci(programs: &[TestProgram]) -> anyhow::Result<()> {
    let names: Vec<_> = programs
        .iter()
        .flat_map(|program| program.tests.iter().map(|test| program.name_of(test)))
        .collect();
    match CI
        .iter()
        .find(|above| !names.iter().any(|name| is_below(name, above)))
    {
        Some(absent) => bail!("CI's share names {absent}, which is not a test"),
        None => Ok(()),
    }
}

/// Whether CI runs a test on a kernel of this release.
fn is_of_ci(name: &str, release: &str) -> bool {
    let has_tcx = missing(RESTART_WITH_TCX, release).is_none();
    CI.iter().any(|above| is_below(name, above)) && !(has_tcx && name == RESTART_WITH_CLSACT)
}

/// The tests that run in a guest.
struct Selection<'a> {
    kernel: &'a Kernel,
    jobs: Vec<Job<'a>>,
    /// The tests that cannot run in the guest, each with the missing feature.
    skipped: BTreeMap<String, &'static str>,
}

impl<'a> Selection<'a> {
    fn new(kernel: &'a Kernel, programs: &'a [TestProgram], filter: &Filter, share: Share) -> Self {
        let release = &kernel.release;
        let mut chosen = Vec::new();
        let mut skipped = BTreeMap::new();
        // This tool's own tests need a machine with cargo.
        for program in programs.iter().filter(|program| program.name != "xtask") {
            let mut tests = Vec::new();
            for test in &program.tests {
                let name = program.name_of(test);
                let wanted = filter.wants(program, test);
                if !wanted || share == Share::Ci && !is_of_ci(&name, release) {
                    continue;
                }
                match missing(&name, release) {
                    Some(feature) => {
                        skipped.insert(name, feature);
                    }
                    None => tests.push(test.as_str()),
                }
            }
            chosen.push((program, tests));
        }
        Self {
            kernel,
            jobs: jobs(chosen),
            skipped,
        }
    }
}

/// Creates a guest with everything that the tests need, and a command for each job.
fn prepare<'a>(
    workspace: &'a Workspace,
    choice: &Choice,
    environment: &[String],
    share: Share,
    selection: &Selection<'a>,
) -> anyhow::Result<(Guest<'a>, Vec<PlannedCommand>)> {
    let built = |name: &str| stripped(workspace, &workspace.dev_binary(name));
    let mut guest = Guest::new(
        workspace,
        selection.kernel,
        choice.limit(),
        built("vm-init")?,
    )?;
    match share {
        Share::Ci => {
            let tools = packages::CI_GUESTS.iter();
            guest
                .root
                .tools(tools.filter_map(packages::Tool::program))?;
        }
        Share::All => add_tools(&mut guest, packages::TESTS)?,
    }
    let root = &mut guest.root;
    for folder in READ_BY_TESTS {
        root.tree(&workspace.root().join(folder))?;
    }
    // Tests look for the agent in the folder of their own program.
    let agent = workspace.dev_binary("health-agent");
    root.program_at(&agent, &built("health-agent")?)?;
    root.libraries_of(&agent)?;
    root.link(&Path::new(PROGRAMS).join("health-agent"), &agent)?;
    for helper in HELPERS {
        root.program_at(&workspace.dev_binary(helper), &built(helper)?)?;
    }

    let machine = workspace.dev_binary("machine");
    let mut commands = Vec::new();
    for job in &selection.jobs {
        let program = job.program;
        root.program_at(&program.path, &stripped(workspace, &program.path)?)?;
        root.libraries_of(&program.path)?;
        root.folder(&program.package)?;
        let mut words = vec![machine.to_string_lossy().into_owned(), "env".to_owned()];
        words.extend_from_slice(environment);
        words.push(program.path.to_string_lossy().into_owned());
        words.extend(job.arguments().into_iter().map(str::to_owned));
        let mut command = PlannedCommand::new(words);
        command.folder = program.package.to_string_lossy().into_owned();
        commands.push(command);
    }
    Ok((guest, commands))
}

/// Runs the tests in a guest and reports the results.
fn run_in(
    guest: Guest,
    commands: &[PlannedCommand],
    selection: &Selection,
    report: &mut Report,
) -> anyhow::Result<Outcome> {
    let Kernel { name, release, .. } = selection.kernel;
    let total: usize = selection.jobs.iter().map(|job| job.tests.len()).sum();
    eprintln!("{total} tests on Linux {release}");
    let mut record = Record::default();
    let mut lines = [Vec::new(), Vec::new()];
    guest.run(true, commands, |index, heard| {
        let job = &selection.jobs[index];
        let (stream, bytes) = match heard {
            CommandOutput::Stdout(bytes) => (0, bytes),
            CommandOutput::Stderr(bytes) => (1, bytes),
            CommandOutput::Ended(ended) => {
                let why = format!("its process ended with {ended:?}");
                for ended in std::mem::take(&mut record).close(&job.tests, &why) {
                    let test = job.program.name_of(&ended.test);
                    if let Some(said) = ended.outcome.failure() {
                        println!("[{name}] FAILED {test}\n{said}");
                    }
                    report.add(test, &ended);
                }
                return Ok(());
            }
        };
        for &byte in bytes {
            if byte != b'\n' {
                lines[stream].push(byte);
                continue;
            }
            let line = String::from_utf8_lossy(&lines[stream]).into_owned();
            lines[stream].clear();
            if let Some(ended) = record.hear(stream == 0, line) {
                print_result(name, job, ended)?;
            }
        }
        Ok(())
    })
}

/// Adds these tools with the programs that they call and the files that they read.
pub(super) fn add_tools(guest: &mut Guest, tools: &[packages::Tool]) -> anyhow::Result<()> {
    let called = CALLED_BY_TOOLS.iter().copied();
    let called = called.filter(|tool| installed(tool));
    let tools = tools.iter().filter_map(packages::Tool::program);
    guest.root.tools(tools.chain(called))?;
    for folder in READ_BY_TOOLS.iter().map(Path::new) {
        if folder.is_dir() {
            guest.root.tree(folder)?;
        }
    }
    Ok(())
}

/// Reports that a test has passed. Failed tests are reported later, with the whole output of their process.
fn print_result(kernel: &str, job: &Job, ended: &TestEnd) -> anyhow::Result<()> {
    if ended.outcome.failure().is_some() {
        return Ok(());
    }
    let test = job.program.name_of(&ended.test);
    let took = ended.took.as_secs_f64();
    writeln!(io::stdout(), "[{kernel}] ok {test} ({took:.1} s)").context("cannot print")
}

/// A copy of a program without debug symbols, which make up most of the file. With them, the programs would not fit
/// into a guest.
fn stripped(workspace: &Workspace, program: &Path) -> anyhow::Result<PathBuf> {
    let folder = workspace.vm()?.join("stripped");
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let name = program.file_name().context("the program has no name")?;
    let copy = folder.join(name);
    let changed = |path: &Path| fs::metadata(path).and_then(|metadata| metadata.modified());
    let source = changed(program).with_context(|| format!("cannot read {}", program.display()))?;
    if changed(&copy).is_ok_and(|copied| copied > source) {
        return Ok(copy);
    }
    // If several processes create the file at the same time, none of them sees a partial one.
    let made = tempfile::Builder::new()
        .prefix(".stripping-")
        .tempfile_in(&folder)
        .with_context(|| format!("cannot create a file in {}", folder.display()))?
        .into_temp_path();
    run(Command::new("strip").arg("-o").args([&*made, program]))?;
    made.persist(&copy)
        .with_context(|| format!("cannot create {}", copy.display()))?;
    Ok(copy)
}
