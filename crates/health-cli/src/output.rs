//! The output of commands: tables without borders, JSON, JSON lines, YAML.

use std::io::{self, BufWriter, Write};
use std::ops::ControlFlow;

use anyhow::Context;
use clap::{Args, ValueEnum};
pub(super) use health_model::printable::printable;
use health_net::stdout::stdout;
use serde::Serialize;
use serde_saphyr::SerializeError;
use tabwriter::TabWriter;

/// The error message for a failed write to stdout.
pub(super) const UNWRITABLE: &str = "cannot write to standard output";
/// Spaces between two columns.
const COLUMN_GAP: usize = 3;

/// The output flag of commands that print.
#[derive(Args, Clone, Copy, Debug)]
pub struct OutputArgs<F = Format>
where
    F: ValueEnum + Clone + Send + Sync + 'static,
{
    /// Output format
    #[arg(
        short,
        long,
        value_enum,
        value_name = "FORMAT",
        default_value = "table"
    )]
    pub(super) output: F,
}

/// The output format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Human-readable table
    Table,
    /// One JSON document
    Json,
    /// One JSON object per line
    Jsonl,
    /// One YAML document
    Yaml,
}

/// The output format of a listing whose table has a wide form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum ListFormat {
    /// Human-readable table
    Table,
    /// Table with more columns
    Wide,
    /// One JSON array
    Json,
    /// One JSON object per line
    Jsonl,
    /// One YAML document
    Yaml,
}

impl ListFormat {
    /// Whether to show all columns of the table.
    pub(super) fn is_wide(self) -> bool {
        self == Self::Wide
    }
}

impl From<ListFormat> for Format {
    fn from(format: ListFormat) -> Self {
        match format {
            ListFormat::Table | ListFormat::Wide => Self::Table,
            ListFormat::Json => Self::Json,
            ListFormat::Jsonl => Self::Jsonl,
            ListFormat::Yaml => Self::Yaml,
        }
    }
}

impl Format {
    /// Prints a listing: a table, an array or sequence, or one object per line.
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

// Values are type-erased, so that the serializer is compiled once instead of once per printed type.
fn write_json(out: &mut dyn Write, value: &dyn erased_serde::Serialize) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *out, value)?;
    writeln!(out)
}

/// Writes one object on its own line.
pub(super) fn write_json_line(
    out: &mut dyn Write,
    value: &dyn erased_serde::Serialize,
) -> io::Result<()> {
    serde_json::to_writer(&mut *out, value)?;
    writeln!(out)
}

pub(super) fn write_yaml(
    mut out: &mut dyn Write,
    value: &dyn erased_serde::Serialize,
) -> io::Result<()> {
    serde_saphyr::to_io_writer(&mut out, &value).map_err(|error| match error {
        SerializeError::IO { error } => error,
        other => io::Error::other(other),
    })
}

