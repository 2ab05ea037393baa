//! Loads many programs at once. The verifier takes up to half a second for each, and verifies programs of privileged
//! processes in parallel.

use std::collections::HashMap;
use std::num::NonZero;
use std::sync::{Mutex, PoisonError};
use std::thread;

use aya::Ebpf;
use aya::programs::{Program, ProgramError};

use super::DatapathError;
use super::loader::load_program;

/// Maximum number of programs loaded at a time: the kernel needs about 10 MB for each during loading.
const MOST: usize = 4;

/// Loads these programs of an object in order, so name the slowest first. Returns the errors of those that could not be
/// loaded.
pub(super) fn load_all(
    ebpf: &mut Ebpf,
    names: impl IntoIterator<Item = &'static str>,
) -> HashMap<&'static str, DatapathError> {
    let mut programs: HashMap<&str, &mut Program> = ebpf.programs_mut().collect();
    let mut errors = HashMap::new();
    let mut wanted = Vec::new();
    for name in names {
        match programs.remove(name) {
            Some(program) => wanted.push((name, program)),
            None => {
                errors.insert(name, DatapathError::Missing(name.to_owned()));
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
