//! The man pages: one for each command, and `health-agent.config(5)` for the settings file.

use clap::{Arg, Args as _, Command};
use clap_mangen::Man;
use clap_mangen::roff::{Inline, Roff, bold, italic, roman};
use health_settings::{Definition, Settings, groups, with_one_form};

/// Name of the settings page, without the section.
const CONFIG: &str = "health-agent.config";
/// Commands whose pages and the settings page refer to each other.
const ABOUT_SETTINGS: [&str; 3] = [
    "health-agent-run",
    "health-agent-config",
    "health-agent-config-check",
];

/// A man page.
pub(crate) struct Page {
    /// File name.
    pub(crate) file: String,
    /// The roff source.
    pub(crate) text: String,
}

/// All pages, dated `date`.
pub(crate) fn all(date: &str) -> Vec<Page> {
    let mut program = health_cli::command().disable_help_subcommand(true);
    program.build();
    let source = format!("health-agent {}", program.get_version().unwrap_or_default());
    let mut pages = vec![config(date, &source)];
    add(&mut pages, &program, None, date, &source);
    pages
}

/// The name of a command's page, such as `health-agent-bpf-rtt`.
fn page_name(command: &Command) -> &str {
    command
        .get_display_name()
        .unwrap_or_else(|| command.get_name())
}

/// Adds the pages of a command and its subcommands.
fn add(
    pages: &mut Vec<Page>,
    command: &Command,
    parent: Option<&Command>,
    date: &str,
    source: &str,
) {
    pages.push(Page {
        file: format!("{}.1", page_name(command)),
        text: of_command(command, parent, date, source),
    });
    for below in command.get_subcommands() {
        add(pages, below, Some(command), date, source);
    }
}

fn of_command(command: &Command, parent: Option<&Command>, date: &str, source: &str) -> String {
    let usage = command.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ").to_owned();
    let shown = command.clone().override_usage(usage).mut_args(complete);
    let man = Man::new(shown)
        .title(page_name(command).to_uppercase())
        .date(date)
        .source(source)
        .manual("health-agent");
    let after = command
        .get_after_long_help()
        .or_else(|| command.get_after_help());
    let after = after.map(ToString::to_string).unwrap_or_default();
    let is_section = |part: &&str| heading(part).is_some();
    let (sections, prose): (Vec<_>, Vec<_>) = after.split("\n\n").partition(is_section);

    let mut text = Vec::new();
    let written = man
        .render_title(&mut text)
        .and_then(|()| man.render_name_section(&mut text))
        .and_then(|()| man.render_synopsis_section(&mut text))
        .and_then(|()| man.render_description_section(&mut text))
        .and_then(|()| paragraphs(&prose).to_writer(&mut text))
        .and_then(|()| man.render_options_section(&mut text))
        .and_then(|()| match command.has_subcommands() {
            true => man.render_subcommands_section(&mut text),
            false => Ok(()),
        })
        .and_then(|()| verbatim(&sections).to_writer(&mut text))
        .and_then(|()| see_also(command, parent).to_writer(&mut text));
    written.expect("writing to a vector does not fail");
    String::from_utf8_lossy(&text).into_owned()
}

/// Puts everything about an argument into its help text: clap_mangen omits the help of arguments that `-h` hides, and
/// formats possible values with macros that man warns about.
fn complete(arg: Arg) -> Arg {
    let values = arg.get_possible_values();
    let values = values.iter().filter(|value| !value.is_hide_set());
    let values: Vec<_> = values
        .map(|value| match value.get_help() {
            Some(help) => format!("{} ({help})", value.get_name()),
            None => value.get_name().to_owned(),
        })
        .collect();
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let help = match values.is_empty() {
        true => help,
        false => format!("{help}: {}", values.join(", ")),
    };
    arg.hide_short_help(false)
        .hide_possible_values(true)
        .help(help)
}

/// Splits a section of the text after the flags, such as `Examples:`, into its heading and the indented lines below it.
fn heading(part: &str) -> Option<(&str, &str)> {
    let (heading, lines) = part.split_once(":\n")?;
    (!heading.contains('\n')).then_some((heading, lines))
}

fn paragraphs(parts: &[&str]) -> Roff {
    let mut roff = Roff::new();
    for part in parts {
        roff.control("PP", []);
        for line in part.lines() {
            roff.text(words(line));
        }
    }
    roff
}

