//! Conntrack: what its maps cost to read and to collect.

mod collect;
mod dump;
mod filled;

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
];

pub(super) fn run(options: &Options) -> anyhow::Result<Report> {
    parts::run(PARTS, options)
}
