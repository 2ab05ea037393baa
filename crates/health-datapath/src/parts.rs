//! Parts of the datapath that an agent can do without. Their programs are not loaded, and what the other programs have for
//! them is cut out as the verifier looks at these: an agent starts sooner, and the kernel keeps less.

use aya::EbpfLoader;

use super::layout::{
    DELIVER, FROM_SERVICE, IP_FROM_SERVICE, IP_MASQUERADE_IN, IP_MASQUERADE_OUT, IP_TO_SERVICE,
    MASQUERADE_IN, MASQUERADE_OUT, TO_SERVICE,
};

/// The parts that there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Parts {
    /// Services, host routing with them.
    pub(super) services: bool,
    /// Masquerading.
    pub(super) masquerade: bool,
}

impl Parts {
    /// Whether there is a program with this name.
    pub(super) fn have(self, program: &str) -> bool {
        match program {
            TO_SERVICE | FROM_SERVICE | DELIVER | IP_TO_SERVICE | IP_FROM_SERVICE => self.services,
            MASQUERADE_OUT | MASQUERADE_IN | IP_MASQUERADE_OUT | IP_MASQUERADE_IN => {
                self.masquerade
            }
            _ => true,
        }
    }

    /// Tells the programs of an object, by the variables that they have for it.
    pub(super) fn apply(self, loader: &mut EbpfLoader<'_>) {
        loader
            .override_global("HAS_SERVICES", flag(self.services), true)
            .override_global("HAS_MASQUERADE", flag(self.masquerade), true);
    }
}

fn flag(is_set: bool) -> &'static u8 {
    if is_set { &1 } else { &0 }
}
