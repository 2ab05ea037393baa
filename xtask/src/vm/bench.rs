//! `cargo xtask bench --vm`: runs a benchmark in guests, with the same programs as on this machine.

use std::path::Path;
use std::process::ExitCode;

use anyhow::bail;
use vm_init::PlannedCommand;

use super::guest::Guest;
use super::suite::add_tools;
use super::{Choice, Ended, PROGRAMS, code_of, first_failure, pass_on};
use crate::packages;
use crate::workspace::Workspace;

/// `bench` itself and the programs that it needs in the same folder. All of them are built.
const BESIDE: [&str; 3] = ["bench", "machine", "health-agent"];

/// Runs `bench` with these arguments in one virtual machine per kernel, one after the other.
pub(crate) fn bench(
    workspace: &Workspace,
    choice: &Choice,
    words: &[String],
) -> anyhow::Result<ExitCode> {
    let arch = choice.arch()?;
    if !arch.is_own() {
        bail!("benchmarks are built for this machine's processor only");
    }
    packages::require(&[packages::emulator(arch)])?;
    packages::require(packages::VM)?;
    let program = |name: &str| format!("{PROGRAMS}/{name}");
    let command = [program("machine"), program("bench")].into_iter();
    let command = PlannedCommand::new(command.chain(words.iter().cloned()));
    let mut code = 0;
    for kernel in &choice.kernels(workspace)? {
        let init = workspace.release_binary("vm-init");
        let mut guest = Guest::new(workspace, kernel, choice.limit(), init)?;
        add_tools(&mut guest, packages::BENCHES)?;
        for name in BESIDE {
            let built = workspace.release_binary(name);
            guest
                .root
                .program_at(&Path::new(PROGRAMS).join(name), &built)?;
            guest.root.libraries_of(&built)?;
        }
        let outcome = guest.run(true, std::slice::from_ref(&command), |_, heard| {
            pass_on(heard)
        })?;
        match code_of(outcome)? {
            Ended::InOrder(next) => code = first_failure(code, next),
            Ended::Interrupted(code) => return Ok(ExitCode::from(code)),
        }
    }
    Ok(ExitCode::from(code))
}
