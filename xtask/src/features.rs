//! Tests of what this machine's kernel may lack. In virtual machines they all run.

use anyhow::Context as _;

use crate::privilege::as_root;
use crate::process::output;
use crate::test::{LIST, listed};
use crate::workspace::Workspace;

/// Something that tests need of the kernel.
struct Feature {
    name: &'static str,
    /// File of the tests.
    file: &'static str,
    /// What those of its tests have in their names that need it.
    tests: &'static str,
    /// Fails without it, in a network namespace of its own: words separated by blanks.
    attempt: &'static str,
}

const FEATURES: &[Feature] = &[
    Feature {
        name: "netem",
        file: "netem",
        tests: "",
        attempt: "tc qdisc add dev lo root netem delay 1ms",
    },
    Feature {
        name: "VLAN devices",
        file: "devices",
        tests: "vlan_devices",
        attempt: "ip link add link lo name vlan5 type vlan id 5",
    },
    Feature {
        name: "dummy devices",
        file: "devices",
        tests: "dummy_device",
        attempt: "ip link add dummy0 type dummy",
    },
];

/// A test that can't run on this machine.
pub(crate) struct Skipped {
    /// `FILE::TEST`.
    pub(crate) test: String,
    /// What the kernel lacks.
    pub(crate) feature: &'static str,
}

impl Skipped {
    /// Its name in its file.
    pub(crate) fn name(&self) -> &str {
        self.test
            .split_once("::")
            .map_or(&self.test, |(_, test)| test)
    }

    /// Whether a filter of `cargo xtask test` means it: by its file, or by a part of its name.
    pub(crate) fn matches(&self, filter: &str) -> bool {
        self.test.strip_suffix(self.name()) == Some(&format!("{filter}::"))
            || self.name().contains(filter)
    }
}

/// The tests of files that this machine's kernel can't run, and why.
pub(crate) fn skipped(workspace: &Workspace) -> anyhow::Result<Vec<Skipped>> {
    let mut skipped = Vec::new();
    for feature in FEATURES {
        if has(feature)? {
            continue;
        }
        let tests = list(workspace, feature.file)?;
        let lacking = tests
            .iter()
            .filter(|test| test.contains(feature.tests))
            .map(|test| Skipped {
                test: format!("{}::{test}", feature.file),
                feature: feature.name,
            });
        skipped.extend(lacking);
    }
    Ok(skipped)
}

fn has(feature: &Feature) -> anyhow::Result<bool> {
    let mut attempt = as_root("unshare", "trying out what the kernel has")?;
    attempt
        .args(["--net", "--"])
        .args(feature.attempt.split(' '));
    Ok(output(&mut attempt)?.is_some())
}

/// The names of a file's tests.
fn list(workspace: &Workspace, file: &str) -> anyhow::Result<Vec<String>> {
    let mut cargo = workspace.cargo()?;
    cargo
        .args(["test", "--quiet", "--package=tests", "--test", file])
        .arg("--")
        .args(LIST);
    let printed = output(&mut cargo)?.with_context(|| format!("{file} does not list its tests"))?;
    Ok(listed(&printed))
}
