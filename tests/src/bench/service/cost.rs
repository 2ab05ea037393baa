//! Cost of services per packet of an endpoint, measured by test runs: the same programs process the same kinds of
//! packets with and without services.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::{Context as _, ensure};
use aya::programs::SchedClassifier;
use health_common::LAYOUT_VERSION;
use health_common::config::{DatapathConfig, SERVICES};
use health_common::endpoint::EndpointInfo;
use health_common::identity::CLUSTER_FIRST;

use super::cluster::counted;
use super::tables::{self, BACKEND_PORT, PORT, cluster_ip};
use crate::bench::parts::median;
use crate::bench::program_cost::{PACKETS, ProgramCost};
use crate::bench::{Figure, Options, Target};
use crate::packet::{Tcp, timestamps};
use crate::testrun::{GO_ON, IFINDEX, TestRun};

/// Number of rounds, and its maximum. Each round uses new source ports, whose number is limited.
const ROUNDS: u16 = 45;
const ROUNDS_MAX: u16 = 60;
const SERVICES_MANY: u32 = 50_000;
/// Katran's times for a segment of a known flow and for a SYN on this kind of machine, in nanoseconds minus the time of
/// an empty program.
pub(super) const KATRAN_KNOWN_NS: f64 = 65.0;
const KATRAN_SYN_NS: f64 = 69.0;

const CLIENT4: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 9);
const CLIENT6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x10, 0x244, 1, 0, 0, 0, 9);
const BACKEND4: Ipv4Addr = Ipv4Addr::new(10, 244, 2, 7);
const BACKEND6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x10, 0x244, 2, 0, 0, 0, 7);

const SYN: u8 = 0x02;
const ACK: u8 = 0x10;
const EMPTY: &str = "bench_empty";
const EMPTY_CODE: u32 = 0;
const GO_ON_CODE: u32 = GO_ON.cast_unsigned();

/// The packets of a round in order.
const STEPS: [Step; 6] = [
    Step::of_all("SYN, a new flow (from_endpoint)", 0, SYN),
    Step::of_all("its answer (to_endpoint)", 1, SYN | ACK),
    Step::of_all("segment of a known flow (from_endpoint)", 0, ACK),
    Step::of_all("its answer (to_endpoint)", 1, ACK),
    Step::of_one("segment of always the same flow (from_endpoint)", 0),
    Step::of_one("its answer (to_endpoint)", 1),
];
const SYN_STEP: usize = 0;
/// The step that corresponds to Katran's measurement.
const KNOWN_STEP: usize = 4;

/// Packets of one kind.
struct Step {
    what: &'static str,
    /// Index of the program in [`Side::programs`].
    program: usize,
    flags: u8,
    flows: u32,
    passes: u32,
}

impl Step {
    /// One packet of each flow.
    const fn of_all(what: &'static str, program: usize, flags: u8) -> Self {
        Self {
            what,
            program,
            flags,
            flows: PACKETS,
            passes: PACKETS,
        }
    }

    /// Many packets of the first flow, whose entries are then in the CPU's caches.
    const fn of_one(what: &'static str, program: usize) -> Self {
        Self {
            what,
            program,
            flags: ACK,
            flows: 1,
            passes: 10 * PACKETS,
        }
    }
}

pub(super) fn figures(options: &Options) -> anyhow::Result<Vec<Figure>> {
    let rounds = options.rounds_or(ROUNDS.into()).min(ROUNDS_MAX.into());
    let rounds = u16::try_from(rounds)?;
    let mut figures = Vec::new();
    for is_v4 in [true, false] {
        figures.extend(family_figures(is_v4, rounds)?);
    }
    Ok(figures)
}

/// Programs with a number of services, possibly none.
struct Side {
    bed: TestRun,
    cost: ProgramCost,
    programs: [SchedClassifier; 2],
    place: Place,
    /// The times of each step, with one value per round.
    times: [Vec<f64>; STEPS.len()],
}

fn family_figures(is_v4: bool, rounds: u16) -> anyhow::Result<Vec<Figure>> {
    let mut sides = [0, 1, SERVICES_MANY]
        .into_iter()
        .map(|services| Side::new(services, is_v4))
        .collect::<anyhow::Result<Vec<_>>>()?;
    for round in 0..=rounds {
        for side in &mut sides {
            side.run(round)?;
        }
    }
    let [without, one, many] = <[Side; 3]>::try_from(sides).ok().context("too few sides")?;
    let without = without.medians()?;
    let family = if is_v4 { "IPv4" } else { "IPv6" };
    let mut figures = Vec::new();
    for (services, times) in [(1, one.medians()?), (SERVICES_MANY, many.medians()?)] {
        let named = format!("{}, {family}, {rounds} rounds", counted(services));
        for (step, (time, without)) in times.into_iter().zip(without).enumerate() {
            let name = format!("{named}: {}", STEPS[step].what);
            let katran = match step {
                KNOWN_STEP => Some((KATRAN_KNOWN_NS, Some(Target::RatioAtMost(1.0)))),
                SYN_STEP => Some((KATRAN_SYN_NS, None)),
                _ => None,
            };
            if let Some((other, target)) = katran {
                figures.push(figure(
                    format!("{name}, what the service adds (other: Katran's whole program)"),
                    time - without,
                    other,
                    target,
                ));
                figures.push(figure(
                    format!("{name}, net of an empty program (other: Katran's)"),
                    time,
                    other,
                    target,
                ));
            }
            figures.push(figure(
                format!("{name}, net (other: without services)"),
                time,
                without,
                None,
            ));
        }
    }
    Ok(figures)
}

