//! Optional parts of the datapath. Without a part, its programs are not loaded and the verifier prunes its code from the
//! other programs: an agent starts sooner, and the kernel keeps less.

use std::io::ErrorKind;

use aya::EbpfLoader;
use aya::maps::{MapError, ProgramArray};
use health_net::clock;

use super::layout::{
    CALLED, CALLS, DELIVER, FROM_SERVICE, IP_CALLED, IP_CALLS, IP_FROM_SERVICE, IP_MASQUERADE_IN,
    IP_MASQUERADE_OUT, IP_TO_SERVICE, MASQUERADE_IN, MASQUERADE_OUT, TO_SERVICE,
};
use super::loader::map_error;
use super::{Datapath, DatapathError};

/// The variable with the time from which programs hold early fragments.
pub(super) const HOLDS_FROM: &str = "HOLDS_FROM";
/// How long new programs leave early fragments alone, seconds: they see later fragments of packets whose first fragment the
/// former programs saw. Loading takes part of this time.
const TAKE_OVER_SECS: u64 = 5;

/// The value of [`HOLDS_FROM`] for programs that are loaded now: seconds of `CLOCK_MONOTONIC`.
pub(super) fn holds_from() -> u32 {
    (clock::now_ns() / 1_000_000_000 + TAKE_OVER_SECS) as u32
}

/// The parts that are loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Parts {
    /// Services, and host routing with them.
    pub(super) services: bool,
    /// Masquerading.
    pub(super) masquerade: bool,
}

impl Parts {
    /// Whether these parts include the program.
    pub(super) fn have(self, program: &str) -> bool {
        match program {
            TO_SERVICE | FROM_SERVICE | DELIVER | IP_TO_SERVICE | IP_FROM_SERVICE => self.services,
            MASQUERADE_OUT | MASQUERADE_IN | IP_MASQUERADE_OUT | IP_MASQUERADE_IN => {
                self.masquerade
            }
            _ => true,
        }
    }

    /// Sets the variables with which the object's programs know their parts.
    pub(super) fn apply(self, loader: &mut EbpfLoader<'_>) {
        loader
            .override_global("HAS_SERVICES", flag(self.services), true)
            .override_global("HAS_MASQUERADE", flag(self.masquerade), true);
    }
}

impl Datapath {
    /// Clears the slots of programs that a former agent had and this one did not load. Must not run before all programs are
    /// attached: an agent that does not get that far leaves the former agent's programs unchanged.
    pub(super) fn clear_unused_calls(&mut self) -> Result<(), DatapathError> {
        self.clear_unused(CALLS.name, &CALLED)?;
        if self.has_ip_programs() {
            self.clear_unused(IP_CALLS.name, &IP_CALLED)?;
        }
        Ok(())
    }

    fn clear_unused(
        &mut self,
        map: &'static str,
        called: &[(u32, &str)],
    ) -> Result<(), DatapathError> {
        let failed = || map_error("write", map);
        let calls = self.maps.get_mut(map);
        let calls = calls.ok_or_else(|| DatapathError::Missing(map.to_owned()))?;
        let mut calls = ProgramArray::try_from(calls).map_err(failed())?;
        for (index, _) in called.iter().filter(|(_, name)| !self.parts.have(name)) {
            match calls.clear_index(index) {
                Ok(()) | Err(MapError::KeyNotFound) => {}
                Err(MapError::SyscallError(error))
                    if error.io_error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(failed()(error)),
            }
        }
        Ok(())
    }
}

fn flag(is_set: bool) -> &'static u8 {
    if is_set { &1 } else { &0 }
}
