//! `cargo xtask test --vm`: the tests of the workspace in guests. They are those that run on this machine,
//! built in the same way; the agent is the static one.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail};
use serde::Deserialize;
use vm_init::{Ended, PlannedCommand};

use super::guest::{Guest, Outcome};
use super::kernel::Kernel;
use super::needs::{is_below, missing};
use super::{CLUSTER, Choice, PROGRAMS, build_static};
use crate::process::{cannot_run, output, run};
use crate::test::{Counts, LIST, ON_BED, UNITS, listed};
use crate::workspace::Workspace;
use crate::{packages, setup};

/// CI's share, by names: load and attach of every program, health, RTT, conntrack, restart. Few of each: what
/// takes seconds with a processor takes minutes without.
const CI: &[&str] = &[
    "attachment::from_one_kind_to_the_other_every_packet_is_handled_once",
    "attachment::no_echo_is_lost_through_kills_and_restarts_with_clsact",
    "attachment::no_echo_is_lost_through_kills_and_restarts_with_tcx",
    "conntrack_gc::what_has_expired_goes_with_both_entries_of_its_translation",
    "conntrack_settings::a_start_with_other_settings_keeps_the_flows_that_there_are",
    "devices",
    "echo::echo_is_answered_without_an_agent",
    "echo::killing_and_starting_the_agent_loses_nothing",
    "mesh::endpoints_keep_their_address_over_a_restart",
    "mesh::three_nodes_reach_each_other_soon_and_peers_are_timed_in_the_kernel",
    "netem",
    "packets::a_probe_and_its_reply_make_a_round_trip",
    "packets::an_echo_request_of_any_size_becomes_its_reply",
    "packets::each_exchange_is_in_conntrack",
    "repair::a_detached_link",
    "repair::removed_pins",
    "rtt::samples_losses_and_probes_in_flight_are_all_that_were_sent",
    "stack",
    "startup::what_a_killed_agent_left_is_taken_over",
    "traffic::connections_to_peers_are_timed_in_the_kernel",
    "verifier",
];

/// Files of this workspace that tests read.
const READ_BY_TESTS: &[&str] = &["deploy", "docs"];

/// Folders of this machine that tools of the tests read, where they are.
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

/// Tools that others call, where they are.
const CALLED_BY_TOOLS: &[&str] = &["conmon", "iptables", "ip6tables", "catatonit", "ldconfig"];

/// A program with tests, as `cargo test` builds it.
struct TestProgram {
    /// Name of its file or crate.
    name: String,
    path: PathBuf,
    /// Folder of its package, where cargo runs it.
    package: PathBuf,
    tests: Vec<String>,
}

impl TestProgram {
    /// A test's name among all tests.
    fn name_of(&self, test: &str) -> String {
        format!("{}::{test}", self.name)
    }
}

/// Runs the tests in a machine of each kernel, and says what they counted to.
pub(crate) fn test(
    workspace: &Workspace,
    choice: &Choice,
    filters: &[String],
    ci: bool,
) -> anyhow::Result<()> {
    let arch = choice.arch()?;
    if !arch.is_own() {
        bail!("the tests are built for this machine's processor only: run a cluster there");
    }
    packages::require(&[packages::emulator(arch)])?;
    packages::require(packages::VM)?;
    packages::require(packages::TESTS)?;
    setup::setup(workspace)?;
    let kernels = choice.kernels(workspace)?;
    build_static(workspace, arch, CLUSTER)?;
    let programs = test_programs(workspace)?;
    if ci {
        require_all_of_ci(&programs)?;
    }

    let mut summary = Vec::new();
    let mut problems = Vec::new();
    for kernel in &kernels {
        let selection = Selection::new(&programs, &kernel.release, filters, ci);
        if selection.chosen.is_empty() && selection.skipped.is_empty() {
            bail!("no test matches {}", filters.join(", "));
        }
        let mut counts = Counts::default();
        counts.skipped += selection.skipped.len() as u64;
        let ran = run_on(workspace, kernel, choice, &selection, &mut counts);
        println!();
        for (test, feature) in &selection.skipped {
            println!("skipped {test}: it needs {feature}");
        }
        summary.push(format!("Linux {}: {counts}", kernel.release));
        match ran {
            Ok(true) if counts.failed == 0 => {}
            Ok(true) => problems.push(format!("{} tests failed on {}", counts.failed, kernel.name)),
            Ok(false) => {
                problems.push("interrupted".to_owned());
                break;
            }
            Err(error) => problems.push(format!("{error:#}")),
        }
    }
    for line in summary {
        println!("{line}");
    }
    if !problems.is_empty() {
        bail!(problems.join("; "));
    }
    Ok(())
}

