//! The exposition formats and the choice among them: two text formats, and Prometheus's protobuf messages, the only
//! format that supports native histograms.
//!
//! The library writes OpenMetrics. The classic format, 0.0.4, differs from it only in comments: the help lines of
//! counters and infos contain the full names of their samples, and there are no unit or end lines.

use std::fmt;

use hyper::HeaderMap;
use hyper::header::ACCEPT;

/// The format of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Prometheus's text format 0.0.4, which every scraper and `promtool` read.
    Classic,
    /// OpenMetrics 1.0.0.
    OpenMetrics,
    /// Messages of Prometheus's `metrics.proto`, each preceded by its length.
    Protobuf,
}

impl Format {
    /// The client's preferred format; if several are equally preferred, the most expressive one.
    pub fn accepted(headers: &HeaderMap) -> Self {
        let (mut protobuf, mut open_metrics, mut classic) = (0.0, 0.0, 0.0);
        for value in headers
            .get_all(ACCEPT)
            .iter()
            .filter_map(|v| v.to_str().ok())
        {
            for range in value.split(',') {
                let mut parts = range.split(';').map(str::trim);
                let media = parts.next().unwrap_or_default().to_ascii_lowercase();
                let parameters: Vec<_> = parts.filter_map(|part| part.split_once('=')).collect();
                let parameter = |name| {
                    let found = parameters.iter().find(|(known, _)| *known == name);
                    found.map(|(_, value)| value.trim_matches('"'))
                };
                let quality = parameter("q").map_or(1.0, |q| q.parse().unwrap_or(0.0));
                let best: &mut f32 = match (media.as_str(), parameter("version")) {
                    ("application/openmetrics-text", None | Some("1.0.0" | "0.0.1")) => {
                        &mut open_metrics
                    }
                    ("application/vnd.google.protobuf", None)
                        if parameter("proto") == Some("io.prometheus.client.MetricFamily")
                            && parameter("encoding") == Some("delimited") =>
                    {
                        &mut protobuf
                    }
                    ("text/plain" | "text/*" | "*/*", None | Some("0.0.4")) => &mut classic,
                    _ => continue,
                };
                *best = best.max(quality);
            }
        }
        if protobuf > 0.0 && protobuf >= open_metrics && protobuf >= classic {
            Self::Protobuf
        } else if open_metrics > 0.0 && open_metrics >= classic {
            Self::OpenMetrics
        } else {
            Self::Classic
        }
    }

    /// The media type of this format.
    pub const fn content_type(self) -> &'static str {
        match self {
            Self::Classic => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Protobuf => {
                "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; \
                 encoding=delimited"
            }
        }
    }
}

/// Accepts OpenMetrics text in pieces of any size, and writes classic text.
#[derive(Debug)]
pub(super) struct ClassicWriter<'a, W> {
    out: &'a mut W,
    /// The current incomplete line.
    line: String,
    /// The next family's help text, which is written only once the family's name and type are known.
    help: String,
}

impl<'a, W: fmt::Write> ClassicWriter<'a, W> {
    pub(super) fn new(out: &'a mut W) -> Self {
        Self {
            out,
            line: String::new(),
            help: String::new(),
        }
    }

    fn end_line(&mut self) -> fmt::Result {
        if let Some(rest) = self.line.strip_prefix("# HELP ") {
            self.help.clear();
            self.help
                .push_str(rest.split_once(' ').map_or("\n", |(_, help)| help));
        } else if let Some((name, kind)) = self
            .line
            .strip_prefix("# TYPE ")
            .and_then(|rest| rest.trim_end().split_once(' '))
        {
            let (suffix, kind) = match kind {
                "counter" => ("_total", kind),
                "info" => ("_info", "gauge"),
                "unknown" => ("", "untyped"),
                kind => ("", kind),
            };
            for part in ["# HELP ", name, suffix, " ", &self.help] {
                self.out.write_str(part)?;
            }
            for part in ["# TYPE ", name, suffix, " ", kind, "\n"] {
                self.out.write_str(part)?;
            }
        } else if !self.line.starts_with('#') {
            self.out.write_str(&self.line)?;
        }
        self.line.clear();
        Ok(())
    }
}

impl<W: fmt::Write> fmt::Write for ClassicWriter<'_, W> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for part in text.split_inclusive('\n') {
            self.line.push_str(part);
            if part.ends_with('\n') {
                self.end_line()?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use hyper::header::HeaderValue;

    use super::*;

    #[test]
    fn each_format_is_for_those_who_ask_for_it() {
        let prometheus = "application/openmetrics-text;version=1.0.0,\
                          application/openmetrics-text;version=0.0.1;q=0.75,\
                          text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        let native = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;\
                      encoding=delimited,application/openmetrics-text;version=1.0.0;q=0.8,\
                      text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        for (accept, format) in [
            (prometheus, Format::OpenMetrics),
            (native, Format::Protobuf),
            (
                native.replace("delimited", "text").as_str(),
                Format::OpenMetrics,
            ),
            (
                native.replace("delimited", "delimited;q=0.3").as_str(),
                Format::OpenMetrics,
            ),
            ("application/openmetrics-text", Format::OpenMetrics),
            (
                "Application/OpenMetrics-Text; charset=utf-8",
                Format::OpenMetrics,
            ),
            (
                "text/plain;q=0.3, application/openmetrics-text;q=0.2",
                Format::Classic,
            ),
            ("application/openmetrics-text;q=0", Format::Classic),
            (
                "application/openmetrics-text;version=2.0.0",
                Format::Classic,
            ),
            ("application/json", Format::Classic),
            ("*/*", Format::Classic),
            (";;,=", Format::Classic),
            ("", Format::Classic),
        ] {
            let value = HeaderValue::from_str(accept).unwrap();
            let headers = HeaderMap::from_iter([(ACCEPT, value)]);
            assert_eq!(Format::accepted(&headers), format, "{accept}");
        }
        assert_eq!(Format::accepted(&HeaderMap::new()), Format::Classic);
    }

    #[test]
    fn classic_text_differs_in_comments_alone_however_it_is_cut() {
        let open_metrics = "# HELP a_b Built.\n# TYPE a_b info\na_b_info{v=\"#\\n\"} 1\n\
                            # HELP c Calls made.\n# TYPE c counter\nc_total 3\n\
                            # HELP d_seconds Delay.\n# TYPE d_seconds gauge\n# UNIT d_seconds seconds\n\
                            d_seconds 0.5\n# HELP e No sample.\n# TYPE e unknown\n# EOF\n";
        let classic = "# HELP a_b_info Built.\n# TYPE a_b_info gauge\na_b_info{v=\"#\\n\"} 1\n\
                       # HELP c_total Calls made.\n# TYPE c_total counter\nc_total 3\n\
                       # HELP d_seconds Delay.\n# TYPE d_seconds gauge\nd_seconds 0.5\n\
                       # HELP e No sample.\n# TYPE e untyped\n";
        for size in [1, 2, 7, open_metrics.len()] {
            let mut out = String::new();
            let mut writer = ClassicWriter::new(&mut out);
            for piece in open_metrics.as_bytes().chunks(size) {
                writer
                    .write_str(std::str::from_utf8(piece).unwrap())
                    .unwrap();
            }
            assert_eq!(out, classic, "in pieces of {size}");
        }
    }
}
