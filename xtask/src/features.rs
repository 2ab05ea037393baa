//! Tests that need kernel features that this machine may lack. In virtual machines, all of them run.

use crate::privilege::as_root;
use crate::process::output;
use crate::test::is_below;
use crate::test::programs::TestProgram;

/// A kernel feature that tests need.
struct Feature {
    name: &'static str,
    /// The file with the tests.
    file: &'static str,
    /// Substring of the names of those tests in the file that need the feature.
    tests: &'static str,
    /// A command that fails without the feature, run in a new network namespace. Arguments are separated by spaces.
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
    Feature {
        name: "WireGuard devices",
        file: "devices",
        tests: "wireguard",
        attempt: "ip link add wg0 type wireguard",
    },
    Feature {
        name: "IPVS",
        file: "services_ipvs",
        tests: "",
        attempt: "ipvsadm --list",
    },
];

/// The selected tests of each program.
type ChosenTests<'a> = [(&'a TestProgram, Vec<&'a str>)];

/// Removes the tests that this machine's kernel cannot run. Returns each test's name with the missing feature.
pub(crate) fn without(chosen: &mut ChosenTests) -> anyhow::Result<Vec<(String, &'static str)>> {
    let mut skipped = Vec::new();
    for feature in FEATURES {
        let needs = |name: &str| is_below(name, feature.file) && name.contains(feature.tests);
        let is_needed = chosen.iter().any(|(program, tests)| {
            let mut names = tests.iter().map(|test| program.name_of(test));
            names.any(|name| needs(&name))
        });
        if !is_needed || has(feature)? {
            continue;
        }
        for (program, tests) in chosen.iter_mut() {
            tests.retain(|test| {
                let name = program.name_of(test);
                let lacks = needs(&name);
                if lacks {
                    skipped.push((name, feature.name));
                }
                !lacks
            });
        }
    }
    Ok(skipped)
}

fn has(feature: &Feature) -> anyhow::Result<bool> {
    let mut attempt = as_root("unshare", "testing the kernel's features")?;
    attempt
        .args(["--net", "--"])
        .args(feature.attempt.split(' '));
    Ok(output(&mut attempt)?.is_some())
}
