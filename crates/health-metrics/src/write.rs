//! Writes metrics in each of the formats.

use std::{fmt, io};

use prometheus_client::encoding::prometheus_protobuf;
use prometheus_client::encoding::text::{encode, encode_eof, encode_registry};
use prometheus_client::registry::Registry;
use prost::Message as _;

use super::format::{ClassicWriter, Format};
use super::summaries::SummaryFamily;

/// Writes a registry's metrics, then the summaries. Text is written as it is produced, protobuf messages only once all
/// are complete.
pub(super) fn write<'a>(
    registry: &Registry,
    summaries: impl Iterator<Item = SummaryFamily<'a>>,
    format: Format,
    out: &mut dyn io::Write,
) -> io::Result<()> {
    let mut text = TextWriter { out, failed: None };
    let written = match format {
        Format::OpenMetrics => write_open_metrics(registry, summaries, &mut text),
        Format::Classic => encode(&mut ClassicWriter::new(&mut text), registry)
            .and_then(|()| write_summaries(summaries, &mut text)),
        Format::Protobuf => return write_messages(registry, summaries, text.out),
    };
    written.map_err(|error| {
        text.failed
            .take()
            .unwrap_or_else(|| io::Error::other(error))
    })
}

fn write_open_metrics<'a>(
    registry: &Registry,
    summaries: impl Iterator<Item = SummaryFamily<'a>>,
    out: &mut TextWriter<'_>,
) -> fmt::Result {
    encode_registry(out, registry)?;
    write_summaries(summaries, out)?;
    encode_eof(out)
}

fn write_summaries<'a>(
    mut summaries: impl Iterator<Item = SummaryFamily<'a>>,
    out: &mut TextWriter<'_>,
) -> fmt::Result {
    summaries.try_for_each(|family| family.write_text(out))
}

fn write_messages<'a>(
    registry: &Registry,
    summaries: impl Iterator<Item = SummaryFamily<'a>>,
    out: &mut dyn io::Write,
) -> io::Result<()> {
    let families = prometheus_protobuf::encode(registry).map_err(io::Error::other)?;
    let summaries = summaries.map(SummaryFamily::message);
    for family in families.into_iter().chain(summaries) {
        // Prometheus's own library also leaves out families without samples.
        if !family.metric.is_empty() {
            out.write_all(&family.encode_length_delimited_to_vec())?;
        }
    }
    Ok(())
}

/// Accepts text, and keeps the I/O error that stopped the writing.
struct TextWriter<'a> {
    out: &'a mut dyn io::Write,
    failed: Option<io::Error>,
}

impl fmt::Write for TextWriter<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.out.write_all(text.as_bytes()).map_err(|error| {
            self.failed = Some(error);
            fmt::Error
        })
    }
}
