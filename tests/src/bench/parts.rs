//! Benchmarks that consist of parts, which can be run individually.

use anyhow::Context as _;

use super::{Figure, Options, Report};
use crate::process::print_line;

/// A part of a benchmark, with its name on the command line.
pub(super) struct Part {
    pub(super) name: &'static str,
    pub(super) about: &'static str,
    pub(super) measure: fn(&Options) -> anyhow::Result<Vec<Figure>>,
}

/// Runs the selected parts.
pub(super) fn run(parts: &[Part], options: &Options) -> anyhow::Result<Report> {
    let mut figures = Vec::new();
    for part in chosen(parts, &options.parts)? {
        print_line(format_args!("{}: {}", part.name, part.about));
        let found = (part.measure)(options).with_context(|| format!("part {}", part.name))?;
        found.iter().for_each(Figure::print);
        figures.extend(found);
    }
    Report::new(figures, 1)
}

/// The parts with these names, or all parts if there are no names.
fn chosen<'a>(parts: &'a [Part], names: &[String]) -> anyhow::Result<Vec<&'a Part>> {
    if names.is_empty() {
        return Ok(parts.iter().collect());
    }
    let find = |name: &String| {
        parts
            .iter()
            .find(|part| part.name == name)
            .with_context(|| {
                let known: Vec<&str> = parts.iter().map(|part| part.name).collect();
                format!("no part {name}; the parts are: {}", known.join(", "))
            })
    };
    names.iter().map(find).collect()
}

/// The median.
pub(super) fn median(mut values: Vec<f64>) -> anyhow::Result<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.get(values.len() / 2);
    middle.copied().context("nothing was measured")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_chosen_by_name() {
        let parts = ["cost", "tcp", "loss"].map(|name| Part {
            name,
            about: "",
            measure: |_| Ok(vec![]),
        });
        let names = |chosen: &[&str]| -> anyhow::Result<Vec<&str>> {
            let chosen: Vec<String> = chosen.iter().map(|&name| name.to_owned()).collect();
            Ok(super::chosen(&parts, &chosen)?
                .iter()
                .map(|part| part.name)
                .collect())
        };
        assert_eq!(names(&[]).unwrap(), ["cost", "tcp", "loss"]);
        assert_eq!(names(&["loss", "cost"]).unwrap(), ["loss", "cost"]);
        let unknown = names(&["cots"]).unwrap_err().to_string();
        assert!(
            unknown.contains("cots") && unknown.contains("tcp"),
            "{unknown}"
        );
    }
}