fn verbatim(sections: &[&str]) -> Roff {
    let mut roff = Roff::new();
    for (heading, lines) in sections.iter().filter_map(|part| heading(part)) {
        roff.control("SH", [heading.to_uppercase().as_str()]);
        roff.control("nf", []);
        for line in lines.lines() {
            roff.text([roman(line.strip_prefix("  ").unwrap_or(line))]);
        }
        roff.control("fi", []);
    }
    roff
}

fn see_also(command: &Command, parent: Option<&Command>) -> Roff {
    let others = parent.into_iter().chain(command.get_subcommands());
    let mut names: Vec<_> = others.map(|other| (page_name(other), "1")).collect();
    if parent.is_none() || ABOUT_SETTINGS.contains(&page_name(command)) {
        names.push((CONFIG, "5"));
    }
    references(&names)
}

/// A SEE ALSO section that lists pages by name and section.
fn references(names: &[(&str, &str)]) -> Roff {
    let mut roff = Roff::new();
    roff.control("SH", ["SEE ALSO"]);
    for (i, (name, section)) in names.iter().enumerate() {
        let end = if i + 1 == names.len() { "" } else { "," };
        roff.control("BR", [*name, &format!("({section}){end}")]);
    }
    roff
}

/// The page of the settings file.
fn config(date: &str, source: &str) -> Page {
    let run = with_one_form(Settings::augment_args(Command::new("run")));
    let mut roff = Roff::new();
    roff.control(
        "TH",
        [&*CONFIG.to_uppercase(), "5", date, source, "health-agent"],
    );
    roff.control("SH", ["NAME"]);
    roff.text([roman(format!("{CONFIG} - settings of health-agent"))]);
    roff.control("SH", ["SYNOPSIS"]);
    roff.text([bold(health_settings::DEFAULT_FILE)]);
    roff.control("SH", ["DESCRIPTION"]);
    markdown(&mut roff, health_settings::INTRODUCTION);
    for group in groups(&run) {
        roff.control("SH", [group.heading.to_uppercase().as_str()]);
        roff.text([roman("In files under "), bold(group.key()), roman(".")]);
        for setting in &group.settings {
            of_setting(&mut roff, setting);
        }
    }
    roff.extend([references(&ABOUT_SETTINGS.map(|name| (name, "1")))]);
    Page {
        file: format!("{CONFIG}.5"),
        text: roff.to_roff(),
    }
}

fn of_setting(roff: &mut Roff, setting: &Definition<'_>) {
    roff.control("TP", []);
    roff.text([bold(setting.name)]);
    roff.text([roman(&*setting.help)]);
    let change = match setting.is_live {
        true => "at once",
        false => "after a restart",
    };
    let facts = [
        ("Values", setting.choices.join(", ")),
        (
            "Range",
            setting.range.map(ToString::to_string).unwrap_or_default(),
        ),
        ("Default", setting.default_text()),
        ("Takes effect", change.to_owned()),
        ("Environment", setting.variable.clone()),
    ];
    for (name, fact) in facts.into_iter().filter(|(_, fact)| !fact.is_empty()) {
        roff.control("br", []);
        roff.text([italic(format!("{name}:")), roman(format!(" {fact}"))]);
    }
}

/// Converts simple Markdown: paragraphs, lists, code blocks and inline code. Omits headings.
fn markdown(roff: &mut Roff, text: &str) {
    let mut is_code = false;
    // Whether the next line starts a new paragraph. The first paragraph needs no break before it.
    let mut is_new = false;
    let mut is_first = true;
    for line in text.lines() {
        if line.starts_with("```") {
            if is_new {
                roff.control("PP", []);
                is_new = false;
            }
            roff.control(if is_code { "fi" } else { "nf" }, []);
            is_code = !is_code;
        } else if is_code {
            roff.text([roman(line)]);
        } else if line.is_empty() {
            is_new = !is_first;
        } else if !line.starts_with('#') {
            match line.strip_prefix("- ") {
                Some(item) => {
                    roff.control("IP", ["\\(bu", "2"]);
                    roff.text(words(item));
                }
                None => {
                    if is_new {
                        roff.control("PP", []);
                    }
                    roff.text(words(line.trim_start()));
                }
            }
            (is_new, is_first) = (false, false);
        }
    }
}

/// Converts a line, with code between backticks in bold.
fn words(line: &str) -> Vec<Inline> {
    let parts = line.split('`').enumerate();
    let inlines = parts.map(|(i, part)| match i % 2 {
        0 => roman(part),
        _ => bold(part),
    });
    inlines.collect()
}
