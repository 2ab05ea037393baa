//! Builds the test programs, all at once, and lists their tests.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail};
use serde::Deserialize;

use crate::process::{cannot_run, output};
use crate::workspace::Workspace;

/// Builds everything but jemalloc, which takes a minute to compile and only saves memory.
const BUILD: &[&str] = &[
    "build",
    "--workspace",
    "--exclude=health-ebpf",
    "--all-targets",
    "--no-default-features",
    "--features=health-agent/etcd,health-agent/kubernetes,tests/all",
];

/// Makes a test program print the names of its tests.
const LIST: &[&str] = &["--list", "--format=terse", "--include-ignored"];

/// Programs whose modules are test files: each test's name starts with the file's name.
const COLLECTIONS: &[&str] = &[ON_BEDS, "programs"];

/// The program whose tests each need their own machine.
const ON_BEDS: &str = "beds";

/// The program whose tests each start a Kubernetes cluster, which takes programs that nothing else needs. Runs only if
/// named, and in long runs.
const ON_CLUSTERS: &str = "kubernetes_cluster";

/// The program that boots virtual machines and calls cargo, which needs this machine's network. Runs only if named.
const ON_HOST: &str = "vm";

/// A test program.
#[derive(Clone, Debug)]
pub(crate) struct TestProgram {
    /// Name of the program's file or crate.
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    /// Folder of the program's package, where cargo runs the program.
    pub(crate) package: PathBuf,
    /// Names of the tests as the program prints them, without the program's name.
    pub(crate) tests: Vec<String>,
}

impl TestProgram {
    /// A test's name among all tests: `FILE::TEST` or `CRATE::MODULE::TEST`.
    pub(crate) fn name_of(&self, test: &str) -> String {
        if COLLECTIONS.contains(&self.name.as_str()) {
            test.to_owned()
        } else {
            format!("{}::{test}", self.name)
        }
    }

    /// Whether each of the program's tests runs in its own process and on its own machine.
    pub(crate) fn is_on_machines(&self) -> bool {
        self.name == ON_BEDS || self.is_on_clusters()
    }

    /// Whether the program's tests need the programs of Kubernetes.
    pub(crate) fn is_on_clusters(&self) -> bool {
        self.name == ON_CLUSTERS
    }

    /// Whether the program's tests run only if they are named.
    pub(crate) fn is_on_demand(&self) -> bool {
        self.is_on_host() || self.is_on_clusters()
    }

    /// Whether the program runs on this machine instead of its own.
    pub(crate) fn is_on_host(&self) -> bool {
        self.name == ON_HOST
    }
}

/// Cargo's message about an artifact; other fields are ignored.
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

/// Builds all crates, programs and tests at once, so that cargo builds each dependency once, and lists the tests.
pub(crate) fn build(workspace: &Workspace) -> anyhow::Result<Vec<TestProgram>> {
    let mut cargo = workspace.cargo()?;
    cargo
        .args(BUILD)
        .arg("--message-format=json-render-diagnostics")
        .stderr(Stdio::inherit())
        .stdin(Stdio::null());
    let built = cargo.output().map_err(|error| cannot_run(&cargo, error))?;
    if !built.status.success() {
        bail!("cannot build the tests");
    }
    let mut programs = Vec::new();
    for line in String::from_utf8_lossy(&built.stdout).lines() {
        let message: Message =
            serde_json::from_str(line).context("cannot parse cargo's build messages")?;
        let (Some(path), Some(target), Some(manifest)) =
            (message.executable, message.target, message.manifest_path)
        else {
            continue;
        };
        if message.profile.is_none_or(|profile| !profile.test) {
            continue;
        }
        let package = manifest
            .parent()
            .context("the manifest has no parent folder")?;
        programs.push(TestProgram {
            name: target.name.replace('-', "_"),
            tests: list(&path)?,
            path,
            package: package.to_owned(),
        });
    }
    programs.retain(|program| !program.tests.is_empty());
    programs.sort_by(|first, second| first.name.cmp(&second.name));
    Ok(programs)
}

fn list(program: &Path) -> anyhow::Result<Vec<String>> {
    let mut command = Command::new(program);
    command.args(LIST);
    let printed = output(&mut command)?
        .with_context(|| format!("{} does not list its tests", program.display()))?;
    Ok(printed
        .lines()
        .filter_map(|line| line.strip_suffix(": test"))
        .map(str::to_owned)
        .collect())
}