fn figure(name: String, ours: f64, other: f64, target: Option<Target>) -> Figure {
    Figure {
        name,
        unit: "ns",
        ours,
        other: Some(other),
        target,
    }
}

/// Where packets go.
struct Place {
    services: u32,
    is_v4: bool,
}

impl Place {
    /// A segment to a service, or to a backend if there are no services; or a segment from a backend.
    fn packet(&self, round: u16, flow: u32, step: &Step) -> anyhow::Result<Vec<u8>> {
        let (client, backend) = (client(self.is_v4), backend(self.is_v4));
        let port = u16::try_from((u32::from(round) + 1) * PACKETS + flow)?;
        let segment = |source, destination| Tcp {
            source,
            destination,
            flags: step.flags,
            options: timestamps(7, 8),
            ..Tcp::default()
        };
        Ok(if step.program == 1 {
            segment(BACKEND_PORT, port).frame(backend, client)
        } else if self.services == 0 {
            segment(port, BACKEND_PORT).frame(client, backend)
        } else {
            // The flows are spread over all services.
            let number = u64::from(flow) * u64::from(self.services) / u64::from(PACKETS);
            let ip = cluster_ip(u32::try_from(number)?, self.is_v4);
            segment(port, PORT).frame(client, ip)
        })
    }
}

impl Side {
    fn new(services: u32, is_v4: bool) -> anyhow::Result<Self> {
        let mut bed = TestRun::load_alone();
        bed.datapath.configure(DatapathConfig {
            layout_version: LAYOUT_VERSION,
            flags: if services > 0 { SERVICES } else { 0 },
            ..DatapathConfig::default()
        })?;
        let info = EndpointInfo {
            ifindex: IFINDEX,
            identity: CLUSTER_FIRST,
            id: 99,
            ..EndpointInfo::default()
        };
        let endpoints = [(CLIENT4.into(), info), (CLIENT6.into(), info)];
        bed.datapath.set_endpoints(&endpoints)?;
        let backend = backend(is_v4);
        let mut served = bed.datapath.services()?;
        tables::serve(
            &mut served,
            (0..services).map(|number| tables::port(number, &[backend])),
        )?;
        let programs = ["from_endpoint", "to_endpoint"].map(|name| bed.program(name));
        let first = Tcp::default().frame(client(is_v4), backend);
        Ok(Self {
            cost: ProgramCost::new(&bed, &[first])?,
            bed,
            programs,
            place: Place { services, is_v4 },
            times: [const { Vec::new() }; STEPS.len()],
        })
    }

    /// Runs each step on [`PACKETS`] new flows, or on the first of them.
    fn run(&mut self, round: u16) -> anyhow::Result<()> {
        for (step, times) in STEPS.iter().zip(&mut self.times) {
            let packets: Vec<_> = (0..step.flows)
                .map(|flow| self.place.packet(round, flow, step))
                .collect::<anyhow::Result<_>>()?;
            self.cost.set_packets(&packets)?;
            let floor = self.cost.measure_own(EMPTY, step.passes, EMPTY_CODE)?;
            let program = &self.programs[step.program];
            let time = self.cost.measure(program, step.passes, GO_ON_CODE)? - floor;
            // The first round warms up.
            if round > 0 {
                times.push(time);
            }
        }
        Ok(())
    }

    /// Checks that the flows went through services if there are any, and did not otherwise.
    fn check(&self) -> anyhow::Result<()> {
        let mut flows = 0;
        for rows in self.bed.maps().service_flow_rows()? {
            flows += rows.collect()?.len();
        }
        ensure!(
            (flows >= PACKETS as usize) == (self.place.services > 0),
            "{flows} flows through {} services",
            self.place.services
        );
        Ok(())
    }

    fn medians(self) -> anyhow::Result<[f64; STEPS.len()]> {
        self.check()?;
        let mut medians = [0.0; STEPS.len()];
        for (median_of, times) in medians.iter_mut().zip(self.times) {
            *median_of = median(times)?;
        }
        Ok(medians)
    }
}

fn client(is_v4: bool) -> IpAddr {
    if is_v4 {
        CLIENT4.into()
    } else {
        CLIENT6.into()
    }
}

fn backend(is_v4: bool) -> IpAddr {
    if is_v4 {
        BACKEND4.into()
    } else {
        BACKEND6.into()
    }
}
