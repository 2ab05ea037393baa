//! Dumps of the agent's own maps.

use anyhow::bail;
use health_common::addr::Addr;
use health_datapath::dump::{DumpError, Pinned, Rows};
use health_datapath::layout::{self, MapLayout};
use health_net::clock;

use super::entry::lines;
use super::{
    arrivals, calls, connections, ct, direct, endpoint, event_filter, fragments, inflight, ipcache,
    lb, masquerade, metrics, nat, policy, ring, rtt, settings, stream, xdp,
};
use crate::output::Format;

/// Shows all entries of a map.
type Show = fn(&Pinned, Format) -> anyhow::Result<()>;

/// All maps except rings.
const MAPS: [(MapLayout, Show); 46] = [
    (layout::CT4, |pinned, format| conntrack(pinned, 0, format)),
    (layout::CT6, |pinned, format| conntrack(pinned, 1, format)),
    (layout::CT_ANY4, |pinned, format| {
        conntrack(pinned, 2, format)
    }),
    (layout::CT_ANY6, |pinned, format| {
        conntrack(pinned, 3, format)
    }),
    (layout::FRAGMENTS4, |pinned, format| {
        let rows = pinned.fragments4_rows()?;
        stream::print(format, &[rows], |row| Some(fragments::entry4(row)))
    }),
    (layout::FRAGMENTS6, |pinned, format| {
        let rows = pinned.fragments6_rows()?;
        stream::print(format, &[rows], |row| Some(fragments::entry6(row)))
    }),
    (layout::NAT4, |pinned, format| {
        translations(pinned, 0, format)
    }),
    (layout::NAT6, |pinned, format| {
        translations(pinned, 1, format)
    }),
    (layout::NAT_ANY4, |pinned, format| {
        translations(pinned, 2, format)
    }),
    (layout::NAT_ANY6, |pinned, format| {
        translations(pinned, 3, format)
    }),
    (layout::RTT, |pinned, format| {
        let clock = clock::state().ok();
        stream::print_each(format, |each| {
            pinned.each_rtt(&mut |key, row| each(&rtt::entry(key, row, clock)))
        })
    }),
    (layout::INFLIGHT, |pinned, format| {
        let rows = pinned.inflight_rows()?;
        stream::print(format, &[rows], |row| Some(inflight::entry(row)))
    }),
    (layout::ARRIVALS, |pinned, format| {
        let rows = pinned.arrivals_rows()?;
        stream::print(format, &[rows], |row| Some(arrivals::entry(row)))
    }),
    (layout::PEERS, |pinned, format| {
        let rows = pinned.peers_rows()?;
        stream::print(format, &[rows], |row| Some(connections::peer(row)))
    }),
    (layout::TCP, |pinned, format| {
        let rows = pinned.tcp_rows()?;
        stream::print(format, &[rows], |row| Some(connections::connection(row)))
    }),
    (layout::ENDPOINTS, |pinned, format| {
        format.print_rows(&endpoint::entries(pinned.endpoints()?), lines)
    }),
    (layout::POLICY, |pinned, format| {
        let rows = pinned.policy_rows()?;
        stream::print(format, &[rows], |row| Some(policy::entry(&row)))
    }),
    (layout::POLICY_COUNTERS, |pinned, format| {
        let rows = pinned.policy_counter_rows()?;
        stream::print(format, &[rows], |row| Some(policy::counter(row)))
    }),
    (layout::IPCACHE, |pinned, format| {
        let rows = pinned.ipcache_rows()?;
        stream::print(format, &[rows], |row| Some(ipcache::entry(row)))
    }),
    (layout::METRICS, |pinned, format| {
        format.print_rows(&metrics::entries(pinned.metrics()?), lines)
    }),
    (layout::CALLS, |pinned, format| {
        format.print_rows(&calls::entries(pinned.calls(&layout::CALLS)?), lines)
    }),
    (layout::IP_CALLS, |pinned, format| {
        let calls = pinned.calls(&layout::IP_CALLS)?;
        format.print_rows(&calls::ip_entries(calls), lines)
    }),
    (layout::MASQUERADE, |pinned, format| {
        format.print_rows(&masquerade::entries(pinned.masquerade()?), lines)
    }),
    (layout::EVENTS, |_, _| {
        bail!(
            "{} cannot be dumped: reading an event removes it; `health-agent monitor` shows them",
            layout::EVENTS.name
        )
    }),
    (layout::MONITOR, |pinned, format| {
        format.print_rows(&event_filter::entries(pinned.monitor()?), lines)
    }),
    (layout::DIRECT, |pinned, format| {
        format.print_rows(&direct::entries(pinned.direct()?), lines)
    }),
    (layout::CONFIG, |pinned, format| {
        format.print_rows(&settings::entries(pinned.config()?), lines)
    }),
    (layout::SVC4, |pinned, format| {
        let rows = pinned.frontend4_rows()?;
        stream::print(format, &[rows], |row| {
            Some(lb::entries::frontend(row, Addr::v4))
        })
    }),
    (layout::SVC6, |pinned, format| {
        let rows = pinned.frontend6_rows()?;
        stream::print(format, &[rows], |row| {
            Some(lb::entries::frontend(row, Addr::v6))
        })
    }),
    (layout::SLOTS, |pinned, format| {
        slots(pinned, &layout::SLOTS, format)
    }),
    (layout::MAGLEV, |pinned, format| {
        slots(pinned, &layout::MAGLEV, format)
    }),
    (layout::BACKENDS, |pinned, format| {
        let rows = pinned.backend_rows()?;
        stream::print(format, &[rows], |row| Some(lb::entries::backend(row)))
    }),
    (layout::SOURCE_RANGES, |pinned, format| {
        let rows = pinned.source_range_rows()?;
        stream::print(format, &[rows], |row| Some(lb::entries::source_range(row)))
    }),
    (layout::AFFINITY, |pinned, format| {
        lb::print_clients(pinned, &lb::Selection::default(), format)
    }),
    (layout::REVNAT4, |pinned, format| {
        service_flows(pinned, 0, format)
    }),
    (layout::REVNAT6, |pinned, format| {
        service_flows(pinned, 1, format)
    }),
    (layout::REVNAT_ANY4, |pinned, format| {
        service_flows(pinned, 2, format)
    }),
    (layout::REVNAT_ANY6, |pinned, format| {
        service_flows(pinned, 3, format)
    }),
    (layout::SOCKETS, |pinned, format| {
        let rows = pinned.socket_rows()?;
        stream::print(format, &[rows], |row| Some(lb::socket_entry(row)))
    }),
    (layout::XDP_DEVICES, |pinned, format| {
        let rows = pinned.xdp_device_rows()?;
        stream::print(format, &[rows], |row| Some(xdp::device(row)))
    }),
    (layout::XDP_FLOWS4, |pinned, format| {
        xdp_flows(pinned, 0, format)
    }),
    (layout::XDP_FLOWS6, |pinned, format| {
        xdp_flows(pinned, 1, format)
    }),
    (layout::XDP_TIMES, |pinned, format| {
        let rows = pinned.xdp_time_rows()?;
        stream::print(format, &[rows], |row| Some(xdp::times(row)))
    }),
    (layout::OWN, |pinned, format| {
        stream::print(format, &[pinned.own_rows()?], |row| {
            Some(endpoint::own(row))
        })
    }),
    (layout::DEVICES, |pinned, format| {
        let rows = pinned.device_rows()?;
        stream::print(format, &[rows], |row| Some(endpoint::device(row)))
    }),
    (layout::HANDS, |pinned, format| {
        stream::print(format, &[pinned.hand_rows()?], |row| Some(ring::hand(row)))
    }),
];

