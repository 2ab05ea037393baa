//! Errors of kernel requests.

use std::io;

use super::netlink::os_error;

/// The kernel rejected a request: the attempt, its object, and the kernel's error.
#[derive(Debug, thiserror::Error)]
#[error("cannot {attempt} {on}: {source}")]
pub struct KernelError {
    attempt: &'static str,
    on: String,
    source: io::Error,
}

impl KernelError {
    pub(crate) fn new(attempt: &'static str, on: impl ToString, source: io::Error) -> Self {
        Self {
            attempt,
            on: on.to_string(),
            source,
        }
    }

    /// The error of a netlink request.
    pub(crate) fn netlink(
        attempt: &'static str,
        on: impl ToString,
    ) -> impl FnOnce(rtnetlink::Error) -> Self {
        let on = on.to_string();
        move |error| Self::new(attempt, on, os_error(error))
    }

    /// The kernel's error number.
    pub fn os_code(&self) -> Option<i32> {
        self.source.raw_os_error()
    }
}
