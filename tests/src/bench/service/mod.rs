//! Services: what they cost a packet and a connection, how soon a change is in force, and what they take, beside
//! kube-proxy's rules for nftables.

mod cluster;
mod cost;
mod flows;
mod maglev;
mod ruleset;
mod server;
mod stand;
mod tables;
mod traffic;

use super::parts::{self, Part};
use super::{Options, Report};

const PARTS: &[Part] = &[
    Part {
        name: "cost",
        about: "what a service costs a packet, by test runs",
        measure: cost::figures,
    },
    Part {
        name: "flows",
        about: "connections, datagrams and requests through services, beside kube-proxy's rules for nftables",
        measure: flows::figures,
    },
    Part {
        name: "maglev",
        about: "how evenly Maglev's tables spread flows, and how many move when a backend goes",
        measure: |_| maglev::figures(),
    },
];

pub(super) fn run(options: &Options) -> anyhow::Result<Report> {
    parts::run(PARTS, options)
}
