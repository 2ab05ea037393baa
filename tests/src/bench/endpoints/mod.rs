//! Endpoints: the time to create and delete one: on its own, on a node with a thousand endpoints, and after a restart.

mod add;
mod many;
mod restored;
mod stand;

use super::parts::{self, Part};
use super::{Options, Report};

const PARTS: &[Part] = &[
    Part {
        name: "add",
        about: "containers added and deleted by CNI, compared with Debian's ptp and host-local",
        measure: |_| add::figures(),
    },
    Part {
        name: "many",
        about: "a node with 1000 endpoints",
        measure: |_| many::figures(),
    },
    Part {
        name: "restored",
        about: "containers added while 200 restored endpoints wait for an unavailable store",
        measure: |_| restored::figures(),
    },
];

pub(super) fn run(options: &Options) -> anyhow::Result<Report> {
    parts::run(PARTS, options)
}
