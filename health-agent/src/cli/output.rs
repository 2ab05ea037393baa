//! What commands print: tables without borders, JSON, JSON lines, YAML.

use std::io::{self, BufWriter, Write};
use std::ops::ControlFlow;

use anyhow::Context;
use clap::{Args, ValueEnum};
use comfy_table::{Row, Table, presets};
use serde::Serialize;
use serde_saphyr::SerializeError;

/// Spaces between two columns.
const COLUMN_GAP: u16 = 3;

/// The flag of commands that print.
#[derive(Args, Clone, Copy, Debug)]
pub struct OutputArgs {
    /// Form of the output
    #[arg(
        short,
        long,
        value_enum,
        value_name = "FORMAT",
        default_value = "table"
    )]
    pub(super) output: Format,
}

/// The form of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Format {
    /// For people
    Table,
    /// One JSON document
    Json,
    /// One JSON object a line
    Jsonl,
    /// One YAML document
    Yaml,
}

impl Format {
    /// Prints a listing: a table, an array or sequence, or an object a line.
    pub(super) fn print_rows<T: Serialize>(
        self,
        rows: &[T],
        table: impl FnOnce(&[T]) -> String,
    ) -> anyhow::Result<()> {
        print(|out| match self {
            Self::Table => out.write_all(table(rows).as_bytes()),
            Self::Json => write_json(out, &rows),
            Self::Jsonl => rows.iter().try_for_each(|row| write_json_line(out, row)),
            Self::Yaml => write_yaml(out, &rows),
        })
    }

    /// Prints one object.
    pub(super) fn print_object<T: Serialize>(
        self,
        object: &T,
        table: impl FnOnce(&T) -> String,
    ) -> anyhow::Result<()> {
        print(|out| self.write_object(out, object, table))
    }

    /// Writes one object to `out`.
    pub(super) fn write_object<T: Serialize>(
        self,
        out: &mut dyn Write,
        object: &T,
        table: impl FnOnce(&T) -> String,
    ) -> io::Result<()> {
        match self {
            Self::Table => out.write_all(table(object).as_bytes()),
            Self::Json => write_json(out, object),
            Self::Jsonl => write_json_line(out, object),
            Self::Yaml => write_yaml(out, object),
        }
    }
}

fn write_json(out: &mut dyn Write, value: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *out, value)?;
    writeln!(out)
}

/// Writes one object on a line of its own.
pub(super) fn write_json_line(out: &mut dyn Write, value: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut *out, value)?;
    writeln!(out)
}

pub(super) fn write_yaml(mut out: &mut dyn Write, value: &impl Serialize) -> io::Result<()> {
    serde_saphyr::to_io_writer(&mut out, value).map_err(|error| match error {
        SerializeError::IO { error } => error,
        other => io::Error::other(other),
    })
}

/// Writes to stdout. A reader who has seen enough and closed it (`| head`) is no failure.
pub(super) fn print(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> anyhow::Result<()> {
    print_more(write).map(|_| ())
}

/// Like [`print`], for what prints again and again: breaks when nobody reads any more.
pub(super) fn print_more(
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> anyhow::Result<ControlFlow<()>> {
    let mut out = BufWriter::new(io::stdout().lock());
    match write(&mut out).and_then(|()| out.flush()) {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => {
            // What is left in the buffer is for nobody.
            let _ = out.into_parts();
            Ok(ControlFlow::Break(()))
        }
        result => result
            .map(ControlFlow::Continue)
            .context("cannot write to standard output"),
    }
}

/// A table: upper-case headers, columns three spaces apart, a final newline.
pub(super) fn table<R: Into<Row>>(
    header: impl Into<Row>,
    rows: impl IntoIterator<Item = R>,
) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(header);
    table.add_rows(rows);
    for column in table.column_iter_mut() {
        column.set_padding((0, COLUMN_GAP));
    }
    let mut text = table.trim_fmt();
    text.push('\n');
    text
}

/// What a cell says that has nothing to say.
pub(super) const NONE: &str = "-";

/// The items with commas between, or [`NONE`].
pub(super) fn comma_separated<T: ToString>(items: impl IntoIterator<Item = T>) -> String {
    let items: Vec<String> = items.into_iter().map(|item| item.to_string()).collect();
    if items.is_empty() {
        NONE.to_owned()
    } else {
        items.join(",")
    }
}

/// Every line of `text` with `spaces` in front.
pub(super) fn indent(spaces: usize, text: &str) -> String {
    text.lines()
        .map(|line| format!("{:spaces$}{line}\n", ""))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_three_spaces_apart_and_lines_end_clean() {
        let rows = [["a", "long value", "-"], ["bb", "405.072µs", "two\nlines"]]
            .map(|row| row.map(str::to_owned));
        assert_eq!(
            table(["NAME", "VALUE", "MORE"], rows),
            "NAME   VALUE        MORE\n\
             a      long value   -\n\
             bb     405.072µs    two\n\
             \u{20}                   lines\n"
        );
    }

    #[test]
    fn a_listing_without_rows_keeps_its_header() {
        assert_eq!(table::<[String; 2]>(["NAME", "ID"], []), "NAME   ID\n");
        assert_eq!(comma_separated::<u8>([]), "-");
        assert_eq!(comma_separated([1, 2]), "1,2");
    }

    #[test]
    fn yaml_is_a_sequence_of_what_json_is_an_array_of() {
        #[derive(Serialize)]
        #[serde(rename_all = "kebab-case")]
        struct Row {
            name: &'static str,
            health_ip: Option<std::net::IpAddr>,
            packets: u64,
            flags: Vec<&'static str>,
        }
        let row = Row {
            name: "no",
            health_ip: Some("fd00:30::1".parse().unwrap()),
            packets: u64::MAX,
            flags: vec!["a: b", ""],
        };
        let mut yaml = Vec::new();
        write_yaml(&mut yaml, &[&row]).unwrap();
        let mut json = Vec::new();
        write_json(&mut json, &[&row]).unwrap();
        let from_yaml: serde_json::Value = serde_saphyr::from_slice(&yaml).unwrap();
        let from_json: serde_json::Value = serde_json::from_slice(&json).unwrap();
        assert_eq!(from_yaml, from_json);
        assert!(yaml.starts_with(b"- name: "), "{yaml:?}");
        assert!(yaml.ends_with(b"\n"), "{yaml:?}");
    }
}