/// Writes to stdout. A reader that closes the pipe early (`| head`) is not a failure.
pub(super) fn print(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> anyhow::Result<()> {
    print_more(write).map(|_| ())
}

/// Like [`print`], for repeated output: breaks when the reader has gone.
pub(super) fn print_more(
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> anyhow::Result<ControlFlow<()>> {
    let written = stdout().and_then(|out| {
        let mut out = BufWriter::new(out.lock());
        let written = write(&mut out).and_then(|()| out.flush());
        // After a failure, discard the rest of the buffer instead of flushing it on drop.
        let _ = out.into_parts();
        written
    });
    finish(written)
}

/// The result of writing to stdout: breaks when the reader has gone.
pub(super) fn finish(written: io::Result<()>) -> anyhow::Result<ControlFlow<()>> {
    match written {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(ControlFlow::Break(())),
        result => result.map(ControlFlow::Continue).context(UNWRITABLE),
    }
}

/// The lines of a table cell.
pub(super) trait CellText {
    /// The raw lines of the cell. Not called `lines`, which would shadow `str::lines`.
    fn text_lines(&self) -> impl Iterator<Item = &str>;
}

/// A single line: line breaks in the string are escaped.
impl<T: AsRef<str>> CellText for T {
    fn text_lines(&self) -> impl Iterator<Item = &str> {
        std::iter::once(self.as_ref())
    }
}

/// A cell that may have several lines.
#[derive(Debug)]
pub(super) struct Cell(Vec<String>);

impl Cell {
    /// A cell with these lines, or with [`NONE`] if there are none.
    pub(super) fn lines_or_none(lines: impl IntoIterator<Item: Into<String>>) -> Self {
        let lines: Vec<String> = lines.into_iter().map(Into::into).collect();
        if lines.is_empty() {
            return NONE.into();
        }
        Self(lines)
    }

    /// A cell with these lines.
    pub(super) fn of_lines(lines: impl IntoIterator<Item: Into<String>>) -> Self {
        Self(lines.into_iter().map(Into::into).collect())
    }
}

impl From<String> for Cell {
    fn from(line: String) -> Self {
        Self(vec![line])
    }
}

impl From<&str> for Cell {
    fn from(line: &str) -> Self {
        Self(vec![line.to_owned()])
    }
}

impl CellText for Cell {
    fn text_lines(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }
}

/// A table: upper-case headers, columns three spaces apart, a final newline. The [`Cell`] with the most lines
/// determines the height of its row.
pub(super) fn table<R: IntoIterator<Item: CellText>>(
    header: impl IntoIterator<Item: CellText>,
    rows: impl IntoIterator<Item = R>,
) -> String {
    let mut table = TabWriter::new(Vec::new()).minwidth(0).padding(COLUMN_GAP);
    // Writing to memory cannot fail.
    let _ = write_row(&mut table, header);
    for row in rows {
        let _ = write_row(&mut table, row);
    }
    let text = table.into_inner().unwrap_or_default();
    let mut clean = String::with_capacity(text.len());
    for line in String::from_utf8_lossy(&text).lines() {
        clean.push_str(line.trim_end());
        clean.push('\n');
    }
    clean
}

/// A table with or without its header.
pub(super) fn listing<R: IntoIterator<Item: CellText>>(
    header: impl IntoIterator<Item: CellText>,
    rows: impl IntoIterator<Item = R>,
    has_headers: bool,
) -> String {
    let mut text = table(header, rows);
    if !has_headers {
        let end = text.find('\n').map_or(text.len(), |end| end + 1);
        text.drain(..end);
    }
    text
}

/// Writes a row with tabs between its cells, in as many lines as its tallest cell has.
fn write_row(out: &mut impl Write, cells: impl IntoIterator<Item: CellText>) -> io::Result<()> {
    let cells: Vec<_> = cells.into_iter().collect();
    let cells: Vec<Vec<&str>> = cells
        .iter()
        .map(|cell| cell.text_lines().collect())
        .collect();
    let height = cells.iter().map(|lines| lines.len().max(1)).max();
    for line in 0..height.unwrap_or_default() {
        for (column, lines) in cells.iter().enumerate() {
            if column > 0 {
                out.write_all(b"\t")?;
            }
            // A tab within a cell would start a new column.
            let text = lines.get(line).copied().unwrap_or_default();
            for (place, word) in text.split('\t').enumerate() {
                if place > 0 {
                    out.write_all(b" ")?;
                }
                out.write_all(printable(word).as_bytes())?;
            }
        }
        out.write_all(b"\n")?;
    }
    Ok(())
}

/// The text of an empty cell.
pub(super) const NONE: &str = "-";

/// Joins items with commas; [`NONE`] if there are none.
pub(super) fn comma_separated<T: ToString>(items: impl IntoIterator<Item = T>) -> String {
    let items: Vec<String> = items.into_iter().map(|item| item.to_string()).collect();
    if items.is_empty() {
        NONE.to_owned()
    } else {
        items.join(",")
    }
}

/// Indents every line of `text` by `spaces`.
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
        let rows = [["a", "long value"], ["bb", "405.072µs"]];
        let more = [Cell::from("-"), Cell::of_lines(["two", "lines"])];
        let rows = rows
            .into_iter()
            .zip(more)
            .map(|([a, b], c)| [a.into(), b.into(), c]);
        assert_eq!(
            table(["NAME", "VALUE", "MORE"], rows),
            "NAME   VALUE        MORE\n\
             a      long value   -\n\
             bb     405.072µs    two\n\
             \u{20}                   lines\n"
        );
    }

    #[test]
    fn what_is_in_a_cell_moves_no_column() {
        let rows = [["a\tb", "µs", ""], ["", "世界", "x"]];
        assert_eq!(
            table(["NAME", "UNIT", "MORE"], rows),
            "NAME   UNIT   MORE\n\
             a b    µs\n       世界   x\n"
        );
        assert_eq!(table(["ONE"], [["1"], [""], ["333"]]), "ONE\n1\n\n333\n");
    }

    #[test]
    fn nothing_in_a_cell_reaches_the_terminal_as_a_command() {
        let rows = [["\u{1b}[2Jgone", "a\rb\u{9b}1m", "\u{202e}txt\nµs"]];
        assert_eq!(
            table(["ONE", "TWO", "THREE"], rows),
            "ONE             TWO            THREE\n\
             \\u{1b}[2Jgone   a\\rb\\u{9b}1m   \\u{202e}txt\\nµs\n"
        );
        let rows = [[Cell::of_lines(["shop/web\nshop/db   80/TCP", "a"])]];
        assert_eq!(
            table(["ONE"], rows),
            "ONE\nshop/web\\nshop/db   80/TCP\na\n"
        );
        assert_eq!(printable("two\nlines\t\u{7f}"), "two\\nlines\\t\\u{7f}");
        assert_eq!(printable("Grüße"), "Grüße");
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
