//! Who may change what IPVS serves: names of the kernel's objects are the same for all agents of a network namespace.

use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use super::error::IpvsError;

/// An abstract name is of the network namespace, and goes with who has it (unix(7)).
const NAME: &str = "health-agent-ipvs";

/// One of a network namespace, until it is dropped.
#[derive(Debug)]
pub(super) struct Lock {
    _socket: UnixDatagram,
}

impl Lock {
    /// Takes it in the namespace of the calling thread.
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
