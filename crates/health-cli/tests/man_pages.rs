//! The man pages of the commands and of the settings file.

#[path = "../examples/man/pages.rs"]
mod pages;

use std::fs;
use std::process::Command as Process;

use clap::{Args as _, Command};
use health_settings::{Settings, groups, with_one_form};

use self::pages::Page;

fn all() -> Vec<Page> {
    pages::all("2026-11-28")
}

/// A page's text without roff's escapes.
fn text(pages: &[Page], file: &str) -> String {
    let page = pages.iter().find(|page| page.file == file);
    let page = page.unwrap_or_else(|| panic!("no page {file}"));
    page.text
        .replace("\\-", "-")
        .replace("\\*(Aq", "'")
        .replace("\\\\", "\\")
}

#[test]
fn each_command_has_a_page_with_all_its_flags() {
    fn check(pages: &[Page], command: &Command, count: &mut usize) {
        *count += 1;
        let name = command.get_display_name().unwrap_or("health-agent");
        let text = text(pages, &format!("{name}.1"));
        let own = command.get_arguments().filter(|arg| arg.get_id() != "help");
        for arg in own {
            let flag = match arg.get_long() {
                Some(long) => format!("--{long}"),
                None => arg.get_value_names().expect("a name")[0].to_string(),
            };
            assert!(text.contains(&flag), "{flag} in {text}");
            let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
            assert!(text.contains(&help), "{help:?} in {text}");
        }
        assert!(text.contains("\n.SH EXAMPLES\n.nf\n"), "{text}");
        assert!(text.contains("\n.SH \"SEE ALSO\"\n"), "{text}");
        assert!(
            !text.contains("\n.SH NOTES\n"),
            "a section without heading: {text}"
        );
        for below in command.get_subcommands() {
            check(pages, below, count);
        }
    }
    let pages = all();
    let mut program = health_cli::command().disable_help_subcommand(true);
    program.build();
    let mut count = 0;
    check(&pages, &program, &mut count);
    assert_eq!(pages.len(), count + 1, "and the page of settings");
}

#[test]
fn the_page_of_settings_has_each_with_range_default_and_variable() {
    let text = text(&all(), "health-agent.config.5");
    let run = with_one_form(Settings::augment_args(Command::new("run")));
    for setting in groups(&run).flat_map(|group| group.settings) {
        let start = format!("\n.TP\n\\fB{}\\fR\n{}", setting.name, setting.help);
        let (_, described) = text.split_once(&start).expect(setting.name);
        let described = described.split("\n.TP\n").next().unwrap_or_default();
        let range = setting.range.map(ToString::to_string).unwrap_or_default();
        for fact in [range, setting.default_text(), setting.variable] {
            assert!(described.contains(&fact), "{}: {described}", setting.name);
        }
    }
    assert!(
        text.contains("\n.nf\n# /etc/health-agent/config.yaml\nmesh:\n  probe-interval: 5s\n.fi\n"),
        "{text}"
    );
}

#[test]
fn pages_render_without_warnings() {
    let folder = tempfile::tempdir().expect("a folder");
    let pages = all();
    for page in &pages {
        fs::write(folder.path().join(&page.file), &page.text).expect("a page");
    }
    let mut mandoc = Process::new("mandoc");
    mandoc.args(["-T", "lint", "-W", "warning"]);
    mandoc.args(pages.iter().map(|page| folder.path().join(&page.file)));
    let output = mandoc
        .output()
        .expect("mandoc; `cargo xtask test` installs it");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.is_empty(), "{said}");
}