/// Fails if a test of CI's share is not there, as after a change of its name.
fn require_all_of_ci(programs: &[TestProgram]) -> anyhow::Result<()> {
    let names: Vec<_> = programs
        .iter()
        .flat_map(|program| program.tests.iter().map(|test| program.name_of(test)))
        .collect();
    match CI
        .iter()
        .find(|above| !names.iter().any(|name| is_below(name, above)))
    {
        Some(absent) => bail!("CI's share names {absent}, which is no test"),
        None => Ok(()),
    }
}

/// Which tests run in a guest, program by program, and which can't.
struct Selection<'a> {
    chosen: Vec<(&'a TestProgram, Vec<&'a str>)>,
    /// Each with the feature that is missing.
    skipped: BTreeMap<String, &'static str>,
}

impl<'a> Selection<'a> {
    fn new(programs: &'a [TestProgram], release: &str, filters: &[String], ci: bool) -> Self {
        let (files, parts): (Vec<_>, Vec<_>) = filters
            .iter()
            .partition(|filter| programs.iter().any(|program| program.name == **filter));
        let mut selection = Self {
            chosen: Vec::new(),
            skipped: BTreeMap::new(),
        };
        for program in programs {
            let mut chosen = Vec::new();
            for test in &program.tests {
                let name = program.name_of(test);
                let wanted = filters.is_empty()
                    || files.contains(&&program.name)
                    || parts.iter().any(|part| test.contains(*part));
                if !wanted || ci && !CI.iter().any(|above| is_below(&name, above)) {
                    continue;
                }
                match missing(&name, release) {
                    Some(feature) => {
                        selection.skipped.insert(name, feature);
                    }
                    None => chosen.push(test.as_str()),
                }
            }
            if !chosen.is_empty() {
                selection.chosen.push((program, chosen));
            }
        }
        selection
    }
}

/// Runs the tests in one machine, and adds what they count to. False if that was interrupted.
fn run_on(
    workspace: &Workspace,
    kernel: &Kernel,
    choice: &Choice,
    selection: &Selection,
    counts: &mut Counts,
) -> anyhow::Result<bool> {
    let mut guest = Guest::new(workspace, kernel, choice.limit())?;
    guest
        .root
        .tools(packages::TESTS.iter().filter_map(packages::Tool::program))?;
    guest.root.tools(
        CALLED_BY_TOOLS
            .iter()
            .copied()
            .filter(|tool| crate::process::installed(tool)),
    )?;
    for folder in READ_BY_TOOLS.iter().map(Path::new) {
        if folder.is_dir() {
            guest.root.tree(folder)?;
        }
    }
    for folder in READ_BY_TESTS {
        guest.root.tree(&workspace.root().join(folder))?;
    }
    // Tests look for the agent beside themselves.
    let agent = workspace.static_binary(kernel.arch, "health-agent");
    guest
        .root
        .program_at(&Path::new(PROGRAMS).join("health-agent"), &agent)?;
    guest
        .root
        .program_at(&workspace.dev_binary("health-agent"), &agent)?;
    for helper in ["bed", "connections"] {
        let path = workspace.dev_binary(helper);
        guest.root.program_at(&path, &stripped(workspace, &path)?)?;
    }

    let mut commands = Vec::new();
    for (program, tests) in &selection.chosen {
        guest
            .root
            .program_at(&program.path, &stripped(workspace, &program.path)?)?;
        guest.root.libraries_of(&program.path)?;
        guest.root.folder(&program.package)?;
        commands.push(planned(program, tests));
    }
    let total: usize = selection.chosen.iter().map(|(_, tests)| tests.len()).sum();
    eprintln!("{total} tests of {} programs", commands.len());

    let mut line = Vec::new();
    let outcome = guest.run(true, &commands, |_, bytes| {
        for &byte in bytes {
            if byte == b'\n' {
                counts.add(&String::from_utf8_lossy(&line));
                line.clear();
            } else {
                line.push(byte);
            }
        }
        Ok(())
    })?;
    let Outcome::Done(all_ended) = outcome else {
        return Ok(false);
    };
    for ((program, _), ended) in selection.chosen.iter().zip(all_ended) {
        // What failed tests end with.
        if !matches!(ended, Ended::Code(0 | 101)) {
            bail!("the tests of {} ended with {ended:?}", program.name);
        }
    }
    Ok(true)
}

