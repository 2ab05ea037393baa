//! Loading many programs at once. The verifier looks at each for up to half a second, and it takes programs of privileged
//! processes side by side.

use std::collections::HashMap;
use std::num::NonZero;
use std::sync::{Mutex, PoisonError};
use std::thread;

use aya::Ebpf;
use aya::programs::{Program, ProgramError};

use super::DatapathError;
use super::loader::load_program;

/// Most programs that are loaded at a time: the kernel needs some 10 MB for each meanwhile.
const MOST: usize = 4;

/// Loads these programs of an object, those that take longest first if they are named first. Returns the errors of those that
/// could not be loaded.
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

/// Loads a program of one of the kinds that there are on devices and at the root of the control groups.
fn load(program: &mut Program) -> Result<(), ProgramError> {
    match program {
        Program::SchedClassifier(program) => program.load(),
        Program::CgroupSockAddr(program) => program.load(),
        Program::CgroupSock(program) => program.load(),
        _ => Err(ProgramError::UnexpectedProgramType),
    }
}
