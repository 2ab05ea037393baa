//! Optional parts of the datapath. Without a part, its programs are not loaded and the verifier prunes its code from
//! the other programs, so an agent starts sooner and the kernel needs less memory.

use aya::EbpfLoader;

use crate::program::DatapathProgram::{
    self, Deliver, FromService, IpFromService, IpMasquerade, IpToService, IpUnmasquerade,
    Masquerade, ToService, Unmasquerade,
};

/// The parts that are loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OptionalParts {
    /// Services, and host routing with them.
    pub(crate) services: bool,
    /// Masquerading.
    pub(crate) masquerade: bool,
}

impl OptionalParts {
    /// Whether these parts include the program.
    pub(crate) fn have(self, program: DatapathProgram) -> bool {
        match program {
            ToService | FromService | Deliver | IpToService | IpFromService => self.services,
            Masquerade | Unmasquerade | IpMasquerade | IpUnmasquerade => self.masquerade,
            _ => true,
        }
    }

    /// Sets the variables with which the object's programs know their parts.
    pub(crate) fn apply(self, loader: &mut EbpfLoader<'_>) {
        loader
            .override_global("HAS_SERVICES", flag(self.services), true)
            .override_global("HAS_MASQUERADE", flag(self.masquerade), true);
    }
}

fn flag(is_set: bool) -> &'static u8 {
    if is_set { &1 } else { &0 }
}
