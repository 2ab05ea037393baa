//! A lock for IPVS in a network namespace: all agents there would use the same names for the kernel's objects.

use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use super::error::IpvsError;

/// An abstract socket name belongs to the network namespace, and is freed with its process (unix(7)).
const NAME: &str = "health-agent-ipvs";

/// The lock of a network namespace, held until this is dropped.
#[derive(Debug)]
pub(super) struct Lock {
    _socket: UnixDatagram,
}

impl Lock {
    /// Takes the lock in the namespace of the calling thread. Fails at once if another process holds it.
    pub(super) fn acquire() -> Result<Self, IpvsError> {
        let bind = || UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(NAME)?);
        match bind() {
            Ok(socket) => Ok(Self { _socket: socket }),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => Err(IpvsError::InUse),
            Err(error) => Err(IpvsError::Lock(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_has_it() {
        let first = Lock::acquire().unwrap();
        assert!(matches!(Lock::acquire(), Err(IpvsError::InUse)));
        drop(first);
        Lock::acquire().unwrap();
    }
}
