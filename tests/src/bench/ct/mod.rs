//! Conntrack: the cost of reading and collecting its maps, and of tracking packets.

mod churn;
mod collect;
mod cost;
mod dump;
mod filled;
mod flood;
mod netfilter;
mod policy;
mod throughput;
mod transfer;

use super::parts::{self, Part};
use super::{Options, Report};

const PARTS: &[Part] = &[
    Part {
        name: "dump",
        about: "listing a million entries",
        measure: |_| dump::figures(),
    },
    Part {
        name: "collect",
        about: "collecting a million entries of which half have expired",
        measure: |_| collect::figures(),
    },
    Part {
        name: "cost",
        about: "cost of tracking per packet, by test runs",
        measure: |_| cost::figures(),
    },
    Part {
        name: "policy",
        about: "cost of policy per packet, by test runs",
        measure: |_| policy::figures(),
    },
    Part {
        name: "throughput",
        about: "packets a second through a veth, beside the kernel's own conntrack",
        measure: |_| throughput::figures(),
    },
    Part {
        name: "transfer",
        about: "a transfer from an endpoint under policy, beside the kernel's own conntrack and filter",
        measure: |_| transfer::figures(),
    },
    Part {
        name: "churn",
        about: "a million connections opened, closed and opened again while they are collected",
        measure: |_| churn::figures(),
    },
    Part {
        name: "flood",
        about: "30 000 idle connections of each IP version beside a flood of echoes and UDP",
        measure: flood::figures,
    },
];

pub(super) fn run(options: &Options) -> anyhow::Result<Report> {
    parts::run(PARTS, options)
}
