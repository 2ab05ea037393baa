//! Cost of a packet that XDP forwards, for a flow between an outside client and a backend on another node, measured by
//! test runs.

use aya::Pod;
use aya::programs::Xdp;
use health_common::config::SERVICES;
use health_common::ct::{Tuple4, Tuple6};
use health_common::tcp::IP_PROTOCOL_TCP;

use super::cost::KATRAN_KNOWN_NS;
use crate::bench::parts::median;
use crate::bench::program_cost::ProgramCost;
use crate::bench::{Figure, Options, Target};
use crate::xdp::{Hosts, Known, PASS, REDIRECT, Stand, TX, Version, hosts, in_namespace};

const ROUNDS: u32 = 45;
const PASSES: u32 = 100_000;
const EMPTY: &str = "bench_xdp_empty";

pub(super) fn figures(options: &Options) -> anyhow::Result<Vec<Figure>> {
    let rounds = options.rounds_or(ROUNDS);
    in_namespace(move |stand| {
        let [v4, v6] = hosts();
        let mut figures = of_version::<Tuple4>(stand, v4, rounds)?;
        // Restores the initial settings. The last measurement ran with ways that were looked up each time.
        stand.configure(SERVICES)?;
        figures.extend(of_version::<Tuple6>(stand, v6, rounds)?);
        Ok(figures)
    })
}

fn of_version<T: Version>(stand: &Stand, hosts: Hosts, rounds: u32) -> anyhow::Result<Vec<Figure>>
where
    T::Translation: Pod,
    T::ServiceFlow: Pod,
{
    let ways = [
        ("another device", hosts.backend, 1, REDIRECT),
        ("the same device", hosts.near_backend, 0, TX),
    ];
    let version = T::IP_VERSION;
    let named = |what: String| {
        format!("IPv{version}, {rounds} rounds: {what}, xdp_netdev net of an empty program")
    };
    let mut figures = Vec::new();
    for (way, backend, device, code) in ways {
        let known = Known::<T>::enter(stand, hosts, backend, IP_PROTOCOL_TCP)?;
        let packets = [
            ("segment of a known flow", 0, known.request()),
            ("its answer", device, known.answer(device)),
        ];
        for (what, device, packet) in packets {
            figures.push(Figure {
                name: named(format!("{what}, forwarded through {way}")) + " (other: Katran's)",
                unit: "ns",
                ours: cost(stand, device, &packet.frame(), code, rounds)?,
                other: Some(KATRAN_KNOWN_NS),
                target: Some(Target::RatioAtMost(1.0)),
            });
        }
    }
    let known = Known::<T>::enter(stand, hosts, hosts.backend, IP_PROTOCOL_TCP)?;
    let request = known.request();
    let mut stranger = request.clone();
    stranger.ends[1].1 += 1;
    let figure = |what: &str, ours| Figure {
        name: named(what.to_owned()),
        unit: "ns",
        ours,
        other: None,
        target: None,
    };
    let ours = cost(stand, 0, &stranger.frame(), PASS, rounds)?;
    figures.push(figure(
        "segment of no service flow, passed to the stack",
        ours,
    ));
    stand.set_way_ticks(0)?;
    let ours = cost(stand, 0, &request.frame(), REDIRECT, rounds)?;
    figures.push(figure("segment of a known flow, looked up each time", ours));
    Ok(figures)
}

/// Nanoseconds that the program takes for a packet that arrives at a device.
fn cost(stand: &Stand, device: usize, frame: &[u8], code: u32, rounds: u32) -> anyhow::Result<f64> {
    let mut cost = ProgramCost::<Xdp>::new(&stand.run, &[frame.to_vec()])?;
    cost.set_context(Some(stand.context(device, frame.len())));
    let mut times = Vec::new();
    for round in 0..=rounds {
        let floor = cost.measure_own(EMPTY, PASSES, TX)?;
        let time = cost.measure(&stand.program, PASSES, code)? - floor;
        // The first round warms up.
        if round > 0 {
            times.push(time);
        }
    }
    median(times)
}
