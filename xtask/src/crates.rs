//! `cargo xtask check-crates`: checks that each crate uses only crates above it in the table of
//! `docs/architecture.md`.

use std::fs;

use anyhow::{Context as _, bail, ensure};
use serde::Deserialize;

use crate::process::output;
use crate::workspace::Workspace;

/// The page with the table, relative to the workspace.
const PAGE: &str = "docs/architecture.md";
/// The heading above it.
const HEADING: &str = "## Crates";

/// Cargo's metadata about the workspace.
#[derive(Debug, Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

/// A crate of the workspace.
#[derive(Debug, Deserialize)]
struct Package {
    name: String,
    dependencies: Vec<Dependency>,
}

/// A dependency of a crate.
#[derive(Debug, Deserialize)]
struct Dependency {
    name: String,
    /// `dev` or `build`; `None` for a normal dependency.
    kind: Option<String>,
    /// The crate's folder, if it is in this workspace.
    path: Option<String>,
}

/// Fails if a crate in the table uses a crate that is not above it. The error names each offender.
pub(crate) fn check(workspace: &Workspace) -> anyhow::Result<()> {
    let page = workspace.root().join(PAGE);
    let text =
        fs::read_to_string(&page).with_context(|| format!("cannot read {}", page.display()))?;
    let order = order(&text);
    ensure!(!order.is_empty(), "{PAGE} has no table under {HEADING:?}");

    let mut cargo = workspace.cargo()?;
    cargo.args(["metadata", "--no-deps", "--format-version=1"]);
    let metadata = output(&mut cargo)?.context("cargo metadata printed nothing")?;
    let metadata: Metadata =
        serde_json::from_str(&metadata).context("cannot parse the output of cargo metadata")?;
    let offences = offences(&order, &metadata.packages);
    if offences.is_empty() {
        println!("{} crates, each uses only those above it", order.len());
        return Ok(());
    }
    bail!("{}", offences.join("\n"));
}

/// The crates in the table, lowest first.
fn order(page: &str) -> Vec<&str> {
    let rows = page
        .lines()
        .skip_while(|line| *line != HEADING)
        .skip_while(|line| !line.starts_with('|'))
        .take_while(|line| line.starts_with('|'));
    rows.filter_map(|row| row.strip_prefix("| `")?.split_once('`'))
        .map(|(name, _)| name)
        .collect()
}

/// All violations, one line each.
fn offences(order: &[&str], packages: &[Package]) -> Vec<String> {
    let place = |name: &str| order.iter().position(|known| *known == name);
    let mut offences: Vec<_> = order
        .iter()
        .filter(|name| !packages.iter().any(|package| package.name == **name))
        .map(|name| format!("{PAGE} lists {name}, which is not a crate of this workspace"))
        .collect();
    for package in packages {
        let used = package
            .dependencies
            .iter()
            .filter(|dependency| dependency.path.is_some())
            .filter(|dependency| dependency.kind.as_deref() != Some("dev"));
        let Some(own) = place(&package.name) else {
            if package.name.starts_with("health-") {
                offences.push(format!("{PAGE} does not list {}", package.name));
            }
            continue;
        };
        offences.extend(
            used.filter(|dependency| place(&dependency.name).is_none_or(|place| place >= own))
                .map(|dependency| {
                    format!(
                        "{} uses {}, which is not above it in {PAGE}",
                        package.name, dependency.name
                    )
                }),
        );
    }
    offences
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "\
# Architecture

## Crates

Lowest first.

| crate | holds |
| --- | --- |
| `health-low` | much |
| `health-high` | more, and `health-low` |

| crate | holds |
| --- | --- |
| `tests` | tests |
";

    fn package(name: &str, used: &[(&str, Option<&str>)]) -> Package {
        Package {
            name: name.to_owned(),
            dependencies: used
                .iter()
                .map(|(name, kind)| Dependency {
                    name: (*name).to_owned(),
                    kind: kind.map(str::to_owned),
                    path: name.starts_with("health-").then(|| format!("/{name}")),
                })
                .collect(),
        }
    }

    #[test]
    fn this_workspace_keeps_its_order() {
        let workspace = Workspace::locate().expect("the workspace");
        check(&workspace).expect("an order that is kept");
    }

    #[test]
    fn the_order_is_that_of_the_first_table() {
        assert_eq!(order(TABLE), ["health-low", "health-high"]);
        assert!(order("# Architecture").is_empty());
    }

    #[test]
    fn a_crate_that_uses_a_higher_one_is_named() {
        let order = order(TABLE);
        let right = [
            package(
                "health-low",
                &[("serde", None), ("health-high", Some("dev"))],
            ),
            package("health-high", &[("health-low", None)]),
            package("tests", &[("health-high", None)]),
        ];
        assert!(offences(&order, &right).is_empty());
        let wrong = [
            package("health-low", &[("health-high", None)]),
            package("health-high", &[("health-low", Some("build"))]),
        ];
        assert_eq!(
            offences(&order, &wrong),
            ["health-low uses health-high, which is not above it in docs/architecture.md"]
        );
    }

    #[test]
    fn the_table_and_the_workspace_have_the_same_crates() {
        let offences = offences(
            &order(TABLE),
            &[package("health-low", &[]), package("health-new", &[])],
        );
        assert_eq!(
            offences,
            [
                "docs/architecture.md lists health-high, which is not a crate of this workspace",
                "docs/architecture.md does not list health-new",
            ]
        );
    }
}
