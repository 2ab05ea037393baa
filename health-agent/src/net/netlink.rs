//! Connections to the kernel's routing netlink. One is bound for life to the network namespace of
//! the thread that opened it.

use std::io;

pub use rtnetlink::Handle;

/// Opens a connection in the calling thread's network namespace. Must be called inside a tokio
/// runtime, which then drives it until the last clone of the handle is dropped.
pub fn open() -> io::Result<Handle> {
    // Strict checking makes the kernel honour filters in dump requests.
    let (connection, handle, _) = rtnetlink::new_connection_with_strict_check()?;
    tokio::spawn(connection);
    Ok(handle)
}

/// The kernel's answer behind an error of the library.
pub(super) fn os_error(error: rtnetlink::Error) -> io::Error {
    match error {
        rtnetlink::Error::NetlinkError(message) => message.to_io(),
        other => io::Error::other(other.to_string()),
    }
}
