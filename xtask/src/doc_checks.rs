//! Checks that files named or linked in the documentation exist, and that docs/limits.md is complete.

use std::fs;
use std::path::{Path, PathBuf};

use crate::workspace::Workspace;

/// Extensions of the files that pages name by paths relative to the workspace.
const EXTENSIONS: &[&str] = &["c", "json", "md", "rs", "service", "sh", "toml", "yaml"];

/// Files that a page names in code spans, relative to the workspace.
fn named<'a>(root: &Path, page: &'a str) -> Vec<&'a str> {
    let spans = page
        .lines()
        .flat_map(|line| line.split('`').skip(1).step_by(2));
    let in_workspace = |span: &&str| {
        let path = Path::new(span);
        let has_extension = path
            .extension()
            .is_some_and(|extension| EXTENSIONS.iter().any(|known| extension == *known));
        let folder = span.split_once('/').map(|(folder, _)| folder);
        has_extension
            && folder.is_some_and(|folder| !folder.is_empty() && root.join(folder).is_dir())
    };
    spans.filter(in_workspace).collect()
}

/// Files that a page links to, relative to the page's folder.
fn linked(page: &str) -> Vec<&str> {
    let targets = page.split("](").skip(1);
    let targets = targets.filter_map(|rest| rest.split([')', '#']).next());
    targets
        .filter(|target| !target.is_empty() && !target.contains("://"))
        .collect()
}

fn pages(root: &Path) -> Vec<PathBuf> {
    let docs = fs::read_dir(root.join("docs")).expect("a folder docs");
    let docs = docs.map(|entry| entry.expect("an entry of docs").path());
    let pages = docs.chain([root.join("README.md")]);
    pages
        .filter(|path| path.extension().is_some_and(|extension| extension == "md"))
        .collect()
}

#[test]
fn files_that_pages_name_or_link_to_are_there() {
    let workspace = Workspace::locate().expect("the workspace");
    let root = workspace.root();
    let mut missing = Vec::new();
    for path in pages(root) {
        let page = fs::read_to_string(&path).expect("a page");
        let folder = path.parent().expect("a page's folder");
        let named = named(root, &page).into_iter().map(|file| root.join(file));
        let linked = linked(&page).into_iter().map(|file| folder.join(file));
        let absent = named.chain(linked).filter(|file| !file.exists());
        missing.extend(absent.map(|file| format!("{}: {}", path.display(), file.display())));
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}

#[test]
fn names_and_links_are_found() {
    let workspace = Workspace::locate().expect("the workspace");
    let page = "`docs/a.md`, `b.rs`, `/etc/c.yaml` and `docs d.md`; [e](e.md#f), [g](https://h.i/j.md), [k](#k)";
    assert_eq!(named(workspace.root(), page), ["docs/a.md"]);
    assert_eq!(linked(page), ["e.md"]);
}

/// Maps that tenants can fill neither with objects nor with packets. They hold settings, a fixed number of entries, or
/// entries per node of the mesh.
const OF_NO_TENANT: &[&str] = &[
    "HEALTH_CALLS",
    "HEALTH_CONFIG",
    "HEALTH_DIRECT",
    "HEALTH_HANDS",
    "HEALTH_INFLIGHT",
    "HEALTH_IP_CALLS",
    "HEALTH_MASQUERADE",
    "HEALTH_METRICS",
    "HEALTH_MONITOR",
    "HEALTH_PEERS",
    "HEALTH_RTT",
    "HEALTH_XDP_DEVICES",
    "HEALTH_XDP_TIMES",
];

/// The contents of code spans in one column of a page's tables.
fn column(page: &str, column: usize) -> impl Iterator<Item = &str> {
    let rows = page.lines().filter(|line| line.starts_with("| "));
    let cells = rows.filter_map(move |row| row.split(" | ").nth(column));
    cells.flat_map(|cell| cell.split('`').skip(1).step_by(2))
}

#[test]
fn the_page_of_limits_has_all_maps_that_tenants_share() {
    let workspace = Workspace::locate().expect("the workspace");
    let page = |name: &str| fs::read_to_string(workspace.root().join("docs").join(name));
    let (maps, limits) = (
        page("maps.md").expect("maps"),
        page("limits.md").expect("limits"),
    );
    let mut shared = column(&maps, 0)
        .filter(|name| name.starts_with("HEALTH_"))
        .peekable();
    assert!(shared.peek().is_some(), "no map in docs/maps.md");
    let missing: Vec<_> = shared
        .filter(|map| !OF_NO_TENANT.contains(map) && !map.ends_with("_RING"))
        .filter(|map| !limits.contains(&format!("`{map}`")))
        .collect();
    assert!(missing.is_empty(), "not in docs/limits.md: {missing:?}");
}

#[test]
fn tests_that_the_page_of_limits_names_are_there() {
    let workspace = Workspace::locate().expect("the workspace");
    let root = workspace.root();
    let limits = fs::read_to_string(root.join("docs/limits.md")).expect("limits");
    let mut sources = String::new();
    for folder in ["crates", "health-agent", "tests"] {
        read_sources(&root.join(folder), &mut sources);
    }
    let named = column(&limits, 5).filter(|name| !name.contains(' '));
    let mut named: Vec<_> = named.filter(|name| name.contains('_')).collect();
    named.dedup();
    assert!(!named.is_empty(), "no test in docs/limits.md");
    named.retain(|name| !sources.contains(&format!("fn {name}(")));
    assert!(named.is_empty(), "no such tests: {named:?}");
}

/// Appends the contents of all source files in a folder.
fn read_sources(folder: &Path, sources: &mut String) {
    for entry in fs::read_dir(folder).expect("a folder of sources") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            read_sources(&path, sources);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            sources.push_str(&fs::read_to_string(&path).expect("a source"));
        }
    }
}
