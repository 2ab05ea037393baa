//! What one run of a program costs, by test runs that restore the packet before each pass.
//!
//! A front program copies the headers back and calls the program under test; the same run with an empty
//! program behind the front is subtracted. A bare repeated run would feed a program its own output.

use aya::maps::{Array, ProgramArray};
use aya::programs::{SchedClassifier, TestRun as _};
use aya::{Ebpf, EbpfLoader, TestRunOptions};
use health_agent::datapath::BENCH_PROGRAMS;

use crate::testrun::TestRun;

/// Bytes that the front program restores.
const HEADERS: usize = 62;
/// Passes in one run.
const PASSES: u32 = 1_000_000;

/// The benchmark programs, on the maps of a loaded datapath.
pub(super) struct ProgramCost {
    ebpf: Ebpf,
    front: SchedClassifier,
    slot: ProgramArray<aya::maps::MapData>,
    packet: Vec<u8>,
}

impl ProgramCost {
    /// Loads the benchmark programs; each pass will start with `packet`.
    pub(super) fn new(bed: &TestRun, packet: Vec<u8>) -> anyhow::Result<Self> {
        let mut ebpf = EbpfLoader::new()
            .default_map_pin_directory(bed.location.pins())
            .load(BENCH_PROGRAMS)?;
        for name in ["bench_front", "bench_empty", "bench_echo_stateless"] {
            classifier(&mut ebpf, name)?.load()?;
        }
        let pin = bed.location.pins().join("bench_front");
        classifier(&mut ebpf, "bench_front")?.pin(&pin)?;
        let front = SchedClassifier::from_pin(&pin)?;
        let headers = ebpf
            .map_mut("BENCH_HEADERS")
            .ok_or_else(|| anyhow::anyhow!("no BENCH_HEADERS"))?;
        let mut first = [0_u8; HEADERS];
        anyhow::ensure!(
            packet.len() >= HEADERS,
            "the packet is shorter than what is restored"
        );
        first.copy_from_slice(&packet[..HEADERS]);
        Array::<_, [u8; HEADERS]>::try_from(headers)?.set(0, first, 0)?;
        let slot = ebpf
            .take_map("BENCH_PROGRAM")
            .ok_or_else(|| anyhow::anyhow!("no BENCH_PROGRAM"))?;
        Ok(Self {
            slot: ProgramArray::try_from(slot)?,
            ebpf,
            front,
            packet,
        })
    }

    /// Nanoseconds a pass with a program of the benchmarks behind the front.
    pub(super) fn measure_own(&mut self, name: &str, expected: u32) -> anyhow::Result<f64> {
        let fd = classifier(&mut self.ebpf, name)?.fd()?.try_clone()?;
        self.slot.set(0, &fd, 0)?;
        self.run(expected)
    }

    /// Nanoseconds a pass with another program behind the front.
    pub(super) fn measure(
        &mut self,
        program: &SchedClassifier,
        expected: u32,
    ) -> anyhow::Result<f64> {
        self.slot.set(0, program.fd()?, 0)?;
        self.run(expected)
    }

    fn run(&self, expected: u32) -> anyhow::Result<f64> {
        let options = TestRunOptions {
            data_in: Some(&self.packet),
            repeat: PASSES,
            ..TestRunOptions::new()
        };
        let result = self.front.test_run(options)?;
        anyhow::ensure!(
            result.return_value == expected,
            "returned {}, not {expected}",
            result.return_value
        );
        // The kernel reports the mean of one pass.
        Ok(result.duration.as_nanos() as f64)
    }
}

fn classifier<'a>(ebpf: &'a mut Ebpf, name: &str) -> anyhow::Result<&'a mut SchedClassifier> {
    let program = ebpf
        .program_mut(name)
        .ok_or_else(|| anyhow::anyhow!("no program {name}"))?;
    Ok(program.try_into()?)
}
