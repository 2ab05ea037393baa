//! Round-trip times measured in the kernel: their accuracy, whether every probe is counted, and the cost of measuring.

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

use health_common::LAYOUT_VERSION;
use health_common::config::{DatapathConfig, PASSIVE_RTT};
use health_common::probe::DEFAULT_KEY;

use super::parts::{self, Part, median};
use super::{Options, Report};

const ICMP_ID: u16 = 0x4a11;
const SESSION: u32 = 1;
/// Port of `/hello`. No agent listens on it here.
const HEALTH_PORT: u16 = 4240;

/// The configuration that an agent would write for the programs.
fn settings() -> DatapathConfig {
    DatapathConfig {
        layout_version: LAYOUT_VERSION,
        icmp_id_be: ICMP_ID.to_be(),
        probe_key: DEFAULT_KEY,
        session: SESSION,
        health_port_be: HEALTH_PORT.to_be(),
        flags: PASSIVE_RTT,
        ..DatapathConfig::default()
    }
}

const PARTS: &[Part] = &[
    Part {
        name: "cost",
        about: "cost of the programs per packet",
        measure: |_| cost::figures(),
    },
    Part {
        name: "tcp",
        about: "cost of the programs per TCP segment",
        measure: |_| tcp::figures(),
    },
    Part {
        name: "reference",
        about: "each probe compared with a packet socket, with delayed packets",
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
        about: "counted losses compared with the injected ones",
        measure: |_| loss::figures(),
    },
    Part {
        name: "throughput",
        about: "iperf3 through the programs",
        measure: |_| throughput::figures(),
    },
    Part {
        name: "listing",
        about: "listing the rows of many peers",
        measure: |_| listing::figures(),
    },
    Part {
        name: "accounts",
        about: "every probe of an agent accounted for",
        measure: accounts::figures,
    },
];

pub(super) fn run(options: &Options) -> anyhow::Result<Report> {
    parts::run(PARTS, options)
}

fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}
