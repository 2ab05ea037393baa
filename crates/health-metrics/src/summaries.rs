//! Summary families, which the library for the other metrics lacks.

use std::fmt::{self, Write};

use prometheus_client::encoding::prometheus_protobuf::prometheus_data_model as model;

use super::recent::Quantiles;

/// Labels and the quantiles that they belong to.
type LabelledQuantiles = (Vec<(&'static str, String)>, Quantiles);

/// Summaries that differ only in their labels.
pub(super) struct SummaryFamily<'a> {
    /// The full name.
    pub(super) name: String,
    /// The help text.
    pub(super) help: &'static str,
    /// Produced one by one: there may be very many.
    pub(super) summaries: Box<dyn Iterator<Item = LabelledQuantiles> + 'a>,
}

impl SummaryFamily<'_> {
    /// Writes the family as text, which is the same in OpenMetrics and the classic format. Writes nothing without
    /// summaries.
    pub(super) fn write_text(self, out: &mut impl Write) -> fmt::Result {
        let name = &self.name;
        let mut summaries = self.summaries.peekable();
        if summaries.peek().is_none() {
            return Ok(());
        }
        writeln!(out, "# HELP {name} {}\n# TYPE {name} summary", self.help)?;
        for (labels, quantiles) in summaries {
            let mut all = String::new();
            for (label, value) in labels {
                let comma = if all.is_empty() { "" } else { "," };
                write!(all, "{comma}{label}=\"{}\"", escaped(&value))?;
            }
            for (quantile, seconds) in &quantiles.values {
                writeln!(out, "{name}{{{all},quantile=\"{quantile}\"}} {seconds}")?;
            }
            writeln!(out, "{name}_sum{{{all}}} {}", quantiles.sum_seconds)?;
            writeln!(out, "{name}_count{{{all}}} {}", quantiles.count)?;
        }
        Ok(())
    }

    /// The family as a message.
    pub(super) fn message(self) -> model::MetricFamily {
        let metrics = self.summaries.map(|(labels, quantiles)| {
            let labels = labels.into_iter().map(|(name, value)| model::LabelPair {
                name: name.to_owned(),
                value,
            });
            let values = quantiles.values.iter();
            let values = values.map(|&(quantile, value)| model::Quantile { quantile, value });
            model::Metric {
                label: labels.collect(),
                summary: Some(model::Summary {
                    sample_count: quantiles.count,
                    sample_sum: quantiles.sum_seconds,
                    quantile: values.collect(),
                    ..model::Summary::default()
                }),
                ..model::Metric::default()
            }
        });
        model::MetricFamily {
            name: self.name,
            help: self.help.to_owned(),
            r#type: model::MetricType::Summary.into(),
            metric: metrics.collect(),
            ..model::MetricFamily::default()
        }
    }
}

/// A label value, escaped for the text formats: the classic one and OpenMetrics escape alike.
fn escaped(value: &str) -> String {
    value
        .replace('\\', r"\\")
        .replace('"', r#"\""#)
        .replace('\n', r"\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_has_quantiles_sum_and_count() {
        let family = |summaries: Vec<LabelledQuantiles>| SummaryFamily {
            name: "rtt_seconds".to_owned(),
            help: "Round trips",
            summaries: Box::new(summaries.into_iter()),
        };
        let quantiles = Quantiles {
            values: vec![(0.5, 0.000_02), (0.99, 1.5)],
            sum_seconds: 3.25,
            count: 7,
        };
        let mut text = String::new();
        let labels = vec![("type", "node".to_owned()), ("name", "a\"b".to_owned())];
        family(vec![(labels, quantiles)])
            .write_text(&mut text)
            .unwrap();
        assert_eq!(
            text,
            "\
# HELP rtt_seconds Round trips
# TYPE rtt_seconds summary
rtt_seconds{type=\"node\",name=\"a\\\"b\",quantile=\"0.5\"} 0.00002
rtt_seconds{type=\"node\",name=\"a\\\"b\",quantile=\"0.99\"} 1.5
rtt_seconds_sum{type=\"node\",name=\"a\\\"b\"} 3.25
rtt_seconds_count{type=\"node\",name=\"a\\\"b\"} 7
"
        );
        let mut none = String::new();
        family(vec![]).write_text(&mut none).unwrap();
        assert_eq!(none, "");
    }
}
