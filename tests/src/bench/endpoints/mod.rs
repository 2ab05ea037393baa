//! Endpoints: what making and deleting one takes, alone and on a node that has a thousand.

mod add;
mod many;
mod stand;

use super::parts::{self, Part};
use super::{Options, Report};

const PARTS: &[Part] = &[
    Part {
        name: "add",
        about: "containers that come and go by CNI, beside Debian's ptp and host-local",
        measure: |_| add::figures(),
    },
    Part {
        name: "many",
        about: "a node with 1000 endpoints",
        measure: |_| many::figures(),
    },
];

pub(super) fn run(options: &Options) -> anyhow::Result<Report> {
    parts::run(PARTS, options)
}
