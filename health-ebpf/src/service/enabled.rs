//! Whether there are services.

use aya_ebpf::Global;
use health_common::config::SERVICES;

use crate::maps::HEALTH_CONFIG;

/// Whether the agent that loads the programs may ever have services. The verifier treats it as a constant: without
/// services, it neither checks nor keeps code that only they need.
#[unsafe(no_mangle)]
static HAS_SERVICES: Global<u8> = Global::new(1);

/// Whether these programs handle services at all, now or later.
#[inline(always)]
pub fn is_there() -> bool {
    HAS_SERVICES.load() != 0
}

/// Whether services are enabled.
#[inline(always)]
pub fn is_on() -> bool {
    is_there()
        && HEALTH_CONFIG
            .get(0)
            .is_some_and(|config| config.flags & SERVICES != 0)
}
