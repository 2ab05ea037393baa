//! Conntrack: what its maps cost to read.

mod dump;
mod filled;

use super::parts::{self, Part};
use super::{Options, Report};

const PARTS: &[Part] = &[Part {
    name: "dump",
    about: "listing a million entries",
    measure: |_| dump::figures(),
}];

pub(super) fn run(options: &Options) -> anyhow::Result<Report> {
    parts::run(PARTS, options)
}
