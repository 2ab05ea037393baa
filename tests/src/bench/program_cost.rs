//! Cost of a program, measured by test runs that restore the packet before each pass.
//!
//! A front program restores the next packet of a set and calls the program under test. The time of the same run with an
//! empty program behind the front is subtracted. Simply repeating a test run would feed a program its own output.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, ensure};
use aya::maps::{Array, MapData, ProgramArray};
use aya::programs::{Program, ProgramError, ProgramFd, SchedClassifier, TestRun as _, Xdp};
use aya::{Ebpf, EbpfLoader, TestRunOptions, TestRunResult};
use aya_obj::programs::XdpAttachType;
use health_common::probe::MESSAGE_LEN;

use super::objects::BENCH_PROGRAMS;
use super::parts::median;
use super::{Figure, Target};
use crate::testrun::TestRun;

/// Number of packet bytes that the front program restores: the size of an ICMPv6 probe.
const PACKET_LEN: usize = 14 + 40 + MESSAGE_LEN;
/// Maximum number of packets that can alternate.
pub(super) const PACKETS: u32 = 1_024;

/// A program type, with the benchmarks' own programs of that type.
pub(super) trait Kind: Sized {
    /// Name of the front program, which restores packets.
    const FRONT: &'static str;
    /// Name of the map with the program behind the front.
    const SLOT: &'static str;
    /// Names of the benchmark programs that can be measured in addition to the datapath's.
    const OWN: &'static [&'static str];
    /// Gets a program from an object before it is loaded.
    fn of(program: &mut Program) -> Result<&mut Self, ProgramError>;
    /// Loads the program.
    fn load(&mut self) -> Result<(), ProgramError>;
    /// The program's file descriptor.
    fn descriptor(&self) -> Result<&ProgramFd, ProgramError>;
    /// Detaches the program from its object.
    fn apart(&mut self, pin: &Path) -> anyhow::Result<Self>;
    /// Runs the program.
    fn run(&self, options: TestRunOptions<'_>) -> Result<TestRunResult, ProgramError>;
}

macro_rules! kind {
    ($program:ty, $front:literal, $slot:literal, $own:expr, $from_pin:expr) => {
        impl Kind for $program {
            const FRONT: &'static str = $front;
            const SLOT: &'static str = $slot;
            const OWN: &'static [&'static str] = &$own;

            fn of(program: &mut Program) -> Result<&mut Self, ProgramError> {
                program.try_into()
            }

            fn load(&mut self) -> Result<(), ProgramError> {
                self.load()
            }

            fn descriptor(&self) -> Result<&ProgramFd, ProgramError> {
                self.fd()
            }

            fn apart(&mut self, pin: &Path) -> anyhow::Result<Self> {
                self.pin(pin)?;
                let apart = $from_pin(pin)?;
                fs::remove_file(pin)?;
                Ok(apart)
            }

            fn run(&self, options: TestRunOptions<'_>) -> Result<TestRunResult, ProgramError> {
                self.test_run(options)
            }
        }
    };
}

kind!(
    SchedClassifier,
    "bench_front",
    "BENCH_PROGRAM",
    ["bench_empty", "bench_echo_stateless", "bench_clock"],
    SchedClassifier::from_pin
);
kind!(
    Xdp,
    "bench_xdp_front",
    "BENCH_XDP_PROGRAM",
    ["bench_xdp_empty"],
    |pin| Xdp::from_pin(pin, XdpAttachType::Interface)
);

const EMPTY: &str = "bench_empty";
const CLOCK: &str = "bench_clock";
/// The return value of both programs.
const OWN_CODE: u32 = 0;

/// A complete run, including the front, with which costs are compared.
#[derive(Clone, Copy, Debug)]
pub(super) enum Floor {
    /// The empty program behind the front.
    Empty,
    /// A program behind the front that only reads the clock.
    Clock,
}

/// Costs of a program in several rounds, and of the floor in the same rounds.
pub(super) struct NetCosts {
    floor: Floor,
    net: Vec<f64>,
    beside: Vec<f64>,
}

impl NetCosts {
    /// Starts with no measurements.
    pub(super) fn beside(floor: Floor) -> Self {
        Self {
            floor,
            net: Vec::new(),
            beside: Vec::new(),
        }
    }

    /// Measures the floor and then the program in a round of `passes`.
    pub(super) fn measure(
        &mut self,
        cost: &mut ProgramCost,
        program: &SchedClassifier,
        passes: u32,
        expected: u32,
    ) -> anyhow::Result<()> {
        let empty = cost.measure_own(EMPTY, passes, OWN_CODE)?;
        self.beside.push(match self.floor {
            Floor::Empty => empty,
            Floor::Clock => cost.measure_own(CLOCK, passes, OWN_CODE)?,
        });
        let full = cost.measure(program, passes, expected)?;
        self.net.push(full - empty);
        Ok(())
    }

