//! Prints rows as they are read, on all CPUs and unordered, so that memory only holds the rows each CPU is working on.

use std::fmt::Display;
use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};

use health_datapath::dump::{Batch, DumpError, Rows};
use health_net::stdout::stdout;
use serde::Serialize;

use super::parallel::on_all_cpus;
use crate::output::{self, Format, write_yaml};

/// Why writing stopped early.
#[derive(Debug, thiserror::Error)]
enum StreamError {
    #[error(transparent)]
    Read(#[from] DumpError),
    #[error(transparent)]
    Write(#[from] io::Error),
}

/// Prints the result of `show` for each entry of some maps, and skips entries for which it returns `None`.
pub(super) fn print<T, U: Display + Serialize>(
    format: Format,
    maps: &[Rows<T>],
    show: impl Fn(T) -> Option<U> + Sync,
) -> anyhow::Result<()> {
    finish(
        stdout()
            .map_err(StreamError::from)
            .and_then(|mut out| write(&mut out, format, maps, show)),
    )
}

/// Like [`print`], for a reader that passes rows one by one.
pub(super) fn print_each<U: Display + Serialize>(
    format: Format,
    read: impl FnOnce(&mut dyn FnMut(&U)) -> Result<(), DumpError>,
) -> anyhow::Result<()> {
    finish(stdout().map_err(StreamError::from).and_then(|out| {
        let mut out = io::BufWriter::new(out);
        write_each(&mut out, format, read)
    }))
}

/// A reader that closes the pipe early (`| head`) is not a failure.
fn finish(result: Result<(), StreamError>) -> anyhow::Result<()> {
    match result {
        Err(StreamError::Write(e)) => output::finish(Err(e)).map(drop),
        Err(StreamError::Read(e)) => Err(e.into()),
        Ok(()) => Ok(()),
    }
}

fn write<T, U: Display + Serialize>(
    out: &mut (dyn Write + Send),
    format: Format,
    maps: &[Rows<T>],
    show: impl Fn(T) -> Option<U> + Sync,
) -> Result<(), StreamError> {
    let listing = Mutex::new(Listing::begin(out, format)?);
    let work = || -> Result<(), StreamError> {
        let mut batch = Batch::default();
        let mut text = Vec::new();
        for rows in maps {
            while let Some(rows) = rows.next(&mut batch)? {
                text.clear();
                for row in rows.filter_map(&show) {
                    write_row(&mut text, format, &row)?;
                }
                let mut listing = listing.lock().unwrap_or_else(PoisonError::into_inner);
                listing.add(&text)?;
            }
        }
        Ok(())
    };
    on_all_cpus(work)?;
    let listing = listing.into_inner().unwrap_or_else(PoisonError::into_inner);
    Ok(listing.end()?)
}

fn write_each<U: Display + Serialize>(
    out: &mut dyn Write,
    format: Format,
    read: impl FnOnce(&mut dyn FnMut(&U)) -> Result<(), DumpError>,
) -> Result<(), StreamError> {
    let mut listing = Listing::begin(out, format)?;
    let mut text = Vec::new();
    let mut written = Ok(());
    read(&mut |row| {
        if written.is_ok() {
            text.clear();
            written = write_row(&mut text, format, row).and_then(|()| listing.add(&text));
        }
    })?;
    written?;
    Ok(listing.end()?)
}

/// Writes a row, preceded by the separator if the format has one.
fn write_row<U: Display + Serialize>(
    text: &mut Vec<u8>,
    format: Format,
    row: &U,
) -> io::Result<()> {
    match format {
        Format::Table => writeln!(text, "{row}"),
        Format::Json => {
            text.extend_from_slice(JSON_SEPARATOR);
            Ok(serde_json::to_writer(text, row)?)
        }
        // Not type-erased like `write_json_line`: there may be a million rows.
        Format::Jsonl => {
            serde_json::to_writer(&mut *text, row)?;
            text.push(b'\n');
            Ok(())
        }
        Format::Yaml => write_yaml(text, &[row]),
    }
}

const JSON_SEPARATOR: &[u8] = b",\n";

/// A listing that is written in parts.
struct Listing<'a, W: ?Sized> {
    out: &'a mut W,
    format: Format,
    is_empty: bool,
}

impl<'a, W: Write + ?Sized> Listing<'a, W> {
    fn begin(out: &'a mut W, format: Format) -> io::Result<Self> {
        if format == Format::Json {
            out.write_all(b"[")?;
        }
        Ok(Self {
            out,
            format,
            is_empty: true,
        })
    }

    /// Writes complete rows.
    fn add(&mut self, mut text: &[u8]) -> io::Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        if self.is_empty && self.format == Format::Json {
            // The first row needs no separator.
            text = text.strip_prefix(b",").unwrap_or(text);
        }
        self.is_empty = false;
        self.out.write_all(text)
    }

    fn end(self) -> io::Result<()> {
        match self.format {
            Format::Json if self.is_empty => self.out.write_all(b"]\n")?,
            Format::Json => self.out.write_all(b"\n]\n")?,
            Format::Yaml if self.is_empty => self.out.write_all(b"[]\n")?,
            _ => {}
        }
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::super::parallel::tests::Gone;
    use super::*;

    fn written(format: Format, rows: &[u32]) -> String {
        let mut out = Vec::new();
        write_each(&mut out, format, |each| {
            rows.iter().for_each(each);
            Ok(())
        })
        .unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn rows_make_a_document_however_many_there_are() {
        for rows in [&[][..], &[7], &[7, 8, 9]] {
            let json: Vec<u32> = serde_json::from_str(&written(Format::Json, rows)).unwrap();
            assert_eq!(json, rows);
            let yaml: Vec<u32> = serde_saphyr::from_str(&written(Format::Yaml, rows)).unwrap();
            assert_eq!(yaml, rows);
        }
        assert_eq!(written(Format::Json, &[7, 8]), "[\n7,\n8\n]\n");
        assert_eq!(written(Format::Json, &[]), "[]\n");
        assert_eq!(written(Format::Jsonl, &[7, 8]), "7\n8\n");
        assert_eq!(written(Format::Table, &[7, 8]), "7\n8\n");
        assert_eq!(written(Format::Table, &[]), "");
    }

    #[test]
    fn a_reader_that_is_gone_ends_it() {
        let read = |each: &mut dyn FnMut(&u32)| {
            each(&7);
            Ok(())
        };
        let result = write_each(&mut Gone, Format::Jsonl, read);
        assert!(matches!(result, Err(StreamError::Write(_))), "{result:?}");
        finish(result).unwrap();
    }
}
