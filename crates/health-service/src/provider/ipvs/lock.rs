//! A lock for IPVS in a network namespace, because all agents there use the same names for kernel objects.

use health_model::ipam::Family;

use super::error::IpvsError;
use super::kernel::{is_subsystem_missing, open_rules};
use super::netlink::nft;

/// An empty nf_tables table owned by one process. It exists in one network namespace, takes `CAP_NET_ADMIN` there to
/// create, and disappears with the process.
const TABLE: &str = "health-agent-services-lock";

/// The lock of a network namespace, held until dropped.
#[derive(Debug)]
pub(super) struct Lock {
    /// `None` if the kernel has no nf_tables, in which case IPVS mode cannot work.
    _owner: Option<nft::Client>,
}

impl Lock {
    /// Takes the lock in the calling thread's network namespace. Fails at once if another process holds it.
    pub(super) fn acquire() -> Result<Self, IpvsError> {
        let Some(mut owner) = open_rules()? else {
            return Ok(Self { _owner: None });
        };
        match owner.create_owned(Family::V4, TABLE) {
            Ok(()) => Ok(Self {
                _owner: Some(owner),
            }),
            Err(error) if is_subsystem_missing(&error) => Ok(Self { _owner: None }),
            // A process without permission to change rules may not list them either.
            Err(error) if error.is(libc::EPERM) && owner.rules(Family::V4, TABLE).is_ok() => {
                Err(IpvsError::InUse)
            }
            Err(error) => {
                let attempt = format!("lock IPVS with the table {TABLE}");
                Err(IpvsError::netlink(attempt)(error))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use nix::sched::{CloneFlags, unshare};

    use super::*;

    #[test]
    fn one_at_a_time_has_it_in_a_network_namespace() {
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: needs root");
            return;
        }
        let in_namespace = || {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            let first = Lock::acquire().unwrap();
            let elsewhere = || {
                unshare(CloneFlags::CLONE_NEWNET).unwrap();
                Lock::acquire().unwrap();
            };
            thread::spawn(elsewhere).join().unwrap();
            assert!(matches!(Lock::acquire(), Err(IpvsError::InUse)));
            drop(first);
            Lock::acquire().unwrap();
        };
        thread::spawn(in_namespace).join().unwrap();
    }
}
