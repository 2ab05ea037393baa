//! Whether masquerading is on, and its settings.

use aya_ebpf::Global;
use health_common::masquerade::Masquerade;
use health_common::neighbour::{ETHERTYPE_IPV4, ETHERTYPE_IPV6};

use crate::bounds::forgotten;
use crate::ip_version::Version;
use crate::maps::HEALTH_MASQUERADE;

/// Whether the agent that loads the programs may ever masquerade. The verifier treats it as a constant.
#[unsafe(no_mangle)]
static HAS_MASQUERADE: Global<u8> = Global::new(1);

/// Whether anything of this IP version is masqueraded.
#[inline(always)]
pub(super) fn is_on(ethertype: u16) -> bool {
    if HAS_MASQUERADE.load() == 0 {
        return false;
    }
    match (HEALTH_MASQUERADE.get(0), ethertype) {
        (Some(config), ETHERTYPE_IPV4) => config.v4.is_on(),
        (Some(config), ETHERTYPE_IPV6) => config.v6.is_on(),
        _ => false,
    }
}

/// The masquerading settings of an IP version.
#[inline(always)]
pub(crate) fn settings<T: Version>() -> Option<&'static Masquerade<T::Address>> {
    // Otherwise LLVM would add the field's offset before the null check, which older verifiers reject.
    Some(T::masquerade(forgotten(HEALTH_MASQUERADE.get(0)?)))
}
