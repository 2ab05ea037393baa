//! Round-trip times stamped in the kernel: how right they are, that no probe goes uncounted, and what
//! stamping costs.

mod accounts;
mod busy;
mod capture;
mod cost;
mod idle;
mod line;
mod listing;
mod loss;
mod prober;
mod reference;
mod tcp;
mod throughput;

use std::time::Duration;

use anyhow::Context as _;
use health_common::LAYOUT_VERSION;
use health_common::config::{DatapathConfig, PASSIVE_RTT};
use health_common::probe::DEFAULT_KEY;

use super::{Figure, Options, Report};
use crate::process::tell;

const ICMP_ID: u16 = 0x4a11;
const SESSION: u32 = 1;
/// Where no agent listens here.
const HEALTH_PORT: u16 = 4240;

/// What the programs are told by an agent.
fn settings() -> DatapathConfig {
    DatapathConfig {
        layout_version: LAYOUT_VERSION,
        ct_any_timeout_secs: 60,
        icmp_id_be: ICMP_ID.to_be(),
        probe_key: DEFAULT_KEY,
        session: SESSION,
        health_port_be: HEALTH_PORT.to_be(),
        flags: PASSIVE_RTT,
        ..DatapathConfig::default()
    }
}

/// One part of the benchmark, by its name on the command line.
struct Part {
    name: &'static str,
    about: &'static str,
    measure: fn(&Options) -> anyhow::Result<Vec<Figure>>,
}

const PARTS: &[Part] = &[
    Part {
        name: "cost",
        about: "what the programs cost a packet",
        measure: |_| cost::figures(),
    },
    Part {
        name: "tcp",
        about: "what the programs cost a TCP segment",
        measure: |_| tcp::figures(),
    },
    Part {
        name: "reference",
        about: "each probe against a packet socket, over held packets",
        measure: |_| reference::figures(),
    },
    Part {
        name: "idle",
        about: "the spread on an idle veth",
        measure: |_| idle::figures(),
    },
    Part {
        name: "busy",
        about: "the tail with all CPUs busy",
        measure: |_| busy::figures(),
    },
    Part {
        name: "loss",
        about: "losses against those made",
        measure: |_| loss::figures(),
    },
    Part {
        name: "throughput",
        about: "iperf3 through the programs",
        measure: |_| throughput::figures(),
    },
    Part {
        name: "listing",
        about: "listing the rows of very many peers",
        measure: |_| listing::figures(),
    },
    Part {
        name: "accounts",
        about: "every probe of an agent accounted for",
        measure: accounts::figures,
    },
];

pub(super) fn run(options: &Options) -> anyhow::Result<Report> {
    let mut figures = Vec::new();
    for part in chosen(&options.parts)? {
        tell(format_args!("{}: {}", part.name, part.about));
        let found = (part.measure)(options).with_context(|| format!("part {}", part.name))?;
        found.iter().for_each(Figure::tell);
        figures.extend(found);
    }
    Report::new(figures, 1)
}

/// The parts of these names; all of them if there are none.
fn chosen(names: &[String]) -> anyhow::Result<Vec<&'static Part>> {
    if names.is_empty() {
        return Ok(PARTS.iter().collect());
    }
    let find = |name: &String| {
        PARTS
            .iter()
            .find(|part| part.name == name)
            .with_context(|| {
                let known: Vec<&str> = PARTS.iter().map(|part| part.name).collect();
                format!("no part {name}; there are: {}", known.join(", "))
            })
    };
    names.iter().map(find).collect()
}

fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

/// The middle one of the values.
fn median(mut values: Vec<f64>) -> anyhow::Result<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.get(values.len() / 2);
    middle.copied().context("nothing was measured")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_chosen_by_name() {
        let names = |chosen: Vec<&Part>| -> Vec<&str> { chosen.iter().map(|p| p.name).collect() };
        assert_eq!(chosen(&[]).map(names).unwrap().len(), PARTS.len());
        let two = ["loss".to_owned(), "cost".to_owned()];
        assert_eq!(chosen(&two).map(names).unwrap(), ["loss", "cost"]);
        assert!(chosen(&["cots".to_owned()]).is_err());
    }
}
