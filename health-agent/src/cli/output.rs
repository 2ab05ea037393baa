//! What commands print: tables without borders, JSON, JSON lines, YAML.

use std::borrow::Cow;
use std::io::{self, BufWriter, Write};
use std::ops::ControlFlow;

use anyhow::Context;
use clap::{Args, ValueEnum};
use health_net::stdout::stdout;
use serde::Serialize;
use serde_saphyr::SerializeError;
use tabwriter::TabWriter;

/// What a failed write to stdout is told as.
pub(super) const UNWRITABLE: &str = "cannot write to standard output";
/// Spaces between two columns.
const COLUMN_GAP: usize = 3;

/// The flag of commands that print.
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

/// The form of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people
    Table,
    /// One JSON document
    Json,
    /// One JSON object a line
    Jsonl,
    /// One YAML document
    Yaml,
}

/// The form of a listing whose table has more columns on request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum ListFormat {
    /// For people
    Table,
    /// The same with more columns
    Wide,
    /// One JSON array
    Json,
    /// One JSON object a line
    Jsonl,
    /// One YAML document
    Yaml,
}

impl ListFormat {
    /// Whether the table has all its columns.
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

// The values are erased: a serializer is compiled once, not once for each type that is printed.
fn write_json(out: &mut dyn Write, value: &dyn erased_serde::Serialize) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *out, value)?;
    writeln!(out)
}

/// Writes one object on a line of its own.
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

/// Writes to stdout. A reader who has seen enough and closed it (`| head`) is no failure.
pub(super) fn print(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> anyhow::Result<()> {
    print_more(write).map(|_| ())
}

/// Like [`print`], for what prints again and again: breaks when nobody reads any more.
pub(super) fn print_more(
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> anyhow::Result<ControlFlow<()>> {
    let written = stdout().and_then(|out| {
        let mut out = BufWriter::new(out.lock());
        let written = write(&mut out).and_then(|()| out.flush());
        // After a failure, what is left in the buffer is for nobody.
        let _ = out.into_parts();
        written
    });
    finish(written)
}

/// What becomes of a command that wrote to stdout: breaks when nobody reads any more.
pub(super) fn finish(written: io::Result<()>) -> anyhow::Result<ControlFlow<()>> {
    match written {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(ControlFlow::Break(())),
        result => result.map(ControlFlow::Continue).context(UNWRITABLE),
    }
}

/// A table: upper-case headers, columns three spaces apart, a final newline. A cell of several lines
/// makes its row as high.
pub(super) fn table<R: IntoIterator<Item: AsRef<str>>>(
    header: impl IntoIterator<Item: AsRef<str>>,
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

/// Writes a row with tabs between its cells, in as many lines as its highest cell has.
fn write_row(out: &mut impl Write, cells: impl IntoIterator<Item: AsRef<str>>) -> io::Result<()> {
    let cells: Vec<_> = cells.into_iter().collect();
    let height = cells
        .iter()
        .map(|cell| cell.as_ref().split('\n').count())
        .max();
    for line in 0..height.unwrap_or_default() {
        for (column, cell) in cells.iter().enumerate() {
            if column > 0 {
                out.write_all(b"\t")?;
            }
            // A tab within would begin a column.
            let text = cell.as_ref().split('\n').nth(line).unwrap_or_default();
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

/// The text with what would control a terminal written out, such as `\u{1b}`, line ends included: names and messages come
/// from others. Cells of a [`table`] need it not, nor does the one line of a failure.
pub(super) fn printable(text: &str) -> Cow<'_, str> {
    if !text.contains(is_control) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            c if is_control(c) => shown.extend(c.escape_default()),
            c => shown.push(c),
        }
    }
    Cow::Owned(shown)
}

/// Whether a terminal does something else than to show it: control characters, and those that turn the direction
/// of what follows.
fn is_control(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
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
             \\u{1b}[2Jgone   a\\rb\\u{9b}1m   \\u{202e}txt\n\
             \u{20}                              µs\n"
        );
        assert_eq!(printable("two\nlines\t\u{7f}"), "two\\nlines\\t\\u{7f}");
        assert!(matches!(printable("Grüße"), Cow::Borrowed("Grüße")));
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