    /// Medians over all rounds except the warm-up rounds at the start. The limit applies to the ratio.
    pub(super) fn figure(
        mut self,
        what: &str,
        warm_up: usize,
        limit: Option<f64>,
    ) -> anyhow::Result<Figure> {
        let floor = match self.floor {
            Floor::Empty => "the empty run",
            Floor::Clock => "a run that reads the clock",
        };
        Ok(Figure {
            name: format!("{what}, net (other: {floor})"),
            unit: "ns",
            ours: median(self.net.split_off(warm_up))?,
            other: Some(median(self.beside.split_off(warm_up))?),
            target: limit.map(Target::RatioAtMost),
        })
    }
}

/// The benchmark programs, which use the maps of a loaded datapath.
pub(super) struct ProgramCost<P = SchedClassifier> {
    ebpf: Ebpf,
    front: P,
    slot: ProgramArray<MapData>,
    packets: Array<MapData, [u8; PACKET_LEN]>,
    turn: Array<MapData, [u32; 2]>,
    /// The first packet. All packets have the same length.
    packet: Vec<u8>,
    count: u32,
    context: Option<Vec<u8>>,
}

impl<P: Kind> ProgramCost<P> {
    /// Loads the benchmark programs. Each pass will use the next of `packets`, which must all have the same length.
    pub(super) fn new(bed: &TestRun, packets: &[Vec<u8>]) -> anyhow::Result<Self> {
        let mut ebpf = EbpfLoader::new()
            .default_map_pin_directory(bed.location.pins())
            .load(BENCH_PROGRAMS)?;
        for name in P::OWN.iter().chain([&P::FRONT]) {
            program::<P>(&mut ebpf, name)?.load()?;
        }
        let pin = bed.location.pins().join(P::FRONT);
        let front = program::<P>(&mut ebpf, P::FRONT)?.apart(&pin)?;
        let mut map = |name: &str| {
            let map = ebpf.take_map(name);
            map.with_context(|| format!("no map {name}"))
        };
        let mut cost = Self {
            slot: ProgramArray::try_from(map(P::SLOT)?)?,
            packets: Array::try_from(map("BENCH_PACKETS")?)?,
            turn: Array::try_from(map("BENCH_TURN")?)?,
            ebpf,
            front,
            packet: Vec::new(),
            count: 0,
            context: None,
        };
        cost.set_packets(packets)?;
        Ok(cost)
    }

    /// Uses these packets from now on.
    pub(super) fn set_packets(&mut self, packets: &[Vec<u8>]) -> anyhow::Result<()> {
        let first = packets.first().context("no packet to measure with")?;
        for (index, packet) in (0..).zip(packets) {
            ensure!(packet.len() == first.len(), "packets of several lengths");
            let mut bytes = [0; PACKET_LEN];
            let restored = packet.len().min(PACKET_LEN);
            bytes[..restored].copy_from_slice(&packet[..restored]);
            self.packets.set(index, bytes, 0)?;
        }
        self.packet.clone_from(first);
        self.count = packets.len().try_into()?;
        Ok(())
    }

    /// Uses this `struct __sk_buff` as the context from now on, or an empty one.
    pub(super) fn set_context(&mut self, context: Option<Vec<u8>>) {
        self.context = context;
    }

    /// Nanoseconds per pass with a benchmark program behind the front, averaged over `passes`.
    pub(super) fn measure_own(
        &mut self,
        name: &str,
        passes: u32,
        expected: u32,
    ) -> anyhow::Result<f64> {
        let fd = program::<P>(&mut self.ebpf, name)?
            .descriptor()?
            .try_clone()?;
        self.slot.set(0, &fd, 0)?;
        self.run(passes, expected)
    }

    /// Nanoseconds per pass with `program` behind the front, averaged over `passes`.
    pub(super) fn measure(
        &mut self,
        program: &P,
        passes: u32,
        expected: u32,
    ) -> anyhow::Result<f64> {
        self.slot.set(0, program.descriptor()?, 0)?;
        self.run(passes, expected)
    }

    fn run(&mut self, passes: u32, expected: u32) -> anyhow::Result<f64> {
        self.turn.set(0, [0, self.count], 0)?;
        let options = TestRunOptions {
            data_in: Some(&self.packet),
            ctx_in: self.context.as_deref(),
            repeat: passes,
            ..TestRunOptions::new()
        };
        let result = self.front.run(options)?;
        ensure!(
            result.return_value == expected,
            "returned {}, not {expected}",
            result.return_value
        );
        // The kernel reports the mean time of a pass.
        Ok(result.duration.as_nanos() as f64)
    }
}

fn program<'a, P: Kind>(ebpf: &'a mut Ebpf, name: &str) -> anyhow::Result<&'a mut P> {
    let program = ebpf
        .program_mut(name)
        .with_context(|| format!("no program {name}"))?;
    Ok(P::of(program)?)
}
