//! The work of this kernel's verifier for each program.

use health_datapath::programs;

use super::{Figure, Report, Target};
use crate::verifier::{VerifiedProgram, verify};

/// Programs may use one part in this many of the kernel's limit.
pub const BUDGET: u64 = 4;
/// Maximum stack size in bytes of a program together with the functions that it calls.
const STACK: f64 = 512.0;

pub(super) fn run() -> anyhow::Result<Report> {
    let verified = verify(&programs()?)?;
    Report::new(verified.iter().flat_map(figures).collect(), 1)
}

fn figures(program: &VerifiedProgram) -> [Figure; 5] {
    let figure = |what: &str, unit, ours, limit: Option<(f64, f64)>| Figure {
        name: format!("{}, {what}", program.name),
        unit,
        ours,
        other: limit.map(|(limit, _)| limit),
        target: limit.map(|(_, part)| Target::RatioAtMost(part)),
    };
    [
        figure(
            "instructions processed (other: the kernel's limit)",
            "insns",
            program.processed as f64,
            Some((program.limit as f64, 1.0 / BUDGET as f64)),
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
            "deepest frame (other: the kernel's limit)",
            "bytes",
            program.deepest_frame.into(),
            Some((STACK, 1.0)),
        ),
    ]
}
