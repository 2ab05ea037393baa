//! Services: their cost per packet and per connection, how soon a change takes effect, and the resources that they
//! need, compared with kube-proxy's nftables rules.

mod cluster;
mod cost;
mod floor;
mod flows;
mod ipvs;
mod maglev;
mod ruleset;
mod scale;
mod server;
mod stand;
mod tables;
mod traffic;
mod xdp;

use health_datapath::layout;
use health_model::settings::HostRouting;

use super::parts::{self, Part};
use super::{Options, Report};

/// The maps for services.
const MAPS: [&str; 12] = [
    layout::SVC4.name,
    layout::SVC6.name,
    layout::BACKENDS.name,
    layout::SLOTS.name,
    layout::MAGLEV.name,
    layout::SOURCE_RANGES.name,
    layout::AFFINITY.name,
    layout::REVNAT4.name,
    layout::REVNAT6.name,
    layout::REVNAT_ANY4.name,
    layout::REVNAT_ANY6.name,
    layout::SOCKETS.name,
];

const PARTS: &[Part] = &[
    Part {
        name: "cost",
        about: "cost of a service per packet, by test runs",
        measure: cost::figures,
    },
    Part {
        name: "flows",
        about: "connections, datagrams and requests through services, compared with kube-proxy's nftables rules, and with IPVS if the kernel has it",
        measure: |options| flows::figures(options, HostRouting::Ebpf),
    },
    Part {
        name: "kernel-routing",
        about: "the same with `--host-routing kernel`",
        measure: |options| flows::figures(options, HostRouting::Kernel),
    },
    Part {
        name: "maglev",
        about: "how evenly Maglev tables spread flows, and how many flows move when a backend is removed",
        measure: |_| maglev::figures(),
    },
    Part {
        name: "scale",
        about: "50,000 services: a change, a start and memory, compared with nft",
        measure: scale::figures,
    },
    Part {
        name: "xdp",
        about: "cost of a packet of a known flow that XDP forwards, by test runs",
        measure: xdp::figures,
    },
];

pub(super) fn run(options: &Options) -> anyhow::Result<Report> {
    parts::run(PARTS, options)
}
