//! The programs stay within a fraction of the kernel verifier's limit and do not grow unnoticed: docs/verifier.md
//! records how many instructions the verifier processed at the last review.

use anyhow::{Context as _, ensure};
use health_datapath::programs;
use nix::sys::utsname::uname;
use tests::bench::verifier::BUDGET;
use tests::verifier::{VerifiedProgram, verify};

const DOCS: &str = include_str!("../../../docs/verifier.md");
/// How much a program may grow before the table must be updated, in percent.
const GROWTH: u64 = 10;

/// Major and minor version of the running kernel.
fn kernel() -> anyhow::Result<String> {
    let release = uname()?.release().to_string_lossy().into_owned();
    let mut numbers = release.split('.');
    let (Some(major), Some(minor)) = (numbers.next(), numbers.next()) else {
        anyhow::bail!("a kernel that calls itself {release}");
    };
    Ok(format!("{major}.{minor}"))
}

/// A program's row of the table.
fn row(kernel: &str, program: &VerifiedProgram) -> String {
    format!(
        "| {kernel} | `{}` | {} | {} | {} | {:.0} ms | {} | {} |",
        program.name,
        program.instructions,
        program.processed,
        program.states,
        program.time.as_secs_f64() * 1e3,
        program.jited,
        program.deepest_frame,
    )
}

/// The number of instructions that the table records for a program under a kernel's verifier.
fn documented_instructions(kernel: &str, name: &str) -> anyhow::Result<Option<u64>> {
    let start = format!("| {kernel} | `{name}` |");
    let Some(row) = DOCS.lines().find(|line| line.starts_with(&start)) else {
        return Ok(None);
    };
    let looked_at = row.split('|').nth(4).context("a row without columns")?;
    Ok(Some(looked_at.trim().parse()?))
}

#[test]
#[ignore = "needs root"]
fn the_verifier_looks_at_no_more_than_is_written_down() -> anyhow::Result<()> {
    let kernel = kernel()?;
    let programs = verify(&programs()?)?;
    let table: Vec<String> = programs
        .iter()
        .map(|program| row(&kernel, program))
        .collect();
    let table = table.join("\n");
    println!("{table}");
    let is_listed = DOCS.contains(&format!("| {kernel} |"));
    for program in &programs {
        let VerifiedProgram {
            name,
            processed,
            limit,
            ..
        } = program;
        ensure!(
            *processed <= limit / BUDGET,
            "{name}: the verifier looks at {processed} instructions; it may at {limit}, and no more than 1/{BUDGET} \
             of that is left to a program"
        );
        // For kernels that are not in the table, only the budget applies.
        if is_listed {
            let reported = documented_instructions(&kernel, name)?.with_context(|| {
                format!("docs/verifier.md does not have {name}; the table would be:\n{table}")
            })?;
            ensure!(
                processed * 100 <= reported * (100 + GROWTH),
                "{name}: the verifier looks at {processed} instructions, and docs/verifier.md says {reported}; if that is \
                 well, the table is:\n{table}"
            );
        }
    }
    Ok(())
}
