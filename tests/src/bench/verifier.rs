//! What the verifier of this kernel has to do for each program.

use health_datapath::PROGRAMS;
use health_datapath::verifier::{Verified, verify};

use super::{Figure, Report, Target};

/// The part of the kernel's limit that a program may take.
pub const BUDGET: u64 = 4;
/// Bytes of stack that a program has with the functions it calls.
const STACK: f64 = 512.0;

pub(super) fn run() -> anyhow::Result<Report> {
    let programs = verify(PROGRAMS)?;
    Report::new(programs.iter().flat_map(figures).collect(), 1)
}

fn figures(program: &Verified) -> [Figure; 5] {
    let figure = |what: &str, unit, ours, target| Figure {
        name: format!("{}, {what}", program.name),
        unit,
        ours,
        other: None,
        target,
    };
    let budget = Target::AtMost((program.limit / BUDGET) as f64);
    [
        figure(
            "instructions looked at",
            "insns",
            program.processed as f64,
            Some(budget),
        ),
        figure("states kept", "states", program.states as f64, None),
        figure(
            "time to verify",
            "ms",
            program.time.as_secs_f64() * 1e3,
            None,
        ),
        figure("machine code", "bytes", program.jited.into(), None),
        figure(
            "deepest frame",
            "bytes",
            program.deepest_frame.into(),
            Some(Target::AtMost(STACK)),
        ),
    ]
}