/// Shows the map with this name.
pub(super) fn dump(pinned: &Pinned, name: &str, format: Format) -> anyhow::Result<()> {
    if let Some((_, show)) = MAPS.iter().find(|(map, _)| map.name == name) {
        return show(pinned, format);
    }
    match pinned.ring_rows(name)? {
        Some(rows) => stream::print(format, &[rows], ring::slot),
        None => Err(DumpError::UnknownMap(pinned.map(name)?.pin().to_owned()).into()),
    }
}

fn conntrack(pinned: &Pinned, map: usize, format: Format) -> anyhow::Result<()> {
    let rows = one(pinned.conntrack_rows()?, map);
    stream::print(format, &rows, |row| Some(ct::entry(row)))
}

fn translations(pinned: &Pinned, map: usize, format: Format) -> anyhow::Result<()> {
    let now_ns = clock::now_ns();
    let rows = one(pinned.nat_rows()?, map);
    stream::print(format, &rows, |row| Some(nat::entry(row, now_ns)))
}

fn service_flows(pinned: &Pinned, map: usize, format: Format) -> anyhow::Result<()> {
    let rows = one(pinned.service_flow_rows()?, map);
    stream::print(format, &rows, |row| Some(lb::flow_entry(row)))
}

fn xdp_flows(pinned: &Pinned, map: usize, format: Format) -> anyhow::Result<()> {
    let rows = one(pinned.xdp_flow_rows()?, map);
    stream::print(format, &rows, |row| Some(xdp::flow(row)))
}

fn slots(pinned: &Pinned, map: &MapLayout, format: Format) -> anyhow::Result<()> {
    let rows = pinned.slot_rows(map)?;
    stream::print(format, &[rows], |row| Some(lb::entries::place(row)))
}

/// The rows of one map out of several that are read together.
fn one<T, const N: usize>(maps: [Rows<T>; N], map: usize) -> Vec<Rows<T>> {
    maps.into_iter().skip(map).take(1).collect()
}