fn planned(program: &TestProgram, tests: &[&str]) -> PlannedCommand {
    let path = program.path.to_string_lossy();
    let mut command = PlannedCommand::new([&path, "--include-ignored", "--test-threads=1"]);
    command.folder = program.package.to_string_lossy().into_owned();
    if tests.len() < program.tests.len() {
        command.words.push("--exact".to_owned());
        command
            .words
            .extend(tests.iter().map(|&test| test.to_owned()));
    }
    command
}

/// What cargo tells of each thing that it built; more of it is not looked at.
#[derive(Deserialize)]
struct Message {
    executable: Option<PathBuf>,
    manifest_path: Option<PathBuf>,
    profile: Option<Profile>,
    target: Option<Target>,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

#[derive(Deserialize)]
struct Target {
    name: String,
}

/// Builds all programs with tests, and lists their tests.
fn test_programs(workspace: &Workspace) -> anyhow::Result<Vec<TestProgram>> {
    let mut programs = Vec::new();
    for selection in [UNITS, ON_BED] {
        build_tests(workspace, selection, &mut programs)?;
    }
    programs.sort_by(|first, second| first.name.cmp(&second.name));
    Ok(programs)
}

fn build_tests(
    workspace: &Workspace,
    selection: &[&str],
    programs: &mut Vec<TestProgram>,
) -> anyhow::Result<()> {
    let mut cargo = workspace.cargo()?;
    cargo
        .args([
            "test",
            "--no-run",
            "--message-format=json-render-diagnostics",
        ])
        .args(selection)
        .stderr(Stdio::inherit());
    let built = cargo
        .stdin(Stdio::null())
        .output()
        .map_err(|error| cannot_run(&cargo, error))?;
    if !built.status.success() {
        bail!("cannot build the tests");
    }
    for line in String::from_utf8_lossy(&built.stdout).lines() {
        let message: Message =
            serde_json::from_str(line).context("cannot read what cargo says of its build")?;
        let (Some(path), Some(target), Some(manifest)) =
            (message.executable, message.target, message.manifest_path)
        else {
            continue;
        };
        // Programs of this tool's package are for machines with cargo.
        if message.profile.is_none_or(|profile| !profile.test) || target.name == "xtask" {
            continue;
        }
        let tests = list(&path)?;
        let package = manifest.parent().context("a manifest in no folder")?;
        programs.push(TestProgram {
            name: target.name,
            path,
            package: package.to_owned(),
            tests,
        });
    }
    Ok(())
}

fn list(program: &Path) -> anyhow::Result<Vec<String>> {
    let mut command = Command::new(program);
    command.args(LIST);
    let printed = output(&mut command)?
        .with_context(|| format!("{} does not list its tests", program.display()))?;
    Ok(listed(&printed))
}

/// A copy without debug symbols, which are most of a program: all of them would not fit into a guest.
fn stripped(workspace: &Workspace, program: &Path) -> anyhow::Result<PathBuf> {
    let folder = workspace.vm()?.join("stripped");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let name = program.file_name().context("a program without a name")?;
    let copy = folder.join(name);
    let changed = |path: &Path| fs::metadata(path).and_then(|metadata| metadata.modified());
    let source = changed(program).with_context(|| format!("cannot read {}", program.display()))?;
    if changed(&copy).is_ok_and(|copied| copied > source) {
        return Ok(copy);
    }
    // Others that make it at the same time never find half of it.
    let made = tempfile::Builder::new()
        .prefix(".stripping-")
        .tempfile_in(&folder)
        .with_context(|| format!("cannot make a file in {}", folder.display()))?
        .into_temp_path();
    run(Command::new("strip").arg("-o").args([&*made, program]))?;
    made.persist(&copy)
        .with_context(|| format!("cannot make {}", copy.display()))?;
    Ok(copy)
}
