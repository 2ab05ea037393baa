//! Sysctls that services need. They stay set when services end.

use health_net::KernelError;
use health_net::sysctl::{self, Setting};

/// Conntrack of IPVS connections, so that replies are translated back after masquerading; connections of removed real
/// servers, and persistence of draining ones, end at once; forwarding.
const SETTINGS: [(&str, &str); 4] = [
    ("ipv4/vs/conntrack", "1"),
    ("ipv4/vs/expire_nodest_conn", "1"),
    ("ipv4/vs/expire_quiescent_template", "1"),
    ("ipv4/ip_forward", "1"),
];

/// A device answers ARP for its own addresses only: other nodes have the addresses of services too.
const STRICT_ARP: [(&str, &str); 2] = [
    ("ipv4/conf/all/arp_ignore", "1"),
    ("ipv4/conf/all/arp_announce", "2"),
];

/// Sets them in the network namespace of the calling thread.
pub(super) fn apply(strict_arp: bool) -> Result<(), KernelError> {
    let strict = STRICT_ARP.iter().filter(|_| strict_arp);
    for (key, value) in SETTINGS.iter().chain(strict) {
        // Writing `ip_forward` resets other sysctls, even if its value stays the same.
        if sysctl::read(key)?.as_deref() != Some(*value) {
            Setting::new(*key, *value).apply()?;
        }
    }
    Ok(())
}
