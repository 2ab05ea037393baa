//! Opens the API's Unix sockets.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt, chown};
use std::os::unix::net::UnixListener as StdUnixListener;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use nix::unistd::{Gid, Group};
use socket2::{Domain, SockAddr, Socket, Type};
use tokio::net::UnixListener;

/// Owner and group may use the agent.
const SOCKET_MODE: u32 = 0o660;
const BACKLOG: i32 = 128;

/// Why the socket could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// A running agent listens on the socket.
    #[error(
        "the socket {path} is in use by pid {pid}; stop that agent, or give this one a \
         --runtime-dir of its own"
    )]
    InUse {
        /// The socket.
        path: PathBuf,
        /// The process that listens.
        pid: i32,
    },
    /// Something other than a socket exists at the path.
    #[error("cannot create the socket {0}: the path exists and is not a socket")]
    NoSocket(PathBuf),
    /// The system reported an error.
    #[error("cannot {what} the socket {path}: {source}")]
    Io {
        /// The attempted operation.
        what: &'static str,
        /// The socket.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// Why a group cannot be given access.
#[derive(Debug, thiserror::Error)]
pub enum GroupError {
    /// No group has that name.
    #[error("{flag} '{name}': no such group; `getent group` lists the existing ones")]
    Unknown {
        /// The flag.
        flag: &'static str,
        /// The group's name.
        name: String,
    },
    /// The system's group database cannot be read.
    #[error("{flag} '{name}': cannot look it up: {source}")]
    Lookup {
        /// The flag.
        flag: &'static str,
        /// The group's name.
        name: String,
        /// The system's error.
        source: Errno,
    },
}

/// The group named `name`, the value of `flag`.
pub fn group(flag: &'static str, name: &str) -> Result<Gid, GroupError> {
    let owned = || name.to_owned();
    match Group::from_name(name) {
        Ok(Some(group)) => Ok(group.gid),
        Ok(None) => Err(GroupError::Unknown {
            flag,
            name: owned(),
        }),
        Err(source) => Err(GroupError::Lookup {
            flag,
            name: owned(),
            source,
        }),
    }
}

/// Opens a socket of the API at `path`, whose folder must exist. The socket is readable and writable by its owner and by
/// `group`, by default the process's own group. Replaces a socket without a listener.
///
/// Two processes that call this at the same time could replace each other's socket, so the caller must hold the pid
/// file.
///
/// Panics outside a tokio runtime.
pub fn bind(path: &Path, group: Option<Gid>) -> Result<UnixListener, BindError> {
    let failed = |what| {
        move |source| BindError::Io {
            what,
            path: path.to_owned(),
            source,
        }
    };
    remove_stale(path)?;
    let address = SockAddr::unix(path).map_err(failed("name"))?;
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None).map_err(failed("create"))?;
    socket.set_nonblocking(true).map_err(failed("set up"))?;
    socket.bind(&address).map_err(failed("bind"))?;
    // No client can connect before the socket listens, so its initial permissions do not matter.
    if let Some(group) = group {
        chown(path, None, Some(group.as_raw())).map_err(failed("set the group of"))?;
    }
    fs::set_permissions(path, Permissions::from_mode(SOCKET_MODE))
        .map_err(failed("set the permissions of"))?;
    socket.listen(BACKLOG).map_err(failed("listen on"))?;
    UnixListener::from_std(StdUnixListener::from(socket)).map_err(failed("poll"))
}

/// Removes a socket that has no listener; fails if it has one.
pub fn remove_stale(path: &Path) -> Result<(), BindError> {
    let failed = |what| {
        move |source| BindError::Io {
            what,
            path: path.to_owned(),
            source,
        }
    };
    match fs::symlink_metadata(path) {
        Ok(there) if there.file_type().is_socket() => {}
        Ok(_) => return Err(BindError::NoSocket(path.to_owned())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(failed("inspect")(e)),
    }
    let address = SockAddr::unix(path).map_err(failed("name"))?;
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None).map_err(failed("create"))?;
    // A listener that has stopped accepting and has a full backlog must not block us.
    socket.set_nonblocking(true).map_err(failed("set up"))?;
    match socket.connect(&address) {
        Ok(()) => {
            let peer = getsockopt(&socket, PeerCredentials)
                .map_err(|e| failed("look up the owner of")(e.into()))?;
            Err(BindError::InUse {
                path: path.to_owned(),
                pid: peer.pid(),
            })
        }
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).map_err(failed("remove the stale"))
        }
        Err(e) => Err(failed("connect to")(e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::UnixStream;

    #[tokio::test]
    async fn a_live_socket_is_refused_by_pid_and_a_stale_one_taken_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("health.sock");
        let listener = bind(&path, None).unwrap();
        let error = bind(&path, None).expect_err("it is in use").to_string();
        let pid = format!("in use by pid {};", std::process::id());
        assert!(error.contains(&pid), "{error}");

        drop(listener);
        assert!(path.exists());
        let _again = bind(&path, None).unwrap();
        UnixStream::connect(&path).unwrap();
    }

    #[tokio::test]
    async fn only_sockets_are_taken_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("health.sock");
        fs::write(&path, "precious").unwrap();
        assert!(matches!(bind(&path, None), Err(BindError::NoSocket(_))));
        assert_eq!(fs::read(&path).unwrap(), b"precious");

        let nowhere = dir.path().join("missing/health.sock");
        let error = bind(&nowhere, None).expect_err("no folder").to_string();
        assert!(error.contains("missing/health.sock"), "{error}");
    }

    #[tokio::test]
    async fn owner_and_group_may_speak_to_the_agent() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("health.sock");
        // A process may give a socket to its own group without being root.
        let own = nix::unistd::getgid();
        let name = Group::from_gid(own).unwrap().unwrap().name;
        let _listener = bind(&path, Some(group("--socket-group", &name).unwrap())).unwrap();
        let there = fs::metadata(&path).unwrap();
        assert_eq!(there.permissions().mode() & 0o777, 0o660);
        assert_eq!(there.gid(), own.as_raw());

        if nix::unistd::geteuid().is_root() {
            let path = dir.path().join("other.sock");
            let other = Gid::from_raw(own.as_raw() + 1);
            let _listener = bind(&path, Some(other)).unwrap();
            assert_eq!(fs::metadata(&path).unwrap().gid(), other.as_raw());
        }
    }

    #[test]
    fn an_unknown_group_is_named() {
        let error = group("--socket-group", "no-such-group")
            .expect_err("no group")
            .to_string();
        assert!(error.contains("--socket-group 'no-such-group'"), "{error}");
    }
}
