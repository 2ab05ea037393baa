//! Sysctls that services need. They stay set after services stop.

use health_net::KernelError;
use health_net::sysctl::{self, Setting};

/// Conntrack for IPVS connections, so that replies are translated back after masquerading; immediate end of connections
/// to removed real servers, and of persistence to draining ones; forwarding.
const SETTINGS: [(&str, &str); 4] = [
    ("ipv4/vs/conntrack", "1"),
    ("ipv4/vs/expire_nodest_conn", "1"),
    ("ipv4/vs/expire_quiescent_template", "1"),
    ("ipv4/ip_forward", "1"),
];

/// Settings that make devices answer ARP only for their own addresses, because other nodes have the service addresses
/// too.
const STRICT_ARP: [(&str, &str); 2] = [
    ("ipv4/conf/all/arp_ignore", "1"),
    ("ipv4/conf/all/arp_announce", "2"),
];

/// Applies the sysctls in the calling thread's network namespace.
pub(super) fn apply(strict_arp: bool) -> Result<(), KernelError> {
    let strict = STRICT_ARP.iter().filter(|_| strict_arp);
    for (key, value) in SETTINGS.iter().chain(strict) {
        // Writing `ip_forward` resets other sysctls even if the value does not change.
        if sysctl::read(key)?.as_deref() != Some(*value) {
            Setting::new(*key, *value).apply()?;
        }
    }
    Ok(())
}
