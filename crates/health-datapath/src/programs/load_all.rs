//! Loads many programs at once. The verifier takes up to half a second per program, and verifies programs of privileged
//! processes in parallel.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::num::NonZero;
use std::sync::{Mutex, PoisonError};
use std::thread;

use aya::Ebpf;
use aya::programs::{Program, ProgramError};

use crate::error::{DatapathError, program_error};
use crate::program::DatapathProgram;

/// Maximum number of programs loaded at a time: the kernel needs about 10 MB for each during loading.
const MOST: usize = 4;

/// Loads these programs of an object in order; the slowest should come first. Returns the errors of programs that could
/// not be loaded.
pub(super) fn load_all(
    ebpf: &mut Ebpf,
    names: impl IntoIterator<Item = DatapathProgram>,
) -> HashMap<DatapathProgram, DatapathError> {
    let mut programs: HashMap<&str, &mut Program> = ebpf.programs_mut().collect();
    let mut errors = HashMap::new();
    let mut wanted = Vec::new();
    for name in names {
        match programs.remove(name.object_name()) {
            Some(program) => wanted.push((name, program)),
            None => {
                let missing = DatapathError::Missing(name.object_name().to_owned());
                errors.insert(name, missing);
            }
        }
    }
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    let threads = threads.min(MOST).min(wanted.len());
    let wanted = Mutex::new(wanted.into_iter());
    let next = || wanted.lock().unwrap_or_else(PoisonError::into_inner).next();
    let load_some = || {
        let mut errors = Vec::new();
        while let Some((name, program)) = next() {
            if let Err(error) = load_program(name, || load(program)) {
                errors.push((name, error));
            }
        }
        errors
    };
    thread::scope(|scope| {
        let others: Vec<_> = (1..threads)
            .filter_map(|_| thread::Builder::new().spawn_scoped(scope, load_some).ok())
            .collect();
        errors.extend(load_some());
        for other in others {
            match other.join() {
                Ok(failed) => errors.extend(failed),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
    });
    errors
}

/// Loads a program of a kind that is attached to devices or to the root cgroup.
fn load(program: &mut Program) -> Result<(), ProgramError> {
    match program {
        Program::SchedClassifier(program) => program.load(),
        Program::CgroupSockAddr(program) => program.load(),
        Program::CgroupSock(program) => program.load(),
        _ => Err(ProgramError::UnexpectedProgramType),
    }
}

/// Maximum number of attempts to load a program when signals interrupt it.
const LOAD_ATTEMPTS: usize = 100;

/// Loads a program. The kernel gives up with `EAGAIN` when the thread gets a signal (`do_check` in
/// `kernel/bpf/verifier.c`), so this error is not the program's fault.
pub(super) fn load_program(
    program: DatapathProgram,
    mut load: impl FnMut() -> Result<(), ProgramError>,
) -> Result<(), DatapathError> {
    let mut attempts = 1;
    loop {
        match load() {
            Err(ProgramError::LoadError { io_error, .. })
                if io_error.kind() == ErrorKind::WouldBlock && attempts < LOAD_ATTEMPTS =>
            {
                attempts += 1;
            }
            result => return result.map_err(program_error("load", program)),
        }
    }
}
