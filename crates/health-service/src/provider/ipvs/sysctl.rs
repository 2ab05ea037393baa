//! Settings of the kernel that services need. They stay when services end.

use health_net::KernelError;
use health_net::sysctl::{self, Setting};

/// With connections tracked, replies find back through masquerading; connections of real servers that are gone or get no
/// new ones end at once; and packets are forwarded.
const SETTINGS: [(&str, &str); 4] = [
    ("ipv4/vs/conntrack", "1"),
    ("ipv4/vs/expire_nodest_conn", "1"),
    ("ipv4/vs/expire_quiescent_template", "1"),
    ("ipv4/ip_forward", "1"),
];

/// A device answers for its own addresses only: others may have those of services too.
const STRICT_ARP: [(&str, &str); 2] = [
    ("ipv4/conf/all/arp_ignore", "1"),
    ("ipv4/conf/all/arp_announce", "2"),
];

/// Makes them, in the namespace of the calling thread.
pub(super) fn apply(strict_arp: bool) -> Result<(), KernelError> {
    let strict = STRICT_ARP.iter().filter(|_| strict_arp);
    for (key, value) in SETTINGS.iter().chain(strict) {
        // Writing `ip_forward` resets others, even if it stays.
        if sysctl::read(key)?.as_deref() != Some(*value) {
            Setting::new(*key, *value).apply()?;
        }
    }
    Ok(())
}
